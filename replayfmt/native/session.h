// What a capture knows natively: rows on their way to the writer, storages, metadata and signatures.
//
// Python's complete path is the reference: it gives ids to what it meets, and tells this what it found out
// (`define_meta`, the signature of a call). What comes here again is recorded without it. Which views a storage has,
// and which of them were written, is known here alone, whoever used them: Python asks (`Entry`). Storages that an op
// returns are born here; Python adopts them when it meets them. All of it is guarded by one mutex, which is never held
// while the interpreter's lock is waited for.

#pragma once

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "content_hash.h"
#include "flushing.h"
#include "operator.h"
#include "pointer_map.h"
#include "program_state.h"
#include "rows.h"
#include "sections.h"

namespace opreplay {

namespace py = pybind11;

struct View {
  const Metas::value_type* meta;
  int64_t offset;
  int64_t tensor;
};

// The views of one storage, in the order of their first use. Found one by one while there are few, by a hash then.
class Views {
 public:
  static constexpr size_t kFew = 8;

  bool few() const { return all_.size() <= kFew; }
  const View* begin() const { return all_.begin(); }
  const View* end() const { return all_.end(); }
  // The tensor that a view is; 0 where it is none yet.
  int64_t find(const Metas::value_type* meta, int64_t offset) const {
    if (!few()) {
      const auto found = by_place_.find({meta, offset});
      return found == by_place_.end() ? 0 : found->second;
    }
    const auto* found =
        std::find_if(begin(), end(), [&](const View& view) { return view.meta == meta && view.offset == offset; });
    return found == end() ? 0 : found->tensor;
  }
  // The same, where there are few: `looks` need not be looked up.
  int64_t find_among_few(const Looks& looks, int64_t offset) const {
    const auto* found = std::find_if(
        begin(), end(), [&](const View& view) { return view.offset == offset && looks == view.meta->first; });
    return found == end() ? 0 : found->tensor;
  }
  // The view that a tensor is, if it is one.
  const View* of(int64_t tensor) const {
    const auto* found =
        in_order_
            ? std::lower_bound(begin(), end(), tensor, [](const View& view, int64_t id) { return view.tensor < id; })
            : std::find_if(begin(), end(), [&](const View& view) { return view.tensor == tensor; });
    return found == end() || found->tensor != tensor ? nullptr : found;
  }
  void add(const View& view) {
    in_order_ = in_order_ && (all_.empty() || all_.back().tensor < view.tensor);
    all_.push_back(view);
    if (all_.size() == kFew + 1) {
      for (const View& each : all_) {
        by_place_.emplace(Place{each.meta, each.offset}, each.tensor);
      }
    } else if (!few()) {
      by_place_.emplace(Place{view.meta, view.offset}, view.tensor);
    }
  }

 private:
  using Place = std::pair<const Metas::value_type*, int64_t>;
  struct Hash {
    size_t operator()(const Place& place) const {
      return WordsHash::mixed(WordsHash::mixed(0, reinterpret_cast<int64_t>(place.first)), place.second);
    }
  };
  c10::SmallVector<View, 2> all_;
  bool in_order_ = true;  // of tensor ids
  std::unordered_map<Place, int64_t, Hash> by_place_;
};

// What lies in a storage beside the bytes that an operator is about to write.
struct Beside {
  Beside(const c10::StorageImpl& storage, size_t from, size_t to) : begin(from), end(to), hash(now(storage)) {}
  uint64_t now(const c10::StorageImpl& storage) const {
    const auto* at = static_cast<const char*>(storage.data());
    return mixed(ContentHash::of(at, begin)) ^ ContentHash::of(at + end, storage.nbytes() - end);
  }

  size_t begin, end;
  uint64_t hash;
};

// A storage. Unless it is careful, its bytes come from recorded ops or from an import, and all that can happen to it is
// to be read, written and viewed. Or to be written by others, if it is watched.
struct Storage {
  Storage(c10::weak_intrusive_ptr<c10::StorageImpl> of, int64_t number, int64_t length, bool is_tracked)
      : impl(std::move(of)), id(number), bytes(length), adopted(is_tracked), careful(is_tracked) {}

