// A small accelerator for tests: two devices of the kind `sim` (PrivateUse1), whose memory the host cannot touch.
//
// Memory is the host's, but protected while no copy runs: a kernel of the CPU that is given it ends the process, as a
// pointer of a GPU's would. Operators run as PyTorch's CPU fallback does it: arguments are copied to the host, results
// back. Operators run at once, in the order in which they are issued; streams and events keep vector clocks, and an
// operator that uses memory which another stream last touched, without an event between the two, raises (or is counted,
// where races are tolerated). What streams and events do is told to PyTorch's trace, as the guard of CUDA does.
//
// Copies between the device and pinned memory for which nobody waits happen as late as they may: to the host when the
// host waits for them, from the host when the device uses the memory. Pinned memory that the host changes before it
// knows that a copy from it is done is such a race, too. An event or a stream that is asked whether its work is done
// says no at first. Memory that is freed is given to the next tensor of the stream that it was allocated on, at once: a
// tensor's memory may be what another stream still uses.
//
// While a graph is captured, operators leave no trace: they run for their results' sizes alone, and what they wrote and
// drew is undone at the end. A capture has the stream that it begins on, and those that wait for an event of one that
// it has; what other streams are given runs at once. Memory that a capture allocates is the graph's until that is gone,
// and what is freed in between is used again by the same capture, unless another stream was said to use it. A replay
// issues what was captured, with the same addresses, the work of each stream on one of its own.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/GPUTrace.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#if __has_include(<ATen/core/GraphImplInterface.h>)
#include <ATen/core/GraphImplInterface.h>
#define HAS_GRAPHS 1
#else  // PyTorch 2.11 has graphs of CUDA alone
namespace at {
enum class GraphCaptureMode : int8_t { Default };
struct GraphImplArgs {
  bool keep_graph = false;
};
struct GraphImplInterface {
  virtual ~GraphImplInterface() = default;
  virtual void capture_begin(c10::MempoolId_t pool, GraphCaptureMode mode) = 0;
  virtual void capture_end() = 0;
  virtual void instantiate() = 0;
  virtual void replay() = 0;
  virtual void reset() = 0;
  virtual c10::MempoolId_t pool() const = 0;
  virtual void enable_debug_mode() = 0;
  virtual void debug_dump(const std::string& path) = 0;
};
}  // namespace at
#endif

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

constexpr auto kKind = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;
constexpr c10::StreamId kStreams = 32;
constexpr c10::StreamId kFirstOfGraphs = 1 << 8;  // the streams inside of a replay of a graph

// ------------------------------------------------------------------------------------------------- streams and events

struct Place {  // a stream of a device
  c10::DeviceIndex device;
  c10::StreamId stream;
  bool operator<(const Place& other) const {
    return device != other.device ? device < other.device : stream < other.stream;
  }
};

using Clock = std::map<Place, int64_t>;  // how far each stream has come, as one of them knows

struct Touched {  // by whom a block was last written, and read since
  std::pair<Place, int64_t> written{{0, 0}, 0};
  Clock read;
};

struct Block {
  size_t bytes;
  size_t mapped;
  c10::DeviceIndex device;
  Touched touched;
  bool fresh = true;            // nobody has used it since it was allocated
  Place home{0, 0};             // the stream that was current when it was allocated, which gets it again
  std::set<Place> used;         // streams that record_stream named: they are waited for
  Clock until = {};             // what has to be done before it is used again
  struct Pool* pool = nullptr;  // of the graphs that it belongs to
};

// The memory of one or more graphs: blocks that were freed while one of them is there.
struct Pool {
  c10::MempoolId_t id;
  int graphs = 0;
  std::set<char*> blocks, free;
};

using Nodes = std::set<size_t>;  // of the graph that is captured, by number

struct Event {
  Clock clock;
  int64_t recorded_ns = 0;
  int64_t capture = 0;  // the number of the capture that it was recorded in, after these nodes
  Nodes nodes{};
  bool asked = false;
};

// A copy between the device and pinned memory, for which nobody has waited.
struct Late {
  std::pair<Place, int64_t> copied;
  char* block;  // of the device, while `copy` is still to be done
  std::function<void()> copy;
  at::Tensor source;  // memory of the host that must not change, with what it was; undefined: there is none
  std::string content;
};

std::recursive_mutex mutex;
std::map<Place, Clock> clocks;
std::map<Place, int64_t> launched;
std::map<char*, Block> blocks;
std::vector<std::string> log_of_launches;
size_t allocated[kDevices], peak[kDevices];
c10::StreamId streams_given = 0;
bool tolerates_races = false;
std::atomic<int64_t> uses{0};  // how often something was asked of the device that CUDA would begin to use one for
int64_t races = 0;
std::vector<Late> late;
std::map<std::tuple<c10::DeviceIndex, c10::StreamId, size_t>, std::vector<std::map<char*, Block>::node_type>> freed;
class SimulatedGraph;
SimulatedGraph* capturing = nullptr;    // the graph that is being captured; the device's work goes there
thread_local bool by_fallback = false;  // copies are part of an operator that the host runs
thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream[kDevices] = {0, 0};

bool is_captured(const Place& place);  // whether what a stream is given goes into the graph that is being captured
bool captures_here(c10::DeviceIndex device) { return is_captured({device, current_stream[device]}); }
void record_in_capture(Event& event, const Place& place);
void wait_in_capture(const Event& event, const Place& place);

int64_t now_ns() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000ll + time.tv_nsec;
}

void merge(Clock& into, const Clock& from) {
  for (const auto& [place, tick] : from) {
    into[place] = std::max(into[place], tick);
  }
}

