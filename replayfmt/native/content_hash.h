// Tells contents of memory apart, within one process: with the structure of XXH3's loop, at the speed of memory.

#pragma once

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
    size_t stripe = 0;
    for (size_t left = bytes; left >= kStripe; left -= kStripe, at += kStripe) {
      hash.add(at, stripe);
      if (++stripe == kStripes) {
        hash.scramble();
        stripe = 0;
      }
    }
    unsigned char last[kStripe] = {};
    std::memcpy(last, at, bytes % kStripe);
    hash.add(last, stripe);
    uint64_t all = bytes;
    for (const uint64_t lane : hash.lanes_) {
      all = mixed(all ^ lane);
    }
    return all;
  }

 private:
  static constexpr size_t kLanes = 8, kStripe = 8 * kLanes, kStripes = 16;
  static constexpr auto kKeys = random_words<kLanes + kStripes>();

  // Both halves of each word are multiplied, and the neighbouring word is added: none counts for nothing where one is 0.
  void add(const unsigned char* stripe, size_t number) {
    uint64_t words[kLanes];
    std::memcpy(words, stripe, kStripe);
    for (size_t lane = 0; lane < kLanes; lane++) {
      const uint64_t keyed = words[lane] ^ kKeys[number + lane];
      lanes_[lane] += (keyed & 0xffffffff) * (keyed >> 32) + words[lane ^ 1];
    }
  }
  void scramble() {
    for (size_t lane = 0; lane < kLanes; lane++) {
      lanes_[lane] = (lanes_[lane] ^ lanes_[lane] >> 47 ^ kKeys[kStripes + lane]) * 0x9e3779b1;
    }
  }

  std::array<uint64_t, kLanes> lanes_{1, 2, 3, 4, 5, 6, 7, 8};
};

}  // namespace opreplay