  c10::weak_intrusive_ptr<c10::StorageImpl> impl;
  int64_t id;
  int64_t bytes;
  bool adopted;                     // Python has a tracker of it, which tells its death
  bool careful;                     // Python looks after each use
  bool new_views = true;            // it may be seen in other ways than so far
  bool unwritten = false;           // nothing was written to it: it may be filled, and nothing else
  bool generated = false;           // generated code allocated it
  bool marked = false;              // Python knows that it may have been written unseen, until it imports it again
  std::string sampled;              // of unwritten host memory: some of its bytes, as they were when it was handed out
  std::optional<uint64_t> content;  // it is watched, and this was its content's hash when recorded work last wrote it
  Views views;

  static uint64_t hash_of(const c10::StorageImpl& storage) { return ContentHash::of(storage.data(), storage.nbytes()); }
  // Whether others wrote it, as far as it is watched.
  bool changed(const c10::StorageImpl& storage) const { return content && *content != hash_of(storage); }
  void note_written(const c10::StorageImpl& storage, int64_t tensor, const std::optional<Beside>& beside) {
    if (content) {
      content = hash_of(storage);
    }
    compare(storage, beside);
    note_written(tensor);
  }
  // Where others have written since beside what an operator wrote, the content is not what is known of it.
  void compare(const c10::StorageImpl& storage, const std::optional<Beside>& before) {
    if (content && before && before->now(storage) != before->hash) {
      content = ~*content;
    }
  }
  void note_written(int64_t tensor) {
    if (std::find(written_.end() - std::min<ptrdiff_t>(std::ssize(written_), 4), written_.end(), tensor) !=
        written_.end()) {
      return;
    }
    if (written_.size() >= enough_written_) {
      sort_written();
      enough_written_ = std::max<size_t>(64, 2 * written_.size());
    }
    written_.push_back(tensor);
  }
  // Tensor id, meta id and offset of each view that was written since `clear_written`.
  std::vector<std::array<int64_t, 3>> written() {
    sort_written();
    std::vector<std::array<int64_t, 3>> found;
    for (const int64_t tensor : written_) {
      if (const View* view = views.of(tensor)) {
        found.push_back({tensor, view->meta->second.id, view->offset});
      }
    }
    return found;
  }
  void clear_written() { written_.clear(); }

 private:
  void sort_written() {
    std::sort(written_.begin(), written_.end());
    written_.erase(std::unique(written_.begin(), written_.end()), written_.end());
  }

  std::vector<int64_t> written_;  // tensors; some several times
  size_t enough_written_ = 64;    // with so many, each is kept once
};

// Ranges of host memory by the address of what lies there. They may overlap; some are out of date.
class HostRanges {
 public:
  size_t size() const { return size_; }
  void clear() { *this = {}; }
  void add(uintptr_t begin, size_t bytes, const void* owner) {
    by_length_[std::bit_width(bytes)].emplace(begin, Range{bytes, owner});
    size_++;
  }
  // Visits what may hold any byte from `begin` to `end`, and drops what a visit says is out of date.
  template <typename Visit>
  void overlapping(uintptr_t begin, uintptr_t end, const Visit& is_out_of_date) {
    for (size_t bits = 0; bits < by_length_.size(); bits++) {
      auto& ranges = by_length_[bits];  // less than 2^bits bytes each
      const uintptr_t reach = uintptr_t{1} << std::min<size_t>(bits, 63);
      for (auto at = ranges.lower_bound(begin > reach ? begin - reach : 0); at != ranges.end() && at->first < end;) {
        const bool drop = at->first + at->second.bytes > begin && is_out_of_date(at->second.owner);
        at = drop ? (size_--, ranges.erase(at)) : std::next(at);
      }
    }
  }

