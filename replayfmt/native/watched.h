// What the watch on threads (thread_watch.cpp) and the recorder's hook (recorder.cpp) tell each other.

#pragma once

#include <c10/core/DispatchKey.h>

#include <atomic>
#include <cstdint>

namespace opreplay {

// The dispatch key of the recorder (RECORDER_KEY in Python). PyTorch has it for fake tensors written in C++, which
// nothing makes on plain tensors.
constexpr c10::DispatchKey kKey = c10::DispatchKey::Fake;
// PyTorch 2.11 has it above dispatch to Python, later ones below.
constexpr bool kAbovePython = kKey > c10::DispatchKey::Python;

// What an operator that is running stands for. `kInParallel`: it began inside a parallel region, so it is no reason for
// the region's other threads to run operators.
enum Inside : int { kNothing, kOperatorRuns, kInParallel };

// Whether PyTorch's RecordFunction is off in threads that have the recorder's key. `kOver`: it was, and is to be on
// again in those that still have it off.
enum Quiet : int { kNeverQuiet, kQuiet, kOver };

struct Watch {
  std::atomic<int> state;         // one of Quiet
  std::atomic<int>* (*inside)();  // one of Inside, of the calling thread: it is as long there as the thread
  void (*settle)();               // turns RecordFunction on in the calling thread, where the state is kOver
  void (*listen)(bool);           // turns RecordFunction on or off in the calling thread, where the state is kQuiet
  void (*joined)();               // operators of the calling thread come to the hook of the capture in progress

  // What the hook tells: operators of the calling thread come to it; one did; it was new. Where RecordFunction is off,
  // it is on until the next operator after what was new, and at times: what runs there without coming to the hook,
  // because something took the key away, is found.
  static void thread_joined(const std::atomic<Watch*>& watch) {
    if (const Watch* of = watch.load()) {
      of->joined();
    }
  }
  static void at_operator(const std::atomic<Watch*>& watch) {
    if (const Watch* of = watch.load(std::memory_order_relaxed)) {
      const int now = of->state.load(std::memory_order_relaxed);
      if (now == kOver) {
        of->settle();
      } else if (now == kQuiet) {
        Hearing& here = hearing();
        of->hear(here, here.is_time());
      }
    }
  }
  static void after_news(const std::atomic<Watch*>& watch) {
    if (const Watch* of = watch.load(); of && of->state.load() == kQuiet) {
      of->hear(hearing(), true);
    }
  }

 private:
  // Of a thread.
  struct Hearing {
    bool on = false;
    uint32_t left = 0, random = 2463534242;

    // One time in 128, at intervals that no loop of a program has.
    bool is_time() {
      if (left > 0) {
        left--;
        return false;
      }
      random ^= random << 13;
      random ^= random >> 17;
      random ^= random << 5;
      left = random % 256;
      return true;
    }
  };
  static Hearing& hearing() {
    thread_local constinit Hearing of_this;
    return of_this;
  }

  // It takes 0.2 us to turn it on or off.
  void hear(Hearing& here, bool on) const {
    if (here.on != on) {
      listen(here.on = on);
    }
  }
};

}  // namespace opreplay
