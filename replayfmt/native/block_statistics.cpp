// Statistics of the elements of a tensor, for its digest: the same figures, to the last bit, as the NumPy code in
// replayfmt/pytorch/tensors/digests.py computes, in one pass instead of five. And the hashes of the chunks of long
// content (long_content.py there).
//
// Elements are taken in blocks of the same length as there. A block's sums are added up in the order in which NumPy
// adds contiguous doubles: halves of halves, down to runs of at most 128 elements in eight interleaved sums. No product
// and sum may be contracted into one operation (building.py forbids it to the compiler).
//
// Helper threads are started and joined within one call, with all signals blocked, and touch nothing of Python or
// PyTorch. So a forked child never waits for one. No function takes the interpreter's lock.

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

extern "C" {

// What is known of the elements so far. `lowest` and `highest` are infinities, and mean nothing, while `finite` is 0.
struct OpReplayStatistics {
  int64_t nan, inf, finite;
  double lowest, highest, total, squares;
};
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed to functions that are inlined alone
#endif

namespace {

using State = OpReplayStatistics;

constexpr int64_t kBlock = 1 << 16;  // elements: as many as in statistics.py
constexpr int64_t kRun = 128;        // elements that NumPy adds up without halving
constexpr int64_t kSums = 8;         // which it does in so many sums

#define INLINE inline __attribute__((always_inline))

// `width` numbers that one instruction takes.
template <typename T, int width>
using Vector __attribute__((vector_size(sizeof(T) * width))) = T;

template <typename T, int width>
INLINE Vector<T, width> read(const void* data, int64_t at) {
  Vector<T, width> found;
  std::memcpy(&found, static_cast<const T*>(data) + at, sizeof found);
  return found;
}

template <typename To, int width, typename From>
INLINE Vector<To, width> as(const From& bits) {
  static_assert(sizeof bits == sizeof(To) * width);
  return (Vector<To, width>)bits;
}

// How elements become doubles, all without rounding but those of 64-bit integers.

template <typename T>
struct Plain {
  static constexpr bool has_two_zeros = std::is_floating_point_v<T>;
  template <int width>
  static INLINE Vector<double, width> load(const void* data, int64_t at) {
    if constexpr (sizeof(T) < 4) {
      return __builtin_convertvector(__builtin_convertvector((read<T, width>(data, at)), Vector<int32_t, width>),
                                     Vector<double, width>);
    } else {
      return __builtin_convertvector((read<T, width>(data, at)), Vector<double, width>);
    }
  }
};

struct BFloat16 {
  static constexpr bool has_two_zeros = true;
  template <int width>
  static INLINE Vector<double, width> load(const void* data, int64_t at) {
    auto bits = __builtin_convertvector((read<uint16_t, width>(data, at)), Vector<uint32_t, width>);
    return __builtin_convertvector((as<float, width>(bits << 16)), Vector<double, width>);
  }
};

struct Float16 {
  static constexpr bool has_two_zeros = true;
  template <int width>
  static INLINE Vector<double, width> load(const void* data, int64_t at) {
    using Bits = Vector<uint32_t, width>;
    using Floats = Vector<float, width>;
    Bits bits = __builtin_convertvector((read<uint16_t, width>(data, at)), Bits);
    Bits exponent = bits & 0x7c00, magnitude = (bits & 0x7fff) << 13;
    Bits normal = magnitude + (112u << 23);
    Bits special = magnitude | 0x7f800000;
    // Of a subnormal number the mantissa counts steps of 2^-24.
    Floats small = __builtin_convertvector(as<int32_t, width>(bits & 0x3ff), Floats) * 0x1p-24f;
    Bits subnormal = as<uint32_t, width>(small);
    Bits is_subnormal = (Bits)(exponent == 0), is_special = (Bits)(exponent == 0x7c00);
    Bits found = (subnormal & is_subnormal) | (special & is_special) | (normal & ~is_subnormal & ~is_special);
    found |= (bits & 0x8000) << 16;
    return __builtin_convertvector((as<float, width>(found)), Vector<double, width>);
  }
};

// One block, `width` doubles at once.
template <typename Element, int width>
struct Pass {
  using Doubles = Vector<double, width>;
  static constexpr int kParts = kSums / width;

  const void* data;
  Doubles low[kParts], high[kParts];
  double tail_low = std::numeric_limits<double>::infinity(), tail_high = -tail_low;

  struct Sums {
    double total, squares;
  };

  explicit INLINE Pass(const void* elements) : data(elements) {
    for (int part = 0; part < kParts; part++) {
      low[part] = Doubles{} + tail_low;
      high[part] = Doubles{} + tail_high;
    }
  }

  static INLINE double one(const void* data, int64_t at) { return Element::template load<1>(data, at)[0]; }

  static INLINE double added(const Doubles (&sums)[kParts]) {
    double r[kSums];
    std::memcpy(r, sums, sizeof r);
    return ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
  }

  // At most kRun elements.
  INLINE Sums run(int64_t start, int64_t count) {
    Sums found{0, 0};
    int64_t done = 0;
    if (count >= kSums) {
      Doubles total[kParts], squares[kParts];
      for (int part = 0; part < kParts; part++) {
        total[part] = squares[part] = Doubles{};
      }
      for (; done + kSums <= count; done += kSums) {
        for (int part = 0; part < kParts; part++) {
          Doubles x = Element::template load<width>(data, start + done + part * width);
          total[part] += x;
          squares[part] += x * x;
          low[part] = x < low[part] ? x : low[part];
          high[part] = x > high[part] ? x : high[part];
        }
      }
      found = {added(total), added(squares)};
    }
    for (; done < count; done++) {
      double x = one(data, start + done);
      found.total += x;
      found.squares += x * x;
      tail_low = x < tail_low ? x : tail_low;
      tail_high = x > tail_high ? x : tail_high;
    }
    return found;
  }

  // At most kBlock elements: those of the first half, and those of the second.
  INLINE Sums sums(int64_t start, int64_t count) {
    struct Half {
      int64_t second;  // elements
      bool in_second;
      Sums first;
    };
    Half halves[16];
    int depth = 0;
    while (true) {
      while (count > kRun) {
        int64_t first = count / 2;
        first -= first % kSums;
        halves[depth++] = {count - first, false, {}};
        count = first;
      }
      Sums found = run(start, count);
      start += count;
      while (depth > 0 && halves[depth - 1].in_second) {
        const Sums& first = halves[--depth].first;
        found = {first.total + found.total, first.squares + found.squares};
      }
      if (depth == 0) {
        return found;
      }
      halves[depth - 1].in_second = true;
      halves[depth - 1].first = found;
      count = halves[depth - 1].second;
    }
  }

  INLINE double lowest() const {
    double found = tail_low;
    for (int part = 0; part < kParts; part++) {
      for (int place = 0; place < width; place++) {
        found = low[part][place] < found ? low[part][place] : found;
      }
    }
    return found;
  }

  INLINE double highest() const {
    double found = tail_high;
    for (int part = 0; part < kParts; part++) {
      for (int place = 0; place < width; place++) {
        found = high[part][place] > found ? high[part][place] : found;
      }
    }
    return found;
  }
};

// Which zeros there are: bit 0 for 0, bit 1 for -0.
template <typename Element, int width>
INLINE int zeros(const void* data, int64_t start, int64_t count) {
  using Bits = Vector<int64_t, width>;
  constexpr int64_t kSign = std::numeric_limits<int64_t>::min();
  Bits plus{}, minus{};
  int64_t done = 0;
  for (; done + width <= count; done += width) {
    auto x = Element::template load<width>(data, start + done);
    Bits bits = as<int64_t, width>(x), zero = (Bits)(x == 0);
    minus |= zero & bits;
    plus |= zero & (bits ^ kSign);
  }
  int found = 0;
  for (int place = 0; place < width; place++) {
    found |= (plus[place] != 0) | (minus[place] != 0) << 1;
  }
  for (; done < count; done++) {
    double x = Element::template load<1>(data, start + done)[0];
    found |= x == 0 ? (std::signbit(x) ? 2 : 1) : 0;
  }
  return found;
}

struct Block {
  State found{};
  bool decided = true;  // or this code cannot tell what NumPy finds: which of two zeros is the lowest
};

// Elements that are all finite.
template <typename Element, int width>
INLINE Block finite_block(const void* data, int64_t start, int64_t count, const Pass<Element, width>& pass,
                          typename Pass<Element, width>::Sums sums) {
  Block block{{0, 0, count, pass.lowest(), pass.highest(), sums.total, sums.squares}};
  State& found = block.found;
  if (Element::has_two_zeros && (found.lowest == 0 || found.highest == 0)) {
    const int which = zeros<Element, width>(data, start, count);
    const double zero = which == 2 ? -0.0 : 0.0;
    block.decided = which != 3;
    found.lowest = found.lowest == 0 ? zero : found.lowest;
    found.highest = found.highest == 0 ? zero : found.highest;
  }
  return block;
}

using BlockOf = Block (*)(const void* data, int64_t start, int64_t count, bool finite);

// The finite ones among elements of which some may not be, one after the other.
template <typename Element>
INLINE Block mixed_block(const void* data, int64_t start, int64_t count, BlockOf block_of_doubles) {
  std::unique_ptr<double[]> kept(new (std::nothrow) double[count]);
  if (!kept) {
    return {{}, false};
  }
  int64_t nan = 0, finite = 0;
  for (int64_t at = start; at < start + count; at++) {
    const double x = Element::template load<1>(data, at)[0];
    nan += std::isnan(x);
    kept[finite] = x;
    finite += std::isfinite(x);
  }
  Block block;
  if (finite) {
    block = block_of_doubles(kept.get(), 0, finite, true);
  }
  block.found.nan = nan;
  block.found.inf = count - finite - nan;
  return block;
}

// `finite`: all elements are known to be finite.
template <typename Element, int width>
INLINE Block block_of(const void* data, int64_t start, int64_t count, bool finite, BlockOf block_of_doubles) {
  Pass<Element, width> pass(data);
  const auto sums = pass.sums(start, count);
  // The sum of elements of which one is not finite is not finite either.
  return finite || std::isfinite(sums.total) ? finite_block<Element, width>(data, start, count, pass, sums)
                                             : mixed_block<Element>(data, start, count, block_of_doubles);
}

// The same for each set of instructions that is worth it.

template <typename Element>
Block block_of_any(const void* data, int64_t start, int64_t count, bool finite) {
  return block_of<Element, 2>(data, start, count, finite, block_of_any<Plain<double>>);
}

#if defined(__x86_64__)
template <typename Element>
__attribute__((target("avx2"))) Block block_of_avx2(const void* data, int64_t start, int64_t count, bool finite) {
  return block_of<Element, 4>(data, start, count, finite, block_of_avx2<Plain<double>>);
}

template <typename Element>
__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl"))) Block block_of_avx512(const void* data, int64_t start,
                                                                                    int64_t count, bool finite) {
  return block_of<Element, 8>(data, start, count, finite, block_of_avx512<Plain<double>>);
}

template <typename Element>
BlockOf best() {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl")) {
    return block_of_avx512<Element>;
  }
  return __builtin_cpu_supports("avx2") ? block_of_avx2<Element> : block_of_any<Element>;
}

