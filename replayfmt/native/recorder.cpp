// Hands every operator to the recorder beneath autograd and autocast, and runs it unchanged.
//
// The recorder sits at a dispatch key of its own, below those of dispatch modes, autograd, autocast and functorch, and
// above those of the backends. A thread takes part while the key is in its set of included keys, which PyTorch hands on
// to the threads of backward passes. What arrives has been cast, taken apart and differentiated as it would be without
// a capture; it is redispatched to the keys below with the very same arguments.
//
// Around the call stand two functions of Python (dispatch/native_mode.py): one before, which decides what the call is,
// and one after. The interpreter's lock is taken for them alone. While they and the operator run, the key is excluded:
// what they call is not recorded.
//
// All that Python calls is declared at the end, with C linkage; building.py compiles this file, hook.py calls it.

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/tensor_dtypes.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <utility>
#include <vector>

namespace {

namespace py = pybind11;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::FunctionSchema;
using c10::OperatorHandle;
using torch::jit::Stack;

// PyTorch has this key for fake tensors written in C++, which nothing makes on plain tensors.
constexpr DispatchKey kKey = DispatchKey::Fake;

// Of a capture. Written with the interpreter's lock; threads without it only ask whether there is one.
struct Functions {
  PyObject* before = nullptr;  // (operator, args, kwargs) -> what to do, see below
  PyObject* after = nullptr;   // (call, result, started_ns, ended_ns)
  PyObject* raised = nullptr;  // (call, exception of Python or None, started_ns, ended_ns)
  PyObject* run = nullptr;     // (operator, args, kwargs) -> result
};
Functions functions;
std::atomic<bool> recording{false};

int64_t now_ns() {  // the clock of time.perf_counter_ns
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// ------------------------------------------------------------------------------------------------------------ to Python

// The recorder's own tensor on the same memory, so that a tensor of the program's which has no Python object does not get
// one: a subclass that is made of it later could not be.
at::Tensor own_view(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj()) {
    return tensor;
  }
  auto* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
}

c10::IValue own_views(const c10::IValue& value) {
  if (value.isTensor()) {
    return own_view(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> views;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      views.push_back(own_view(tensor));
    }
    return views;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> views;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      views.push_back(tensor.has_value() ? std::optional(own_view(*tensor)) : std::nullopt);
    }
    return views;
  }
  return value;
}

py::object to_python(const c10::Argument& argument, const c10::IValue& value, bool own) {
  if (value.isNone()) {
    return py::none();
  }
  c10::TypePtr type = argument.real_type();
  if (auto optional = type->cast<c10::OptionalType>()) {
    type = optional->getElementType();
  }
  switch (type->kind()) {  // numbers on the stack, types of their own in Python
    case c10::TypeKind::ScalarTypeType:
      return py::reinterpret_borrow<py::object>(
          reinterpret_cast<PyObject*>(torch::getTHPDtype(static_cast<c10::ScalarType>(value.toInt()))));
    case c10::TypeKind::LayoutType:
      return py::reinterpret_borrow<py::object>(
          reinterpret_cast<PyObject*>(torch::getTHPLayout(static_cast<c10::Layout>(value.toInt()))));
    case c10::TypeKind::MemoryFormatType:
      return py::cast(static_cast<c10::MemoryFormat>(value.toInt()));
    default:
      return torch::jit::toPyObject(own ? own_views(value) : value);
  }
}

struct PythonArguments {
  py::tuple args;
  py::dict kwargs;
};

