// Counts the operators of threads in which the recorder does not take part.
//
// PyTorch calls `started` before and `ended` after every operator of every thread of the process, while a capture has
// it registered. A thread takes part where Python said so (`take_part`), or where the capture's dispatch mode is on the
// thread's own stack, or its key included: PyTorch hands that on to its threads (autograd, TorchScript). All other
// operators are counted, with the first one's name. What runs inside of a counted or seen operator belongs to it.
//
// A thread in which the recorder takes part through the key need not be watched, and yet each of its operators would
// pay for the callback, a quarter of a microsecond. So PyTorch's RecordFunction is off there (quiet) as long as the
// callback is the only one: like the key, that is part of the state that PyTorch hands on to threads, and takes back.
// The doors by which a program gets callbacks of its own turn it on again first (watching.py).
//
// No function takes the interpreter's lock. Memory is allocated once for each thread, and given to another when it
// ends. All that Python calls is declared at the end, with C linkage; building.py compiles this file, watching.py calls
// it.

#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "watched.h"

// Of the interpreter, where there is one: the calling thread's state, while Python code runs in it. (Operators that
// Python code calls run without the interpreter's lock.)
extern "C" void* PyGILState_GetThisThreadState() __attribute__((weak));

namespace {

using namespace opreplay;

constexpr size_t kName = 64;
constexpr size_t kOperator = 192;

struct Thread;

// What PyTorch keeps from the start of something to its end. `thread`: none where that was no operator.
struct Begun : at::ObserverContext {
  explicit Begun(Thread* owner) : thread(owner) {}
  Thread* thread;
};

// Of an outermost operator. It lies in the thread's own memory.
struct Running final : Begun {
  using Begun::Begun;
  static void* operator new(size_t, void* place) { return place; }
  static void operator delete(void*) {}
  static void operator delete(void*, void*) {}
};

struct Thread {
  std::atomic<Thread*> next{nullptr};
  std::atomic<bool> taken{true};
  std::atomic<int> inside{kNothing};         // others look at it
  std::atomic<int> covered{0};               // of `enter` and `leave`
  std::atomic<uint64_t> part{0};             // the capture that it takes part in
  std::atomic<uint64_t> hook{0};             // the last capture whose hook operators of it came to
  std::atomic_flag lock = ATOMIC_FLAG_INIT;  // of what follows
  std::atomic<uint64_t> count{0};
  uint64_t counted_for{0};  // the capture that counted
  int64_t id{0};
  bool takes_part{false};  // in the capture that counted
  bool moves_data{false};  // of collectives
  char name[kName]{};
  char first[kOperator]{};
  alignas(Running) unsigned char running[sizeof(Running)];
};

std::atomic<Thread*> threads{nullptr};
std::atomic<uint64_t> active{0};  // the number of the capture that counts; 0: none
std::atomic<uint64_t> captures{0};
std::atomic<const void*> mode{nullptr};          // its dispatch mode, a Python object that is only compared
std::atomic<const void*> also{nullptr};          // the mode that is in its place while a graph is captured
std::atomic<at::CallbackHandle> last_handle{0};  // the last one that is known to be given; they count up
std::atomic<uint64_t> missed{0};                 // operators that others' callbacks were not called for
void settle_late();
void listen(bool on);
void joined();
std::atomic<int>* inside_of_this();
Watch watch{{kNeverQuiet}, inside_of_this, settle_late, listen, joined};
at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
std::atomic<int64_t>* ran_in_child =
    nullptr;                               // of a forked child: set where it runs an operator; its parent has it, too
std::atomic<int64_t>* children = nullptr;  // memory that forked children share: how many there were, then for each its
size_t most_children = 0;                  // process id and whether it ran an operator
std::atomic<int64_t> terminated_ns{0};     // when SIGTERM came, by the monotonic clock
struct sigaction terminating = {};         // Python's own action

int64_t monotonic_ns() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

// Notes when the signal came, and does what Python does, which calls its handler when the main thread is in Python
// again.
void on_termination(int number) {
  terminated_ns.store(monotonic_ns());
  terminating.sa_handler(number);
}

bool forked = false;  // then the callback stays: PyTorch's lock around callbacks may be held for ever

thread_local Thread* own = nullptr;

struct AtThreadsEnd {
  ~AtThreadsEnd() {
    if (Thread* thread = own) {
      own = nullptr;
      thread->inside.store(kNothing, std::memory_order_relaxed);
      thread->covered.store(0, std::memory_order_relaxed);
      thread->part.store(0, std::memory_order_relaxed);
      thread->hook.store(0, std::memory_order_relaxed);
      thread->taken.store(false, std::memory_order_release);
    }
  }
};

struct Locked {
  explicit Locked(Thread* thread) : flag(thread->lock) {
    while (flag.test_and_set(std::memory_order_acquire)) {
    }
  }
  ~Locked() { flag.clear(std::memory_order_release); }
  std::atomic_flag& flag;
};

__attribute__((noinline)) Thread* find_own() {
  static thread_local AtThreadsEnd at_end;
  (void)&at_end;
  for (Thread* thread = threads.load(std::memory_order_acquire); thread; thread = thread->next.load()) {
    bool taken = false;
    if (thread->count == 0 && !thread->taken.load(std::memory_order_relaxed) &&
        thread->taken.compare_exchange_strong(taken, true, std::memory_order_acquire)) {
      Locked locked(thread);
      if (thread->count == 0) {
        thread->counted_for = 0;
        return own = thread;
      }
      thread->taken.store(false, std::memory_order_release);  // what it counted is not told yet
    }
  }
  auto* thread = new Thread;
  Thread* head = threads.load();
  do {
    thread->next.store(head);
  } while (!threads.compare_exchange_weak(head, thread));
  return own = thread;
}

inline Thread* self() {
  Thread* thread = own;
  return thread ? thread : find_own();
}

// Of a look through the guards of compiled code: they compare the thread's included keys with those that it was
// compiled under, so the recorder's key is taken away meanwhile. Compiled code stays compiled then, in a capture and
// after it. What guards themselves compute is none of the program's work.
struct GuardLookup final : Begun {
  GuardLookup() : Begun(nullptr) {
    self()->covered++;
    c10::impl::tls_set_dispatch_key_included(kKey, false);
  }
  ~GuardLookup() override {
    c10::impl::tls_set_dispatch_key_included(kKey, true);
    self()->covered--;
  }
};
constexpr char kGuardLookup[] = "TorchDynamo Cache Lookup";  // as Dynamo names it

std::unique_ptr<at::ObserverContext> begins(Thread* thread) {
  thread->inside.store(at::in_parallel_region() ? kInParallel : kOperatorRuns, std::memory_order_relaxed);
  return std::unique_ptr<at::ObserverContext>(new (static_cast<void*>(thread->running)) Running(thread));
}

// The key that threads of the recorder in recorder.cpp have included.
bool has_key() { return c10::impl::tls_is_dispatch_key_included(kKey); }

bool has_mode() {
  using Modes = c10::impl::TorchDispatchModeTLS;
  const void* searched = mode.load(std::memory_order_relaxed);
  const void* other = also.load(std::memory_order_relaxed);
  for (int64_t place = 0, length = Modes::stack_len(); place < length; place++) {
    const auto& found = Modes::get_stack_at(place);
    const void* here = found->ptr(&found->pyinterpreter());
    if (here == searched || here == other) {
      return true;
    }
  }
  return false;
}

// Whether this is a helper of an operator that another thread runs, in a parallel region that the operator opened.
bool helps() {
  if (!at::in_parallel_region()) {
    return false;
  }
  for (Thread* thread = threads.load(std::memory_order_acquire); thread; thread = thread->next.load()) {
    if (thread->inside.load(std::memory_order_relaxed) == kOperatorRuns || thread->covered.load() > 0) {
      return true;
    }
  }
  return false;
}

void name_of_this(char (&name)[kName]) {
  name[0] = 0;
  pthread_getname_np(pthread_self(), name, sizeof(name));
}

void count(Thread* thread, const at::RecordFunction& function, uint64_t capture) {
  Locked locked(thread);
  if (thread->counted_for != capture) {
    thread->count = 0;
    thread->counted_for = capture;
    name_of_this(thread->name);
    thread->moves_data = std::strcmp(thread->name, "pt_gloo_runloop") == 0;
#ifdef __linux__
    thread->id = static_cast<int64_t>(syscall(SYS_gettid));
#endif
  }
  // Gloo's threads copy for collectives, which are recorded as such. Python code in them is the program's.
  if (thread->moves_data && !(PyGILState_GetThisThreadState && PyGILState_GetThisThreadState())) {
    return;
  }
  if (thread->count == 0) {
    std::string first(function.name());
    const char* overload = function.overload_name();
    if (overload && *overload) {
      first.append(".").append(overload);
    }
    std::strncpy(thread->first, first.c_str(), kOperator - 1);
  }
  thread->takes_part = thread->hook.load(std::memory_order_relaxed) == capture ||
                       thread->part.load(std::memory_order_relaxed) == capture;
  if (thread->takes_part) {  // something took its key away, as it may do again
    int quiet = kQuiet;
    watch.state.compare_exchange_strong(quiet, kOver);
  }
  thread->count++;
}

std::unique_ptr<at::ObserverContext> started(const at::RecordFunction& function) {
  const uint64_t capture = active.load(std::memory_order_relaxed);
  if (capture == 0) {
    if (ran_in_child && function.operator_name().has_value()) {
      ran_in_child->store(1, std::memory_order_relaxed);
    }
    return nullptr;
  }
  const char* name = function.name();
  if (name[0] == kGuardLookup[0] && std::strcmp(name, kGuardLookup) == 0) {
    return has_key() ? std::make_unique<GuardLookup>() : nullptr;
  }
  Thread* thread = self();
  if (thread->inside.load(std::memory_order_relaxed) != kNothing) {
    return nullptr;
  }
  if (thread->covered.load(std::memory_order_relaxed) > 0 || has_key() ||
      (has_mode() ? c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Python)
                  : thread->part.load(std::memory_order_relaxed) == capture)) {
    return begins(thread);
  }
  if (!function.operator_name().has_value()) {
    return nullptr;  // a region that somebody named, not an operator
  }
  if (!helps()) {
    count(thread, function, capture);
  }
  return begins(thread);
}