// Whether this thread takes subnormal numbers for zero: then results depend on the order of operations.
bool flushes() { return _mm_getcsr() & 0x8040; }
#else
template <typename Element>
BlockOf best() {
  return block_of_any<Element>;
}

#if defined(__aarch64__)
bool flushes() {
  uint64_t control;
  asm("mrs %0, fpcr" : "=r"(control));
  return control & (1 << 24);
}
#else
bool flushes() { return true; }  // unknown: nothing is computed here
#endif
#endif

// By kind of element: its letter in pytorch/tensors/digests.py.
BlockOf block_function(char kind) {
  switch (kind) {
    case 'd':
      return best<Plain<double>>();
    case 'f':
      return best<Plain<float>>();
    case 'e':
      return best<Float16>();
    case 'g':
      return best<BFloat16>();
    case 'b':
      return best<Plain<int8_t>>();
    case 'B':
      return best<Plain<uint8_t>>();
    case 'h':
      return best<Plain<int16_t>>();
    case 'H':
      return best<Plain<uint16_t>>();
    case 'i':
      return best<Plain<int32_t>>();
    case 'I':
      return best<Plain<uint32_t>>();
    case 'q':
      return best<Plain<int64_t>>();
    case 'Q':
      return best<Plain<uint64_t>>();
    default:
      return nullptr;
  }
}

