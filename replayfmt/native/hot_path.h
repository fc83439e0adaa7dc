// Records calls that hold nothing new, without Python: operators of PyTorch's own on plain strided tensors whose
// metadata, storages and signature the capture knows. Anything else takes the complete path.

#pragma once

#include <bit>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "operator.h"
#include "session.h"

namespace opreplay {

// One call, from its arguments to its record, with the session's mutex held. Values come as a stack has them, or as C++
// does.
class HotCall {
 public:
  // `has_run`: on the complete path. It is not asked whether others wrote what it uses, nor whether Python looks after
  // that.
  HotCall(Session& session, const Operator& op, bool has_run = false) : session_(session), op_(op), has_run_(has_run) {
    take_token(op.number);
    take_token(0);  // number of positional arguments
    end_ = here();
  }

  // Takes the next argument. Whether it is known. Makes tensor ids for new views.
  template <typename Value>
  bool take(const Value& value) {
    const size_t index = next_++;
    const bool keyword = index >= op_.keywords;
    const Place begin = here();
    if (keyword) {
      encoded_.key.push_back(-static_cast<int64_t>(index) - 1);
    }
    const size_t from = encoded_.key.size();
    if (!take_value(index, value) ||
        (op_.dropout == index && !(encoded_.key.back() == kFloat && encoded_.floats.back() == 0.0))) {
      return false;
    }
    // Left out as Python has it: what is as the schema says, positional arguments only at the end.
    const bool is_default = op_.defaults[index] && encodes(*op_.defaults[index], from, begin);
    if (keyword && is_default) {
      go_back(begin);
    } else if (!keyword && !is_default) {
      end_ = here();
      encoded_.key[1] = static_cast<int64_t>(next_);
    }
    if (next_ == op_.keywords) {
      go_back(end_);
    }
    return true;
  }

  // The arguments of a kernel of generated code, all at once, as a stack has them.
  bool take_all(c10::ArrayRef<c10::IValue> values) {
    given_ = values;
    return std::all_of(values.begin(), values.end(), [this](const c10::IValue& value) { return take(value); });
  }

  // Whether a call that draws random numbers is known as a whole, before it runs: it returns tensors, and the generator
  // is as it would be in a replay.
  bool draws_as_told() {
    const size_t given = encoded_.key.size();
    encoded_.key.push_back(kResults);
    encoded_.key.resize(given + 1 + op_.results, kTensor);
    const bool known = known_signature() != 0;
    encoded_.key.resize(given);
    return known && on_host_ && session_.drawn && *session_.drawn == Draws::now();
  }

  // Whether the operator runs as one kernel where its first argument is.
  bool is_one_kernel() const { return is_one_kernel_; }

  // The next result, likewise: known apart from new storages and views.
  bool take_result(const at::Tensor& tensor) {
    begin_results();
    if (!tensor.defined() || !is_plain(tensor)) {
      return !tensor.defined() && take_token(kUndefined);
    }
    c10::StorageImpl* impl = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    Storage* storage = session_.storage_of(impl);
    if (storage ? storage->careful : std::find(used_.begin(), used_.end(), impl) != used_.end()) {
      return has_run_ && take_token(kTensor);  // Python may have begun to look after an argument's since it was taken
    }
    const Looks looks(tensor);
    const int64_t seen = storage ? session_.view_of(*storage, looks, tensor.storage_offset()) : 0;
    const auto* meta = seen ? nullptr : session_.define_meta_of(looks);
    if ((!seen && !meta) ||
        (storage ? storage->bytes != static_cast<int64_t>(impl->nbytes()) || (!storage->new_views && !seen)
                 : impl->nbytes() != 0 && !tensor.is_meta() && impl->data() == nullptr)) {
      return false;
    }
    results_.push_back({impl, storage, meta, tensor.storage_offset(), seen});
    return take_token(kTensor);
  }
  bool take_result(const std::vector<at::Tensor>& tensors) { return take_results(tensors); }
  template <typename List>
  bool take_results(const List& list) {
    begin_results();
    return take_list(list, [this](const auto& each) { return take_result(each); });
  }
  template <typename... Values>
  bool take_result(const std::tuple<Values...>& values) {
    return std::apply([this](const auto&... each) { return (take_result(each) && ...); }, values);
  }
  bool take_result(const c10::IValue& value) {
    if (value.isTensor() || value.isTensorList()) {
      return value.isTensor() ? take_result(value.toTensor()) : take_results(value.toListRef());
    }
    begin_results();
    if (!session_.scalars) {
      take_token(kNone);  // a number that is not recorded
    }
    const bool is_address = value.isInt() && value.toInt() >= session_.least_address;  // perhaps
    return !is_address && (session_.scalars ? take_number(value) : value.isBool() || value.isInt() || value.isDouble());
  }