// What a dispatch mode is given for these values: trailing arguments that have their schema's default are left out.
// `own`: with views of the recorder's own.
PythonArguments python_arguments(const FunctionSchema& schema, const c10::IValue* values, bool own) {
  const auto& arguments = schema.arguments();
  const auto has_default = [&](size_t index) {
    const auto& given = arguments[index].default_value();
    return given.has_value() && *given == values[index];
  };
  size_t keywords = arguments.size();
  while (keywords > 0 && arguments[keywords - 1].kwarg_only()) {
    keywords--;
  }
  size_t positional = keywords;
  while (positional > 0 && has_default(positional - 1)) {
    positional--;
  }
  PythonArguments made{py::tuple(positional), py::dict()};
  for (size_t index = 0; index < positional; index++) {
    made.args[index] = to_python(arguments[index], values[index], own);
  }
  for (size_t index = keywords; index < arguments.size(); index++) {
    if (!has_default(index)) {
      made.kwargs[py::str(arguments[index].name())] = to_python(arguments[index], values[index], own);
    }
  }
  return made;
}

py::object python_results(const FunctionSchema& schema, const Stack& stack) {
  const size_t count = schema.returns().size();
  if (count == 0) {
    return py::none();
  }
  const size_t first = stack.size() - count;
  if (count == 1) {
    return torch::jit::toPyObject(own_views(stack[first]));
  }
  py::tuple results(count);
  for (size_t index = 0; index < count; index++) {
    results[index] = torch::jit::toPyObject(own_views(stack[first + index]));
  }
  return results;
}

void push_results(const FunctionSchema& schema, py::handle result, Stack* stack) {
  const auto& returns = schema.returns();
  if (returns.size() == 1) {
    stack->push_back(torch::jit::toIValue(result, returns[0].real_type()));
  } else if (returns.size() > 1) {
    auto items = py::cast<py::sequence>(result);
    for (size_t index = 0; index < returns.size(); index++) {
      stack->push_back(torch::jit::toIValue(items[index], returns[index].real_type()));
    }
  }
}

// Calls Python. What it raises passes on through PyTorch as an exception of C++.
py::object call(PyObject* function, py::handle one, py::handle two, py::handle three, py::handle four = {}) {
  PyObject* arguments[] = {one.ptr(), two.ptr(), three.ptr(), four.ptr()};
  PyObject* result = PyObject_Vectorcall(function, arguments, four ? 4 : 3, nullptr);
  if (!result) {
    python_error error;
    error.persist();
    throw error;
  }
  return py::reinterpret_steal<py::object>(result);
}

// ------------------------------------------------------------------------------------------------------------- the hook

// What `before` says, apart from a call that is being recorded (any other object):
//   None    run it, unrecorded, and what it calls, too
//   False   run it; what it calls is recorded
//   True    Python runs it (`run`)

// A Python object that is let go of with the interpreter's lock.
class Held {
 public:
  Held() = default;
  explicit Held(py::object object) : object_(object.release().ptr()) {}
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    if (object_) {
      py::gil_scoped_acquire lock;
      Py_DECREF(object_);
    }
  }
  py::handle get() const { return object_; }
  void set(py::object object) { object_ = object.release().ptr(); }

 private:
  PyObject* object_ = nullptr;
};

bool is_for_others(const Stack& stack, size_t first) {
  // Tensors that dispatch themselves come here when their own code calls an operator beneath itself.
  for (size_t index = first; index < stack.size(); index++) {
    const auto& value = stack[index];
    if (value.isTensor()) {
      if (value.toTensor().key_set().has(DispatchKey::Python)) {
        return true;
      }
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) {
        if (tensor.defined() && tensor.key_set().has(DispatchKey::Python)) {
          return true;
        }
      }
    }
  }
  return false;
}

