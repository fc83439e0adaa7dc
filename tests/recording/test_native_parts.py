"""The native recorder's containers do what simple ones do: random steps on both, in C++, and the answers compared."""

import ctypes
from collections.abc import Callable

import pytest

from replayfmt.native import building

POINTER_MAP = """
#include "pointer_map.h"

#include <algorithm>
#include <random>
#include <unordered_map>

namespace {
int alive = 0;
struct Value {
  explicit Value(int given) : number(given) { alive++; }
  Value(const Value&) = delete;
  ~Value() { alive--; }
  int number;
};
const void* address(size_t of) { return reinterpret_cast<const void*>(64 * (of + 1)); }
}  // namespace

// Additions and removals among `addresses`.
extern "C" int differences(unsigned seed, int steps, size_t addresses) {
  int wrong = 0;
  {
    std::mt19937 random(seed);
    opreplay::PointerMap<Value> map;
    std::unordered_map<const void*, Value*> reference;  // values stay where they are
    for (int step = 0; step < steps; step++) {
      const void* key = address(random() % addresses);
      if (const auto found = reference.find(key); found == reference.end()) {
        reference[key] = &map.add(key, step);
      } else {
        map.erase(key);
        reference.erase(found);
      }
      if (step % 997 == 0) {
        map.clear();
        reference.clear();
      }
      for (size_t other = 0; other < addresses; other++) {
        const auto found = reference.find(address(other));
        wrong += map.find(address(other)) != (found == reference.end() ? nullptr : found->second);
      }
      size_t seen = 0;
      map.each([&](const void* each, Value& value) { seen += reference.at(each) == &value; });
      wrong += seen != reference.size() || map.size() != reference.size() || alive != static_cast<int>(seen);
    }
  }
  return wrong + alive;
}
"""

