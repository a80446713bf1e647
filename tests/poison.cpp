// SPDX-License-Identifier: Apache-2.0
// Every allocation that torch makes on the CPU, also inside its C++ operators, is handed out full of one 32-bit word.
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>

namespace {

std::atomic<uint32_t> word{0};

struct Poisoning final : c10::Allocator {
  c10::Allocator* real;
  explicit Poisoning(c10::Allocator* real) : real(real) {}
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr data = real->allocate(bytes);
    if (word) {
      std::fill_n((uint32_t*)data.get(), bytes / 4, word.load());
      std::fill_n((uint16_t*)data.get() + bytes / 4 * 2, bytes % 4 / 2, (uint16_t)word.load());
      if (bytes % 2) ((uint8_t*)data.get())[bytes - 1] = (uint8_t)word.load();
    }
    return data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return real->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override { real->copy_data(to, from, bytes); }
};

}  // namespace

extern "C" void set_word(uint32_t value) {
  static Poisoning* allocator = nullptr;
  if (!allocator) {
    allocator = new Poisoning(c10::GetCPUAllocator());
    c10::SetCPUAllocator(allocator);
  }
  word = value;
}