// Tells PyTorch's trace, as CUDA's guard does. Without the lock: what listens is written in Python.
template <typename... Values>
void tell(void (c10::impl::PyInterpreterVTable::*what)(c10::DeviceType, Values...) const, Values... values) {
  if (const auto* interpreter = c10::impl::GPUTrace::get_trace()) {
    ((**interpreter).*what)(kKind, values...);
  }
}

using Table = c10::impl::PyInterpreterVTable;

bool covers(const Clock& known, const std::pair<Place, int64_t>& work) {
  const auto found = known.find(work.first);
  return work.second == 0 || (found != known.end() && found->second >= work.second);
}

bool covers(const Clock& known, const Clock& work) {
  return std::all_of(work.begin(), work.end(), [&](const auto& each) { return covers(known, each); });
}

void check_unchanged(const Late& one) {
  const bool same =
      !one.source.defined() || !std::memcmp(one.source.data_ptr(), one.content.data(), one.content.size());
  races += !same;
  TORCH_CHECK(same || tolerates_races,
              "sim: pinned memory has changed before the host waited for a copy from it to a device");
}

// The host knows that this is done; or, of copies to the host alone, a stream does that reads what they wrote.
void land(const Clock& known, bool by_host = true) {
  std::vector<Late> done;
  const auto waiting = std::stable_partition(
      late.begin(), late.end(), [&](const Late& one) { return !covers(known, one.copied) || (!by_host && one.block); });
  std::move(waiting, late.end(), std::back_inserter(done));
  late.erase(waiting, late.end());
  for (Late& one : done) {
    if (one.copy) {
      one.copy();
    }
    if (one.source.defined()) {
      check_unchanged(one);
    }
  }
}

uintptr_t handle_of(const void* event) { return reinterpret_cast<uintptr_t>(event); }

uintptr_t handle_of(const c10::Stream& stream) { return static_cast<uintptr_t>(stream.id()); }

