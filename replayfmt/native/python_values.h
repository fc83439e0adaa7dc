// Values on their way to Python and back, and the functions there that they are given to.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/tensor_dtypes.h>

#include <array>
#include <optional>

namespace opreplay {

namespace py = pybind11;
using c10::FunctionSchema;
using c10::OperatorHandle;
using torch::jit::Stack;

struct Functions {
  PyObject* before = nullptr;           // (operator or its name, args, kwargs) -> what to do, see below
  PyObject* after = nullptr;            // (call, result, started_ns, ended_ns) -> the record's signature, or None
  PyObject* raised = nullptr;           // (call, exception of Python or None, started_ns, ended_ns)
  PyObject* interrupted = nullptr;      // (call or None, args, kwargs, result or None): one of the others raised
  PyObject* run = nullptr;              // (operator, args, kwargs) -> result
  PyObject* describe = nullptr;         // (operator) -> an OperatorForHook (hook.py), or None
  PyObject* register_thread = nullptr;  // (): it numbers the calling thread and the scope that it is in
  PyObject* late = nullptr;             // (operator, args, kwargs, result, started_ns, ended_ns) -> signature, or None
  PyObject* late_raised = nullptr;      // (operator, args, kwargs, exception or None, started_ns, ended_ns)
  PyObject* flush_if_due = nullptr;     // () after a record: something waits to be written, or told
  PyObject* wrote = nullptr;  // (operator, args, kwargs): it wrote to storages that Python has looked after since
  PyObject* register_storages =
      nullptr;                  // (tensors): an operator is about to use storages that the hot path does not know
  PyObject* unknown = nullptr;  // (type as text) -> what stands for a value that Python cannot have
};

// In the order in which Python gives them (hook.py).
inline std::array<PyObject**, 13> places(Functions& of) {
  return {&of.before,          &of.after, &of.raised,      &of.interrupted,  &of.run,   &of.describe,
          &of.register_thread, &of.late,  &of.late_raised, &of.flush_if_due, &of.wrote, &of.register_storages,
          &of.unknown};
}

// Room for the recorder's own frames where the program is as deep as Python lets it be. With the interpreter's lock.
class DeeperCalls {
 public:
  DeeperCalls() {
    if (in_progress_++ == 0) {
      programs_ = Py_GetRecursionLimit();
      Py_SetRecursionLimit(programs_ + kFrames);
    }
  }
  DeeperCalls(const DeeperCalls&) = delete;
  DeeperCalls& operator=(const DeeperCalls&) = delete;
  ~DeeperCalls() {
    if (--in_progress_ == 0 && Py_GetRecursionLimit() == programs_ + kFrames) {  // else the program has set another one
      Py_SetRecursionLimit(programs_);
    }
  }

 private:
  static constexpr int kFrames = 500;
  inline static int in_progress_ = 0, programs_ = 0;
};

// Calls a function of a capture's; None where the capture has ended, which may be whenever Python runs. What it raises
// passes on through PyTorch as an exception of C++. `run` runs the program's own code; the others are the recorder's.
template <typename... Values>
py::object call_as_is(PyObject* function, const Values&... values) {
  if (!function) {
    return py::none();
  }
  const py::object held = py::reinterpret_borrow<py::object>(function);  // the capture may end meanwhile
  PyObject* arguments[] = {values.ptr()..., nullptr};
  PyObject* result = PyObject_Vectorcall(function, arguments, sizeof...(values), nullptr);
  if (!result) {
    python_error error;
    error.persist();
    throw error;
  }
  return py::reinterpret_steal<py::object>(result);
}

template <typename... Values>
py::object call(PyObject* function, const Values&... values) {
  const DeeperCalls deeper;
  return call_as_is(function, values...);
}

// The layouts whose tensors warn when one is made: the program has been warned of its own.
class NoWarnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

// The recorder's own tensor on the same memory, so that a tensor of the program's which has no Python object does not
// get one: a subclass that is made of it later could not be.
inline at::Tensor own_view(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj()) {
    return tensor;
  }
  NoWarnings none;
  const c10::WarningUtils::WarningHandlerGuard guard(&none);
  auto* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
}

