// Registered memory: the ranges that an engine and its peers may access by transfers.
#pragma once

#include "adxl/refusal.h"

#include <map>
#include <mutex>
#include <vector>

namespace emu::adxl {

// The bytes of this structure are sent to peers.
struct Range {
  uint64_t begin, bytes;
  uint32_t type;  // MemType
  uint32_t reserved = 0;
};

// The limits of each engine, from CANN's documents.
constexpr size_t kMaxRanges = 4096;
constexpr uint64_t kMaxDeviceBytes = 50ull << 30;
constexpr uint64_t kMaxHostBytes = 20ull << 30;
// With HCCS, registered device memory must begin at a multiple of this number of bytes.
constexpr uint64_t kHccsAlignment = 2ull << 20;

class Memory {
public:
  explicit Memory(int device) : device_(device) {}
  MemHandle add(const MemDesc &memory, MemType type);  // throws a Refusal
  void remove(MemHandle handle);  // an unknown handle has no effect, as in CANN
  std::vector<Range> ranges() const;

private:
  const int device_;
  mutable std::mutex mutex_;
  uintptr_t next_ = 1;
  std::map<uintptr_t, Range> ranges_;  // by handle
};

// Returns the registered range that contains all these bytes, or null.
const Range *range_of(const std::vector<Range> &ranges, uint64_t begin, uint64_t bytes);

std::string hex(uint64_t address);

}  // namespace emu::adxl
