// What a capture knows natively: rows on their way to the writer, storages, metadata and signatures.
//
// Python's complete path is the reference: it gives ids, and tells this what it found out (`publish`, `note_meta`, the
// signature of a call). What comes here again is recorded without it. Storages that an op returns are born here; Python
// adopts them when it meets them. All of it is guarded by one mutex, which is never held while the interpreter's lock is
// waited for.

#pragma once

#include <ATen/ATen.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "program_state.h"
#include "rows.h"

namespace opreplay {

namespace py = pybind11;

struct Operator;

using Key = c10::SmallVector<int64_t, 64>;  // long enough for nearly all, without memory of its own

// Values by runs of words. What is looked up need not own its words.
struct WordsHash {
  using is_transparent = void;
  size_t operator()(std::span<const int64_t> words) const {
    uint64_t hash = 0x9e3779b97f4a7c15ull ^ words.size();
    for (int64_t word : words) {
      hash = (hash ^ static_cast<uint64_t>(word)) * 0xff51afd7ed558ccdull;
      hash ^= hash >> 32;
    }
    return hash;
  }
};
struct WordsEqual {
  using is_transparent = void;
  bool operator()(std::span<const int64_t> one, std::span<const int64_t> other) const {
    return one.size() == other.size() && std::memcmp(one.data(), other.data(), one.size_bytes()) == 0;
  }
};
template <typename Value>
using ByWords = std::unordered_map<Words, Value, WordsHash, WordsEqual>;

struct Meta {
  int64_t id;
  int64_t device;
};

// What a tensor looks like, apart from where in its storage it lies: dtype and device, sizes, strides.
inline int64_t dtype_and_device(const at::TensorImpl& tensor) {
  const auto device = tensor.device();
  return (static_cast<int64_t>(c10::typeMetaToScalarType(tensor.dtype())) << 32) |
         (static_cast<int64_t>(device.type()) << 16) | static_cast<uint8_t>(device.index());
}
using Metas = ByWords<Meta>;

struct View {
  int64_t meta, offset, tensor;
  const Metas::value_type* looks;