void add(State& sum, const State& block) {
  sum.nan += block.nan;
  sum.inf += block.inf;
  if (block.finite == 0) {
    return;
  }
  sum.finite += block.finite;
  sum.lowest = block.lowest < sum.lowest ? block.lowest : sum.lowest;
  sum.highest = block.highest > sum.highest ? block.highest : sum.highest;
  sum.total += block.total;
  sum.squares += block.squares;
}

// What XXH3-64 combines the words of a chunk with, by stripe and lane, and its sums with; what the sums begin with.
constexpr int kLanes = 8, kStripes = 16;
constexpr int64_t kChunk = kStripes * kLanes * sizeof(uint64_t);
struct HashConstants {
  uint64_t secret[kStripes][kLanes], merging[kLanes], start[kLanes], length;
};

// Adds a chunk to the sums, lane by lane: the product of a keyed word's halves, and the neighbouring word.
using AddChunk = void (*)(const unsigned char* chunk, const HashConstants& constants, uint64_t* sums);

void add_chunk(const unsigned char* chunk, const HashConstants& constants, uint64_t* sums) {
  for (int stripe = 0; stripe < kStripes; stripe++) {
    uint64_t words[kLanes];
    std::memcpy(words, chunk + stripe * sizeof words, sizeof words);
    for (int lane = 0; lane < kLanes; lane++) {
      const uint64_t keyed = words[lane] ^ constants.secret[stripe][lane];
      sums[lane] += (keyed & 0xffffffff) * (keyed >> 32) + words[lane ^ 1];
    }
  }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void add_chunk_avx2(const unsigned char* chunk, const HashConstants& constants,
                                                    uint64_t* sums) {
  __m256i found[2], added[2] = {};
  std::memcpy(found, sums, sizeof found);
  for (int stripe = 0; stripe < kStripes; stripe++) {
    for (int half = 0; half < 2; half++) {
      __m256i words, secret;
      std::memcpy(&words, chunk + stripe * 64 + half * 32, sizeof words);
      std::memcpy(&secret, constants.secret[stripe] + half * 4, sizeof secret);
      const __m256i keyed = words ^ secret;
      found[half] = _mm256_add_epi64(found[half], _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32)));
      added[half] = _mm256_add_epi64(added[half], words);
    }
  }
  for (int half = 0; half < 2; half++) {
    found[half] = _mm256_add_epi64(found[half], _mm256_shuffle_epi32(added[half], 0x4e));
  }
  std::memcpy(sums, found, sizeof found);
}
#endif