void recorded(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const DispatchKeySet below = keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, kKey);
  const FunctionSchema& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  if (!recording.load(std::memory_order_relaxed) ||
      c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Python) || is_for_others(*stack, first)) {
    op.redispatchBoxed(below, stack);
    return;
  }
  c10::impl::ExcludeDispatchKeyGuard hidden(kKey);
  Held made;
  bool alone = false;
  {
    py::gil_scoped_acquire lock;
    if (!functions.before) {
      alone = true;
    } else {
      py::object function = py::reinterpret_borrow<py::object>(torch::detail::getTorchApiFunction(op));
      PythonArguments given = python_arguments(schema, stack->data() + first, true);
      py::object said = call(functions.before, function, given.args, given.kwargs);
      if (said.ptr() == Py_True) {
        given = python_arguments(schema, stack->data() + first, false);
        py::object result = call(functions.run, function, given.args, given.kwargs);
        torch::jit::drop(*stack, schema.arguments().size());
        push_results(schema, result, stack);
        return;
      }
      alone = said.is_none();
      if (!alone) {
        made.set(std::move(said));
      }
    }
  }
  if (alone) {
    op.redispatchBoxed(below, stack);
    return;
  }
  if (made.get().ptr() == Py_False) {
    c10::impl::tls_set_dispatch_key_excluded(kKey, false);  // the guard puts it back as it was before
    try {
      op.redispatchBoxed(below, stack);
    } catch (...) {
      c10::impl::tls_set_dispatch_key_excluded(kKey, true);
      throw;
    }
    c10::impl::tls_set_dispatch_key_excluded(kKey, true);
    return;
  }
  const int64_t started = now_ns();
  const auto raised = [&](py::handle error) {
    const int64_t ended = now_ns();
    if (functions.raised) {
      call(functions.raised, made.get(), error, py::int_(started), py::int_(ended));
    }
  };
  try {
    op.redispatchBoxed(below, stack);
  } catch (const python_error& error) {
    py::gil_scoped_acquire lock;
    raised(error.value ? py::handle(error.value) : py::none());
    throw;
  } catch (const py::error_already_set& error) {
    py::gil_scoped_acquire lock;
    raised(error.value());
    throw;
  } catch (...) {
    py::gil_scoped_acquire lock;
    raised(py::none());
    throw;
  }
  const int64_t ended = now_ns();
  py::gil_scoped_acquire lock;
  if (functions.after) {
    call(functions.after, made.get(), python_results(schema, *stack), py::int_(started), py::int_(ended));
  }
}

TORCH_LIBRARY_IMPL(_, Fake, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&recorded>());
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Begin. Each thread takes part from its `include` on.
EXPORTED void opreplay_recorder_begin(PyObject* before, PyObject* after, PyObject* raised, PyObject* run) {
  for (PyObject* function : {before, after, raised, run}) {
    Py_INCREF(function);
  }
  functions = {before, after, raised, run};
  recording.store(true);
}

// Record nothing more.
EXPORTED void opreplay_recorder_end() {
  recording.store(false);
  const Functions ended = std::exchange(functions, {});
  for (PyObject* function : {ended.before, ended.after, ended.raised, ended.run}) {
    Py_XDECREF(function);
  }
}

// The calling thread takes part, or not. Whether it did.
EXPORTED int opreplay_recorder_include(int takes_part) {
  const bool did = c10::impl::tls_is_dispatch_key_included(kKey);
  c10::impl::tls_set_dispatch_key_included(kKey, takes_part != 0);
  return did;
}

// What the calling thread calls is hidden from the recorder, or not. Whether it was.
EXPORTED int opreplay_recorder_hide(int hidden) {
  const bool was = c10::impl::tls_is_dispatch_key_excluded(kKey);
  c10::impl::tls_set_dispatch_key_excluded(kKey, hidden != 0);
  return was;
}

// Whether the calling thread takes part.
EXPORTED int opreplay_recorder_included() { return c10::impl::tls_is_dispatch_key_included(kKey); }

// Whether a capture has the hook.
EXPORTED int opreplay_recorder_active() { return recording.load(); }

// The key, as a set's bits.
EXPORTED uint64_t opreplay_recorder_key() { return DispatchKeySet(kKey).raw_repr(); }

// Whether the calling thread takes part, and is not hidden now.
EXPORTED int opreplay_recorder_sees() {
  return c10::impl::tls_is_dispatch_key_included(kKey) && !c10::impl::tls_is_dispatch_key_excluded(kKey);
}