// `numbers`: numbers that C++ code made tensors of are numbers in Python.
inline c10::IValue own_views(const c10::IValue& value, bool numbers = true) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    at::Tensor view = own_view(tensor);
    if (!numbers && tensor.defined() && tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      view.unsafeGetTensorImpl()->set_wrapped_number(false);
    }
    return view;
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

// An operator as Python names it; its name as text where Python has none for it. Python looks for the name at first:
// what a signal handler raises meanwhile passes on.
inline py::object function_of(const OperatorHandle& op) {
  try {
    return py::reinterpret_borrow<py::object>(torch::detail::getTorchApiFunction(op));
  } catch (py::error_already_set& raised) {
    if (!raised.matches(PyExc_AttributeError)) {
      raised.restore();
      python_error error;
      error.persist();
      throw error;
    }
  } catch (const std::exception&) {
  }
  return py::str(toString(op.operator_name()));
}

// A value for the recorder, or for the program where `recorder` is null.
inline py::object converted(const c10::TypePtr& type, const c10::IValue& value, const Functions* recorder,
                            bool numbers) {
  if (!recorder) {
    return torch::jit::toPyObject(value);
  }
  try {
    return torch::jit::toPyObject(own_views(value, numbers));
  } catch (const python_error&) {
    throw;  // a signal handler's
  } catch (const std::exception&) {
    return recorder->unknown ? call(recorder->unknown, py::str(type->str())) : py::none();
  }
}

inline py::object to_python(const c10::Argument& argument, const c10::IValue& value, const Functions* recorder,
                            bool numbers) {
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
      return converted(argument.real_type(), value, recorder, numbers);
  }
}

struct PythonArguments {
  py::tuple args;
  py::dict kwargs;
};

// What a dispatch mode is given for these values: trailing arguments that have their schema's default are left out.
// For the recorder they are views of its own.
inline PythonArguments python_arguments(const FunctionSchema& schema, const c10::IValue* values,
                                        const Functions* recorder, bool numbers = true) {
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
    made.args[index] = to_python(arguments[index], values[index], recorder, numbers);
  }
  for (size_t index = keywords; index < arguments.size(); index++) {
    if (!has_default(index)) {
      made.kwargs[py::str(arguments[index].name())] = to_python(arguments[index], values[index], recorder, numbers);
    }
  }
  return made;
}

inline py::object python_results(const FunctionSchema& schema, const Stack& stack, const Functions& recorder) {
  const size_t count = schema.returns().size();
  if (count == 0) {
    return py::none();
  }
  const size_t first = stack.size() - count;
  if (count == 1) {
    return converted(schema.returns()[0].real_type(), stack[first], &recorder, true);
  }
  py::tuple results(count);
  for (size_t index = 0; index < count; index++) {
    results[index] = converted(schema.returns()[index].real_type(), stack[first + index], &recorder, true);
  }
  return results;
}

inline void push_results(const FunctionSchema& schema, py::handle result, Stack* stack) {
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

// Runs an operator, calls Python with what an exception of Python's is, and lets the exception pass.
template <typename Run, typename Tell>
decltype(auto) telling(const Run& run, const Tell& tell) {
  try {
    return run();
  } catch (const python_error& error) {
    py::gil_scoped_acquire lock;
    tell(error.value ? py::handle(error.value) : py::handle(Py_None));
    throw;
  } catch (const py::error_already_set& error) {
    py::gil_scoped_acquire lock;
    tell(error.value());
    throw;
  } catch (...) {
    py::gil_scoped_acquire lock;
    tell(py::handle(Py_None));
    throw;
  }
}

// Whether nobody but the thread that ends the interpreter gets its lock any more.
inline bool interpreter_ends() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

// A Python object that is let go of with the interpreter's lock.
class Held {
 public:
  Held() = default;
  explicit Held(py::object object) : object_(object.release().ptr()) {}
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    if (object_ && !interpreter_ends()) {
      py::gil_scoped_acquire lock;
      Py_DECREF(object_);
    }
  }
  py::handle get() const { return object_; }
  void set(py::object object) { object_ = object.release().ptr(); }

 private:
  PyObject* object_ = nullptr;
};

}  // namespace opreplay