INLINE uint64_t folded(const uint64_t* sums, const HashConstants& constants) {
  uint64_t found = constants.length;
  for (int lane = 0; lane < kLanes; lane += 2) {
    const auto product = static_cast<unsigned __int128>(sums[lane] ^ constants.merging[lane]) *
                         (sums[lane + 1] ^ constants.merging[lane + 1]);
    found += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }
  found = (found ^ found >> 37) * 0x165667919e3779f9ull;
  return found ^ found >> 32;
}

// Calls `work` in up to `threads` threads, the caller's included.
template <typename Work>
void in_threads(int threads, Work work) {
  std::vector<std::thread> helpers;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    helpers.reserve(threads);
    for (int number = 1; number < threads; number++) {
      helpers.emplace_back(work);
    }
  } catch (const std::system_error&) {  // the system gives no more of them
  } catch (const std::bad_alloc&) {
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  work();
  for (std::thread& helper : helpers) {
    helper.join();
  }
}

}  // namespace

extern "C" {

// Add `count` contiguous elements to `sum`, block by block. How many could be added: NumPy has to do the rest.
__attribute__((visibility("default"))) int64_t opreplay_statistics(OpReplayStatistics* sum, const void* data,
                                                                   int64_t count, int kind, int threads) {
  const BlockOf block_of = block_function(static_cast<char>(kind));
  if (block_of == nullptr || flushes()) {
    return 0;
  }
  const int64_t blocks = (count + kBlock - 1) / kBlock;
  const auto length = [&](int64_t number) { return std::min(kBlock, count - number * kBlock); };
  int64_t done = 0;  // elements
  const auto take = [&](int64_t number, const Block& block) {
    if (block.decided) {
      add(*sum, block.found);
      done += length(number);
    }
    return block.decided;
  };
  try {
    if (threads <= 1) {
      for (int64_t number = 0;
           number < blocks && take(number, block_of(data, number * kBlock, length(number), false));) {
        number++;
      }
      return done;
    }
    std::vector<Block> found(blocks);
    std::atomic<int64_t> next{0};
    in_threads(threads, [&] {
      for (int64_t number = next++; number < blocks; number = next++) {
        found[number] = block_of(data, number * kBlock, length(number), false);
      }
    });
    for (int64_t number = 0; number < blocks && take(number, found[number]);) {
      number++;
    }
  } catch (const std::bad_alloc&) {
  }
  return done;
}

// Write the XXH3-64 of each chunk of 1 KiB to `hashes`.
__attribute__((visibility("default"))) void opreplay_chunk_hashes(const unsigned char* data, int64_t count,
                                                                  const HashConstants* constants, uint64_t* hashes,
                                                                  int threads) {
  AddChunk add = add_chunk;
#if defined(__x86_64__)
  add = __builtin_cpu_supports("avx2") ? add_chunk_avx2 : add;
#endif
  constexpr int64_t kShare = 1 << 10;
  std::atomic<int64_t> next{0};
  in_threads(threads, [&] {
    for (int64_t first = kShare * next++; first < count; first = kShare * next++) {
      for (int64_t number = first; number < std::min(first + kShare, count); number++) {
        uint64_t sums[kLanes];
        std::memcpy(sums, constants->start, sizeof sums);
        add(data + number * kChunk, *constants, sums);
        hashes[number] = folded(sums, *constants);
      }
    }
  });
}

}  // extern "C"
