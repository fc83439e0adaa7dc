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

#include <ATen/Operators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/PyInterpreterHooks.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "code_calls.h"
#include "hot_run.h"
#include "python_types.h"

#include <cstdint>
#include <utility>
#include <vector>

namespace {

using namespace opreplay;
using c10::DispatchKey;
using c10::DispatchKeySet;

// ------------------------------------------------------------------------------------------------------------- the
// hook

// What `before` says, apart from a call that is being recorded (any other object):
//   None    run it, unrecorded, and what it calls, too
//   False   run it; what it calls is recorded
//   True    Python runs it (`run`)

// While an operator runs here: what it calls is hidden from the recorder, and the watch on threads knows that the
// threads of the parallel regions that it opens work for it.
class Runs {
 public:
  Runs() : inside_(of_this()), before_(inside_.load(std::memory_order_relaxed)) {
    if (before_ == kNothing) {
      inside_.store(at::in_parallel_region() ? kInParallel : kOperatorRuns, std::memory_order_relaxed);
    }
  }
  ~Runs() { inside_.store(before_, std::memory_order_relaxed); }

 private:
  static std::atomic<int>& of_this() {
    thread_local std::atomic<int> unwatched{kNothing};
    thread_local std::atomic<int>& known = watch.load() ? *watch.load()->inside() : unwatched;
    return known;
  }
  const c10::impl::ExcludeDispatchKeyGuard hidden_{kKey};
  std::atomic<int>& inside_;
  const int before_;
};

// What is called while it lives is not hidden.
struct Shown {
  Shown() { c10::impl::tls_set_dispatch_key_excluded(kKey, false); }
  ~Shown() { c10::impl::tls_set_dispatch_key_excluded(kKey, true); }
};

// Tensors that dispatch themselves come here when their own code calls an operator beneath itself, or traces one.
bool is_for_others(const at::Tensor& tensor) {
  return (tensor.key_set().has(DispatchKey::Python) && !runs_on_itself(tensor)) ||
         (tensor.is_meta() && is_only_traced(tensor.device()));
}
bool is_for_others(const std::optional<at::Tensor>& tensor) { return tensor && is_for_others(*tensor); }
bool is_for_others(at::ITensorListRef list) {
  return std::any_of(list.begin(), list.end(), [](const at::Tensor& tensor) { return is_for_others(tensor); });
}
template <typename Value>
bool is_for_others(const Value&) {
  return false;
}
bool is_for_others(const Stack& stack, size_t first) {
  return std::any_of(stack.begin() + static_cast<std::ptrdiff_t>(first), stack.end(), [](const c10::IValue& value) {
    return value.isDevice()   ? is_only_traced(value.toDevice())
           : value.isTensor() ? is_for_others(value.toTensor())
                              : value.isTensorList() && is_for_others(at::TensorList(value.toTensorVector()));
  });
}

// Whether a mode or a tensor that dispatches itself gets the call next.
bool goes_to_python(const OperatorHandle& op, DispatchKeySet below) {
  return kAbovePython && below.has(DispatchKey::Python) && !op.hasKernelForDispatchKey(DispatchKey::Python);
}

// What PyTorch's fallback for dispatch to Python does, except that what Python calls is not hidden from the recorder,
// which has the key above.
void dispatch_to_python(const OperatorHandle& op, Stack* stack) {
  constexpr DispatchKeySet others({DispatchKey::Python, kKey});
  constexpr DispatchKeySet above =
      DispatchKeySet(DispatchKeySet::FULL) ^ (DispatchKeySet(DispatchKeySet::FULL_AFTER, DispatchKey::Python) | others);
  const c10::impl::ExcludeDispatchKeyGuard guard(above);
  (*c10::impl::getGlobalPyInterpreter())->dispatch(op, stack);
}

// The last `count` values of a stack.
c10::ArrayRef<c10::IValue> last(const Stack& stack, size_t count) {
  return c10::ArrayRef<c10::IValue>(stack).slice(stack.size() - count);
}

// Whether it has run.
bool record_hot(const Capture& capture, const OperatorHandle& op, DispatchKeySet below, Stack* stack, size_t first) {
  HotRun run(capture, op);
  const auto arguments = c10::ArrayRef<c10::IValue>(*stack).slice(first);
  if (!run.begins([&](HotCall& made) {
        return std::all_of(arguments.begin(), arguments.end(), [&](const auto& value) { return made.take(value); });
      })) {
    return false;
  }
  const Saved saved(arguments.begin(), arguments.end());
  const auto given = [&] { return Stack(saved.begin(), saved.end()); };
  run.runs([&] { op.redispatchBoxed(below, stack); }, given);
  const auto results = last(*stack, op.schema().returns().size());
  run.returned(
      [&](HotCall& made) {
        return std::all_of(results.begin(), results.end(), [&](const auto& value) { return made.take_result(value); });
      },
      given, [&] { return Stack(results.begin(), results.end()); });
  return true;
}

void recorded(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const DispatchKeySet below = keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, kKey);
  if (goes_to_python(op, below)) {
    dispatch_to_python(op, stack);
    return;
  }
  const FunctionSchema& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  const std::shared_ptr<Capture> found = capture_in_progress();
  if (!found || is_for_others(*stack, first)) {
    op.redispatchBoxed(below, stack);
    return;
  }
  const Runs runs;
  const Capture& capture = *found;
  if (capture.session->hot.load(std::memory_order_relaxed) && record_hot(capture, op, below, stack, first)) {
    return;
  }
  const Operator& known = described(op, schema, capture);
  Held made;
  {
    py::gil_scoped_acquire lock;
    const py::object function = function_of(op);
    PythonArguments given = python_arguments(schema, stack->data() + first, &capture.functions, known.takes_numbers);
    py::object said = call(capture.functions.before, function, given.args, given.kwargs);
    if (said.ptr() == Py_True && capture.functions.run) {
      given = python_arguments(schema, stack->data() + first, nullptr);
      const py::object result = call_as_is(capture.functions.run, function, given.args, given.kwargs);
      torch::jit::drop(*stack, schema.arguments().size());
      push_results(schema, result, stack);
      return;
    }
    if (!said.is_none() && said.ptr() != Py_True) {
      made.set(std::move(said));
    }
  }
  if (!made.get()) {
    op.redispatchBoxed(below, stack);
    return;
  }
  if (made.get().ptr() == Py_False) {
    const Shown shown;
    op.redispatchBoxed(below, stack);
    return;
  }
  const auto arguments = [] { return PythonArguments{py::tuple(), py::dict()}; };  // the call has them
  const bool learns = known.plain && capture.session->hot.load(std::memory_order_relaxed);
  const Saved saved(learns ? stack->begin() + static_cast<std::ptrdiff_t>(first) : stack->end(), stack->end());
  const int64_t started = now_ns();
  telling([&] { op.redispatchBoxed(below, stack); },
          [&](py::handle error) {
            around(capture, capture.functions.raised, made.get(), arguments, py::none(), made.get(), error,
                   py::int_(started), py::int_(now_ns()));
          });
  const int64_t ended = now_ns();
  py::gil_scoped_acquire lock;
  const py::object result = python_results(schema, *stack, capture.functions);
  const py::object signature = around(capture, capture.functions.after, made.get(), arguments, result, made.get(),
                                      result, py::int_(started), py::int_(ended));
  if (learns) {
    learn(*capture.session, known, saved, last(*stack, schema.returns().size()), signature);
  }
}