  // The signature that Python gave calls like this one; 0 where it has seen none.
  int64_t signature() {
    begin_results();
    return known_signature();
  }

  // Arguments on storages that the capture does not know. Not as tensors: one more reference may need the interpreter's
  // lock.
  const std::vector<c10::TensorImpl*>& unregistered() const { return unregistered_; }

  // Append the record, and what is new.
  void record(int64_t signature, int64_t context, int64_t started_ns, int64_t ended_ns) {
    const int64_t head[] = {signature, context, started_ns - session_.began_ns, ended_ns - started_ns};
    int64_t* row =
        session_.rows.grow(4 + tensors_.size() + results_.size() + encoded_.ints.size() + encoded_.floats.size());
    row = std::copy(std::begin(head), std::end(head), row);
    row = std::copy(tensors_.begin(), tensors_.end(), row);
    row = std::transform(results_.begin(), results_.end(), row, [this](const Made& made) { return number_of(made); });
    row = std::copy(encoded_.ints.begin(), encoded_.ints.end(), row);
    std::transform(encoded_.floats.begin(), encoded_.floats.end(), row, std::bit_cast<int64_t, double>);
    for (const auto& [impl, tensor, beside] : written_) {
      if (Storage* storage = session_.storage_of(impl); storage && !storage->careful) {
        storage->note_written(*impl, tensor, beside);
        if (std::exchange(storage->unwritten, false)) {
          storage->sampled = std::string();
        }
      } else {
        writes_for_python_ = true;
      }
    }
    if (op_.draws) {
      session_.drawn = Draws::now();
    }
  }

  // It is about to run, or has its record.
  bool writes() const { return !written_.empty(); }
  void begin_writes() {
    for (const auto& written : written_) {
      session_.writes.begin(written.impl);
    }
  }
  void end_writes() {
    for (const auto& written : written_) {
      session_.writes.end(written.impl);
    }
  }

  // Python has noted what it wrote.
  void compare_beside() {
    for (const auto& [impl, tensor, beside] : written_) {
      if (Storage* storage = session_.storage_of(impl)) {
        storage->compare(*impl, beside);
      }
    }
  }

  // Whether it wrote to a storage that another thread had Python look after meanwhile.
  bool writes_for_python() const { return writes_for_python_; }

  // As a key, the values of the calls that Python gave a signature.
  Words key() {
    begin_results();
    return Words(encoded_.key.begin(), encoded_.key.end());
  }
  // What a value says that stands alone, as an argument; nothing where it cannot be told here.
  std::shared_ptr<const Encoded> encoded(size_t index, const c10::IValue& value) {
    go_back({0, 0, 0});
    return take_value(index, value) ? std::make_shared<const Encoded>(encoded_) : nullptr;
  }

 private:
  static constexpr int64_t kOriginOp = 1, kOriginUninitialized = 2;

  struct Written {
    c10::StorageImpl* impl;
    int64_t tensor;
    std::optional<Beside> beside;
  };
  struct Made {
    c10::StorageImpl* impl;
    Storage* storage;  // none: it is new
    const Metas::value_type* meta;
    int64_t offset;
    int64_t seen;  // as this tensor; 0: not yet
  };
  struct Place {
    size_t key, ints, floats;
  };