// RecordFunction is on again in the calling thread, where a capture has turned it off. Whether it was off.
bool settle() {
  const bool is_off = watch.state.load(std::memory_order_relaxed) == kOver && !at::isRecordFunctionEnabled();
  if (is_off) {
    at::enableRecordFunction(true);
  }
  return is_off;
}

// The same within an operator: each node of a backward pass that was quiet when it began is quiet once more.
void settle_late() {
  if (settle() && active.load() != 0 && at::getStepCallbacks(at::RecordScope::FUNCTION).callbacks_.size() > 1) {
    missed++;
  }
}

void listen(bool on) {
  if (at::isRecordFunctionEnabled() != on) {
    at::enableRecordFunction(on);
  }
}

void joined() { self()->hook.store(active.load(), std::memory_order_relaxed); }

std::atomic<int>* inside_of_this() { return &self()->inside; }

// A handle that PyTorch gives now.
at::CallbackHandle next_handle() {
  const auto nothing = [](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> { return nullptr; };
  const at::CallbackHandle given =
      at::addThreadLocalCallback(at::RecordFunctionCallback(nothing).scopes({at::RecordScope::LITE_INTERPRETER}));
  at::removeCallback(given);
  return given;
}

void ended(const at::RecordFunction&, at::ObserverContext* context) {
  Thread* thread = context ? static_cast<Begun*>(context)->thread : nullptr;
  if (thread) {
    thread->inside.store(kNothing, std::memory_order_relaxed);
  }
}

}  // namespace