 private:
  struct Range {
    size_t bytes;
    const void* owner;
  };
  std::array<std::multimap<uintptr_t, Range>, 65> by_length_;
  size_t size_ = 0;
};

inline bool is_plain(const at::Tensor& tensor) {
  using enum c10::DispatchKey;
  constexpr c10::DispatchKeySet others({Python, ZeroTensor, Conjugate, Negative, NestedTensor, Quantized});
  return !tensor.key_set().has_any(others) && tensor.layout() == at::kStrided && tensor.has_storage() &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
         !(tensor.is_meta() && tensor.storage().sym_nbytes().is_symbolic());
}

// Whether PyTorch's own allocator gave a storage its memory, on the host: it is this process's alone, and of no file.
inline bool allocated_by_torch(uintptr_t address) {
  const auto& storage = *reinterpret_cast<const c10::StorageImpl*>(address);
  const c10::DeleterFnPtr frees = c10::GetCPUAllocator()->raw_deleter();
  return frees != nullptr && storage.device_type() == at::kCPU && storage.data_ptr().get_deleter() == frees;
}

// Some of a storage's bytes, at places that depend on its length alone; none if it is not in host memory. As in
// recording/content/storage_content.py.
inline std::string sample(const c10::StorageImpl& storage) {
  constexpr size_t whole_bytes = 1024, words = 32, word_bytes = 8;
  const size_t length = storage.nbytes();
  const char* bytes = storage.device_type() == at::kCPU ? static_cast<const char*>(storage.data()) : nullptr;
  if (bytes == nullptr || length <= whole_bytes) {
    return bytes == nullptr ? std::string() : std::string(bytes, length);
  }
  std::string made(words * word_bytes, '\0');
  for (size_t word = 0; word < words; word++) {
    std::memcpy(&made[word * word_bytes], bytes + word * ((length - word_bytes) / (words - 1)), word_bytes);
  }
  return made;
}

class Session {
 public:
  Session(int64_t began, size_t chunk, bool scalars_too, int64_t least)
      : began_ns(began), chunk_records(chunk), scalars(scalars_too), least_address(least) {}

  std::mutex mutex;
  Rows rows{mutex}, new_storages{mutex}, definitions{mutex};
  PointerMap<Storage> storages;  // by the address of their StorageImpl, which a weak reference keeps
  Metas metas;
  std::vector<const Metas::value_type*> metas_by_id{nullptr};
  Rows new_metas{mutex};  // in order of their ids: codes of dtype and device, kind, sizes, strides
  Signatures signatures;  // operators refer to them: none is removed
  Operators operators;
  std::atomic<bool> hot{false};  // calls may be recorded here; written with the mutex held
  StatedSettings stated;         // withdrawn with the mutex held
  StatedGradMode grad_mode;
  Contexts contexts;
  WatchedStreams streams;
  const int64_t began_ns;
  const size_t chunk_records;
  const bool scalars;                    // numbers that ops return are recorded
  const int64_t least_address;           // integers from there on may be addresses
  std::atomic<int64_t> release_head{0};  // begins rows that tell the death of storages; 0: Python tells it
  size_t born = 0;                       // storages since the last look for dead ones
  std::optional<Draws> drawn;            // where a replay's generator is; none where Python has not said it
  DrawTurns turns;                       // of calls that draw
  WritesInProgress writes;
  Flushing flushing;
  int64_t last_generated = 0;  // number of the newest kernel of generated code, counted down
  void (*enter)() = nullptr;   // around work that is recorded as a whole, where threads are watched
  void (*leave)() = nullptr;

  // Whether it is time to look for dead storages. With the mutex held.
  bool drains() const { return born >= std::max<size_t>(64, storages.size() / 4); }
  bool drains_now() {
    std::lock_guard<std::mutex> lock(mutex);
    return drains();
  }

  // While the rows of a frame come, there is time to write the one before in so many parts.
  static constexpr size_t kTurns = 64;
  // Whether there is something for Python to do after a record. With the mutex held.
  bool waits(int64_t now) const {
    const bool turn = rows.size() >= chunk_records && rows.size() % (chunk_records / kTurns + 1) == 0;
    return (drains() && !release_head) || turn || flushing.overdue(now);
  }

