// What ops depend on besides their arguments: settings of PyTorch's, where random numbers come
// from, and streams.

#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace opreplay {

// Whether what the calling thread computes on a device is not the program's work: fake tensors and functionalization
// ask what a result looks like, on tensors without memory, where dispatch to Python is off.
inline bool is_only_traced(const at::Device& device) {
  return device.is_meta() && c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python);
}

// Whether an operator gets a tensor that dispatches itself as it is: dispatch to Python is off, and it has memory.
inline bool runs_on_itself(const at::Tensor& tensor) {
  return c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python) && tensor.has_storage() &&
         tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
}

// What the default generator of the CPU draws next.
struct Draws {
  at::mt19937_data_pod engine;
  std::optional<float> next_float;
  std::optional<double> next_double;

  static Draws now() {
    auto* generator = at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
    std::lock_guard<std::mutex> lock(generator->mutex_);
    return {generator->engine().data(), generator->next_float_normal_sample(), generator->next_double_normal_sample()};
  }
  at::Tensor state() const {  // as `torch.Generator.get_state` has it
    at::CPUGeneratorImpl generator;
    at::mt19937 same;
    same.set_data(engine);
    generator.set_engine(same);
    generator.set_next_float_normal_sample(next_float);
    generator.set_next_double_normal_sample(next_double);
    return at::Tensor(generator.get_state());
  }
  bool operator==(const Draws& other) const {
    return engine.seed_ == other.engine.seed_ && engine.left_ == other.engine.left_ &&
           engine.seeded_ == other.engine.seeded_ && engine.next_ == other.engine.next_ &&
           engine.state_ == other.engine.state_ && next_float == other.next_float && next_double == other.next_double;
  }
};

// Whether memory that nothing was written to has a known content.
inline bool fills_empty() {
  const auto& context = at::globalContext();
  return context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
}

// Whether anything depends on CUDA's settings. To ask whether there is a device (at::hasCUDA) initializes its driver.
#if __has_include(<ATen/cuda/CUDAConfig.h>)
constexpr bool kBuiltWithCuda = true;
#else
constexpr bool kBuiltWithCuda = false;
#endif

// The settings that any op may depend on, apart from the grad mode.
inline uint64_t general_settings() {
  const auto& context = at::globalContext();
  uint64_t bits = static_cast<uint64_t>(at::get_num_threads());
  const auto add = [&bits](uint64_t value, int width) { bits = (bits << width) | value; };
  add(static_cast<uint64_t>(c10::typeMetaToScalarType(at::get_default_dtype())), 8);
  add(kBuiltWithCuda ? static_cast<uint64_t>(context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL))
                     : 0,
      3);
  add(context.deterministicAlgorithms(), 1);
  add(context.deterministicAlgorithmsWarnOnly(), 1);
#if defined(__x86_64__)
  add((_mm_getcsr() & 0x8040) != 0, 1);  // denormals are flushed to zero
#endif
  return bits;
}

// Those that some ops depend on: number `index` of the settings that Python watches (stream/program_state.py, WATCHED).
constexpr size_t kWatched = 25;