extern "C" {

struct OpReplayCounted {
  uint64_t count;
  int64_t id;
  int64_t takes_part;
  char name[kName];
  char first[kOperator];
};

// For the recorder's hook.
__attribute__((visibility("default"))) Watch* opreplay_watch_shared() { return &watch; }

// Begin to count. `dispatch_mode`: the Python object that is on the mode stacks of threads that take part.
// `may_be_quiet`: the calling thread has the key, and nothing but counting needs the callback there. Whether it is
// quiet.
__attribute__((visibility("default"))) int opreplay_watch_begin(const void* dispatch_mode, int may_be_quiet) {
  terminated_ns.store(0);
  const bool quiet = may_be_quiet && !at::hasCallbacks() && at::isRecordFunctionEnabled();
  mode.store(dispatch_mode);
  if (handle == at::INVALID_CALLBACK_HANDLE) {
    handle = at::addGlobalCallback(at::RecordFunctionCallback(started, ended).scopes({at::RecordScope::FUNCTION}));
  }
  active.store(++captures);
  if (quiet) {
    last_handle.store(next_handle());
    watch.state.store(kQuiet);
    at::enableRecordFunction(false);
  }
  return quiet;
}

// The calling thread is quiet no more, nor may any other be: they settle when the hook or a step in Python finds them.
// Whether it was otherwise before.
__attribute__((visibility("default"))) int opreplay_watch_loud() {
  int quiet = kQuiet;
  const bool was = watch.state.compare_exchange_strong(quiet, kOver);
  settle();
  return was;
}

// The calling thread is quiet no more where it must not be.
__attribute__((visibility("default"))) void opreplay_watch_settle() { settle(); }

// Whether somebody was given a callback while threads are quiet, and came through none of the doors.
__attribute__((visibility("default"))) int opreplay_watch_overlooked() {
  if (watch.state.load() != kQuiet) {
    return 0;
  }
  const at::CallbackHandle given = next_handle();
  return last_handle.exchange(given) + 1 != given;
}

// How many operators began where RecordFunction was still off, although others had callbacks for them by then. Each is
// told once.
__attribute__((visibility("default"))) int opreplay_watch_missed() { return static_cast<int>(missed.exchange(0)); }

// Threads with this mode take part, too; null: none. Returns the one before.
__attribute__((visibility("default"))) const void* opreplay_watch_also(const void* dispatch_mode) {
  return also.exchange(dispatch_mode);
}

// Count no more. What was counted is kept until the next begin.
__attribute__((visibility("default"))) void opreplay_watch_end() {
  opreplay_watch_loud();
  active.store(0);
  mode.store(nullptr);
  also.store(nullptr);
  if (handle != at::INVALID_CALLBACK_HANDLE && !forked) {
    at::removeCallback(handle);
    handle = at::INVALID_CALLBACK_HANDLE;
  }
}

// Have SIGTERM's arrival noted, beside what Python does. Whatever Python sets for it next takes our place. Called with
// the interpreter's lock, so that Python sets nothing meanwhile.
__attribute__((visibility("default"))) void opreplay_watch_termination() {
  struct sigaction now = {};
  sigaction(SIGTERM, nullptr, &now);
  const bool plain = !(now.sa_flags & SA_SIGINFO) && now.sa_handler != SIG_DFL && now.sa_handler != SIG_IGN;
  if (plain && now.sa_handler != on_termination) {
    terminating = now;
    now.sa_handler = on_termination;
    sigaction(SIGTERM, &now, nullptr);
  }
}

// How long ago SIGTERM came, in ns; 0: it did not.
__attribute__((visibility("default"))) int64_t opreplay_watch_terminated() {
  const int64_t came = terminated_ns.load();
  return came ? std::max<int64_t>(monotonic_ns() - came, 1) : 0;
}

// In a forked child: count no more. Takes no lock, since others' may be held for ever; the callback stays and does
// nothing. (Where RecordFunction was off, PyTorch takes its lock around callbacks to turn it on, as for a backward
// pass.)
__attribute__((visibility("default"))) void opreplay_watch_forked() {
  forked = true;
  terminated_ns.store(0);
  if (children) {
    const auto number = static_cast<size_t>(children[0].fetch_add(1));
    if (number < most_children) {
      children[1 + 2 * number].store(getpid());
      ran_in_child = &children[2 + 2 * number];
    }
  }
  active.store(0);
  opreplay_watch_loud();
  for (Thread* thread = threads.load(); thread; thread = thread->next.load()) {
    thread->lock.clear();
    thread->count = 0;
    if (thread != own) {
      thread->inside.store(kNothing);
      thread->covered.store(0);
      thread->taken.store(false);
    }
  }
}

// The calling thread takes part in the capture, or does not any more.
__attribute__((visibility("default"))) void opreplay_watch_take_part(int takes) {
  self()->part.store(takes ? active.load() : 0, std::memory_order_relaxed);
}

// What the calling thread does until it leaves is recorded as a whole, by other means.
__attribute__((visibility("default"))) void opreplay_watch_enter() { self()->covered++; }

__attribute__((visibility("default"))) void opreplay_watch_leave() { self()->covered--; }

// Whether a thread that does not take part is inside an operator.
__attribute__((visibility("default"))) int opreplay_watch_running() {
  const uint64_t capture = active.load();
  for (Thread* thread = threads.load(); thread; thread = thread->next.load()) {
    if (thread->inside.load() != kNothing && thread->hook.load() != capture && thread->part.load() != capture) {
      return 1;
    }
  }
  return 0;
}

// Children that are forked from now on say in this memory, which they share, whether they run operators.
__attribute__((visibility("default"))) void opreplay_watch_children(void* shared, uint64_t words) {
  children = static_cast<std::atomic<int64_t>*>(shared);
  most_children = (words - 1) / 2;
}

// Hand over what was counted since the last time, of up to `capacity` threads. The number of threads that counted.
__attribute__((visibility("default"))) int opreplay_watch_collect(OpReplayCounted* out, int capacity) {
  int found = 0;
  for (Thread* thread = threads.load(); thread; thread = thread->next.load()) {
    Locked locked(thread);
    if (thread->count && thread->counted_for == captures.load()) {
      if (found < capacity) {
        OpReplayCounted& entry = out[found];
        entry.count = thread->count;
        entry.id = thread->id;
        entry.takes_part = thread->takes_part;
        std::memcpy(entry.name, thread->name, kName);
        std::memcpy(entry.first, thread->first, kOperator);
        thread->count = 0;
      }
      found++;
    }
  }
  return found;
}

}  // extern "C"