  // With the mutex held.
  const Metas::value_type* meta_of(const Looks& looks) {
    const Metas::value_type*& recent = recent_metas_[looks.glance() % recent_metas_.size()];
    if (recent && looks == recent->first) {
      return recent;
    }
    const auto found = metas.find(looks);
    return found == metas.end() ? nullptr : recent = &*found;
  }
  // Likewise, but metadata of a known dtype and device is defined where it is new.
  const Metas::value_type* define_meta_of(const Looks& looks) {
    const auto* known = meta_of(looks);
    const auto kind = known ? kinds_.end() : kinds_.find(looks.kind);
    if (known || kind == kinds_.end()) {
      return known;
    }
    return &add_meta(looks.words(), kind->second.first, kind->second.second);
  }
  Storage* storage_of(const c10::StorageImpl* impl) const { return storages.find(impl); }
  // The tensor that a view of a storage is; 0 where it is none yet.
  int64_t view_of(const Storage& storage, const Looks& looks, int64_t offset) {
    if (storage.views.few()) {
      return storage.views.find_among_few(looks, offset);
    }
    const auto* meta = meta_of(looks);
    return meta ? storage.views.find(meta, offset) : 0;
  }
  // The storage that Python knows by this address and id. Its memory may be another storage's by now: ids tell them
  // apart.
  Storage* storage_of(const c10::StorageImpl* impl, int64_t id) const {
    Storage* found = storages.find(impl);
    return found && found->id == id ? found : nullptr;
  }
  // `tracked`: Python met it first, and has a tracker of it.
  Storage& add(c10::StorageImpl* impl, int64_t id, int64_t bytes, bool tracked) {
    born++;
    if (!tracked) {
      young_.push_back(impl);
    }
    return storages.add(impl, weak(impl), id, bytes, tracked);
  }
  int64_t add_view(int64_t storage, const View& place, Views* views) {
    const int64_t tensor = ++tensor_ids_;
    const int64_t definition[] = {tensor, storage, place.offset, place.meta->second.id};
    definitions.add(definition);
    if (views) {
      views->add({place.meta, place.offset, tensor});
    }
    return tensor;
  }
  // A storage's id, which is given with its row. `origin`: one of the format's.
  int64_t storage_id(int64_t bytes, int64_t device_id, int64_t origin, int64_t payload) {
    const int64_t row[] = {++storage_ids_, bytes, device_id, origin, payload};
    new_storages.add(row);
    return storage_ids_;
  }
  const Metas::value_type* meta_numbered(int64_t id) const { return metas_by_id.at(id); }

  // The record of an op that ran in the calling thread comes next. How many rows that takes. With the mutex held.
  size_t follow_grad_mode(int64_t context, int64_t since_start_ns) {
    const int64_t signature = grad_mode.follow();
    if (signature != 0) {
      const int64_t row[] = {signature, context, since_start_ns, 0};
      rows.add(row);
    }
    return signature != 0;
  }

  // Append a row that tells the death of the storages that were born here, if any died. With the mutex held.
  void release_dead(int64_t context, int64_t now_ns) {
    if (Words row = take_dead(); !row.empty()) {
      row.insert(row.begin(), {release_head, context, now_ns - began_ns, 0});
      rows.add(row);
    }
  }

  // ------------------------------------------------------------------------------------------------------ from Python

  // The id of metadata. `dtype_code` and `device_id`: the file's for its dtype and device.
  int64_t define_meta(at::ScalarType dtype, const at::Device& device, int64_t flags, const Words& sizes,
                      const Words& strides, int64_t dtype_code, int64_t device_id) {
    Looks looks(dtype, device, sizes, strides);
    const int64_t plain = std::exchange(looks.kind, looks.kind | flags << kFlagBits);
    std::lock_guard<std::mutex> lock(mutex);
    if (flags == 0) {
      kinds_.emplace(plain, std::pair(dtype_code, device_id));
    }
    const auto found = metas.find(looks);
    return (found != metas.end() ? *found : add_meta(looks.words(), dtype_code, device_id)).second.id;
  }
  // The id of what a plain tensor looks like; 0 where Python has not defined its dtype and device.
  int64_t meta_id_of(const at::Tensor& tensor) {
    if (!is_plain(tensor)) {
      return 0;
    }
    std::lock_guard<std::mutex> lock(mutex);
    const auto* known = define_meta_of(Looks(tensor));
    return known ? known->second.id : 0;
  }
  // Dtype, sizes, strides and flags of metadata.
  py::tuple meta(size_t id) {
    Words words;
    {
      std::lock_guard<std::mutex> lock(mutex);
      words = metas_by_id.at(id)->first;
    }
    const auto dims = static_cast<std::ptrdiff_t>(words.size() / 2);
    const auto tuple = [](auto first, auto last) { return py::tuple(py::cast(Words(first, last))); };
    return py::make_tuple(static_cast<at::ScalarType>(words[0] >> 32 & 0xffff),
                          tuple(words.begin() + 1, words.begin() + 1 + dims),
                          tuple(words.begin() + 1 + dims, words.end()), words[0] >> kFlagBits);
  }

