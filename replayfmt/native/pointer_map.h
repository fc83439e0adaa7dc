// A map from addresses to values.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace opreplay {

// Values stay where they are. Open addressing, and memory of values that are gone is used again: a recorded call looks
// up each of its tensors, and adds a value for each new one.
template <typename Value>
class PointerMap {
 public:
  PointerMap() = default;
  PointerMap(const PointerMap&) = delete;
  PointerMap& operator=(const PointerMap&) = delete;
  ~PointerMap() { clear(); }

  size_t size() const { return size_; }
  Value* find(const void* key) const { return slots_[place(key)].value; }

  // Adds a value for an address that has none.
  template <typename... Arguments>
  Value& add(const void* key, Arguments&&... arguments) {
    if (2 * (size_ + 1) > slots_.size()) {
      const std::vector<Slot> before = std::exchange(slots_, std::vector<Slot>(2 * slots_.size()));
      for (const Slot& slot : before) {
        if (slot.key) {
          slots_[place(slot.key)] = slot;
        }
      }
    }
    if (spare_.empty()) {
      spare_.push_back(memory_.allocate(1));
    }
    Value* made = std::construct_at(spare_.back(), std::forward<Arguments>(arguments)...);
    spare_.pop_back();
    slots_[place(key)] = {key, made};
    size_++;
    return *made;
  }

  void erase(const void* key) {
    size_t hole = place(key);
    if (!slots_[hole].key) {
      return;
    }
    std::destroy_at(slots_[hole].value);
    spare_.push_back(slots_[hole].value);
    size_--;
    for (size_t at = next(hole); slots_[at].key; at = next(at)) {
      if (((at - first(slots_[at].key)) & (slots_.size() - 1)) >= ((at - hole) & (slots_.size() - 1))) {
        slots_[hole] = slots_[at];  // it would not be found beyond the hole
        hole = at;
      }
    }
    slots_[hole] = {};
  }

  template <typename Visit>
  void each(const Visit& visit) const {
    for (const Slot& slot : slots_) {
      if (slot.key) {
        visit(slot.key, *slot.value);
      }
    }
  }

  void clear() {
    each([this](const void*, Value& value) {
      std::destroy_at(&value);
      memory_.deallocate(&value, 1);
    });
    for (Value* value : spare_) {
      memory_.deallocate(value, 1);
    }
    spare_.clear();
    slots_.assign(kFewest, {});
    size_ = 0;
  }

 private:
  static constexpr size_t kFewest = 64;  // a power of two, as all sizes are
  struct Slot {
    const void* key = nullptr;
    Value* value = nullptr;
  };

  // Where an address would be, and where it is, or is to be.
  size_t first(const void* key) const {
    return (reinterpret_cast<uintptr_t>(key) * 0x9e3779b97f4a7c15ull) >> (64 - std::countr_zero(slots_.size()));
  }
  size_t place(const void* key) const {
    size_t at = first(key);
    while (slots_[at].key && slots_[at].key != key) {
      at = next(at);
    }
    return at;
  }
  size_t next(size_t at) const { return (at + 1) & (slots_.size() - 1); }

  std::vector<Slot> slots_ = std::vector<Slot>(kFewest);  // at most half of them are taken
  size_t size_ = 0;
  std::vector<Value*> spare_;  // memory without a value
  [[no_unique_address]] std::allocator<Value> memory_;
};

}  // namespace opreplay