void check_index(c10::DeviceIndex index) { TORCH_CHECK(0 <= index && index < kDevices, "sim: no device ", int(index)); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kKind; }
  c10::Device getDevice() const override {
    uses++;
    return {kKind, current_device};
  }
  void setDevice(c10::Device device) const override {
    uses++;
    check_index(device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  static c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }
  static c10::Stream stream_of(c10::DeviceIndex index, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, {kKind, index}, id);
  }
  c10::Stream getStream(c10::Device device) const override {
    uses++;
    return stream_of(index_of(device), current_stream[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(index_of(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    std::lock_guard lock(mutex);
    return stream_of(index_of(device), 1 + streams_given++ % kStreams);  // from a pool, as CUDA's are
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(handle_of(stream));
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    {
      std::lock_guard lock(mutex);
      const Place place{stream.device_index(), stream.id()};
      if (!*event) {
        *event = new Event;
      }
      *static_cast<Event*>(*event) = {clocks[place], now_ns()};
      record_in_capture(*static_cast<Event*>(*event), place);
    }
    const OnDevice here(stream.device());
    tell(&Table::trace_gpu_event_record, handle_of(*event), handle_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) {
      return;
    }
    {
      std::lock_guard lock(mutex);
      const Place place{stream.device_index(), stream.id()};
      wait_in_capture(*static_cast<Event*>(event), place);
      merge(clocks[place], static_cast<Event*>(event)->clock);
    }
    const OnDevice here(stream.device());
    tell(&Table::trace_gpu_event_wait, handle_of(event), handle_of(stream));
  }
  bool queryEvent(void* event) const override {
    std::lock_guard lock(mutex);
    auto* asked = static_cast<Event*>(event);
    return !asked || answer(asked->clock, asked->asked);
  }
  // The first answer is that it is not done, unless the host knows better.
  static bool answer(const Clock& clock, bool& asked) {
    if (!asked && !covers(waited(), clock)) {
      asked = true;
      return false;
    }
    asked = false;
    wait_for(clock);
    return true;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    if (event) {
      tell(&Table::trace_gpu_event_deletion, handle_of(event));
    }
    delete static_cast<Event*>(event);
  }
  static void refuse_while_capturing(const char* what) {
    TORCH_CHECK(!capturing, "sim: ", what, " is not permitted while a graph is captured");
  }
  void synchronizeEvent(void* event) const override {
    if (!event) {
      return;
    }
    refuse_while_capturing("to wait for an event");
    {
      std::lock_guard lock(mutex);
      wait_for(static_cast<Event*>(event)->clock);
    }
    tell(&Table::trace_gpu_event_synchronization, handle_of(event));
  }
  bool queryStream(const c10::Stream& stream) const override {
    static std::map<Place, bool> asked;
    std::lock_guard lock(mutex);
    const Place place{stream.device_index(), stream.id()};
    return answer(clocks[place], asked[place]);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    refuse_while_capturing("to wait for a stream");
    {
      std::lock_guard lock(mutex);
      wait_for(clocks[{stream.device_index(), stream.id()}]);
    }
    const OnDevice here(stream.device());
    tell(&Table::trace_gpu_stream_synchronization, handle_of(stream));
  }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    uses++;
    refuse_while_capturing("to wait for a device");
    {
      std::lock_guard lock(mutex);
      for (auto& [place, clock] : std::map<Place, Clock>(clocks)) {
        if (place.device == index) {
          wait_for(clock);
        }
      }
    }
    const OnDevice here({kKind, index});
    tell(&Table::trace_gpu_device_synchronization);
  }
  struct OnDevice {  // what listens asks for the current device
    explicit OnDevice(c10::Device device) : before(std::exchange(current_device, device.index())) {}
    ~OnDevice() { current_device = before; }
    const c10::DeviceIndex before;
  };
  // The host waited: whatever is issued from now on comes after.
  static void wait_for(const Clock& clock) {
    const Clock known = clock;
    for (auto& [place, other] : clocks) {
      merge(other, known);
    }
    merge(waited(), known);
    land(waited());
  }
  static Clock& waited() {
    static Clock clock;
    return clock;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;
  double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
    return static_cast<double>(static_cast<Event*>(end)->recorded_ns - static_cast<Event*>(begin)->recorded_ns) / 1e6;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ------------------------------------------------------------------------------------------------------------- memory

Pool* pool_in_use();
void note_made(const c10::DataPtr& data);

struct Allocator final : c10::DeviceAllocator {
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard lock(mutex);
    if (const auto found = blocks.find(static_cast<char*>(data.get())); found != blocks.end()) {
      found->second.used.insert({stream.device_index(), stream.id()});
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override { peak[index] = allocated[index]; }
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kKind, current_device);
    if (bytes == 0) {
      return {nullptr, device};
    }
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), mapped = (bytes + page - 1) / page * page;
    std::lock_guard lock(mutex);
    Pool* pool = pool_in_use();
    const Place home{current_device, current_stream[current_device]};
    for (char* free : pool ? pool->free : std::set<char*>()) {  // as the next op of a capture uses what one left
      const bool is_ours = !(blocks[free].home < home) && !(home < blocks[free].home) && blocks[free].used.empty();
      if (blocks[free].mapped == mapped && is_ours) {
        pool->free.erase(free);
        c10::DataPtr again(free, free, &release, device);
        note_made(again);
        return again;
      }
    }
    auto& reusable = freed[{current_device, current_stream[current_device], mapped}];
    const auto again = std::find_if(reusable.rbegin(), reusable.rend(),
                                    [](const auto& node) { return covers(Guard::waited(), node.mapped().until); });
    if (!pool && again != reusable.rend()) {
      auto node = std::move(*again);
      reusable.erase(std::next(again).base());
      char* address = node.key();
      Block& block = node.mapped();
      block.bytes = bytes;
      block.fresh = true;
      block.used.clear();
      block.until.clear();
      blocks.insert(std::move(node));
      note_allocated(bytes);
      return {address, address, &release, device};
    }
    void* memory = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(memory != MAP_FAILED, "sim: out of memory");
    blocks[static_cast<char*>(memory)] = {bytes, mapped, current_device, {}, true, home, {}, {}, pool};
    if (pool) {
      pool->blocks.insert(static_cast<char*>(memory));
    }
    note_allocated(bytes);
    c10::DataPtr made(memory, memory, &release, device);
    note_made(made);
    return made;
  }
  static void note_allocated(size_t bytes) {
    allocated[current_device] += bytes;
    peak[current_device] = std::max(peak[current_device], allocated[current_device]);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override;
  static void release(void* memory) {
    if (!memory) {
      return;
    }
    std::lock_guard lock(mutex);
    const auto found = blocks.find(static_cast<char*>(memory));
    Block& block = found->second;
    if (block.pool) {  // as long as a graph may use it
      block.pool->free.insert(found->first);
      return;
    }
    for (const Place& place : block.used) {
      merge(block.until, clocks[place]);
    }
    allocated[block.device] -= block.bytes;
    for (Late& one : late) {  // nobody can see any more whether it was done
      if (one.block == memory) {
        one.copy = nullptr;
      }
    }
    freed[{block.home.device, block.home.stream, block.mapped}].push_back(blocks.extract(found));
  }
  static void unmap(std::map<char*, Block>::iterator found) {
    allocated[found->second.device] -= found->second.bytes;
    munmap(found->first, found->second.mapped);
    blocks.erase(found);
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(kKind, &allocator);

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const {
  allocator.recordStream(data, stream);
}

// Pinned memory of the host: copies to and from it need not wait.
struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    char* memory = static_cast<char*>(::operator new(std::max<size_t>(bytes, 1)));
    std::memset(memory, 0xA5, bytes);
    std::lock_guard lock(mutex);
    pinned()[memory] = bytes;
    return {memory, memory, &release, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
  static void release(void* memory) {
    std::lock_guard lock(mutex);
    pinned().erase(static_cast<char*>(memory));
    ::operator delete(memory);
  }
  static std::map<char*, size_t>& pinned() {
    static std::map<char*, size_t> all;
    return all;
  }
  static bool holds(const void* address) {
    std::lock_guard lock(mutex);
    auto* wanted = const_cast<char*>(static_cast<const char*>(address));
    auto found = pinned().upper_bound(wanted);
    return found != pinned().begin() &&
           wanted < std::prev(found)->first + std::max<size_t>(std::prev(found)->second, 1);
  }
};
PinnedMemory pinned_memory;
const at::HostAllocatorRegistry<kKind> pinned_memory_of_sim(&pinned_memory);

std::pair<char* const, Block>* block_of(const void* address) {
  auto* wanted = const_cast<char*>(static_cast<const char*>(address));
  auto found = blocks.upper_bound(wanted);
  if (found == blocks.begin()) {
    return nullptr;
  }
  --found;
  return wanted < found->first + found->second.mapped ? &*found : nullptr;
}

// The host may touch this memory of the device's meanwhile.
class Open {
 public:
  explicit Open(const void* address) : lock_(mutex), block_(address ? block_of(address) : nullptr) {
    for (Late& one : late) {  // the device is about to use it
      if (block_ && one.block == block_->first && one.copy) {
        std::exchange(one.copy, nullptr)();
      }
    }
    protect(PROT_READ | PROT_WRITE);
  }
  ~Open() { protect(PROT_NONE); }

 private:
  void protect(int how) {
    if (block_) {
      mprotect(block_->first, block_->second.mapped, how);
    }
  }
  std::lock_guard<std::recursive_mutex> lock_;
  std::pair<char* const, Block>* block_;
};

void Allocator::copy_data(void* to, const void* from, size_t bytes) const {
  const Open one(to), other(from);
  std::memcpy(to, from, bytes);
}

// A host tensor on the memory of a device's tensor, good while that is open.
at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

// ----------------------------------------------------------------------------------------------------- using memory

// An operator uses memory that was touched before. Raises where another stream did, and nothing says that it is done.
void check_order(const std::string& op, Place here, const std::pair<Place, int64_t>& touch, const char* how) {
  if (touch.first < here || here < touch.first) {
    const bool ordered = covers(clocks[here], touch);
    races += !ordered;
    TORCH_CHECK(ordered || tolerates_races, "sim: ", op, " on stream ", here.stream, " of device ", int(here.device),
                " uses memory that stream ", touch.first.stream, " of device ", int(touch.first.device), " ", how,
                " last, and no event lies between them");
  }
}

void note_written(const std::string& op, Place here, Block& block) {
  check_order(op, here, block.touched.written, "wrote");
  for (const auto& reader : block.touched.read) {
    check_order(op, here, reader, "read");
  }
  block.touched = {{here, clocks[here][here]}, {}};
  block.fresh = false;
}

// An operator on the current stream of `device` uses these tensors.
void touch(const std::string& op, c10::DeviceIndex device, const std::vector<at::Tensor>& read,
           const std::vector<at::Tensor>& written) {
  if (by_fallback || captures_here(device)) {
    return;
  }
  std::lock_guard lock(mutex);
  const Place here{device, current_stream[device]};
  Clock& clock = clocks[here];
  merge(clock, Guard::waited());
  clock[here]++;
  for (const auto* tensors : {&read, &written}) {
    for (const at::Tensor& tensor : *tensors) {
      auto* block = tensor.defined() && tensor.device().type() == kKind ? block_of(tensor.storage().data()) : nullptr;
      if (!block) {
        continue;
      }
      if (tensors == &written) {
        note_written(op, here, block->second);
      } else {
        check_order(op, here, block->second.touched.written, "wrote");
        block->second.touched.read[here] = clock[here];
        block->second.fresh = false;
      }
    }
  }
  launched[here]++;
  log_of_launches.push_back(op);
}

// An operator on the current stream of `device`, the last one, made this tensor.
void came_to_be(const std::string& op, c10::DeviceIndex device, const at::Tensor& tensor) {
  if (captures_here(device)) {
    return;
  }
  std::lock_guard lock(mutex);
  auto* block = tensor.defined() && tensor.device().type() == kKind ? block_of(tensor.storage().data()) : nullptr;
  if (block && block->second.fresh) {
    note_written(op, {device, current_stream[device]}, block->second);
  }
}

// What runs meanwhile is part of one operator.
struct AsOne {
  AsOne() { by_fallback = true; }
  ~AsOne() { by_fallback = false; }
};

// ------------------------------------------------------------------------------------------------------------- graphs

void by_the_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking);

std::vector<Pool*> pools;

bool is_here(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kKind; }

// A tensor at the same address, which keeps no memory. Tensors of the host are taken as they are now.
at::Tensor at_same_address(const at::Tensor& tensor, bool host_stays) {
  if (!is_here(tensor)) {
    return tensor.defined() && !host_stays ? tensor.clone() : tensor;
  }
  void* memory = tensor.storage().mutable_data();
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                       c10::DataPtr(memory, memory, [](void*) {}, tensor.device()), nullptr, false);
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return made;
}

c10::IValue at_same_address(const c10::IValue& value) {
  if (value.isTensor()) {
    return at_same_address(value.toTensor(), false);
  }
  if (value.isList()) {
    const auto given = value.toList();
    c10::impl::GenericList list(given.elementType());
    for (const c10::IValue each : given) {
      list.push_back(at_same_address(each));
    }
    return list;
  }
  return value;
}

std::vector<at::Tensor> tensors_in(const c10::IValue& value) {
  std::vector<at::Tensor> found;
  if (value.isTensor()) {
    found.push_back(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue each : value.toList()) {
      for (const at::Tensor& tensor : tensors_in(each)) {
        found.push_back(tensor);
      }
    }
  }
  return found;
}

void copy_here(const at::Tensor& from, const at::Tensor& to) {
  const Open one(from.storage().data()), other(to.storage().data());
  on_host(to).copy_(on_host(from));
}

class SimulatedGraph final : public at::GraphImplInterface {
 public:
  explicit SimulatedGraph(const at::GraphImplArgs& args) : keeps_(args.keep_graph) {}
  ~SimulatedGraph() override { reset(); }
  void capture_begin(c10::MempoolId_t id, at::GraphCaptureMode) override {
    TORCH_CHECK(!capturing, "sim: a graph is being captured");
    TORCH_CHECK(!pool_, "sim: this graph was captured before: reset it");
    std::lock_guard lock(mutex);
    static c10::CaptureId_t next = 1;
    for (Pool* pool : pools) {
      pool_ = pool->id == id ? pool : pool_;
    }
    if (!pool_) {
      pool_ = new Pool{id == c10::MempoolId_t{0, 0} ? c10::MempoolId_t{next++, 0} : id};
      pools.push_back(pool_);
    }
    pool_->graphs++;
    origin_ = {current_device, current_stream[current_device]};
    number_ = ++captures;
    came_to_ = {{origin_, {}}};
    capturing = this;
  }
  void capture_end() override {
    TORCH_CHECK(capturing == this, "sim: no capture of this graph is in progress");
    TORCH_CHECK(origin_.stream == current_stream[current_device],
                "sim: a capture ends on the stream on which it began");
    capturing = nullptr;
    std::lock_guard lock(mutex);
    for (const auto& [address, bytes] : saved_) {
      if (blocks.count(address)) {
        const Open open(address);
        std::memcpy(address, bytes.data(), bytes.size());
      }
    }
    saved_.clear();
    for (char* address : made_) {
      const Open open(address);
      std::memset(address, 0xA5, blocks[address].bytes);
    }
    Nodes joined;
    std::vector<size_t> waiting(came_to_[origin_].begin(), came_to_[origin_].end());
    while (!waiting.empty()) {
      const size_t node = waiting.back();
      waiting.pop_back();
      if (joined.insert(node).second) {
        waiting.insert(waiting.end(), nodes_[node].after.begin(), nodes_[node].after.end());
      }
    }
    TORCH_CHECK(joined.size() == nodes_.size(),
                "sim: a stream of a capture has work that the one that it began on does not wait for");
    captured_ = true;
    instantiated_ = !keeps_;
  }
  void instantiate() override {
    TORCH_CHECK(captured_, "sim: nothing was captured");
    instantiated_ = true;
  }
  void replay() override {
    TORCH_CHECK(captured_, "sim: nothing was captured");
    TORCH_CHECK(!capturing, "sim: a graph inside of a graph");
    instantiate();
    {
      std::lock_guard lock(mutex);
      for (char* address : used_) {
        TORCH_CHECK(blocks.count(address), "sim: a graph uses memory that was freed");
      }
    }
    replays++;
    const Place here{current_device, current_stream[current_device]};
    Clock begun;
    {
      std::lock_guard lock(mutex);
      begun = clocks[here];
      merge(begun, Guard::waited());
    }
    std::vector<Clock> done;
    Clock last;
    for (const Node& node : nodes_) {
      // Other streams have numbers of their own: nothing but edges orders them.
      const bool on_origin = !(node.place < origin_) && !(origin_ < node.place);
      const Place place = on_origin ? here : Place{node.place.device, kFirstOfGraphs + node.place.stream};
      const c10::DeviceGuard guard(c10::Device(kKind, place.device));
      const auto before = std::exchange(current_stream[place.device], place.stream);
      {
        std::lock_guard lock(mutex);
        merge(clocks[place], begun);
        for (const size_t earlier : node.after) {
          merge(clocks[place], done[earlier]);
        }
      }
      try {
        node.run();
      } catch (...) {
        current_stream[place.device] = before;
        throw;
      }
      current_stream[place.device] = before;
      std::lock_guard lock(mutex);
      done.push_back(clocks[place]);
      merge(last, done.back());
    }
    std::lock_guard lock(mutex);
    merge(clocks[here], last);
    become(here);
  }
  // All that other streams of a replay did comes before what this one is given next: it counts as this one's.
  static void become(const Place& here) {
    const auto passes = [](const Place& place) { return place.stream >= kFirstOfGraphs; };
    const int64_t tick = ++clocks[here][here];
    for (auto& [address, block] : blocks) {
      if (passes(block.touched.written.first)) {
        block.touched.written = {here, tick};
      }
      if (std::erase_if(block.touched.read, [&](const auto& read) { return passes(read.first); })) {
        block.touched.read[here] = tick;
      }
    }
    std::erase_if(clocks, [&](const auto& clock) { return passes(clock.first); });
    for (auto& [place, clock] : clocks) {
      std::erase_if(clock, [&](const auto& known) { return passes(known.first); });
    }
    std::erase_if(Guard::waited(), [&](const auto& known) { return passes(known.first); });
  }
  void reset() override {
    std::lock_guard lock(mutex);
    capturing = capturing == this ? nullptr : capturing;
    nodes_.clear();
    made_.clear();
    used_.clear();
    saved_.clear();
    captured_ = instantiated_ = false;
    if (pool_ && --pool_->graphs == 0) {
      for (char* address : pool_->blocks) {
        blocks[address].pool = nullptr;
        if (pool_->free.count(address)) {
          Allocator::unmap(blocks.find(address));
        }
      }
      pools.erase(std::find(pools.begin(), pools.end(), pool_));
      delete pool_;
    }
    pool_ = nullptr;
  }
  c10::MempoolId_t pool() const override {
    TORCH_CHECK(pool_, "sim: nothing was captured");
    return pool_->id;
  }
  void enable_debug_mode() override {}
  void debug_dump(const std::string& path) override {
    std::ofstream file(path);
    for (const Node& node : nodes_) {
      file << node.name << "\n";
    }
  }

  static int64_t replays;
  Pool* memory() const { return pool_; }
  // An operator is about to run for its results' sizes. What it writes is as it was, later.
  void keep(const std::vector<at::Tensor>& used, const std::vector<at::Tensor>& written) {
    std::lock_guard lock(mutex);
    for (const auto* tensors : {&used, &written}) {
      for (const at::Tensor& tensor : *tensors) {
        auto* block = is_here(tensor) ? block_of(tensor.storage().data()) : nullptr;
        if (block) {
          used_.insert(block->first);
        }
        if (block && tensors == &written && !made_.count(block->first) && !saved_.count(block->first)) {
          const Open open(block->first);
          saved_[block->first] = std::string(block->first, block->second.bytes);
        }
      }
    }
  }
  void made(const c10::DataPtr& data) {
    if (data) {
      made_.insert(static_cast<char*>(data.get()));
    }
  }
  bool has(const Place& place) const { return came_to_.count(place) > 0; }
  int64_t number() const { return number_; }
  Nodes& came_to(const Place& place) { return came_to_[place]; }
  // What the current stream of a device is given next.
  void add(c10::DeviceIndex device, std::string name, std::function<void()> run, std::string kind = "kernel") {
    const Place place{device, current_stream[device]};
    nodes_.push_back({std::move(name), std::move(kind), place, came_to_[place], std::move(run)});
    came_to_[place] = {nodes_.size() - 1};
  }
  // What a stream's next work comes after: (number, kind).
  std::vector<std::pair<int64_t, std::string>> frontier(const Place& place) {
    std::vector<std::pair<int64_t, std::string>> found;
    for (const size_t node : has(place) ? came_to_[place] : Nodes()) {
      found.emplace_back(static_cast<int64_t>(node) + 1, nodes_[node].kind);
    }
    return found;
  }

 private:
  const bool keeps_;
  Pool* pool_ = nullptr;
  struct Node {
    std::string name, kind;
    Place place;
    Nodes after;
    std::function<void()> run;
  };
  static inline int64_t captures = 0;
  bool captured_ = false, instantiated_ = false;
  Place origin_{0, 0};
  int64_t number_ = 0;
  std::map<Place, Nodes> came_to_;  // by the streams that the capture has
  std::vector<Node> nodes_;
  std::set<char*> made_, used_;
  std::map<char*, std::string> saved_;
};
int64_t SimulatedGraph::replays = 0;

bool is_captured(const Place& place) { return capturing && capturing->has(place); }

void record_in_capture(Event& event, const Place& place) {
  if (is_captured(place)) {
    event.capture = capturing->number();
    event.nodes = capturing->came_to(place);
  }
}

void wait_in_capture(const Event& event, const Place& place) {
  if (!capturing || event.capture != capturing->number()) {
    TORCH_CHECK(!is_captured(place), "sim: a stream that is captured waits for what is not");
    return;
  }
  capturing->came_to(place).insert(event.nodes.begin(), event.nodes.end());
}

Pool* pool_in_use() { return captures_here(current_device) ? capturing->memory() : nullptr; }

void note_made(const c10::DataPtr& data) {
  if (captures_here(current_device)) {
    capturing->made(data);
  }
}

// What an operator of a graph does at each replay: its results go to where those of the capture were.
void add_node(c10::DeviceIndex device, const c10::OperatorHandle& op, std::vector<c10::IValue> args,
              std::vector<at::Tensor> results) {
  capturing->add(device, op.schema().name(), [op, args = std::move(args), results = std::move(results)] {
    torch::jit::Stack stack = args;
    by_the_host(op, &stack);
    size_t next = 0;
    for (const c10::IValue& value : stack) {
      for (const at::Tensor& made : tensors_in(value)) {
        const at::Tensor& place = results.at(next++);
        if (is_here(made) && made.storage().data() != place.storage().data()) {
          TORCH_CHECK(made.sizes() == place.sizes(), "sim: ", op.schema().name(),
                      " returned another size than captured");
          copy_here(made, place);
          touch("result", place.device().index(), {}, {place});
        }
      }
    }
  });
}

// ---------------------------------------------------------------------------------------------------------- operators

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::Device(kKind, Guard::index_of(device.value_or(c10::Device(kKind)))));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::Device(kKind, Guard::index_of(device.value_or(c10::Device(kKind)))));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  const auto at_offset = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           at_offset);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  Guard::refuse_while_capturing("to resize memory");
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr made = allocator.allocate(bytes);
  if (storage.data() && bytes) {
    allocator.copy_data(made.get(), storage.data(), std::min(bytes, storage.nbytes()));
  }
  storage.set_data_ptr_noswap(std::move(made));
  storage.set_nbytes(bytes);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() != sizes) {
    impl->set_sizes_contiguous(sizes);
    const size_t bytes = at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(), self.storage_offset());
    if (self.storage().nbytes() < bytes) {
      resize_storage(self.storage(), bytes);
    }
  }
  if (format) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}