  // Once this has set it to false, no call appends a row any more without Python, and none draws random numbers.
  void set_hot(bool is_hot) {
    py::gil_scoped_release unlocked;
    std::unique_lock<std::mutex> lock(mutex);
    hot.store(is_hot);
    if (!is_hot) {
      turns.wait(lock);
    }
  }

  // No call appends a row without Python until the stream states the settings as they are then (`settle`).
  void unsettle() {
    py::gil_scoped_release unlocked;
    std::unique_lock<std::mutex> lock(mutex);
    stated.withdraw();
    turns.wait(lock);
  }

  // The grad mode that the stream states: at first, and where Python states the calling thread's.
  void begin_grad_mode(bool enabled) {
    std::lock_guard<std::mutex> lock(mutex);
    grad_mode.begin(enabled);
  }
  size_t state_grad_mode(std::array<int64_t, 2> signatures, int64_t context, int64_t since_start_ns) {
    std::lock_guard<std::mutex> lock(mutex);
    grad_mode.name(signatures);
    return follow_grad_mode(context, since_start_ns);
  }
  bool stated_grad_mode() {
    std::lock_guard<std::mutex> lock(mutex);
    return grad_mode.enabled();
  }
  // The record of an op that ran in the calling thread, from Python. How many rows that took.
  size_t append_op(const py::bytes& row) {
    const Words words = words_of(row);
    std::lock_guard<std::mutex> lock(mutex);
    const size_t before = follow_grad_mode(words.at(1), words.at(2));
    rows.add(words);
    return before + 1;
  }

  // No call draws random numbers without Python until as many have been released.
  void reserve_draws() {
    py::gil_scoped_release unlocked;
    std::unique_lock<std::mutex> lock(mutex);
    turns.reserve(lock);
  }
  void release_draws() {
    std::lock_guard<std::mutex> lock(mutex);
    turns.release();
  }

  void set_context(unsigned long ident, int64_t context) {
    std::lock_guard<std::mutex> lock(mutex);
    contexts.set(ident, context);
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
    std::construct_at(&turns);
    std::construct_at(&writes);
    hot.store(false);
  }

  // The addresses of the storages that calls here are writing now.
  std::vector<uintptr_t> being_written() {
    std::lock_guard<std::mutex> lock(mutex);
    return writes.addresses();
  }

  int64_t add_storage(int64_t bytes, int64_t device_id, int64_t origin, int64_t payload) {
    std::lock_guard<std::mutex> lock(mutex);
    return storage_id(bytes, device_id, origin, payload);
  }
  int64_t define_tensor(int64_t storage, int64_t offset, int64_t meta) {
    std::lock_guard<std::mutex> lock(mutex);
    return add_view(storage, {meta_numbered(meta), offset, 0}, nullptr);
  }
  // Python has a tracker of a storage now, and looks after each use until it says otherwise.
  void track(c10::StorageImpl* impl, int64_t id, int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    storages.erase(impl);  // it may have been another one to Python
    add(impl, id, bytes, true);
  }
  struct Adopted {
    int64_t id, bytes;
    bool unwritten, generated;
    std::string sampled;
  };
  // Python has a tracker of a storage that was born here from now on, and looks after each use where nothing was
  // written to it. None where it is not known, or Python had one: an exception may have come between, and then it
  // enters as a new one.
  std::optional<Adopted> adopt(c10::StorageImpl* impl) {
    std::lock_guard<std::mutex> lock(mutex);
    Storage* found = storage_of(impl);
    if (!found || found->adopted) {
      return std::nullopt;
    }
    found->adopted = true;
    found->careful = found->careful || found->unwritten;
    return Adopted{found->id, found->bytes, std::exchange(found->unwritten, false),
                   std::exchange(found->generated, false), std::exchange(found->sampled, {})};
  }