inline uint8_t watched_setting(size_t index) {
  const auto& context = at::globalContext();
  const auto precision = [&context](at::Float32Backend backend, at::Float32Op op) {
    return static_cast<uint8_t>(context.float32Precision(backend, op));
  };
  switch (index) {
    case 0:
      return context.userEnabledMkldnn();
    case 1:
      return context.deterministicMkldnn();
    case 2:
      return context.userEnabledNNPACK();
    case 3:
      return precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL);
    case 4:
      return precision(at::Float32Backend::MKLDNN, at::Float32Op::CONV);
    case 5:
      return precision(at::Float32Backend::MKLDNN, at::Float32Op::RNN);
    case 6:
      return context.allowFP16ReductionCPU();
    case 7:
      return context.userEnabledFlashSDP();
    case 8:
      return context.userEnabledMemEfficientSDP();
    case 9:
      return context.userEnabledMathSDP();
    case 10:
      return context.userEnabledCuDNNSDP();
    case 11:
      return context.allowFP16BF16ReductionMathSDP();
    case 12:
      return context.deterministicFillUninitializedMemory();
    case 13:
      return static_cast<uint8_t>(context.qEngine());
    case 14:
      return precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL);
    case 15:
      return precision(at::Float32Backend::CUDA, at::Float32Op::CONV);
    case 16:
      return precision(at::Float32Backend::CUDA, at::Float32Op::RNN);
    case 17:
      return static_cast<uint8_t>(context.allowFP16ReductionCuBLAS());
    case 18:
      return static_cast<uint8_t>(context.allowBF16ReductionCuBLAS());
    case 19:
      return context.allowFP16AccumulationCuBLAS();
    case 20:
      return context.userEnabledCuDNN();
    case 21:
      return context.benchmarkCuDNN();
    case 22:
      return context.deterministicCuDNN();
    case 23:
      return static_cast<uint8_t>(at::globalContext().blasPreferredBackend());
    default:
      return static_cast<uint8_t>(context.linalgPreferredBackend());
  }
}

// The settings that the stream states. Python changes them; ops read them in any thread.
class StatedSettings {
 public:
  // Which statement is in force; 0 while another one is being made.
  uint64_t number() const { return number_.load(); }
  void withdraw() { number_ = 0; }
  // They are as they are now.
  void settle() {
    general_ = general_settings();
    for (size_t index = 0; index < kWatched; index++) {
      watched_[index] = watched_setting(index);
    }
    number_ = ++statements_;
  }
  // Whether an op of the calling thread runs under them. `watches`: those that it depends on.
  bool hold(const std::vector<size_t>& watches) const {
    return general_ == general_settings() && std::all_of(watches.begin(), watches.end(), [this](size_t index) {
             return watched_[index] == watched_setting(index);
           });
  }

 private:
  std::atomic<uint64_t> number_{0};
  std::atomic<uint64_t> statements_{0};
  std::atomic<uint64_t> general_{0};
  std::array<std::atomic<uint8_t>, kWatched> watched_{};
};

// The grad mode that the stream states. Where an op ran in the other one, a record that states that comes right before
// its own. All of it with the session's mutex held.
class StatedGradMode {
 public:
  // `signatures`: those of the records that state it.
  void begin(bool enabled) { enabled_ = enabled; }
  void name(std::array<int64_t, 2> signatures) { signatures_ = signatures; }
  bool enabled() const { return enabled_; }
  // Whether an op of the calling thread can be recorded.
  bool can_follow() const { return enabled_ == c10::GradMode::is_enabled() || signatures_[0] != 0; }
  // The signature of the record that comes before an op of the calling thread; 0: none does.
  int64_t follow() {
    const bool now = c10::GradMode::is_enabled();
    return std::exchange(enabled_, now) == now ? 0 : signatures_[now];
  }

 private:
  bool enabled_ = true;
  std::array<int64_t, 2> signatures_{};  // none where Python has not told of them
};

// Devices whose work Python sees on a stream of its own choice: calls on other streams than the default one are
// recorded there.
class WatchedStreams {
 public:
  void watch(const at::Device& device) {
    kind_.store(static_cast<int>(device.type()));
    indices_.fetch_or(uint64_t{1} << (static_cast<unsigned>(device.index()) & 63));
  }

  // Whether the default streams of all these devices are current. Costs a load where there are none.
  bool are_default() const {
    uint64_t left = indices_.load(std::memory_order_relaxed);
    if (left == 0) {
      return true;
    }
    const auto kind = static_cast<c10::DeviceType>(kind_.load());
    const auto* guard = c10::impl::getDeviceGuardImpl(kind);
    for (; left != 0; left &= left - 1) {
      if (guard->getStream({kind, static_cast<c10::DeviceIndex>(std::countr_zero(left))}).id() != 0) {
        return false;
      }
    }
    return true;
  }

 private:
  std::atomic<int> kind_{0};          // of the accelerators
  std::atomic<uint64_t> indices_{0};  // theirs, as bits
};

}  // namespace opreplay