// ------------------------------------------------------------------------------------- operators whose calls stay
// unboxed

// The same as `recorded`, with arguments and results as C++ has them: tensors are not counted once more, which for one
// that has a Python object takes the interpreter's lock. What the hot path does not know goes the way of all others.
template <typename Result, typename... Args>
Result recorded_unboxed(const c10::TypedOperatorHandle<Result(Args...)>& op, DispatchKeySet keys, Args... args) {
  const DispatchKeySet below = keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, kKey);
  const std::shared_ptr<Capture> found = capture_in_progress();
  const bool to_python = goes_to_python(op, below);
  if (!to_python && (!found || (is_for_others(args) || ...))) {
    return op.redispatch(below, std::forward<Args>(args)...);
  }
  if (!to_python && found->session->hot.load(std::memory_order_relaxed)) {
    const Runs runs;
    HotRun run(*found, op);
    if (run.begins([&](HotCall& made) { return (made.take(args) && ...); })) {
      const auto given = [&] { return c10::impl::boxArgs<Args...>(args...); };
      Result result = run.runs([&]() -> Result { return op.redispatch(below, args...); }, given);
      run.returned([&](HotCall& made) { return made.take_result(result); }, given,
                   [&] {
                     Stack stack;
                     c10::impl::push_outputs<Result, true>::copy(result, &stack);
                     return stack;
                   });
      return result;
    }
  }
  static const auto boxed = c10::BoxedKernel::makeFromFunction<&recorded>();
  return c10::impl::BoxedKernelWrapper<Result(Args...)>::call(boxed, op, keys, std::forward<Args>(args)...);
}

template <typename Op, typename Schema = typename Op::schema>
struct Unboxed;
template <typename Op, typename Result, typename... Args>
struct Unboxed<Op, Result(Args...)> {
  static Result call(DispatchKeySet keys, Args... args) {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name).template typed<Result(Args...)>();
    return recorded_unboxed<Result, Args...>(op, keys, std::forward<Args>(args)...);
  }
  static void keep(torch::Library& library) {
    const std::string overload(Op::overload_name);
    library.impl((overload.empty() ? std::string(Op::name) : std::string(Op::name) + "." + overload).c_str(),
                 TORCH_FN(call));
  }
};