  // The storages that were born here and are alive, as far as Python has no tracker of them.
  py::list unadopted() {
    Alive alive;
    {
      std::lock_guard<std::mutex> lock(mutex);
      for (const void* address : young_) {
        add_unadopted(address, alive);
      }
    }
    return as_python(std::move(alive));
  }

  // Those of them that hold any of these bytes of host memory.
  py::list overlapping(uintptr_t begin, uintptr_t end) {
    Alive placed, alive;  // let go of without the mutex
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (ranges_.size() > 2 * young_.size() + 1024) {
        ranges_.clear();
        placed_ = 0;
      }
      for (; placed_ < young_.size(); placed_++) {
        if (!add_unadopted(young_[placed_], placed)) {
          continue;
        }
        if (const auto& found = *placed.back(); found.device_type() == at::kCPU && found.nbytes()) {
          ranges_.add(reinterpret_cast<uintptr_t>(found.data()), found.nbytes(), young_[placed_]);
        }
      }
      ranges_.overlapping(begin, end, [&](const void* address) { return !add_unadopted(address, alive); });
    }
    return as_python(std::move(alive));
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
    size_t kept = 0, placed = 0;
    for (size_t index = 0; index < young_.size(); index++) {
      const void* address = young_[index];
      const Storage* storage = storages.find(address);
      if (!storage || storage->adopted) {
        continue;
      }
      if (storage->impl.expired()) {
        ids.push_back(storage->id);
        storages.erase(address);
      } else {
        placed += index < placed_;
        young_[kept++] = address;
      }
    }
    young_.resize(kept);
    placed_ = placed;
    std::sort(ids.begin(), ids.end());
    return ids;
  }

  void clear() {
    std::lock_guard<std::mutex> lock(mutex);
    hot.store(false);
    drawn.reset();
    storages.clear();
    young_.clear();
    ranges_.clear();
    placed_ = 0;
    recent_metas_ = {};
    metas.clear();
    metas_by_id.assign(1, nullptr);
    kinds_.clear();
  }

 private:
  int64_t storage_ids_ = 0, tensor_ids_ = 0;  // the last ones given
  using Alive = std::vector<c10::intrusive_ptr<c10::StorageImpl>>;
  std::vector<const void*> young_;  // addresses of the storages that were born here, and of some that are gone
  HostRanges ranges_;               // where those lie that were there at the last look,
  size_t placed_ = 0;               // which are the first so many
  std::unordered_map<int64_t, std::pair<int64_t, int64_t>> kinds_;  // codes of dtype and device in the file, by kind
  std::array<const Metas::value_type*, 64> recent_metas_{};         // found last, by what is seen of them at a glance

  static c10::weak_intrusive_ptr<c10::StorageImpl> weak(c10::StorageImpl* impl) {
    c10::raw::weak_intrusive_ptr::incref(impl);
    return c10::weak_intrusive_ptr<c10::StorageImpl>::reclaim(impl);
  }
  // With the mutex held.
  const Metas::value_type& add_meta(Words words, int64_t dtype_code, int64_t device_id) {
    int64_t* row = new_metas.grow(2 + words.size());
    *row++ = dtype_code;
    *row++ = device_id;
    std::copy(words.begin(), words.end(), row);
    const auto& made =
        *metas.emplace(std::move(words), Meta{static_cast<int64_t>(metas_by_id.size()), device_id}).first;
    metas_by_id.push_back(&made);
    return made;
  }
  // Add a storage that was born here. Whether it is alive, and Python has no tracker of it. With the mutex held.
  bool add_unadopted(const void* address, Alive& alive) const {
    const Storage* storage = storages.find(address);
    auto strong = storage && !storage->adopted ? storage->impl.lock() : nullptr;
    return strong && (alive.push_back(std::move(strong)), true);
  }
  static py::list as_python(Alive alive) {
    py::list made;
    for (auto& impl : alive) {
      made.append(py::reinterpret_steal<py::object>(THPStorage_Wrap(c10::Storage(std::move(impl)))));
    }
    return made;
  }
};

