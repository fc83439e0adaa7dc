// What tensors look like, and values by runs of words, which looks and signatures are.

#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <unordered_map>

#include "rows.h"

namespace opreplay {

// What a tensor looks like, apart from where in its storage it lies. As words: kind, sizes, strides.
struct Looks {
  explicit Looks(const at::Tensor& tensor)
      : Looks(tensor.scalar_type(), tensor.device(), tensor.sizes(), tensor.strides()) {}
  Looks(at::ScalarType dtype, const at::Device& device, at::IntArrayRef of_sizes, at::IntArrayRef of_strides)
      : kind((static_cast<int64_t>(dtype) << 32) | (static_cast<int64_t>(device.type()) << 16) |
             static_cast<uint8_t>(device.index())),
        sizes(of_sizes),
        strides(of_strides) {}
  Words words() const {
    Words all{kind};
    all.insert(all.end(), sizes.begin(), sizes.end());
    all.insert(all.end(), strides.begin(), strides.end());
    return all;
  }
  bool operator==(const Words& words) const {
    const size_t dims = sizes.size();
    bool same = words.size() == 1 + 2 * dims && words[0] == kind;
    for (size_t dim = 0; same && dim < dims; dim++) {
      same = words[1 + dim] == sizes[dim] && words[1 + dims + dim] == strides[dim];
    }
    return same;
  }

  // Tells most of those that one program has apart.
  size_t glance() const {
    uint64_t seen = static_cast<uint64_t>(kind >> 32) + sizes.size();
    if (!sizes.empty()) {
      seen = ((seen * 31 + sizes.front()) * 31 + sizes.back()) * 31 + strides.front() + 7 * strides.back();
    }
    return seen * 0x9e3779b97f4a7c15ull >> 32;
  }

  int64_t kind;  // dtype and device
  at::IntArrayRef sizes, strides;
};

// Values by runs of words. What is looked up need not own its words.
struct WordsHash {
  using is_transparent = void;
  static uint64_t mixed(uint64_t hash, int64_t word) {
    hash = (hash ^ static_cast<uint64_t>(word)) * 0xff51afd7ed558ccdull;
    return hash ^ hash >> 32;
  }
  size_t operator()(std::span<const int64_t> words) const {
    return std::accumulate(words.begin(), words.end(), uint64_t{0}, mixed);
  }
  size_t operator()(const Looks& looks) const {
    const uint64_t hash = std::accumulate(looks.sizes.begin(), looks.sizes.end(), mixed(0, looks.kind), mixed);
    return std::accumulate(looks.strides.begin(), looks.strides.end(), hash, mixed);
  }
};
struct WordsEqual {
  using is_transparent = void;
  bool operator()(std::span<const int64_t> one, std::span<const int64_t> other) const {
    return std::equal(one.begin(), one.end(), other.begin(), other.end());
  }
  bool operator()(const Looks& looks, const Words& words) const { return looks == words; }
};
template <typename Value>
using ByWords = std::unordered_map<Words, Value, WordsHash, WordsEqual>;
using Signatures = ByWords<int64_t>;

// Metadata by what tensors look like. Flags of the format's (lazy bits, zeros) are in the highest bits of the kind.
constexpr int kFlagBits = 48;
struct Meta {
  int64_t id;
  int64_t device;
};
using Metas = ByWords<Meta>;

}  // namespace opreplay
