// What a capture knows natively: rows on their way to the writer, storages, metadata and signatures.
//
// Python's complete path is the reference: it gives ids, and tells this what it found out (`publish`, `note_meta`, the
// signature of a call). What comes here again is recorded without it. Storages that an op returns are born here; Python
// adopts them when it meets them. All of it is guarded by one mutex, which is never held while the interpreter's lock is
// waited for.

#pragma once

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace opreplay {

namespace py = pybind11;

struct Operator;

using Words = std::vector<int64_t>;

struct WordsHash {
  size_t operator()(const Words& words) const {
    uint64_t hash = 0x9e3779b97f4a7c15ull ^ words.size();
    for (int64_t word : words) {
      hash = (hash ^ static_cast<uint64_t>(word)) * 0xff51afd7ed558ccdull;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

// Rows of 64-bit words, which Python appends to and takes away as `bytes`.
class Rows {
 public:
  explicit Rows(std::mutex& mutex) : mutex_(mutex) {}

  // With the mutex held.
  void add(const int64_t* words, size_t count) {
    words_.insert(words_.end(), words, words + count);
    ends_.push_back(words_.size());
  }
  size_t size() const { return ends_.size(); }

  // From Python.
  void append(const py::bytes& row) {
    char* content = nullptr;
    Py_ssize_t length = 0;
    PyBytes_AsStringAndSize(row.ptr(), &content, &length);
    Words words(length / sizeof(int64_t));
    std::memcpy(words.data(), content, words.size() * sizeof(int64_t));
    std::lock_guard<std::mutex> lock(mutex_);
    add(words.data(), words.size());
  }
  size_t length() {
    std::lock_guard<std::mutex> lock(mutex_);
    return ends_.size();
  }
  // The words of the first `count` rows, and where each row ends.
  py::tuple first(size_t count) {
    Words words, ends;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      count = std::min(count, ends_.size());
      ends.assign(ends_.begin(), ends_.begin() + static_cast<std::ptrdiff_t>(count));
      words.assign(words_.begin(), words_.begin() + static_cast<std::ptrdiff_t>(count ? ends_[count - 1] : 0));
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
    words_.erase(words_.begin(), words_.begin() + gone);
    ends_.erase(ends_.begin(), ends_.begin() + count);
    for (size_t& end : ends_) {
      end -= gone;
    }
  }

 private:
  std::mutex& mutex_;
  Words words_;
  std::vector<size_t> ends_;
};

struct Counter {
  std::atomic<int64_t> value{1};
  int64_t next() { return value.fetch_add(1); }
};

struct View {
  int64_t meta, offset, tensor;
};

// A storage that needs no care: its bytes come from recorded ops or from an import, and all that can happen to it is to
// be read, written and viewed.
struct Storage {
  c10::weak_intrusive_ptr<c10::StorageImpl> impl;
  int64_t id;
  int64_t bytes;
  bool adopted;    // Python has a tracker of it, which tells its death
  bool new_views;  // it may be seen in other ways than so far
  std::vector<View> views;
  std::vector<int64_t> written;  // tensors written since Python asked

  int64_t find(int64_t meta, int64_t offset) const {
    for (const View& view : views) {
      if (view.meta == meta && view.offset == offset) {
        return view.tensor;
      }
    }
    return 0;
  }
  void note_written(int64_t tensor) {
    if (std::find(written.begin(), written.end(), tensor) == written.end()) {
      written.push_back(tensor);
    }
  }
};

struct Meta {
  int64_t id;
  int64_t device;
};

// The settings that any op may depend on.
inline uint64_t general_settings() {
  const auto& context = at::globalContext();
  uint64_t bits = static_cast<uint64_t>(at::get_num_threads());
  const auto add = [&bits](uint64_t value, int width) { bits = (bits << width) | value; };
  add(static_cast<uint64_t>(c10::typeMetaToScalarType(at::get_default_dtype())), 8);
  add(static_cast<uint64_t>(context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL)), 3);
  add(c10::GradMode::is_enabled(), 1);
  add(context.deterministicAlgorithms(), 1);
  add(context.deterministicAlgorithmsWarnOnly(), 1);
#if defined(__x86_64__)
  add((_mm_getcsr() & 0x8040) != 0, 1);  // denormals are flushed to zero
#endif
  return bits;
}

// Those that some ops depend on: number `index` of the settings that Python watches (state/numeric_state.py, WATCHED).
constexpr size_t kWatched = 23;

inline uint8_t watched_setting(size_t index) {
  const auto& context = at::globalContext();
  const auto precision = [&context](at::Float32Backend backend, at::Float32Op op) {
    return static_cast<uint8_t>(context.float32Precision(backend, op));
  };
  switch (index) {
    case 0: return context.userEnabledMkldnn();
    case 1: return context.deterministicMkldnn();
    case 2: return context.userEnabledNNPACK();
    case 3: return precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL);
    case 4: return precision(at::Float32Backend::MKLDNN, at::Float32Op::CONV);
    case 5: return precision(at::Float32Backend::MKLDNN, at::Float32Op::RNN);
    case 6: return context.allowFP16ReductionCPU();
    case 7: return context.userEnabledFlashSDP();
    case 8: return context.userEnabledMemEfficientSDP();
    case 9: return context.userEnabledMathSDP();
    case 10: return context.userEnabledCuDNNSDP();
    case 11: return context.allowFP16BF16ReductionMathSDP();
    case 12: return context.deterministicFillUninitializedMemory();
    case 13: return static_cast<uint8_t>(context.qEngine());
    case 14: return precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL);
    case 15: return precision(at::Float32Backend::CUDA, at::Float32Op::CONV);
    case 16: return precision(at::Float32Backend::CUDA, at::Float32Op::RNN);
    case 17: return static_cast<uint8_t>(context.allowFP16ReductionCuBLAS());
    case 18: return static_cast<uint8_t>(context.allowBF16ReductionCuBLAS());
    case 19: return context.allowFP16AccumulationCuBLAS();
    case 20: return context.userEnabledCuDNN();
    case 21: return context.benchmarkCuDNN();
    default: return context.deterministicCuDNN();
  }
}

class Session {
 public:
  std::mutex mutex;
  Rows rows{mutex}, births{mutex}, definitions{mutex};
  Counter next_storage, next_tensor;
  std::unordered_map<const c10::StorageImpl*, Storage> storages;
  std::unordered_map<Words, Meta, WordsHash> metas;
  std::unordered_map<Words, int64_t, WordsHash> signatures;
  std::unordered_map<const c10::FunctionSchema*, std::shared_ptr<Operator>> operators;
  std::atomic<bool> hot{false};          // calls may be recorded here; written with the mutex held
  std::atomic<uint64_t> general{0};      // the settings that the stream states
  std::array<std::atomic<uint8_t>, kWatched> watched{};
  std::atomic<uint64_t> scopes_moved{next_move()};  // another number after each change, in no other session
  int64_t began_ns = 0;
  size_t chunk_records = 0;
  bool scalars = true;  // numbers that ops return are recorded
  size_t born = 0;                       // storages since the last look for dead ones

  // Whether it is time to look for dead storages. With the mutex held.
  bool drains() const { return born >= std::max<size_t>(64, storages.size() / 4); }
  bool drains_now() {
    std::lock_guard<std::mutex> lock(mutex);
    return drains();
  }

  // Whether there is something for Python to do after a record. With the mutex held.
  bool waits() const { return drains() || (rows.size() >= chunk_records && rows.size() % 1024 == 0); }

  static uint64_t next_move() {
    static std::atomic<uint64_t> moves{0};
    return ++moves;
  }

  static void meta_key(const at::Tensor& tensor, Words& key) {
    const auto* impl = tensor.unsafeGetTensorImpl();
    const auto device = impl->device();
    key.clear();
    key.push_back((static_cast<int64_t>(tensor.scalar_type()) << 32) | (static_cast<int64_t>(device.type()) << 16) |
                  static_cast<uint8_t>(device.index()));
    key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
    key.insert(key.end(), tensor.strides().begin(), tensor.strides().end());
  }

  // ------------------------------------------------------------------------------------------------------ from Python

  void note_meta(const at::Tensor& tensor, int64_t id, int64_t device) {
    Words key;
    meta_key(tensor, key);
    std::lock_guard<std::mutex> lock(mutex);
    metas.emplace(std::move(key), Meta{id, device});
  }

  // Once this returns false, no call appends a row any more without Python.
  void set_hot(bool is_hot) {
    std::lock_guard<std::mutex> lock(mutex);
    hot.store(is_hot);
  }

  // In a forked child: a thread that is not there may have held the mutex.
  void forked() {
    std::construct_at(&mutex);
    hot.store(false);
  }

  // Python used a view of a storage. Whether the storage was not known here: then Python tells its other views as well.
  bool publish(uintptr_t address, int64_t id, int64_t bytes, bool new_views, int64_t meta, int64_t offset,
               int64_t tensor) {
    bool is_new = false;
    auto* impl = reinterpret_cast<c10::StorageImpl*>(address);
    std::lock_guard<std::mutex> lock(mutex);
    auto found = storages.find(impl);
    if (found != storages.end() && found->second.id != id) {
      return false;  // another storage, in the memory of one that died
    }
    if (found == storages.end()) {
      auto weak = c10::weak_intrusive_ptr<c10::StorageImpl>(
          c10::intrusive_ptr<c10::StorageImpl>::unsafe_reclaim_from_nonowning(impl));
      found = storages.emplace(impl, Storage{std::move(weak), id, bytes, true, new_views, {}, {}}).first;
      born++;
      is_new = true;
    }
    Storage& storage = found->second;
    storage.bytes = bytes;
    storage.new_views = new_views;
    if (!storage.find(meta, offset)) {
      storage.views.push_back({meta, offset, tensor});
    }
    return is_new;
  }

  int64_t view(uintptr_t address, int64_t id, int64_t meta, int64_t offset) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = find(address, id);
    return found == storages.end() ? 0 : found->second.find(meta, offset);
  }

  // Id, bytes, views and written tensors of a storage, which Python has a tracker of from now on; None where it is not
  // known. `id`: 0 where Python does not know it. `forget`: it is not known here any more.
  py::object take(uintptr_t address, int64_t id, bool forget) {
    int64_t bytes = 0;
    std::vector<View> seen;
    std::vector<int64_t> written;
    {
      std::lock_guard<std::mutex> lock(mutex);
      const auto found = find(address, id);
      if (found == storages.end()) {
        return py::none();
      }
      found->second.adopted = true;
      id = found->second.id;
      bytes = found->second.bytes;
      seen = found->second.views;
      written = std::exchange(found->second.written, {});
      if (forget) {
        storages.erase(found);
      }
    }
    py::list views(seen.size());
    for (size_t index = 0; index < seen.size(); index++) {
      views[index] = py::make_tuple(seen[index].meta, seen[index].offset, seen[index].tensor);
    }
    return py::make_tuple(id, bytes, views, py::cast(written));
  }

  // Its writes so far do not matter any more.
  void forget_written(uintptr_t address, int64_t id) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = find(address, id);
    if (found != storages.end()) {
      found->second.written.clear();
    }
  }

  // The storages that were born here and are alive.
  py::list unadopted() {
    std::vector<c10::intrusive_ptr<c10::StorageImpl>> alive;
    {
      std::lock_guard<std::mutex> lock(mutex);
      for (auto& [impl, storage] : storages) {
        if (!storage.adopted) {
          if (auto strong = storage.impl.lock()) {
            alive.push_back(std::move(strong));
          }
        }
      }
    }
    py::list made;
    for (auto& impl : alive) {
      made.append(py::reinterpret_steal<py::object>(THPStorage_Wrap(c10::Storage(std::move(impl)))));
    }
    return made;
  }

  // Ids of the storages born here that died.
  std::vector<int64_t> dead() {
    std::vector<int64_t> ids;
    std::lock_guard<std::mutex> lock(mutex);
    born = 0;
    for (auto place = storages.begin(); place != storages.end();) {
      if (place->second.impl.expired()) {
        if (!place->second.adopted) {
          ids.push_back(place->second.id);
        }
        place = storages.erase(place);
      } else {
        ++place;
      }
    }
    std::sort(ids.begin(), ids.end());
    return ids;
  }

  // The stream states the settings as they are now.
  void settle() {
    general = general_settings();
    for (size_t index = 0; index < kWatched; index++) {
      watched[index] = watched_setting(index);
    }
  }

  // Whether an op runs under the settings that the stream states. `watches`: those that it depends on.
  bool is_settled(const std::vector<size_t>& watches) const {
    return general == general_settings() && std::all_of(watches.begin(), watches.end(), [this](size_t index) {
             return watched[index] == watched_setting(index);
           });
  }

  void move_scopes() { scopes_moved.store(next_move()); }

  void clear() {
    std::lock_guard<std::mutex> lock(mutex);
    hot.store(false);
    storages.clear();
    metas.clear();
    signatures.clear();
  }

 private:
  // The storage that a tracker of Python's is of. Its memory may be another storage's by now: ids tell them apart.
  std::unordered_map<const c10::StorageImpl*, Storage>::iterator find(uintptr_t address, int64_t id) {
    const auto found = storages.find(reinterpret_cast<c10::StorageImpl*>(address));
    return found == storages.end() || id == 0 || found->second.id == id ? found : storages.end();
  }
};

}  // namespace opreplay
