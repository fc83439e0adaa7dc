// Records calls that hold nothing new, without Python: operators of PyTorch's own on plain strided tensors whose metadata,
// storages and signature the capture knows. Anything else takes the complete path.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <bit>
#include <optional>

#include "session.h"

namespace opreplay {

// How an argument's value is laid out in a row.
enum class Kind : uint8_t { tensor, tensors, number, integer, real, boolean, integers, reals, booleans, dtype, layout,
                            memory_format, device, text, other };

struct Operator {
  bool plain = false;  // Python says that its calls may be recorded here
  std::vector<Kind> kinds;
  size_t keywords = 0;               // index of the first keyword-only argument
  std::vector<size_t> writes;        // indices of the arguments that it writes
  std::vector<size_t> watches;       // the settings that it depends on, by number
  std::optional<size_t> dropout;     // index of the argument without which it draws no random numbers
  bool takes_numbers = false;        // also where its schema says tensors
  int64_t number = 0;                // tells operators apart in keys
};

inline Kind kind_of(c10::TypePtr type) {
  if (auto optional = type->cast<c10::OptionalType>()) {
    type = optional->getElementType();
  }
  switch (type->kind()) {
    case c10::TypeKind::TensorType: return Kind::tensor;
    case c10::TypeKind::NumberType: return Kind::number;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType: return Kind::integer;
    case c10::TypeKind::FloatType: return Kind::real;
    case c10::TypeKind::BoolType: return Kind::boolean;
    case c10::TypeKind::ScalarTypeType: return Kind::dtype;
    case c10::TypeKind::LayoutType: return Kind::layout;
    case c10::TypeKind::MemoryFormatType: return Kind::memory_format;
    case c10::TypeKind::DeviceObjType: return Kind::device;
    case c10::TypeKind::StringType: return Kind::text;
    case c10::TypeKind::ListType:
      switch (kind_of(type->castRaw<c10::ListType>()->getElementType())) {
        case Kind::tensor: return Kind::tensors;
        case Kind::integer: return Kind::integers;
        case Kind::real: return Kind::reals;
        case Kind::boolean: return Kind::booleans;
        default: return Kind::other;
      }
    default: return Kind::other;
  }
}

// Tokens of a signature's key. What a signature holds besides (constants in its nodes) follows the token.
enum Token : int64_t { kTensor = 1, kNone, kFalse, kTrue, kInt, kFloat, kList, kDtype, kLayout, kMemoryFormat, kDevice,
                       kText, kResults };

inline bool is_plain(const at::Tensor& tensor) {
  const auto keys = tensor.key_set();
  return !keys.has(c10::DispatchKey::Python) && !keys.has(c10::DispatchKey::ZeroTensor) &&
         !keys.has(c10::DispatchKey::Conjugate) && !keys.has(c10::DispatchKey::Negative) &&
         tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.is_quantized() && tensor.has_storage() &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

class HotCall {
 public:
  HotCall(Session& session, const Operator& op) : session_(session), op_(op) {}

  // Whether all that the arguments are is known. Makes tensor ids for new views. With the mutex held.
  bool take_arguments(const c10::FunctionSchema& schema, const c10::IValue* values) {
    const auto& arguments = schema.arguments();
    const auto has_default = [&](size_t index) {
      const auto& given = arguments[index].default_value();
      return given.has_value() && *given == values[index];
    };
    size_t positional = op_.keywords;
    while (positional > 0 && has_default(positional - 1)) {
      positional--;
    }
    if (op_.dropout && !(values[*op_.dropout].isDouble() && values[*op_.dropout].toDouble() == 0.0)) {
      return false;
    }
    key_.push_back(op_.number);
    key_.push_back(static_cast<int64_t>(positional));
    for (size_t index = 0; index < positional; index++) {
      if (!take(index, values[index])) {
        return false;
      }
    }
    for (size_t index = op_.keywords; index < arguments.size(); index++) {
      if (!has_default(index)) {
        key_.push_back(-static_cast<int64_t>(index) - 1);
        if (!take(index, values[index])) {
          return false;
        }
      }
    }
    return true;
  }

  // Whether all that the results are is known, apart from new storages and views. With the mutex held.
  bool take_results(const c10::IValue* values, size_t count) {
    key_.push_back(kResults);
    for (size_t index = 0; index < count; index++) {
      const c10::IValue& value = values[index];
      if (value.isTensor()) {
        if (!take_result(value.toTensor())) {
          return false;
        }
      } else if (value.isTensorList()) {
        const auto tensors = value.toTensorList();
        key_.push_back(kList);
        key_.push_back(static_cast<int64_t>(tensors.size()));
        for (const at::Tensor& tensor : tensors) {
          if (!take_result(tensor)) {
            return false;
          }
        }
      } else if (value.isInt() && value.toInt() >> 32 > 0) {
        return false;  // it may be an address
      } else if (session_.scalars ? !take_number(value) : !take_nothing(value)) {
        return false;
      }
    }
    return true;
  }

  // The signature that Python gave calls like this one; 0 where it has seen none.
  int64_t signature() const {
    const auto found = session_.signatures.find(key_);
    return found == session_.signatures.end() ? 0 : found->second;
  }

  // Append the record, and what is new. With the mutex held.
  void record(int64_t signature, int64_t context, int64_t started_ns, int64_t ended_ns) {
    for (size_t index = 0; index < made_.size(); index++) {
      const Made& made = made_[index];
      int64_t tensor = 0;
      auto found = session_.storages.find(made.impl);
      if (found == session_.storages.end()) {
        auto weak = c10::weak_intrusive_ptr<c10::StorageImpl>(
            c10::intrusive_ptr<c10::StorageImpl>::unsafe_reclaim_from_nonowning(made.impl));
        const auto bytes = static_cast<int64_t>(made.impl->nbytes());
        const int64_t id = session_.next_storage.next();
        found = session_.storages.emplace(made.impl, Storage{std::move(weak), id, bytes, false, true, {}, {}}).first;
        session_.born++;
        const int64_t birth[] = {id, bytes, made.meta.device, kOriginOp, 0};
        session_.births.add(birth, 5);
      } else {
        tensor = found->second.find(made.meta.id, made.offset);
      }
      results_.push_back(tensor ? tensor : new_view(found->second, made.meta.id, made.offset));
    }
    for (const auto& [impl, tensor] : written_) {
      const auto found = session_.storages.find(impl);
      if (found != session_.storages.end()) {  // not so where another thread had Python look after it meanwhile
        found->second.note_written(tensor);
      }
    }
    c10::SmallVector<int64_t, 48> row{signature, context, started_ns - session_.began_ns, ended_ns - started_ns};
    row.append(tensors_.begin(), tensors_.end());
    row.append(results_.begin(), results_.end());
    row.append(ints_.begin(), ints_.end());
    for (double value : floats_) {
      row.push_back(std::bit_cast<int64_t>(value));
    }
    session_.rows.add(row.data(), row.size());
  }

  const Words& key() const { return key_; }

 private:
  static constexpr int64_t kOriginOp = 1;

  struct Made {
    c10::StorageImpl* impl;
    Meta meta;
    int64_t offset;
  };

  const Meta* meta_of(const at::Tensor& tensor) {
    Session::meta_key(tensor, scratch_);
    const auto found = session_.metas.find(scratch_);
    return found == session_.metas.end() ? nullptr : &found->second;
  }

  int64_t new_view(Storage& storage, int64_t meta, int64_t offset) {
    const int64_t tensor = session_.next_tensor.next();
    const int64_t definition[] = {tensor, storage.id, offset, meta};
    session_.definitions.add(definition, 4);
    storage.views.push_back({meta, offset, tensor});
    return tensor;
  }

  bool take_tensor(size_t index, const at::Tensor& tensor) {
    if (!tensor.defined()) {
      key_.push_back(kNone);
      return true;
    }
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      return op_.takes_numbers && take_wrapped_number(tensor);
    }
    if (!is_plain(tensor)) {
      return false;
    }
    c10::StorageImpl* impl = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    const auto found = session_.storages.find(impl);
    const Meta* meta = meta_of(tensor);
    if (found == session_.storages.end() || !meta || found->second.bytes != static_cast<int64_t>(impl->nbytes())) {
      return false;
    }
    int64_t number = found->second.find(meta->id, tensor.storage_offset());
    if (!number) {
      if (!found->second.new_views) {
        return false;
      }
      number = new_view(found->second, meta->id, tensor.storage_offset());
    }
    key_.push_back(kTensor);
    tensors_.push_back(number);
    if (std::find(op_.writes.begin(), op_.writes.end(), index) != op_.writes.end()) {
      written_.emplace_back(impl, number);
    }
    return true;
  }

  bool take_result(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      key_.push_back(kNone);
      return true;
    }
    if (!is_plain(tensor)) {
      return false;
    }
    c10::StorageImpl* impl = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    const Meta* meta = meta_of(tensor);
    if (!meta) {
      return false;
    }
    const auto found = session_.storages.find(impl);
    if (found == session_.storages.end()) {
      if (impl->nbytes() != 0 && !tensor.is_meta() && impl->data() == nullptr) {
        return false;
      }
    } else if (found->second.bytes != static_cast<int64_t>(impl->nbytes()) ||
               (!found->second.new_views && !found->second.find(meta->id, tensor.storage_offset()))) {
      return false;
    }
    key_.push_back(kTensor);
    made_.push_back({impl, *meta, tensor.storage_offset()});
    return true;
  }

