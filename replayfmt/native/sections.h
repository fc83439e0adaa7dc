// What threads that record must not do at the same time, and what each of them has of its own.
//
// Rows are appended when an op has returned, before its caller goes on: an op that began after another one had
// returned, in whichever thread, has its row after it. What a row relies on besides (where random numbers come from,
// the settings that the stream states, the scope that a thread is in) is looked at under the mutex under which the row
// is appended. Nothing here waits for the interpreter's lock.

#pragma once

#include <Python.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace opreplay {

// Who draws random numbers: the order of draws is the order of records. On the hot path one op at a time does, and none
// while Python has reserved the draws. All of it with the mutex held.
class DrawTurns {
 public:
  bool is_free() const { return !drawing_ && reserved_ == 0; }
  void begin() { drawing_ = true; }
  void end() {
    drawing_ = false;
    ended_.notify_all();
  }
  // Waits until no op draws on the hot path. What such an op does until then needs no lock that the caller may hold.
  void wait(std::unique_lock<std::mutex>& lock) {
    ended_.wait(lock, [this] { return !drawing_; });
  }
  void reserve(std::unique_lock<std::mutex>& lock) {
    reserved_++;
    wait(lock);
  }
  void release() { reserved_ -= reserved_ > 0; }

 private:
  bool drawing_ = false;
  int reserved_ = 0;
  std::condition_variable ended_;
};

// Storages that ops on the hot path are writing, from before they run until they have their rows. All of it with the
// mutex held.
class WritesInProgress {
 public:
  void begin(const void* storage) { storages_.push_back(storage); }
  void end(const void* storage) {
    const auto found = std::find(storages_.begin(), storages_.end(), storage);
    if (found != storages_.end()) {  // none in a forked child
      storages_.erase(found);
    }
  }
  std::vector<uintptr_t> addresses() const {
    std::vector<uintptr_t> found;
    for (const void* each : storages_) {
      found.push_back(reinterpret_cast<uintptr_t>(each));
    }
    return found;
  }

 private:
  std::vector<const void*> storages_;  // one for each thread, or a few
};

// The context (thread, scope) of each thread that records, as Python numbers them, by the thread's ident.
class Contexts {
 public:
  static constexpr int64_t kNone = -1;

  // Where the calling thread's is from now on. `mutex` is not held.
  const std::atomic<int64_t>& of_this_thread(std::mutex& mutex) {
    thread_local struct {
      uint64_t owner = 0;
      const std::atomic<int64_t>* place = nullptr;
    } known;
    if (known.owner != number_) {
      std::lock_guard<std::mutex> lock(mutex);
      known = {number_, &at(PyThread_get_thread_ident())};
    }
    return *known.place;
  }
  // With the mutex held.
  void set(unsigned long ident, int64_t context) { at(ident).store(context); }

 private:
  std::atomic<int64_t>& at(unsigned long ident) { return places_.try_emplace(ident, kNone).first->second; }
  static uint64_t next_number() {
    static std::atomic<uint64_t> numbers{0};
    return ++numbers;
  }

  const uint64_t number_ = next_number();  // no other object's, also later
  std::unordered_map<unsigned long, std::atomic<int64_t>> places_;
};

}  // namespace opreplay