void wait_for_current_stream(c10::DeviceIndex of, c10::DeviceIndex by) {
  std::lock_guard lock(mutex);
  merge(clocks[{by, current_stream[by]}], Clock(clocks[{of, current_stream[of]}]));
}

// Between the device and pinned memory, as late as may be.
void copy_late(const at::Tensor& self, const at::Tensor& to, Place here) {
  std::lock_guard lock(mutex);
  const std::pair<Place, int64_t> copied{here, clocks[here][here]};
  if (is_here(self)) {
    const Open open(self.storage().data());
    late.push_back({copied, nullptr, [from = on_host(self).clone(), to] { to.copy_(from); }, {}, {}});
    return;
  }
  for (const Late& one : late) {
    check_unchanged(one);
  }
  auto* block = block_of(to.storage().data());
  if (!block || !to.numel()) {
    return;
  }
  const std::string content(static_cast<const char*>(self.data_ptr()), self.is_contiguous() ? self.nbytes() : 0);
  late.push_back({copied, block->first,
                  [from = self, into = at_same_address(to, true)] {
                    const Open open(into.storage().data());
                    on_host(into).copy_(from);
                  },
                  self, content});
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  const auto on_device = [](const at::Tensor& tensor) { return tensor.device().type() == kKind; };
  const auto device = (on_device(to) ? to : self).device().index();
  if (!by_fallback && captures_here(device)) {
    TORCH_CHECK(on_device(to) || non_blocking, "sim: a copy for which the host waits, while a graph is captured");
    capturing->keep({self}, {to});
    const at::Tensor from = at_same_address(self, true), into = at_same_address(to, true);
    capturing->add(device, "copy", [from, into] { copy_from(from, into, true); });
    return to;
  }
  if (!by_fallback && on_device(to) &&
      on_device(self)) {  // between two devices, both their current streams wait for each other
    wait_for_current_stream(self.device().index(), device);
  }
  touch("copy", device, {self}, {to});
  if (by_fallback) {
  } else if (on_device(to) && on_device(self)) {
    wait_for_current_stream(device, self.device().index());
  } else if (!non_blocking) {
    Guard().synchronizeStream(Guard::stream_of(device, current_stream[device]));
  }
  if (!by_fallback && on_device(to) && !on_device(self)) {
    std::lock_guard lock(mutex);
    land(clocks[{device, current_stream[device]}], false);
  }
  if (!by_fallback && non_blocking && on_device(self) != on_device(to) && (on_device(to) ? self : to).is_pinned()) {
    copy_late(self, to, {device, current_stream[device]});
    return to;
  }
  const Open one(on_device(self) ? self.storage().data() : nullptr);
  const Open other(on_device(to) ? to.storage().data() : nullptr);
  const at::Tensor from = on_device(self) ? on_host(self) : self;
  at::Tensor into = on_device(to) ? on_host(to) : to;
  into.copy_(from);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  resize(to, c10::fromIntArrayRefSlow(self.sizes()), std::nullopt);
  return copy_from(self, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  const auto device = self.device().index();
  Guard::refuse_while_capturing("a value that the host reads");
  touch("read", device, {self}, {});
  Guard().synchronizeStream(Guard::stream_of(device, current_stream[device]));
  const Open open(self.storage().data());
  return at::native::_local_scalar_dense_cpu(on_host(self));
}

void record_stream(at::Tensor& self, c10::Stream stream) { allocator.recordStream(self.storage().data_ptr(), stream); }

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) {
    device_ = c10::Device(kKind, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

const at::Generator& default_generator(c10::DeviceIndex index) {
  static const std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (c10::DeviceIndex device = 0; device < kDevices; device++) {
      made.push_back(at::make_generator<Generator>(device));
      made.back().set_current_seed(c10::default_rng_seed_val);
    }
    return made;
  }();
  const auto wanted = index < 0 ? current_device : index;
  check_index(wanted);
  return all[wanted];
}

// Everything else: on the host, with a generator of the host's in the state of the device's.
void by_the_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  const std::vector<c10::IValue> as_given(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end());
  std::vector<at::Tensor> read, written;
  std::vector<std::pair<at::Generator, at::Generator>> drawn;
  c10::DeviceIndex device = current_device;
  for (size_t index = 0; index < schema.arguments().size(); index++) {
    c10::IValue& value = (*stack)[first + index];
    const auto& argument = schema.arguments()[index];
    auto& into = argument.alias_info() && argument.alias_info()->isWrite() ? written : read;
    if (value.isTensor()) {
      into.push_back(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        into.push_back(tensor);
      }
    } else if (argument.name() == "generator" || value.isGenerator()) {
      const at::Generator given = value.isGenerator() ? value.toGenerator() : at::Generator();
      drawn.emplace_back(given, at::make_generator<at::CPUGeneratorImpl>());
      value = drawn.back().second;
    }
  }
  for (const auto* tensors : {&read, &written}) {
    for (const at::Tensor& tensor : *tensors) {
      if (tensor.defined() && tensor.device().type() == kKind) {
        device = tensor.device().index();
      }
    }
  }
  const bool draws_unasked = drawn.empty() && op.hasTag(at::Tag::nondeterministic_seeded);
  at::Tensor hosts_own;
  if (draws_unasked) {  // the host's kernel draws from the host's default generator
    drawn.emplace_back(at::Generator(), at::detail::getDefaultCPUGenerator());
    hosts_own = drawn.back().second.get_state();
  }
  for (auto& [given, host] : drawn) {
    if (!given.defined()) {
      given = default_generator(device);
    }
    host.set_state(given.get_state());
  }
  const c10::DeviceGuard guard(c10::Device(kKind, device));
  touch(schema.name(), device, read, written);
  const bool captured = captures_here(device) && !by_fallback;
  std::vector<c10::IValue> given;
  if (captured) {
    capturing->keep(read, written);
    for (const c10::IValue& value : as_given) {
      given.push_back(at_same_address(value));
    }
  }
  {
    const AsOne one;
    at::native::cpu_fallback(op, stack);
  }
  if (captured) {
    std::vector<at::Tensor> results;
    for (size_t index = stack->size() - schema.returns().size(); index < stack->size(); index++) {
      for (const at::Tensor& tensor : tensors_in((*stack)[index])) {
        results.push_back(at_same_address(tensor, true));
      }
    }
    add_node(device, op, std::move(given), std::move(results));
  }
  for (size_t index = stack->size() - schema.returns().size(); index < stack->size(); index++) {
    const c10::IValue& value = (*stack)[index];
    for (const at::Tensor& tensor : value.isTensor()       ? std::vector<at::Tensor>{value.toTensor()}
                                    : value.isTensorList() ? value.toTensorVector()
                                                           : std::vector<at::Tensor>{}) {
      came_to_be(schema.name(), device, tensor);
    }
  }
  for (auto& [given, host] : drawn) {
    if (!captured) {
      given.set_state(host.get_state());
    }
  }
  if (draws_unasked) {
    drawn.back().second.set_state(hosts_own);
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_host>());
}