  bool take(size_t index, const c10::IValue& value) {
    if (value.isNone()) {
      key_.push_back(kNone);
      return true;
    }
    switch (op_.kinds[index]) {
      case Kind::tensor:
        return take_tensor(index, value.toTensor());
      case Kind::tensors: {
        if (value.isTensorList()) {
          const auto tensors = value.toTensorList();
          key_.push_back(kList);
          key_.push_back(static_cast<int64_t>(tensors.size()));
          for (const at::Tensor& tensor : tensors) {
            if (!take_tensor(index, tensor)) {
              return false;
            }
          }
          return true;
        }
        if (!value.isOptionalTensorList()) {
          return false;
        }
        const auto tensors = value.toOptionalTensorVector();
        key_.push_back(kList);
        key_.push_back(static_cast<int64_t>(tensors.size()));
        for (const auto& tensor : tensors) {
          if (!take_tensor(index, tensor.has_value() ? *tensor : at::Tensor())) {
            return false;
          }
        }
        return true;
      }
      case Kind::number:
      case Kind::integer:
      case Kind::real:
      case Kind::boolean:
        return take_number(value);
      case Kind::integers:
        return value.isIntList() && take_list(value.toIntVector());
      case Kind::reals:
        return value.isDoubleList() && take_list(value.toDoubleVector());
      case Kind::booleans:
        return value.isBoolList() && take_list(value.toBoolList());
      case Kind::dtype:
        return take_constant(kDtype, value);
      case Kind::layout:
        return take_constant(kLayout, value);
      case Kind::memory_format:
        return take_constant(kMemoryFormat, value);
      case Kind::device: {
        const auto device = value.toDevice();
        key_.push_back(kDevice);
        key_.push_back((static_cast<int64_t>(device.type()) << 16) | static_cast<uint8_t>(device.index()));
        return true;
      }
      case Kind::text: {
        const std::string& text = value.toStringRef();
        key_.push_back(kText);
        key_.push_back(static_cast<int64_t>(text.size()));
        key_.insert(key_.end(), text.begin(), text.end());
        return true;
      }
      case Kind::other:
        return false;
    }
    return false;
  }