  Place here() const { return {encoded_.key.size(), encoded_.ints.size(), encoded_.floats.size()}; }
  void go_back(const Place& place) {
    encoded_.key.resize(place.key);
    encoded_.ints.resize(place.ints);
    encoded_.floats.resize(place.floats);
  }
  // Whether what was said since a place is this.
  bool encodes(const Encoded& value, size_t key, const Place& begin) const {
    return std::equal(encoded_.key.begin() + key, encoded_.key.end(), value.key.begin(), value.key.end()) &&
           std::equal(encoded_.ints.begin() + begin.ints, encoded_.ints.end(), value.ints.begin(), value.ints.end()) &&
           std::equal(encoded_.floats.begin() + begin.floats, encoded_.floats.end(), value.floats.begin(),
                      value.floats.end());
  }

  int64_t known_signature() {
    if (!op_.newest || !WordsEqual()(op_.newest->first, encoded_.key)) {
      const auto found = session_.signatures.find(std::span<const int64_t>(encoded_.key));
      op_.newest = found == session_.signatures.end() ? nullptr : &*found;
    }
    return op_.newest ? op_.newest->second : 0;
  }

  int64_t new_view(Storage& storage, const Metas::value_type* meta, int64_t offset) {
    return session_.add_view(storage.id, {meta, offset, 0}, &storage.views);
  }

  int64_t number_of(const Made& made) {
    if (made.seen) {
      return made.seen;
    }
    Storage* storage = made.storage;
    if (!storage && results_.size() > 1) {
      storage = session_.storage_of(made.impl);  // another result may have made it
    }
    if (!storage) {
      const auto bytes = static_cast<int64_t>(made.impl->nbytes());
      const bool unwritten = op_.empty && !fills_empty();
      const int64_t origin = unwritten ? kOriginUninitialized : kOriginOp;
      const int64_t id = session_.storage_id(bytes, made.meta->second.device, origin, 0);
      storage = &session_.add(made.impl, id, bytes, false);
      storage->generated = op_.generated;
      storage->unwritten = unwritten && bytes != 0 && made.impl->device_type() != at::kMeta;
      if (storage->unwritten) {
        storage->sampled = sample(*made.impl);
      }
    }
    const int64_t tensor = storage->views.find(made.meta, made.offset);
    return tensor ? tensor : new_view(*storage, made.meta, made.offset);
  }

  void begin_results() {
    if (!has_results_) {
      has_results_ = true;
      encoded_.key.push_back(kResults);
    }
  }

  // ---------------------------------------------------------------------------------------------- values as C++ has
  // them

