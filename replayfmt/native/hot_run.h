// One call on the hot path, from its arguments to its record, and the capture that it belongs to.
//
// What is known runs without Python. Where something was new, Python hears of it afterwards, and what it says is
// remembered for the next call.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "hot_path.h"
#include "python_values.h"
#include "watched.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

namespace opreplay {

// One capture. An operator that is running holds on to the one that it began in: what it tells when it returns, however
// late, is for that one alone.
struct Capture {
  Functions functions;  // read and written with the interpreter's lock; none once the capture has ended
  std::shared_ptr<Session> session;
  uint64_t number = 0;  // no other capture of this process has it
};
inline std::shared_ptr<Capture> current;         // read and written with the interpreter's lock
inline std::atomic<uint64_t> current_number{0};  // of the capture in progress; 0: there is none
inline std::atomic<Watch*> watch{nullptr};       // on threads, where there is one

// The capture in progress, or none. Takes the interpreter's lock once in each thread.
inline std::shared_ptr<Capture> capture_in_progress() {
  thread_local struct {
    uint64_t number = 0;
    std::shared_ptr<Capture> capture;
  } known;
  Watch::at_operator(watch);
  const uint64_t number = current_number.load(std::memory_order_acquire);
  if (number == 0) {  // it has ended where its key could not be taken from this thread, or was put back into it
    c10::impl::tls_set_dispatch_key_included(kKey, false);
    return nullptr;
  }
  if (known.number != number) {
    py::gil_scoped_acquire lock;
    known = {current_number.load(), current};
    Watch::thread_joined(watch);
  }
  return known.capture;
}

inline int64_t now_ns() {  // the clock of time.perf_counter_ns
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Calls Python around an operator; where that raises (a signal handler does), what the operator may have written is
// noted. `arguments`: those that `begun` does not have.
template <typename Arguments, typename... Values>
py::object around(const Capture& of, PyObject* function, py::handle begun, const Arguments& arguments,
                  py::handle result, const Values&... values) {
  try {
    return call(function, values...);
  } catch (const python_error&) {
    const PythonArguments given = arguments();
    call(of.functions.interrupted, begun, given.args, given.kwargs, result);
    throw;
  }
}

// An operator, as Python describes it.
inline const Operator& describe(const OperatorHandle& op, const FunctionSchema& schema, const Capture& capture) {
  Session& of = *capture.session;
  {
    std::lock_guard<std::mutex> lock(of.mutex);
    if (const Operator* found = of.operators.find(schema)) {
      return *found;
    }
  }
  auto made = std::make_unique<Operator>();
  {
    py::gil_scoped_acquire lock;
    if (py::object function = function_of(op); capture.functions.describe && !py::isinstance<py::str>(function)) {
      if (py::object said = call(capture.functions.describe, function); !said.is_none()) {
        using Indices = std::vector<size_t>;
        std::tie(made->plain, made->writes, made->watches, made->dropout, made->takes_numbers, made->fills, made->empty,
                 made->draws, made->backends) =
            py::cast<std::tuple<bool, Indices, Indices, std::optional<size_t>, bool, bool, bool, bool,
                                std::vector<c10::DispatchKey>>>(said);
      }
    }
  }
  std::lock_guard<std::mutex> lock(of.mutex);
  if (const Operator* found = of.operators.find(schema)) {
    return *found;  // another thread was faster
  }
  made->number = static_cast<int64_t>(of.operators.size());
  read_schema(*made, of, schema);
  return of.operators.add(schema, std::move(made));
}

// An operator, described by Python at its first call. `schema`: the operator's.
inline const Operator& described(const OperatorHandle& op, const FunctionSchema& schema, const Capture& capture) {
  struct Known {
    const FunctionSchema* schema;
    uint64_t capture, gone;
    const Operator* found;  // by schema and capture, which keeps it
  };
  thread_local std::array<Known, 128> recent{};
  Known& known = recent[(reinterpret_cast<uintptr_t>(&schema) * 0x9e3779b97f4a7c15ull) >> 57];
  const uint64_t gone = operators_gone.load(std::memory_order_relaxed);
  if (known.schema != &schema || known.capture != capture.number || known.gone != gone) {
    known = {&schema, capture.number, gone, &describe(op, schema, capture)};
  }
  return *known.found;
}

// Where the number of the calling thread and the scope that it is in stands; none where calls may not be recorded here
// any more. Python numbers a thread at its first call.
inline const std::atomic<int64_t>* find_context(const Capture& capture) {
  Session& of = *capture.session;
  const std::atomic<int64_t>& context = of.contexts.of_this_thread(of.mutex);
  if (context.load() == Contexts::kNone) {
    py::gil_scoped_acquire lock;
    call(capture.functions.register_thread);
  }
  return context.load() != Contexts::kNone && of.hot.load(std::memory_order_relaxed) ? &context : nullptr;
}

// Remember which signature Python gave a call, where calls like it can be recorded here.
inline void learn(Session& of, const Operator& known, c10::ArrayRef<c10::IValue> arguments,
                  c10::ArrayRef<c10::IValue> results, py::handle signature) {
  Watch::after_news(watch);
  if (signature.is_none()) {
    return;
  }
  std::lock_guard<std::mutex> lock(of.mutex);
  HotCall made(of, known, true);
  if (std::all_of(arguments.begin(), arguments.end(), [&](const c10::IValue& value) { return made.take(value); }) &&
      std::all_of(results.begin(), results.end(), [&](const c10::IValue& value) { return made.take_result(value); })) {
    of.signatures.emplace(made.key(), py::cast<int64_t>(signature));
  }
}

using Saved = c10::SmallVector<c10::IValue, 12>;

// A call that is recorded without Python, as far as that goes: Python hears of it afterwards where something was new.
class HotRun {
 public:
  HotRun(const Capture& capture, const OperatorHandle& op) : HotRun(capture, op, op.schema()) {}
  // Of a kernel that no dispatcher calls. `kernel`: as Python knows it.
  HotRun(const Capture& capture, const Operator& known, const FunctionSchema& schema, py::handle kernel)
      : HotRun(capture, known, schema, nullptr, kernel) {}

  // Gives a call its arguments, or results; whether all of them are known. Values as a stack has them, for Python.
  using Take = c10::function_ref<bool(HotCall&)>;
  using Values = c10::function_ref<Stack()>;

  // Whether it may begin.
  bool begins(Take take) {
    statement_ = session_.stated.number();
    if (!known_.plain || !session_.streams.are_default() || statement_ == 0 || !session_.stated.hold(known_.watches) ||
        !(context_ = find_context(capture_))) {
      return false;
    }
    std::unique_lock<std::mutex> lock(session_.mutex);
    if (!session_.grad_mode.can_follow() || !take(call_)) {
      return false;
    }
    if (!call_.unregistered().empty()) {
      lock.unlock();
      register_storages();
      lock.lock();
      std::destroy_at(&call_);
      std::construct_at(&call_, session_, known_);
      if (!take(call_) || !call_.unregistered().empty()) {
        return false;
      }
    }
    if (!is_as_begun() || !call_.is_one_kernel() ||
        (known_.draws && !(session_.turns.is_free() && call_.draws_as_told()))) {
      return false;
    }
    if (known_.draws) {
      session_.turns.begin();
      drawing_ = true;
    }
    if (call_.writes()) {
      call_.begin_writes();
      writing_ = true;
    }
    return true;
  }

  ~HotRun() {
    if (writing_) {
      std::lock_guard<std::mutex> lock(session_.mutex);
      call_.end_writes();
    }
    stop_drawing();
  }

  // Runs the operator.
  template <typename Run>
  decltype(auto) runs(const Run& run, Values arguments) {
    started_ = now_ns();
    return telling(run, [&](py::handle error) {
      const int64_t ended = now_ns();
      stop_drawing();
      tell(capture_.functions.late_raised, arguments(), error, py::none(), ended);
    });
  }

  // It returned.
  void returned(Take take, Values arguments, Values results) {
    const int64_t ended = now_ns();
    bool recorded = false, waits = false;
    {
      std::lock_guard<std::mutex> lock(session_.mutex);
      if ((drawing_ || is_as_begun()) && take(call_)) {
        if (const int64_t signature = call_.signature()) {
          const int64_t context = context_->load(std::memory_order_relaxed);  // as others' scopes may be another by now
          session_.follow_grad_mode(context, started_ - session_.began_ns);
          call_.record(signature, context, started_, ended);
          if (session_.drains() && session_.release_head) {
            session_.release_dead(context, ended);
          }
          if (std::exchange(writing_, false)) {
            call_.end_writes();
          }
          recorded = true;
          waits = session_.waits(ended);
        }
      }
    }
    stop_drawing();
    if (recorded && !waits && !call_.writes_for_python()) {
      return;
    }
    py::gil_scoped_acquire lock;
    if (recorded) {
      if (call_.writes_for_python()) {
        tell_writes(arguments());
        compare_beside();
      }
      call(capture_.functions.flush_if_due);
      return;
    }
    const Stack values = arguments(), found = results();
    const py::object result = python_results(schema_, found, capture_.functions);
    learn(session_, known_, values, found, tell(capture_.functions.late, values, result, result, ended));
    compare_beside();
  }

 private:
  HotRun(const Capture& capture, const OperatorHandle& op, const FunctionSchema& schema)
      : HotRun(capture, described(op, schema, capture), schema, &op, py::handle()) {}
  HotRun(const Capture& capture, const Operator& known, const FunctionSchema& schema, const OperatorHandle* op,
         py::handle kernel)
      : capture_(capture),
        session_(*capture.session),
        known_(known),
        schema_(schema),
        op_(op),
        kernel_(kernel),
        call_(session_, known_) {}

  // Python tells of the storages that it uses for the first time.
  void register_storages() {
    py::gil_scoped_acquire lock;
    py::list tensors;
    for (c10::TensorImpl* impl : call_.unregistered()) {
      tensors.append(
          own_view(at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl))));
    }
    call(capture_.functions.register_storages, tensors);
  }