template <typename... Ops>
void keep_unboxed(torch::Library& library) {
  (Unboxed<Ops>::keep(library), ...);
}

// ------------------------------------------------------------------------------------------ memory that is taken by
// DLPack

// DLPack's C interface (DLPackExchangeAPI of version 1): libraries look it up once for a class of tensors and keep it.
struct ExchangeApi {
  uint32_t major, minor;
  void* previous;
  void* allocate;
  int (*manage)(void* tensor, void** taken);
  void* give;
  int (*describe)(void* tensor, void* taken);
  void* stream;
};
ExchangeApi pytorchs_api{}, telling_api{};
PyObject* on_taken = nullptr;  // called with each tensor; used with the interpreter's lock

// With the interpreter's lock. Returns what the interface said.
int tell_taken(void* tensor, int said) {
  if (said == 0 && on_taken) {
    Py_XDECREF(PyObject_CallOneArg(on_taken, static_cast<PyObject*>(tensor)));
  }
  return on_taken && PyErr_Occurred() ? -1 : said;
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Take the key, for as long as the process lives, where no other library has it. Whether it is taken.
EXPORTED int opreplay_recorder_take_key() {
  static const bool taken = [] {
    if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(kKey)) {
      return false;  // a second fallback would end the process
    }
    count_operators_gone();
    static torch::Library all(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
    all.fallback(torch::CppFunction::makeFromBoxedFunction<&recorded>());
    static torch::Library commonest(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
    namespace ops = at::_ops;
    keep_unboxed<ops::_local_scalar_dense, ops::_safe_softmax, ops::_softmax, ops::_softmax_backward_data,
                 ops::_to_copy, ops::_unsafe_view, ops::add_Scalar, ops::add_Tensor, ops::add__Tensor, ops::addcdiv_,
                 ops::addcmul_, ops::addmm, ops::addmm_out, ops::alias, ops::bmm, ops::bmm_out, ops::cat, ops::clone,
                 ops::copy_, ops::detach, ops::div_Scalar, ops::div_Tensor, ops::div__Scalar, ops::div__Tensor,
                 ops::embedding, ops::exp, ops::expand, ops::fill__Scalar, ops::gelu, ops::gelu_backward,
                 ops::index_Tensor, ops::lerp__Scalar, ops::mean_dim, ops::mm, ops::mm_out, ops::mul_Scalar,
                 ops::mul_Tensor, ops::mul__Scalar, ops::mul__Tensor, ops::native_layer_norm,
                 ops::native_layer_norm_backward, ops::neg, ops::permute, ops::pow_Tensor_Scalar, ops::relu, ops::rsqrt,
                 ops::select_int, ops::sigmoid, ops::silu, ops::slice_Tensor, ops::split_Tensor, ops::sqrt,
                 ops::sub_Tensor, ops::sum_dim_IntList, ops::t, ops::tanh, ops::tanh_backward, ops::transpose_int,
                 ops::unsqueeze, ops::view, ops::where_self, ops::zero_>(commonest);
    return true;
  }();
  return taken;
}

// A module of the types that Python needs.
EXPORTED PyObject* opreplay_recorder_types() { return python_types().release().ptr(); }

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
  made->number = ++captures;
  current = std::move(made);
  current_number.store(captures, std::memory_order_release);
}

// What thread_watch.cpp shares. Before the first capture.
EXPORTED void opreplay_recorder_watched(Watch* by) { watch.store(by); }

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

// PyTorch's interface, but that `opreplay_recorder_on_taken`'s function hears of each tensor that is taken; null where
// it is of another version. It is never freed: libraries keep it.
EXPORTED const void* opreplay_recorder_exchange_api(const void* pytorchs) {
  const auto& given = *static_cast<const ExchangeApi*>(pytorchs);
  if (given.major != 1) {
    return nullptr;
  }
  if (pytorchs != &telling_api) {
    pytorchs_api = telling_api = given;
    telling_api.manage = [](void* tensor, void** taken) {
      return tell_taken(tensor, pytorchs_api.manage(tensor, taken));
    };
    telling_api.describe = [](void* tensor, void* taken) {
      return tell_taken(tensor, pytorchs_api.describe(tensor, taken));
    };
  }
  return &telling_api;
}

// What to call with each tensor; None for nothing.
EXPORTED void opreplay_recorder_on_taken(PyObject* function) {
  Py_XDECREF(std::exchange(on_taken, function == Py_None ? nullptr : Py_NewRef(function)));
}

// The key, as a set's bits.
EXPORTED uint64_t opreplay_recorder_key() { return DispatchKeySet(kKey).raw_repr(); }

// Whether the calling thread takes part (1), and a capture has the hook (2).
EXPORTED int opreplay_recorder_state() {
  return (c10::impl::tls_is_dispatch_key_included(kKey) ? 1 : 0) | (current_number.load() ? 2 : 0);
}