// What a capture knows of one storage, for Python's tracker of it: recording/stream/session.py has the same in Python.
// Where the storage is not known any more it has no views, and new ones are not remembered.
class Entry {
 public:
  Entry(std::shared_ptr<Session> session, uintptr_t address, int64_t id)
      : session_(std::move(session)), impl_(reinterpret_cast<c10::StorageImpl*>(address)), id_(id) {}

  // The tensor that a view is; 0 where it is none yet.
  int64_t find(int64_t meta, int64_t offset) const {
    return with([&](Storage& known) { return known.views.find(session_->meta_numbered(meta), offset); });
  }
  // Likewise, but a new view becomes one.
  int64_t view(int64_t meta, int64_t offset) const {
    std::lock_guard<std::mutex> lock(session_->mutex);
    Storage* known = session_->storage_of(impl_, id_);
    const View place{session_->meta_numbered(meta), offset, 0};
    const int64_t tensor = known ? known->views.find(place.meta, offset) : 0;
    return tensor ? tensor : session_->add_view(id_, place, known ? &known->views : nullptr);
  }
  // Meta id, offset and tensor id of each view, the first one used first.
  std::vector<std::array<int64_t, 3>> views() const {
    return with([](Storage& known) {
      std::vector<std::array<int64_t, 3>> found;
      for (const View& view : known.views) {
        found.push_back({view.meta->second.id, view.offset, view.tensor});
      }
      return found;
    });
  }
  // Tensor id, meta id and offset of each view that recorded work wrote in place since `clear_written`.
  std::vector<std::array<int64_t, 3>> written() const {
    return with([](Storage& known) { return known.written(); });
  }
  void clear_written() const {
    with([](Storage& known) { known.clear_written(); });
  }
  void note_written(int64_t tensor) const {
    with([tensor](Storage& known) { known.note_written(tensor); });
  }

  // Calls may be recorded without Python that use it; or not: Python looks after each use.
  void offer(int64_t bytes, bool new_views) const {
    with([=](Storage& known) {
      known.bytes = bytes;
      known.new_views = new_views;
      known.careful = false;
    });
  }
  void withdraw() const {
    with([](Storage& known) { known.careful = true; });
  }
  // It is watched from now on, and nothing else: each use compares it with what it holds now.
  void watch() const {
    const uint64_t content = Storage::hash_of(*impl_);
    with([=](Storage& known) {
      known.content = content;
      known.careful = false;
    });
  }
  // Nothing of it is known any more.
  void forget() const {
    std::lock_guard<std::mutex> lock(session_->mutex);
    if (session_->storage_of(impl_, id_)) {
      session_->storages.erase(impl_);
    }
  }
  // It was imported again: what was written unseen until then does not matter any more.
  void unmark() const {
    with([](Storage& known) { known.marked = false; });
  }

  // The hash of its content when recorded work last wrote it, where it is watched.
  std::optional<uint64_t> content() const {
    return with([](Storage& known) { return known.content; });
  }
  void set_content(std::optional<uint64_t> content) const {
    with([content](Storage& known) { known.content = content; });
  }

 private:
  // Calls `use` with the storage, if it is known, with the mutex held.
  template <typename Use>
  std::invoke_result_t<Use, Storage&> with(const Use& use) const {
    std::lock_guard<std::mutex> lock(session_->mutex);
    if (Storage* known = session_->storage_of(impl_, id_)) {
      return use(*known);
    }
    return std::invoke_result_t<Use, Storage&>();
  }

  std::shared_ptr<Session> session_;
  c10::StorageImpl* impl_;
  int64_t id_;
};

}  // namespace opreplay
