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

#include "hot_path.h"

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <utility>
#include <vector>

namespace {

using namespace opreplay;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::FunctionSchema;
using c10::OperatorHandle;
using torch::jit::Stack;

// PyTorch has this key for fake tensors written in C++, which nothing makes on plain tensors.
constexpr DispatchKey kKey = DispatchKey::Fake;

struct Functions {
  PyObject* before = nullptr;       // (operator or its name, args, kwargs) -> what to do, see below
  PyObject* after = nullptr;        // (call, result, started_ns, ended_ns) -> the record's signature, or None
  PyObject* raised = nullptr;       // (call, exception of Python or None, started_ns, ended_ns)
  PyObject* interrupted = nullptr;  // (call or None, args, kwargs, result or None): one of the others raised
  PyObject* run = nullptr;          // (operator, args, kwargs) -> result
  PyObject* describe = nullptr;     // (operator) -> an OperatorForHook (hook.py), or None
  PyObject* context = nullptr;      // () -> the number of the calling thread and the scope that it is in
  PyObject* late = nullptr;         // (operator, args, kwargs, result, started_ns, ended_ns) -> signature, or None
  PyObject* late_raised = nullptr;  // (operator, args, kwargs, exception or None, started_ns, ended_ns)
  PyObject* pump = nullptr;         // () after a record: something waits to be written, or told
  PyObject* unknown = nullptr;      // (type as text) -> what stands for a value that Python cannot have
};

// In the order in which Python gives them (hook.py).
std::array<PyObject**, 11> places(Functions& of) {
  return {&of.before,   &of.after,   &of.raised, &of.interrupted, &of.run,
          &of.describe, &of.context, &of.late,   &of.late_raised, &of.pump, &of.unknown};
}

// One capture. An operator that is running holds on to the one that it began in: what it tells when it returns, however
// late, is for that one alone.
struct Capture {
  Functions functions;  // read and written with the interpreter's lock; none once the capture has ended
  std::shared_ptr<Session> session;
};
std::shared_ptr<Capture> current;        // read and written with the interpreter's lock
std::atomic<uint64_t> current_number{0};  // of the capture in progress; 0: there is none

// The capture in progress, or none. Takes the interpreter's lock once in each thread.
std::shared_ptr<Capture> capture_in_progress() {
  thread_local struct {
    uint64_t number = 0;
    std::shared_ptr<Capture> capture;
  } known;
  const uint64_t number = current_number.load(std::memory_order_acquire);
  if (number == 0) {
    return nullptr;
  }
  if (known.number != number) {
    py::gil_scoped_acquire lock;
    known = {current_number.load(), current};
  }
  return known.capture;
}

int64_t now_ns() {  // the clock of time.perf_counter_ns
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// ------------------------------------------------------------------------------------------------------------ to Python

// Calls a function of a capture's; None where the capture has ended, which may be whenever Python runs. What it raises
// passes on through PyTorch as an exception of C++.
template <typename... Values>
py::object call(PyObject* function, const Values&... values) {
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

// The recorder's own tensor on the same memory, so that a tensor of the program's which has no Python object does not get
// one: a subclass that is made of it later could not be.
at::Tensor own_view(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj() ||
      tensor.layout() != at::kStrided || tensor.is_nested()) {
    return tensor;  // others warn once when they are made, and that is the program's
  }
  auto* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
}

// `numbers`: numbers that C++ code made tensors of are numbers in Python.
c10::IValue own_views(const c10::IValue& value, bool numbers = true) {
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

// An operator as Python names it; its name as text where Python has none for it.
py::object function_of(const OperatorHandle& op) {
  try {
    return py::reinterpret_borrow<py::object>(torch::detail::getTorchApiFunction(op));
  } catch (const std::exception&) {
    return py::str(toString(op.operator_name()));
  }
}

// A value for the recorder, or for the program where `recorder` is null.
py::object converted(const c10::TypePtr& type, const c10::IValue& value, const Functions* recorder, bool numbers) {
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

py::object to_python(const c10::Argument& argument, const c10::IValue& value, const Functions* recorder,
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
PythonArguments python_arguments(const FunctionSchema& schema, const c10::IValue* values, const Functions* recorder,
                                 bool numbers = true) {
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

py::object python_results(const FunctionSchema& schema, const Stack& stack, const Functions& recorder) {
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

// ------------------------------------------------------------------------------------------------------------- the hook

// What `before` says, apart from a call that is being recorded (any other object):
//   None    run it, unrecorded, and what it calls, too
//   False   run it; what it calls is recorded
//   True    Python runs it (`run`)

// Calls Python around an operator; where that raises (a signal handler does), what the operator may have written is noted.
template <typename Call, typename Arguments>
void around(const Capture& of, const Call& tell, py::handle begun, const Arguments& arguments, py::handle result) {
  try {
    tell();
  } catch (const python_error&) {
    if (of.functions.interrupted) {
      PythonArguments given = arguments();
      call(of.functions.interrupted, begun, given.args, given.kwargs, result);
    }
    throw;
  }
}

// Whether nobody but the thread that ends the interpreter gets its lock any more.
bool interpreter_ends() {
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

// The operator, described by Python at its first call.
const Operator& described(const OperatorHandle& op, const Capture& capture) {
  Session& of = *capture.session;
  const FunctionSchema& schema = op.schema();
  {
    std::lock_guard<std::mutex> lock(of.mutex);
    const auto found = of.operators.find(&schema);
    if (found != of.operators.end()) {
      return *found->second;
    }
  }
  auto made = std::make_shared<Operator>();
  {
    py::gil_scoped_acquire lock;
    if (py::object function = function_of(op); capture.functions.describe && !py::isinstance<py::str>(function)) {
      py::object found = call(capture.functions.describe, function);
      if (!found.is_none()) {
        const auto said = py::cast<py::tuple>(found);
        made->plain = py::cast<bool>(said[0]);
        made->writes = py::cast<std::vector<size_t>>(said[1]);
        made->watches = py::cast<std::vector<size_t>>(said[2]);
        made->dropout = py::cast<std::optional<size_t>>(said[3]);
        made->takes_numbers = py::cast<bool>(said[4]);
      }
    }
  }
  for (const auto& argument : schema.arguments()) {
    made->kinds.push_back(kind_of(argument.real_type()));
    made->keywords += !argument.kwarg_only();
  }
  std::lock_guard<std::mutex> lock(of.mutex);
  made->number = static_cast<int64_t>(of.operators.size());
  return *of.operators.emplace(&schema, std::move(made)).first->second;
}

// The calling thread and the scope that it is in, as Python numbers them. Whether calls may still be recorded here.
bool find_context(const Capture& capture, int64_t* context) {
  Session& of = *capture.session;
  thread_local struct {
    uint64_t moved = 0;
    int64_t context = 0;
  } known;
  const uint64_t moved = of.scopes_moved.load();
  if (known.moved != moved) {
    py::gil_scoped_acquire lock;
    const py::object found = call(capture.functions.context);
    if (found.is_none()) {
      return false;
    }
    known = {moved, py::cast<int64_t>(found)};
  }
  *context = known.context;
  return of.hot.load(std::memory_order_relaxed);
}

// Remember which signature Python gave a call, where calls like it can be recorded here.
void learn(Session& of, const Operator& known, const FunctionSchema& schema, const c10::IValue* arguments,
           const Stack& stack, py::handle signature) {
  if (signature.is_none()) {
    return;
  }
  const size_t results = schema.returns().size();
  std::lock_guard<std::mutex> lock(of.mutex);
  HotCall made(of, known);
  if (made.take_arguments(schema, arguments) && made.take_results(stack.data() + stack.size() - results, results)) {
    of.signatures.emplace(made.key(), py::cast<int64_t>(signature));
  }
}

using Saved = c10::SmallVector<c10::IValue, 12>;

// Calls Python with what an exception of Python's is, and lets the exception pass.
template <typename Call, typename Tell>
void telling(const Call& run, const Tell& tell) {
  try {
    run();
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

// Records a call without Python, as far as that goes. Whether it has run.
bool record_hot(const Capture& capture, const OperatorHandle& op, DispatchKeySet below, Stack* stack, size_t first) {
  Session& of = *capture.session;
  const FunctionSchema& schema = op.schema();
  const Operator& known = described(op, capture);
  int64_t context = 0;
  if (!known.plain || !of.is_settled(known.watches) || !find_context(capture, &context)) {
    return false;
  }
  HotCall made(of, known);
  {
    std::lock_guard<std::mutex> lock(of.mutex);
    if (!made.take_arguments(schema, stack->data() + first)) {
      return false;
    }
  }
  const Saved saved(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end());
  const int64_t started = now_ns();
  telling(
      [&] { op.redispatchBoxed(below, stack); },
      [&](py::handle error) {
        const int64_t ended = now_ns();
        if (capture.functions.late_raised) {
          py::object function = function_of(op);
          const auto arguments = [&] { return python_arguments(schema, saved.data(), &capture.functions, known.takes_numbers); };
          PythonArguments given = arguments();
          around(capture, [&] { call(capture.functions.late_raised, function, given.args, given.kwargs, error, py::int_(started),
                            py::int_(ended)); },
                 py::none(), arguments, py::none());
        }
      });
  const int64_t ended = now_ns();
  const size_t results = schema.returns().size();
  bool recorded = false, waits = false;
  {
    std::lock_guard<std::mutex> lock(of.mutex);
    if (of.hot.load(std::memory_order_relaxed) && made.take_results(stack->data() + stack->size() - results, results)) {
      if (const int64_t signature = made.signature()) {
        made.record(signature, context, started, ended);
        recorded = true;
        waits = of.waits();
      }
    }
  }
  if (!recorded || waits) {
    py::gil_scoped_acquire lock;
    if (!recorded && capture.functions.late) {
      py::object function = function_of(op);
      const auto arguments = [&] { return python_arguments(schema, saved.data(), &capture.functions, known.takes_numbers); };
      PythonArguments given = arguments();
      py::object result = python_results(schema, *stack, capture.functions);
      py::object signature = py::none();
      around(capture, [&] { signature = call(capture.functions.late, function, given.args, given.kwargs, result, py::int_(started),
                                    py::int_(ended)); },
             py::none(), arguments, result);
      learn(of, known, schema, saved.data(), *stack, signature);
    } else if (capture.functions.pump) {
      call(capture.functions.pump);
    }
  }
  return true;
}

void recorded(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const DispatchKeySet below = keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, kKey);
  const FunctionSchema& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  const std::shared_ptr<Capture> found = capture_in_progress();
  if (!found || c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Python) || is_for_others(*stack, first)) {
    op.redispatchBoxed(below, stack);
    return;
  }
  c10::impl::ExcludeDispatchKeyGuard hidden(kKey);
  const Capture& capture = *found;
  Session& of = *capture.session;
  if (of.hot.load(std::memory_order_relaxed) && record_hot(capture, op, below, stack, first)) {
    return;
  }
  Held made;
  bool alone = false;
  Saved saved;
  {
    py::gil_scoped_acquire lock;
    if (!capture.functions.before) {
      alone = true;
    } else {
      py::object function = function_of(op);
      PythonArguments given = python_arguments(schema, stack->data() + first, &capture.functions, described(op, capture).takes_numbers);
      py::object said = call(capture.functions.before, function, given.args, given.kwargs);
      if (said.ptr() == Py_True) {
        given = python_arguments(schema, stack->data() + first, nullptr);
        const py::object run = py::reinterpret_borrow<py::object>(capture.functions.run);
        if (!run) {  // the capture has ended
          op.redispatchBoxed(below, stack);
          return;
        }
        py::object result = call(run.ptr(), function, given.args, given.kwargs);
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
  const auto arguments = [] { return PythonArguments{py::tuple(), py::dict()}; };  // the call has them
  const Operator* known = of.hot.load(std::memory_order_relaxed) ? &described(op, capture) : nullptr;
  if (known && known->plain) {
    saved.assign(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end());
  }
  const int64_t started = now_ns();
  telling(
      [&] { op.redispatchBoxed(below, stack); },
      [&](py::handle error) {
        const int64_t ended = now_ns();
        if (capture.functions.raised) {
          around(capture, [&] { call(capture.functions.raised, made.get(), error, py::int_(started), py::int_(ended)); }, made.get(),
                 arguments, py::none());
        }
      });
  const int64_t ended = now_ns();
  py::gil_scoped_acquire lock;
  if (capture.functions.after) {
    py::object result = python_results(schema, *stack, capture.functions);
    py::object signature = py::none();
    around(capture, [&] { signature = call(capture.functions.after, made.get(), result, py::int_(started), py::int_(ended)); }, made.get(),
           arguments, result);
    if (known && known->plain) {
      learn(of, *known, schema, saved.data(), *stack, signature);
    }
  }
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Take the key, for as long as the process lives, where no other library has it. Whether it is taken.
EXPORTED int opreplay_recorder_take_key() {
  static const bool taken = [] {
    if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(kKey)) {
      return false;  // a second fallback would end the process
    }
    static torch::Library library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&recorded>());
    return true;
  }();
  return taken;
}

// A module of the types that Python needs.
EXPORTED PyObject* opreplay_recorder_types() {
  py::object scope = py::module_::import("types").attr("ModuleType")("opreplay_recorder");
  py::class_<Rows>(scope, "Rows", py::module_local())
      .def("append", &Rows::append)
      .def("__len__", &Rows::length)
      .def("first", &Rows::first)
      .def("drop", &Rows::drop);
  py::class_<Counter>(scope, "Counter", py::module_local())
      .def("__iter__", [](py::object self) { return self; })
      .def("__next__", &Counter::next);
  py::class_<Session, std::shared_ptr<Session>>(scope, "Session", py::module_local())
      .def(py::init([](int64_t began_ns, size_t chunk_records, bool scalars) {
        auto made = std::make_shared<Session>();
        made->began_ns = began_ns;
        made->chunk_records = chunk_records;
        made->scalars = scalars;
        return made;
      }))
      .def_property_readonly("rows", [](Session& self) { return &self.rows; }, py::return_value_policy::reference_internal)
      .def_property_readonly("births", [](Session& self) { return &self.births; },
                             py::return_value_policy::reference_internal)
      .def_property_readonly("definitions", [](Session& self) { return &self.definitions; },
                             py::return_value_policy::reference_internal)
      .def_property_readonly("next_storage", [](Session& self) { return &self.next_storage; },
                             py::return_value_policy::reference_internal)
      .def_property_readonly("next_tensor", [](Session& self) { return &self.next_tensor; },
                             py::return_value_policy::reference_internal)
      .def_property("hot", [](Session& self) { return self.hot.load(); },
                    &Session::set_hot)
      .def("note_meta", &Session::note_meta)
      .def("publish", &Session::publish)
      .def("view", &Session::view)
      .def("take", &Session::take)
      .def("forget_written", &Session::forget_written)
      .def("unadopted", &Session::unadopted)
      .def("drains", &Session::drains_now)
      .def("dead", &Session::dead)
      .def("settle", &Session::settle)
      .def("move_scopes", &Session::move_scopes)
      .def("clear", &Session::clear)
      .def("forked", &Session::forked);
  return scope.release().ptr();
}

// Begin. `given`: the functions of `Functions` in their order, then the session. Each thread takes part from its
// `include` on.
EXPORTED void opreplay_recorder_begin(PyObject* given) {
  static uint64_t captures = 0;
  const auto items = py::reinterpret_borrow<py::tuple>(given);
  auto made = std::make_shared<Capture>();
  size_t index = 0;
  for (PyObject** place : places(made->functions)) {
    *place = py::object(items[index++]).release().ptr();
  }
  made->session = py::cast<std::shared_ptr<Session>>(items[index]);
  current = std::move(made);
  current_number.store(++captures, std::memory_order_release);
}

// Record nothing more.
EXPORTED void opreplay_recorder_end() {
  current_number.store(0);
  if (const std::shared_ptr<Capture> ended = std::exchange(current, nullptr)) {
    Functions functions = std::exchange(ended->functions, {});
    for (PyObject** place : places(functions)) {
      Py_XDECREF(*place);
    }
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
EXPORTED int opreplay_recorder_active() { return current_number.load() != 0; }

// The key, as a set's bits.
EXPORTED uint64_t opreplay_recorder_key() { return DispatchKeySet(kKey).raw_repr(); }

// Whether the calling thread takes part, and is not hidden now.
EXPORTED int opreplay_recorder_sees() {
  return c10::impl::tls_is_dispatch_key_included(kKey) && !c10::impl::tls_is_dispatch_key_excluded(kKey);
}
