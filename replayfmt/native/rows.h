// Rows on their way from any thread to the writer, and the ids that they are given.

#pragma once

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <span>
#include <vector>

namespace opreplay {

namespace py = pybind11;

using Words = std::vector<int64_t>;

inline Words words_of(const py::bytes& row) {
  char* content = nullptr;
  Py_ssize_t length = 0;
  PyBytes_AsStringAndSize(row.ptr(), &content, &length);
  Words words(length / sizeof(int64_t));
  std::memcpy(words.data(), content, words.size() * sizeof(int64_t));
  return words;
}

// Rows of 64-bit words, which Python appends to and takes away as `bytes`.
class Rows {
 public:
  explicit Rows(std::mutex& mutex) : mutex_(mutex) {}

  // With the mutex held. Where another row of `count` words is, to be filled in before the next one is added.
  int64_t* grow(size_t count) {
    if (used_ + count > words_.size()) {
      words_.resize(2 * (used_ + count));
    }
    used_ += count;
    ends_.push_back(used_);
    return words_.data() + used_ - count;
  }
  void add(std::span<const int64_t> words) { std::copy(words.begin(), words.end(), grow(words.size())); }
  size_t size() const { return ends_.size(); }

  // From Python.
  void append(const py::bytes& row) {
    const Words words = words_of(row);
    std::lock_guard<std::mutex> lock(mutex_);
    add(words);
  }
  size_t length() {
    std::lock_guard<std::mutex> lock(mutex_);
    return ends_.size();
  }
  // The words of `count` rows from `begin` on, and where each row ends in them.
  py::tuple part(size_t begin, size_t count) {
    Words words, ends;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      begin = std::min(begin, ends_.size());
      count = std::min(count, ends_.size() - begin);
      const auto end_of = [this](size_t rows) { return rows ? static_cast<std::ptrdiff_t>(ends_[rows - 1]) : 0; };
      const std::ptrdiff_t from = end_of(begin), to = end_of(begin + count);
      words.assign(words_.begin() + from, words_.begin() + to);
      for (size_t row = begin; row < begin + count; row++) {
        ends.push_back(static_cast<int64_t>(ends_[row]) - from);
      }
    }
    const auto bytes = [](const Words& from) {
      return py::bytes(reinterpret_cast<const char*>(from.data()), from.size() * sizeof(int64_t));
    };
    return py::make_tuple(bytes(words), bytes(ends));
  }
  void drop(size_t count) {
    std::lock_guard<std::mutex> lock(mutex_);
    count = std::min(count, ends_.size());
    if (count == 0) {
      return;
    }
    const size_t gone = ends_[count - 1];
    std::copy(words_.begin() + gone, words_.begin() + used_, words_.begin());
    used_ -= gone;
    ends_.erase(ends_.begin(), ends_.begin() + count);
    for (size_t& end : ends_) {
      end -= gone;
    }
  }

 private:
  std::mutex& mutex_;
  Words words_;      // with room for more than there are
  size_t used_ = 0;  // how many there are
  std::vector<size_t> ends_;
};

}  // namespace opreplay