  bool is_of(const at::TensorImpl& impl) const {
    const auto sizes = impl.sizes(), strides = impl.strides();
    const Words& words = looks->first;
    return offset == impl.storage_offset() && words.size() == 1 + 2 * sizes.size() &&
           words[0] == dtype_and_device(impl) && std::equal(sizes.begin(), sizes.end(), words.begin() + 1) &&
           std::equal(strides.begin(), strides.end(), words.begin() + 1 + static_cast<std::ptrdiff_t>(sizes.size()));
  }
};

// A storage that needs no care: its bytes come from recorded ops or from an import, and all that can happen to it is to
// be read, written and viewed.
struct Storage {
  c10::weak_intrusive_ptr<c10::StorageImpl> impl;
  int64_t id;
  int64_t bytes;
  bool adopted;    // Python has a tracker of it, which tells its death
  bool new_views;  // it may be seen in other ways than so far
  bool unwritten;  // nothing was written to it: it may be filled, and nothing else
  bool generated;  // generated code allocated it
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
  // The view that a tensor is; 0 where it is none of them.
  int64_t find(const at::Tensor& tensor) const {
    for (const View& view : views) {
      if (view.is_of(*tensor.unsafeGetTensorImpl())) {
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

class Session {
 public:
  std::mutex mutex;
  Rows rows{mutex}, births{mutex}, definitions{mutex};
  Counter next_storage, next_tensor;
  std::unordered_map<const c10::StorageImpl*, Storage> storages;
  Metas metas;
  std::vector<const Metas::value_type*> metas_by_id;
  ByWords<int64_t> signatures;
  std::unordered_map<const c10::FunctionSchema*, std::shared_ptr<Operator>> operators;
  std::atomic<bool> hot{false};          // calls may be recorded here; written with the mutex held
  std::atomic<uint64_t> general{0};      // the settings that the stream states
  std::array<std::atomic<uint8_t>, kWatched> watched{};
  std::atomic<uint64_t> scopes_moved{next_move()};  // another number after each change, in no other session
  WatchedStreams streams;
  int64_t began_ns = 0;
  size_t chunk_records = 0;
  bool scalars = true;  // numbers that ops return are recorded
  std::atomic<int64_t> release_head{0};  // begins rows that tell the death of storages; 0: Python tells it
  size_t born = 0;                       // storages since the last look for dead ones
  std::optional<Draws> drawn;            // where a replay's generator is; none where Python has not said it
  size_t drawing = 0;                    // calls that draw here
  int64_t last_generated = 0;            // number of the newest kernel of generated code, counted down
  void (*enter)() = nullptr;             // around work that is recorded as a whole, where threads are watched
  void (*leave)() = nullptr;
  std::condition_variable drew;          // one of them has returned

  // Whether it is time to look for dead storages. With the mutex held.
  bool drains() const { return born >= std::max<size_t>(64, storages.size() / 4); }
  bool drains_now() {
    std::lock_guard<std::mutex> lock(mutex);
    return drains();
  }

  // Whether there is something for Python to do after a record. With the mutex held.
  bool waits() const {
    return (drains() && !release_head) || (rows.size() >= chunk_records && rows.size() % 1024 == 0);
  }

  static uint64_t next_move() {
    static std::atomic<uint64_t> moves{0};
    return ++moves;
  }

  static Key meta_key(const at::Tensor& tensor) {
    const at::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    Key key{dtype_and_device(impl)};
    key.append(impl.sizes().begin(), impl.sizes().end());
    key.append(impl.strides().begin(), impl.strides().end());
    return key;
  }

  // With the mutex held.
  const Metas::value_type* meta_of(const at::Tensor& tensor) const {
    const auto found = metas.find(std::span<const int64_t>(meta_key(tensor)));
    return found == metas.end() ? nullptr : &*found;
  }
  int64_t signature_of(const Key& key) const {
    const auto found = signatures.find(std::span<const int64_t>(key));
    return found == signatures.end() ? 0 : found->second;
  }
  Storage* storage_of(const c10::StorageImpl* impl) {
    const auto found = storages.find(impl);
    return found == storages.end() ? nullptr : &found->second;
  }
  Storage& add(c10::StorageImpl* impl, int64_t id, int64_t bytes, bool adopted, bool new_views) {
    born++;
    return storages.emplace(impl, Storage{weak(impl), id, bytes, adopted, new_views, false, false, {}, {}}).first->second;
  }

  // Append a row that tells the death of the storages that were born here, if any died. With the mutex held.
  void release_dead(int64_t context, int64_t now_ns) {
    Key row{release_head, context, now_ns - began_ns, 0};
    const std::vector<int64_t> ids = take_dead();
    if (!ids.empty()) {
      row.append(ids.begin(), ids.end());
      rows.add(row.data(), row.size());
    }
  }

  // ------------------------------------------------------------------------------------------------------ from Python

  void note_meta(const at::Tensor& tensor, int64_t id, int64_t device) {
    const Key key = meta_key(tensor);
    std::lock_guard<std::mutex> lock(mutex);
    const auto& made = *metas.emplace(Words(key.begin(), key.end()), Meta{id, device}).first;
    metas_by_id.resize(std::max(metas_by_id.size(), static_cast<size_t>(id) + 1));
    metas_by_id[id] = &made;
  }

  // Once this has set it to false, no call appends a row any more without Python, and none draws random numbers.
  void set_hot(bool is_hot) {
    py::gil_scoped_release unlocked;
    std::unique_lock<std::mutex> lock(mutex);
    hot.store(is_hot);
    drew.wait(lock, [&] { return is_hot || drawing == 0; });
  }

  // The default generator of the CPU is where a replay's will be (or not: then Python looks before the next draw).
  void note_drawn(bool as_replayed) {
    std::lock_guard<std::mutex> lock(mutex);
    drawn = as_replayed ? std::optional(Draws::now()) : std::nullopt;
  }
  // The state that a replay's will be in; None where Python has not said where it is.
  std::optional<at::Tensor> drawn_state() {
    std::lock_guard<std::mutex> lock(mutex);
    return drawn ? std::optional(drawn->state()) : std::nullopt;
  }

  // In a forked child: a thread that is not there may have held the mutex.
  void forked() {
    std::construct_at(&mutex);
    std::construct_at(&drew);
    drawing = 0;
    hot.store(false);
  }

  // Python used a view of a storage. Whether the storage was not known here: then Python tells its other views as well.
  bool publish(uintptr_t address, int64_t id, int64_t bytes, bool new_views, int64_t meta, int64_t offset,
               int64_t tensor) {
    auto* impl = reinterpret_cast<c10::StorageImpl*>(address);
    std::lock_guard<std::mutex> lock(mutex);
    Storage* known = storage_of(impl);
    if (known && known->id != id) {
      return false;  // another storage, in the memory of one that died
    }
    Storage& storage = known ? *known : add(impl, id, bytes, true, new_views);
    storage.bytes = bytes;
    storage.new_views = new_views;
    if (!storage.find(meta, offset) && static_cast<size_t>(meta) < metas_by_id.size() && metas_by_id[meta]) {
      storage.views.push_back({meta, offset, tensor, metas_by_id[meta]});
    }
    return !known;
  }

  int64_t view(uintptr_t address, int64_t id, int64_t meta, int64_t offset) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = find(address, id);
    return found == storages.end() ? 0 : found->second.find(meta, offset);
  }

  // Id, bytes, views and written tensors of a storage, whether nothing was written to it, and whether generated code
  // allocated it; Python has a tracker of it from now on. None where it is not known. `id`: 0 where Python does not know it. `forget`: it is not known here any more.
  py::object take(uintptr_t address, int64_t id, bool forget) {
    int64_t bytes = 0;
    bool unwritten = false, generated = false;
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
      unwritten = found->second.unwritten;
      generated = found->second.generated;
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
    return py::make_tuple(id, bytes, views, py::cast(written), unwritten, generated);
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
    std::lock_guard<std::mutex> lock(mutex);
    return take_dead();
  }
  // With the mutex held.
  std::vector<int64_t> take_dead() {
    std::vector<int64_t> ids;
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

  // Python knows that a storage may have been written unseen, until it says otherwise.
  void note_marked(c10::StorageImpl* impl) {
    std::lock_guard<std::mutex> lock(mutex);
    if (marked_.size() >= 2 * marked_alive_ + 64) {
      std::erase_if(marked_, [](const auto& each) { return each.second.expired(); });
      marked_alive_ = marked_.size();
    }
    marked_.emplace(impl, weak(impl));
  }
  bool is_marked(c10::StorageImpl* impl) {
    std::lock_guard<std::mutex> lock(mutex);
    return marked_.count(impl) != 0;
  }
  void forget_marked(uintptr_t address) {
    std::lock_guard<std::mutex> lock(mutex);
    marked_.erase(reinterpret_cast<c10::StorageImpl*>(address));
  }

  void move_scopes() { scopes_moved.store(next_move()); }

  void clear() {
    std::lock_guard<std::mutex> lock(mutex);
    hot.store(false);
    drawn.reset();
    storages.clear();
    metas.clear();
    metas_by_id.clear();
    signatures.clear();
    marked_.clear();
  }

 private:
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  std::unordered_map<const c10::StorageImpl*, WeakStorage> marked_;
  size_t marked_alive_ = 0;  // when it was last looked

  static WeakStorage weak(c10::StorageImpl* impl) {
    return WeakStorage(c10::intrusive_ptr<c10::StorageImpl>::unsafe_reclaim_from_nonowning(impl));
  }
  // The storage that a tracker of Python's is of. Its memory may be another storage's by now: ids tell them apart.
  std::unordered_map<const c10::StorageImpl*, Storage>::iterator find(uintptr_t address, int64_t id) {
    const auto found = storages.find(reinterpret_cast<c10::StorageImpl*>(address));
    return found == storages.end() || id == 0 || found->second.id == id ? found : storages.end();
  }
};

// While it lives, what the calling thread does belongs to work that is recorded as a whole.
class Covered {
 public:
  explicit Covered(const Session& session) : leave_(session.leave) {
    if (session.enter) {
      session.enter();
    }
  }
  Covered(const Covered&) = delete;
  Covered& operator=(const Covered&) = delete;
  ~Covered() {
    if (leave_) {
      leave_();
    }
  }

 private:
  void (*leave_)();
};

}  // namespace opreplay
