// What the watch on threads (thread_watch.cpp) and the recorder's hook (recorder.cpp) tell each other.

#pragma once

#include <atomic>

namespace opreplay {

// What an operator that is running stands for. `kInParallel`: it began inside a parallel region, so it is no reason for
// the region's other threads to run operators.
enum Inside : int { kNothing, kOperatorRuns, kInParallel };

// Whether PyTorch's RecordFunction is off in threads that have the recorder's key. `kOver`: it was, and is to be on again
// in those that still have it off.
enum Quiet : int { kNeverQuiet, kQuiet, kOver };

struct Watch {
  std::atomic<int> state;         // one of Quiet
  std::atomic<int>* (*inside)();  // one of Inside, of the calling thread: it is as long there as the thread
  void (*settle)();               // turns RecordFunction on in the calling thread, where the state is kOver
};

}  // namespace opreplay