  // Nothing that its record relies on has changed. With the mutex held.
  bool is_as_begun() const {
    return session_.hot.load(std::memory_order_relaxed) && session_.stated.number() == statement_;
  }

  // What Python says to a call that it hears of afterwards. `outcome`: the result, or an exception.
  py::object tell(PyObject* function, const Stack& values, py::handle outcome, py::handle result, int64_t ended) const {
    const auto arguments = [&] {
      return python_arguments(schema_, values.data(), &capture_.functions, known_.takes_numbers);
    };
    const PythonArguments given = arguments();
    return around(capture_, function, py::none(), arguments, result, callee(), given.args, given.kwargs, outcome,
                  py::int_(started_), py::int_(ended));
  }

  // It wrote to storages that Python has looked after since it began.
  void tell_writes(const Stack& values) const {
    const auto arguments = [&] {
      return python_arguments(schema_, values.data(), &capture_.functions, known_.takes_numbers);
    };
    const PythonArguments given = arguments();
    around(capture_, capture_.functions.wrote, py::none(), arguments, py::none(), callee(), given.args, given.kwargs);
  }

  void compare_beside() {
    std::lock_guard<std::mutex> lock(session_.mutex);
    call_.compare_beside();
  }

  py::object callee() const { return op_ ? function_of(*op_) : py::reinterpret_borrow<py::object>(kernel_); }

  void stop_drawing() {
    if (std::exchange(drawing_, false)) {
      std::lock_guard<std::mutex> lock(session_.mutex);
      session_.turns.end();
    }
  }

  const Capture& capture_;
  Session& session_;
  const Operator& known_;
  const FunctionSchema& schema_;
  const OperatorHandle* op_;  // none: `kernel_` is called
  py::handle kernel_;
  HotCall call_;
  const std::atomic<int64_t>* context_ = nullptr;  // changes with the scopes of its thread's
  uint64_t statement_ = 0;                         // of settings that it began under
  int64_t started_ = 0;
  bool drawing_ = false, writing_ = false;
};

}  // namespace opreplay