  bool take_value(size_t index, const at::Tensor& tensor) {
    if (!tensor.defined()) {
      return take_token(kUndefined);
    }
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      return op_.takes_numbers && take_wrapped_number(tensor);
    }
    if (!is_plain(tensor)) {
      return false;
    }
    c10::StorageImpl* impl = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    Storage* storage = session_.storage_of(impl);
    if (!storage && impl->nbytes() != 0 && !tensor.is_meta()) {
      unregistered_.push_back(tensor.unsafeGetTensorImpl());
      return take_token(kTensor);
    }
    if (storage && storage->careful) {
      return has_run_ && take_token(kTensor);
    }
    if (!storage || storage->bytes != static_cast<int64_t>(impl->nbytes()) ||
        (storage->unwritten && !fills(index, tensor, *storage))) {
      return false;
    }
    const bool written = std::find(op_.writes.begin(), op_.writes.end(), index) != op_.writes.end();
    std::optional<Beside> beside;
    if (written && !has_run_ && storage->content && tensor.nbytes() != impl->nbytes()) {
      if (!tensor.is_contiguous()) {
        return false;
      }
      const size_t begin = tensor.storage_offset() * tensor.itemsize();
      beside.emplace(*impl, begin, begin + tensor.nbytes());
    }
    if (!has_run_ && storage->changed(*impl)) {
      return false;
    }
    used_.push_back(impl);
    on_host_ = on_host_ && tensor.is_cpu();
    if (index == 0) {
      is_one_kernel_ =
          is_one_kernel_ || std::any_of(op_.backends.begin(), op_.backends.end(),
                                        [&](c10::DispatchKey backend) { return tensor.key_set().has(backend); });
    }
    if (written && is_out(index) && storage->bytes == 0) {
      return false;  // it will be resized
    }
    const Looks looks(tensor);
    int64_t number = session_.view_of(*storage, looks, tensor.storage_offset());
    if (!number) {
      const auto* meta = storage->new_views ? session_.define_meta_of(looks) : nullptr;
      if (!meta) {
        return false;
      }
      number = new_view(*storage, meta, tensor.storage_offset());
    }
    tensors_.push_back(number);
    if (written) {
      // Each lies beside the other: Python compares what lies beside all of them.
      const auto lies_beside = [&](const Written& other) { return other.impl == impl; };
      if (storage->content && !has_run_ && std::any_of(written_.begin(), written_.end(), lies_beside)) {
        return false;
      }
      written_.push_back({impl, number, beside});
    }
    return take_token(kTensor);
  }
  bool take_value(size_t, bool value) { return take_token(value ? kTrue : kFalse); }
  bool take_value(size_t, int64_t value) {
    encoded_.ints.push_back(value);
    return take_token(kInt);
  }
  bool take_value(size_t, double value) {
    encoded_.floats.push_back(value);
    return take_token(kFloat);
  }
  bool take_value(size_t index, const c10::SymInt& value) {
    return !value.is_heap_allocated() && take_value(index, value.as_int_unchecked());
  }
  bool take_value(size_t index, const at::Scalar& value) {
    switch (value.isSymbolic() ? at::kComplexDouble : value.type()) {
      case at::kBool:
        return take_value(index, value.toBool());
      case at::kLong:
        return take_value(index, value.toLong());
      case at::kDouble:
        return take_value(index, value.toDouble());
      default:
        return false;
    }
  }
  bool take_value(size_t, at::ScalarType value) { return take_constant(kDtype, static_cast<int64_t>(value)); }
  bool take_value(size_t, at::Layout value) { return take_constant(kLayout, static_cast<int64_t>(value)); }
  bool take_value(size_t, at::MemoryFormat value) { return take_constant(kMemoryFormat, static_cast<int64_t>(value)); }
  bool take_value(size_t, at::Device value) {
    on_host_ = on_host_ && value.is_cpu();
    return take_constant(kDevice, (static_cast<int64_t>(value.type()) << 16) | static_cast<uint8_t>(value.index()));
  }
  bool take_value(size_t, std::string_view text) {
    take_constant(kText, static_cast<int64_t>(text.size()));
    encoded_.key.append(text.begin(), text.end());
    return true;
  }
  bool take_value(size_t, const at::Generator&) { return false; }
  template <typename Value>
  bool take_value(size_t index, const std::optional<Value>& value) {
    return value.has_value() ? take_value(index, *value) : take_token(kNone);
  }
  template <typename Value>
  bool take_value(size_t index, const at::OptionalArrayRef<Value>& value) {
    return value.has_value() ? take_value(index, *value) : take_token(kNone);
  }
  template <typename Value>
  bool take_value(size_t index, const c10::ArrayRef<Value>& list) {
    return take_list(list, [&](const Value& item) { return take_value(index, item); });
  }
  bool take_value(size_t index, const at::ITensorListRef& list) {
    return take_list(list, [&](const at::Tensor& item) { return take_value(index, item); });
  }
  bool take_value(size_t index, const c10::List<std::optional<at::Tensor>>& list) {
    return take_list(list, [&](const std::optional<at::Tensor>& item) { return take_value(index, item); });
  }

  bool is_out(size_t index) const { return index >= op_.keywords; }  // of an argument that is written