// As on CUDA: lengths that are numbers, results that are no tensors, and seeds that nothing is written to.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>
flash_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double dropout, bool causal, bool,
                std::optional<double> scale) {
  const auto [out, sums] =
      at::_scaled_dot_product_flash_attention_for_cpu(q.cpu(), k.cpu(), v.cpu(), dropout, causal, std::nullopt, scale);
  const auto seed = q.options().dtype(at::kUInt64);
  return {out.to(q.device()),  sums.to(q.device()),        {}, {}, q.sym_size(2), k.sym_size(2), at::empty({2}, seed),
          at::empty({}, seed), at::empty({0}, q.options())};
}

// Elsewhere a composite of other operators.
at::Tensor silu_backward(const at::Tensor& grad, const at::Tensor& x) {
  return at::silu_backward(grad.cpu(), x.cpu()).to(x.device());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_scaled_dot_product_flash_attention", flash_attention);
  library.impl("silu_backward", silu_backward);
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", at::native::set_);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("record_stream", record_stream);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // the macro's name for it
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
}

// --------------------------------------------------------------------------------------------------------------- hooks

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    check_index(index);
    current_device = index;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current_device, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current_device : index);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    std::lock_guard lock(mutex);
    const auto* block = block_of(data);
    TORCH_CHECK(block, "sim: not memory of a device");
    return {kKind, block->second.device};
  }
  bool isPinnedPtr(const void* data) const override { return PinnedMemory::holds(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

}  // namespace

PYBIND11_MODULE(simulated_accelerator, module) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  // Under the name that the device was given.
  module.def("register_graphs", [] {
#ifdef HAS_GRAPHS
    at::GraphImplRegistry()->Register(c10::DeviceTypeName(kKind, false), [](const at::GraphImplArgs& args) {
      return std::unique_ptr<at::GraphImplInterface>(new SimulatedGraph(args));
    });
#endif
  });
  module.def("uses", [] { return uses.load(); });
  module.def("graph_replays", [] { return SimulatedGraph::replays; });
  // What the current streams' next work comes after in the graph that is being captured: (number, kind).
  module.def("capture_frontier", [] {
    std::vector<std::pair<int64_t, std::string>> found;
    for (c10::DeviceIndex device = 0; capturing && device < kDevices; device++) {
      const auto of_device = capturing->frontier({device, current_stream[device]});
      found.insert(found.end(), of_device.begin(), of_device.end());
    }
    return found;
  });
  // What another library does, which PyTorch does not see: doubles floats, now or in the graph that is being captured.
  module.def("launch_beside", [](const at::Tensor& tensor) {
    auto* first = static_cast<float*>(tensor.data_ptr());
    const auto run = [first, count = tensor.numel()] {
      const Open open(first);
      std::for_each(first, first + count, [](float& value) { value *= 2; });
    };
    if (captures_here(tensor.device().index())) {
      capturing->add(tensor.device().index(), "beside", run);
    } else {
      run();
    }
  });
  module.def("is_capturing", [] { return capturing != nullptr; });
  module.def("is_current_stream_capturing", [] { return captures_here(current_device); });
  // Work of a kernel that is written in Python, into the graph that is being captured: `run` is called at each replay,
  // and `used` are the tensors that it works on (with `same_address`, so that the graph keeps none of their memory).
  module.def("add_work", [](const py::function& run, const std::vector<at::Tensor>& used) {
    TORCH_CHECK(!used.empty() && captures_here(used.front().device().index()), "sim: no graph is being captured here");
    capturing->keep(used, {});
    const std::shared_ptr<py::function> held(new py::function(run), [](py::function* function) {
      const py::gil_scoped_acquire gil;
      delete function;
    });
    capturing->add(used.front().device().index(), "python", [held] {
      const py::gil_scoped_acquire gil;
      (*held)();
    });
  });
  module.def("same_address", [](const at::Tensor& tensor) { return at_same_address(tensor, true); });
  module.def("device_count", [] { return int(kDevices); });
  module.def("current_device", [] { return int(current_device); });
  module.def("set_device", [](int index) { hooks.setCurrentDevice(static_cast<c10::DeviceIndex>(index)); });
  module.def("default_generator", [](int index) { return default_generator(static_cast<c10::DeviceIndex>(index)); });
  // (device, stream) of each that was used, with how much was launched there.
  module.def("launched", [] {
    std::lock_guard lock(mutex);
    std::map<std::pair<int, int64_t>, int64_t> counts;
    for (const auto& [place, count] : launched) {
      counts[{place.device, place.stream}] = count;
    }
    return counts;
  });
  module.def("forget_launches", [] {
    std::lock_guard lock(mutex);
    launched.clear();
    log_of_launches.clear();
  });
  module.def("launches", [] {
    std::lock_guard lock(mutex);
    return log_of_launches;
  });
  module.def("tolerate_races", [](bool tolerate) { tolerates_races = tolerate; });
  module.def("races", [] { return races; });
  module.def("forget_races", [] { races = 0; });
  module.def("memory_allocated", [](int index) { return allocated[index]; });
  module.def("max_memory_allocated", [](int index) { return peak[index]; });
  module.def("reset_peak_memory_stats", [](int index) { peak[index] = allocated[index]; });
}