  // A number that C++ code made a tensor of.
  bool take_wrapped_number(const at::Tensor& tensor) {
    if (!tensor.is_cpu() || tensor.dim() != 0) {
      return false;
    }
    switch (tensor.scalar_type()) {
      case at::kDouble:
        key_.push_back(kFloat);
        floats_.push_back(*tensor.const_data_ptr<double>());
        return true;
      case at::kLong:
        key_.push_back(kInt);
        ints_.push_back(*tensor.const_data_ptr<int64_t>());
        return true;
      case at::kBool:
        key_.push_back(*tensor.const_data_ptr<bool>() ? kTrue : kFalse);
        return true;
      default:
        return false;
    }
  }

  bool take_constant(Token token, const c10::IValue& value) {
    if (!value.isInt()) {
      return false;
    }
    key_.push_back(token);
    key_.push_back(value.toInt());
    return true;
  }

  template <typename List>
  bool take_list(const List& numbers) {
    key_.push_back(kList);
    key_.push_back(static_cast<int64_t>(numbers.size()));
    for (const auto& number : numbers) {
      take_number(c10::IValue(static_cast<typename List::value_type>(number)));
    }
    return true;
  }

  // A number that is not recorded.
  bool take_nothing(const c10::IValue& value) {
    key_.push_back(kNone);
    return value.isBool() || value.isInt() || value.isDouble();
  }

  bool take_number(const c10::IValue& value) {
    if (value.isBool()) {
      key_.push_back(value.toBool() ? kTrue : kFalse);
    } else if (value.isInt()) {
      key_.push_back(kInt);
      ints_.push_back(value.toInt());
    } else if (value.isDouble()) {
      key_.push_back(kFloat);
      floats_.push_back(value.toDouble());
    } else {
      return false;
    }
    return true;
  }

  Session& session_;
  const Operator& op_;
  Words key_;
  Words scratch_;
  c10::SmallVector<int64_t, 16> tensors_, results_, ints_;
  c10::SmallVector<double, 4> floats_;
  c10::SmallVector<Made, 4> made_;
  c10::SmallVector<std::pair<c10::StorageImpl*, int64_t>, 4> written_;
};

}  // namespace opreplay