SESSION = """
#include "session.h"

#include <deque>
#include <random>

using namespace opreplay;

// Rows of up to `most` words that are added at one end and taken from the other.
extern "C" int differences_of_rows(unsigned seed, int steps, size_t most) {
  std::mt19937 random(seed);
  std::mutex mutex;
  Rows rows(mutex);
  std::deque<Words> reference;
  int wrong = 0;
  for (int step = 0; step < steps; step++) {
    Words row(random() % (most + 1));
    std::generate(row.begin(), row.end(), random);
    rows.add(row);
    reference.push_back(row);
    if (step % 3 == 0) {
      const size_t gone = random() % 5;
      rows.drop(gone);
      reference.erase(reference.begin(), reference.begin() + std::min(gone, reference.size()));
    }
    const size_t from = random() % (reference.size() + 2), count = random() % (reference.size() + 2);
    const size_t there = std::min(count, reference.size() - std::min(from, reference.size()));
    const py::tuple taken = rows.part(from, count);
    const Words words = words_of(taken[0]), ends = words_of(taken[1]);
    size_t begin = 0;
    wrong += ends.size() != there || rows.length() != reference.size();
    for (size_t at = 0; at < std::min(ends.size(), there); at++) {
      wrong += Words(words.begin() + begin, words.begin() + ends[at]) != reference[from + at];
      begin = ends[at];
    }
    wrong += begin != words.size();
  }
  return wrong;
}

// Views of a storage by looks and offset, whose tensors may come in any order.
extern "C" int differences_of_views(unsigned seed, int steps, int64_t places) {
  std::mt19937 random(seed);
  const std::vector<int64_t> sizes{3, 4}, strides{4, 1};
  Metas metas;
  std::vector<const Metas::value_type*> all;
  std::vector<Looks> looks;
  for (const auto dtype : {at::kFloat, at::kInt, at::kByte}) {
    looks.emplace_back(dtype, at::Device(at::kCPU), sizes, strides);
    all.push_back(&*metas.emplace(looks.back().words(), Meta{std::ssize(all), 0}).first);
  }
  Views views;
  std::map<std::pair<size_t, int64_t>, int64_t> reference;
  std::map<int64_t, std::pair<size_t, int64_t>> by_tensor;
  int wrong = 0;
  for (int step = 0; step < steps; step++) {
    const size_t meta = random() % all.size();
    const int64_t offset = random() % places;
    const int64_t tensor = seed % 2 ? step + 1 : int64_t{1} + random() % (1 << 30);
    if (!reference.count({meta, offset}) && !by_tensor.count(tensor)) {
      views.add({all[meta], offset, tensor});
      reference[{meta, offset}] = tensor;
      by_tensor[tensor] = {meta, offset};
    }
    for (size_t other = 0; other < all.size(); other++) {
      const auto found = reference.find({other, offset});
      const int64_t expected = found == reference.end() ? 0 : found->second;
      wrong += views.find(all[other], offset) != expected;
      wrong += views.few() && views.find_among_few(looks[other], offset) != expected;
    }
    const int64_t asked = random() % 2 ? tensor : static_cast<int64_t>(random());
    const View* view = views.of(asked);
    const auto found = by_tensor.find(asked);
    wrong += found == by_tensor.end()
        ? view != nullptr
        : view == nullptr || view->meta != all[found->second.first] || view->offset != found->second.second;
  }
  return wrong;
}

// Ranges of all sizes, some of which are out of date when they are met.
extern "C" int differences_of_ranges(unsigned seed, int steps, uintptr_t last) {
  struct Range {
    uintptr_t begin;
    size_t bytes;
    bool old;
  };
  std::mt19937 random(seed);
  HostRanges ranges;
  std::deque<Range> owners;  // stay where they are
  std::vector<const Range*> reference;
  int wrong = 0;
  for (int step = 0; step < steps; step++) {
    owners.push_back({random() % last, size_t{1} + random() % (size_t{1} << random() % 12), false});
    ranges.add(owners.back().begin, owners.back().bytes, &owners.back());
    reference.push_back(&owners.back());
    owners[random() % owners.size()].old = step % 3 == 0;
    const uintptr_t begin = random() % last, end = begin + 1 + random() % 300;
    std::vector<const void*> seen, expected;
    ranges.overlapping(begin, end, [&](const void* owner) {
      seen.push_back(owner);
      return static_cast<const Range*>(owner)->old;
    });
    for (auto at = reference.begin(); at != reference.end();) {
      const bool meets = (*at)->begin < end && (*at)->begin + (*at)->bytes > begin;
      if (meets) {
        expected.push_back(*at);
      }
      at = meets && (*at)->old ? reference.erase(at) : at + 1;
    }
    std::sort(seen.begin(), seen.end());
    std::sort(expected.begin(), expected.end());
    wrong += seen != expected || ranges.size() != reference.size();
  }
  return wrong;
}
"""


@pytest.fixture(scope="module", name="build")
def _build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ctypes.PyDLL]:
    def build(code: str, **flags: bool) -> ctypes.PyDLL:
        folder = tmp_path_factory.mktemp("checks")
        source, made = folder / "checks.cpp", folder / "checks.so"
        source.write_text(code)
        include = f"-I{building.__file__.removesuffix('building.py')}"
        building.compile_library(source, made, "-O0", "-fvisibility=default", include, **flags)
        return ctypes.PyDLL(str(made))

    return build


@pytest.mark.slow
@pytest.mark.recorder("native")
def test_addresses_are_found_added_and_removed_as_in_the_standard_library(build: Callable[..., ctypes.PyDLL]) -> None:
    differences = build(POINTER_MAP).differences
    for seed, (steps, addresses) in enumerate([(2000, 5), (2000, 40), (2000, 200), (3000, 700)]):
        assert differences(seed, steps, ctypes.c_size_t(addresses)) == 0


@pytest.mark.slow
def test_rows_views_and_ranges_of_memory_are_kept_and_found_as_in_simple_containers(
    build: Callable[..., ctypes.PyDLL],
) -> None:
    library = build(SESSION, with_python=True)
    for seed in range(4):
        assert library.differences_of_rows(seed, 500, ctypes.c_size_t(9)) == 0
        assert library.differences_of_ranges(seed, 500, ctypes.c_size_t(20_000)) == 0
        for places in (2, 5, 500):  # few views, and many
            assert library.differences_of_views(seed, 500, ctypes.c_int64(places)) == 0
