// Tells contents of memory apart, within one process: with the structure of XXH3's loop, at the speed of memory.

#pragma once

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace opreplay {

constexpr uint64_t mixed(uint64_t value) {  // splitmix64's
  value += 0x9e3779b97f4a7c15ull;
  value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ value >> 27) * 0x94d049bb133111ebull;
  return value ^ value >> 31;
}
template <size_t count>
constexpr std::array<uint64_t, count> random_words() {
  std::array<uint64_t, count> words{};
  for (size_t index = 0; index < count; index++) {
    words[index] = mixed(index);
  }
  return words;
}

class ContentHash {
 public:
  static uint64_t of(const void* memory, size_t bytes) {
    ContentHash hash;
    const auto* at = static_cast<const unsigned char*>(memory);
    const size_t whole = bytes / kStripe;
#ifdef __x86_64__
    static const bool has_avx2 = __builtin_cpu_supports("avx2");
    has_avx2 ? hash.add_with_avx2(at, whole) : hash.add(at, whole);
#else
    hash.add(at, whole);
#endif
    unsigned char last[kStripe] = {};
    std::memcpy(last, at + whole * kStripe, bytes % kStripe);
    hash.add_one(last, whole % kStripes);
    uint64_t all = bytes;
    for (const uint64_t lane : hash.lanes_) {
      all = mixed(all ^ lane);
    }
    return all;
  }

 private:
  static constexpr size_t kLanes = 8, kStripe = 8 * kLanes, kStripes = 16;
  static constexpr uint64_t kPrime = 0x9e3779b1;
  static constexpr auto kKeys = random_words<kLanes + kStripes>();

  void add(const unsigned char* stripes, size_t count) {
    for (size_t number = 0; number < count; number++) {
      add_one(stripes + number * kStripe, number % kStripes);
      if (number % kStripes == kStripes - 1) {
        scramble();
      }
    }
  }
  // Both halves of each word are multiplied, and the neighbouring word is added: none counts for nothing where one is
  // 0.
  void add_one(const unsigned char* stripe, size_t number) {
    uint64_t words[kLanes];
    std::memcpy(words, stripe, kStripe);
    for (size_t lane = 0; lane < kLanes; lane++) {
      const uint64_t keyed = words[lane] ^ kKeys[number + lane];
      lanes_[lane] += (keyed & 0xffffffff) * (keyed >> 32) + words[lane ^ 1];
    }
  }
  void scramble() {
    for (size_t lane = 0; lane < kLanes; lane++) {
      lanes_[lane] = (lanes_[lane] ^ lanes_[lane] >> 47 ^ kKeys[kStripes + lane]) * kPrime;
    }
  }

#ifdef __x86_64__
  __attribute__((target("avx2"))) static __m256i load(const void* at) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(at));
  }
  // The same as `add`. (Compilers make slower code than for the narrower registers that all processors have.)
  __attribute__((target("avx2"))) void add_with_avx2(const unsigned char* stripes, size_t count) {
    auto* kept = reinterpret_cast<__m256i*>(lanes_.data());
    const __m256i factor = _mm256_set1_epi64x(kPrime);
    __m256i lanes[2] = {load(kept), load(kept + 1)};
    for (size_t number = 0; number < count; number++) {
      for (size_t half = 0; half < 2; half++) {
        const __m256i words = load(stripes + number * kStripe + half * 32);
        const __m256i keyed = _mm256_xor_si256(words, load(&kKeys[number % kStripes + half * 4]));
        const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
        const __m256i neighbours = _mm256_shuffle_epi32(words, _MM_SHUFFLE(1, 0, 3, 2));
        lanes[half] = _mm256_add_epi64(lanes[half], _mm256_add_epi64(product, neighbours));
      }
      if (number % kStripes == kStripes - 1) {
        for (size_t half = 0; half < 2; half++) {
          __m256i lane = _mm256_xor_si256(lanes[half], _mm256_srli_epi64(lanes[half], 47));
          lane = _mm256_xor_si256(lane, load(&kKeys[kStripes + half * 4]));
          const __m256i high = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(lane, 32), factor), 32);
          lanes[half] = _mm256_add_epi64(_mm256_mul_epu32(lane, factor), high);
        }
      }
    }
    _mm256_storeu_si256(kept, lanes[0]);
    _mm256_storeu_si256(kept + 1, lanes[1]);
  }
#endif

  std::array<uint64_t, kLanes> lanes_{1, 2, 3, 4, 5, 6, 7, 8};
};

}  // namespace opreplay
