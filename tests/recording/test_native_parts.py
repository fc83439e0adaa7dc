"""The native recorder's table of storages does what std::unordered_map does."""

import ctypes

from replayfmt.native import building

CHECKS = """
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

// How many answers differ, over `steps` additions and removals among `addresses`.
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


def test_addresses_are_found_added_and_removed_as_in_the_standard_library(tmp_path):
    (tmp_path / "checks.cpp").write_text(CHECKS)
    made = tmp_path / "checks.so"
    include = f"-I{building.__file__.removesuffix('building.py')}"
    flags = ("-O1", "-std=c++20", "-fPIC", "-shared", include)
    building.run_compiler([*building.compiler(), *flags, str(tmp_path / "checks.cpp"), "-o", str(made)])
    differences = ctypes.CDLL(str(made)).differences
    for seed, (steps, addresses) in enumerate([(2000, 5), (2000, 40), (2000, 200), (3000, 700)]):
        assert differences(seed, steps, ctypes.c_size_t(addresses)) == 0
