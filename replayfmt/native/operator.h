// What the hot path knows of an operator besides its name, and how the values of its calls are told apart.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "looks.h"

namespace opreplay {

using Key = c10::SmallVector<int64_t, 64>;  // long enough for nearly all, without memory of its own

// Tokens of a signature's key. What a signature holds besides (constants in its nodes) follows the token.
enum Token : int64_t {
  kOther,
  kTensor,
  kNone,
  kFalse,
  kTrue,
  kInt,
  kFloat,
  kList,
  kDtype,
  kLayout,
  kMemoryFormat,
  kDevice,
  kText,
  kUndefined,
  kResults
};

// What a signature's key, and the slots of a row, have of values.
struct Encoded {
  Key key;
  c10::SmallVector<int64_t, 16> ints;
  c10::SmallVector<double, 4> floats;
};

struct Operator {
  std::string schema;                                    // as text
  bool plain = false;                                    // Python says that its calls may be recorded here
  std::vector<Token> integers;                           // what an integer on a stack is, of each argument
  std::vector<std::shared_ptr<const Encoded>> defaults;  // of arguments, where they have one that can be told here
  size_t keywords = 0;                                   // index of the first keyword-only argument
  std::vector<size_t> writes;                            // indices of the arguments that it writes
  std::vector<size_t> watches;                           // the settings that it depends on, by number
  std::optional<size_t> dropout;  // index of the argument without which it draws no random numbers
  bool takes_numbers = false;     // also where its schema says tensors
  bool fills = false;             // it writes all of its first argument, and reads nothing of it
  bool empty = false;             // it returns memory that nothing was written to
  bool draws = false;             // it draws random numbers
  size_t results = 0;
  std::vector<c10::DispatchKey> backends;  // where it is one kernel, and a composite elsewhere; none: everywhere
  bool of_generated_code = false;          // a kernel that generated code calls
  bool generated = false;                  // it allocates for generated code
  int64_t number = 0;                      // tells operators apart in keys
  mutable const Signatures::value_type* newest = nullptr;  // of its signatures, the one found last
};

// How many operators were taken out of the dispatcher, as where a library is destroyed. Another one may get their
// memory.
inline std::atomic<uint64_t> operators_gone{0};

inline void count_operators_gone() {
  struct Counts : c10::OpRegistrationListener {
    void onOperatorRegistered(const c10::OperatorHandle&) override {}
    void onOperatorDeregistered(const c10::OperatorHandle&) override { operators_gone++; }
  };
  static const auto counts = c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Counts>());
}

// The operators of a capture, by their schemas. None is removed: signatures and calls refer to them.
class Operators {
 public:
  size_t size() const { return all_.size(); }

  // None where it is not described yet.
  const Operator* find(const c10::FunctionSchema& schema) {
    const auto found = by_schema_.find(&schema);
    if (found == by_schema_.end()) {
      return nullptr;
    }
    if (const uint64_t gone = operators_gone.load(); found->second.gone != gone) {
      if (found->second.op->schema != toString(schema)) {
        return nullptr;
      }
      found->second.gone = gone;
    }
    return found->second.op;
  }
  const Operator& add(const c10::FunctionSchema& schema, std::unique_ptr<Operator> made) {
    made->schema = toString(schema);
    by_schema_[&schema] = {made.get(), operators_gone.load()};
    return *all_.emplace_back(std::move(made));
  }

 private:
  struct Found {
    const Operator* op;
    uint64_t gone;  // when it was last seen to be this one's schema
  };
  std::vector<std::unique_ptr<Operator>> all_;
  std::unordered_map<const c10::FunctionSchema*, Found> by_schema_;
};

// What an integer on a stack is, where an argument has this type.
inline Token integer_of(const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::OptionalType:
    case c10::TypeKind::ListType:
      return integer_of(type->containedType(0));
    case c10::TypeKind::NumberType:
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return kInt;
    case c10::TypeKind::ScalarTypeType:
      return kDtype;
    case c10::TypeKind::LayoutType:
      return kLayout;
    case c10::TypeKind::MemoryFormatType:
      return kMemoryFormat;
    default:
      return kOther;
  }
}

}  // namespace opreplay
