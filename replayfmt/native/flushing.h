// When waiting rows are written, and by whom.
//
// The recorder has a thread of its own for that, but a program may starve it: CPython wakes a thread that wants the
// interpreter's lock each time another one lets go of it, and then it is too late if that one takes it back at once, as
// compiled code does at each call. So a thread that records writes what is overdue itself, a part at a time, and the
// recorder's own thread waits without the lock until nobody has done so for a while.

#pragma once

#include <semaphore.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace opreplay {

class Flushing {
 public:
  // A semaphore, because a forked child may destroy one that a thread of its parent waits for.
  Flushing() { sem_init(&woken_, 0, 0); }
  Flushing(const Flushing&) = delete;
  Flushing& operator=(const Flushing&) = delete;
  ~Flushing() { sem_destroy(&woken_); }

  // Rows are to be written once more: at `due_ns` by a thread that records, or else at `late_ns` by the recorder's own.
  void expect(int64_t due_ns, int64_t late_ns) {
    due_ns_.store(due_ns, std::memory_order_relaxed);
    late_ns_.store(late_ns, std::memory_order_relaxed);
  }
  bool overdue(int64_t now) const { return now >= due_ns_.load(std::memory_order_relaxed); }

  // The recorder's own thread is to write now.
  void wake() {
    if (!waking_.exchange(true)) {
      sem_post(&woken_);
    }
  }

  // What the recorder's own thread does, without the interpreter's lock.
  static void wait(Flushing* self) {
    while (now(CLOCK_MONOTONIC) < self->late_ns_.load(std::memory_order_relaxed) && !self->is_woken()) {
    }
    self->waking_ = false;
  }

 private:
  // Whether it is woken before what is late now.
  bool is_woken() {
#if __GLIBC_PREREQ(2, 30)
    const timespec until = time_of(late_ns_.load(std::memory_order_relaxed));
    return sem_clockwait(&woken_, CLOCK_MONOTONIC, &until) == 0;
#else  // by a clock that somebody may set: no longer than half a second at a time
    const int64_t left = late_ns_.load(std::memory_order_relaxed) - now(CLOCK_MONOTONIC);
    const timespec until = time_of(now(CLOCK_REALTIME) + std::min<int64_t>(left, 500'000'000));
    return sem_timedwait(&woken_, &until) == 0;
#endif
  }
  static int64_t now(clockid_t clock) {
    timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * 1'000'000'000 + time.tv_nsec;
  }
  static timespec time_of(int64_t ns) { return {ns / 1'000'000'000, ns % 1'000'000'000}; }

  sem_t woken_;
  std::atomic<bool> waking_{false};
  std::atomic<int64_t> due_ns_{INT64_MAX}, late_ns_{0};
};

}  // namespace opreplay