  // Whether the operator writes all of a storage, and reads nothing of it.
  bool fills(size_t index, const at::Tensor& tensor, const Storage& storage) const {
    if (op_.of_generated_code) {
      return storage.generated && is_completed(*tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    }
    const bool writes = std::find(op_.writes.begin(), op_.writes.end(), index) != op_.writes.end();
    if (!(op_.fills && index == 0) && !(writes && is_out(index))) {
      return false;
    }
    return tensor.unsafeGetTensorImpl()->is_non_overlapping_and_dense() &&
           static_cast<int64_t>(tensor.nbytes()) == storage.bytes;
  }

  // Whether the tensors that a kernel of generated code writes are all of a storage, so that it reads what it has
  // written.
  bool is_completed(const c10::StorageImpl& storage) const {
    c10::SmallVector<std::pair<size_t, size_t>, 4> written;  // its first byte, and the one after its last
    for (const size_t index : op_.writes) {
      const at::Tensor& tensor = given_[index].toTensor();
      const at::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
      if (impl.unsafe_storage().unsafeGetStorageImpl() == &storage && impl.is_non_overlapping_and_dense()) {
        const size_t first = static_cast<size_t>(impl.storage_offset()) * impl.itemsize();
        written.emplace_back(first, first + tensor.nbytes());
      }
    }
    std::sort(written.begin(), written.end());
    size_t end = 0;
    for (const auto& [first, after] : written) {
      end = first <= end ? std::max(end, after) : end;
    }
    return end == storage.nbytes();
  }

  // ----------------------------------------------------------------------------------------------- and as a stack does

  bool take_value(size_t index, const c10::IValue& value) {
    if (value.isNone()) {
      return take_token(kNone);
    }
    if (value.isInt() && op_.integers[index] != kInt) {
      return op_.integers[index] != kOther && take_constant(op_.integers[index], value.toInt());
    }
    return value.isTensor()    ? take_value(index, value.toTensor())
           : value.isIntList() ? op_.integers[index] == kInt && take_value(index, at::IntArrayRef(value.toIntVector()))
           : value.isDoubleList() ? take_value(index, at::ArrayRef<double>(value.toDoubleVector()))
           : value.isBoolList()   ? take_list(value.toBoolList(), [&](bool item) { return take_value(index, item); })
           : value.isTensorList() || value.isOptionalTensorList()
               ? take_list(value.toListRef(), [&](const c10::IValue& item) { return take_value(index, item); })
           : value.isDevice() ? take_value(index, value.toDevice())
           : value.isString() ? take_value(index, std::string_view(value.toStringRef()))
                              : take_number(value);
  }
  bool take_number(const c10::IValue& value) {
    return value.isBool()     ? take_value(0, value.toBool())
           : value.isInt()    ? take_value(0, value.toInt())
           : value.isDouble() ? take_value(0, value.toDouble())
                              : false;
  }

  // ------------------------------------------------------------------------------------------------------ their parts

  bool take_token(int64_t token) {
    encoded_.key.push_back(token);
    return true;
  }
  bool take_constant(Token token, int64_t value) { return take_token(token) && take_token(value); }
  template <typename List, typename Take>
  bool take_list(const List& list, const Take& take_item) {
    take_constant(kList, static_cast<int64_t>(list.size()));
    return std::all_of(list.begin(), list.end(), take_item);
  }

  // A number that C++ code made a tensor of.
  bool take_wrapped_number(const at::Tensor& tensor) {
    if (!tensor.is_cpu() || tensor.dim() != 0) {
      return false;
    }
    switch (tensor.scalar_type()) {
      case at::kDouble:
        return take_value(0, *tensor.const_data_ptr<double>());
      case at::kLong:
        return take_value(0, *tensor.const_data_ptr<int64_t>());
      case at::kBool:
        return take_value(0, *tensor.const_data_ptr<bool>());
      default:
        return false;
    }
  }

  Session& session_;
  const Operator& op_;
  const bool has_run_;
  size_t next_ = 0;  // index of the next argument
  Place end_;        // of the positional arguments that are not left out
  bool has_results_ = false;
  bool writes_for_python_ = false;
  bool on_host_ = true;  // no argument is on, or names, a device
  bool is_one_kernel_ = op_.backends.empty();
  Encoded encoded_;
  c10::ArrayRef<c10::IValue> given_;  // of a kernel of generated code
  std::vector<c10::TensorImpl*> unregistered_;
  c10::SmallVector<const c10::StorageImpl*, 16> used_;
  c10::SmallVector<int64_t, 16> tensors_;
  c10::SmallVector<Made, 4> results_;
  c10::SmallVector<Written, 4> written_;
};

// Describe what its schema says of an operator.
inline void read_schema(Operator& op, Session& session, const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  op.results = schema.returns().size();
  for (const auto& argument : arguments) {
    op.integers.push_back(integer_of(argument.real_type()));
    op.keywords += !argument.kwarg_only();
  }
  for (size_t index = 0; index < arguments.size(); index++) {
    const auto& value = arguments[index].default_value();
    op.defaults.push_back(value ? HotCall(session, op).encoded(index, *value) : nullptr);
  }
}

}  // namespace opreplay
