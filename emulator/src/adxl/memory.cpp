#include "adxl/memory.h"

namespace emu::adxl {

std::string hex(uint64_t address) {
  std::ostringstream text;
  text << "0x" << std::hex << address;
  return text.str();
}

static aclrtPtrAttributes attributes_of(uint64_t address) {
  aclrtPtrAttributes attributes{};
  aclrtPointerGetAttributes(reinterpret_cast<void *>(address), &attributes);
  return attributes;
}

// RegisterMem's document: device memory must be from aclrtMalloc, host memory from aclrtMallocHost.
static bool is_memory_of(int device, const Range &range) {
  for (uint64_t address : {range.begin, range.begin + range.bytes - 1}) {
    const aclrtMemLocation &at = attributes_of(address).location;
    bool fits = range.type == MEM_DEVICE
                    ? at.type == ACL_MEM_LOCATION_TYPE_DEVICE && int(at.id) == device
                    : at.type == ACL_MEM_LOCATION_TYPE_HOST;
    if (!fits)
      return false;
  }
  return true;
}

MemHandle Memory::add(const MemDesc &memory, MemType type) {
  refuse_unless(type == MEM_DEVICE || type == MEM_HOST, PARAM_INVALID, "memory of type ", type);
  const char *kind = type == MEM_DEVICE ? "device" : "host";
  refuse_unless(memory.addr && memory.len, PARAM_INVALID, "registration of ", memory.len,
                " bytes at ", hex(memory.addr));
  refuse_unless(memory.addr + memory.len > memory.addr, PARAM_INVALID, "registration of ",
                memory.len, " bytes at ", hex(memory.addr), ", which exceeds the address space");
  Range added{memory.addr, memory.len, uint32_t(type)};
  // The emulator itself will access these addresses. So MEM_DEVICE with an address outside the
  // device's memory is refused with all settings.
  bool known = is_memory_of(device_, added);
  refuse_unless(known || type == MEM_HOST, PARAM_INVALID, "the ", memory.len, " bytes at ",
                hex(memory.addr), " are no memory of device ", device_);
  demand(known, PARAM_INVALID, "the ", memory.len, " bytes at ", hex(memory.addr),
         " are no host memory of aclrtMallocHost");

  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t total = added.bytes;
  for (auto &[handle, range] : ranges_)
    total += range.type == added.type ? range.bytes : 0;
  uint64_t most = type == MEM_DEVICE ? kMaxDeviceBytes : kMaxHostBytes;
  demand(total <= most, PARAM_INVALID, "registration of ", total >> 20, " MiB of ", kind,
         " memory, at most ", most >> 20, " MiB");
  demand(ranges_.size() < kMaxRanges, PARAM_INVALID, "registration of more than ", kMaxRanges,
         " ranges");
  ranges_[next_] = added;
  return reinterpret_cast<MemHandle>(next_++);
}

void Memory::remove(MemHandle handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  ranges_.erase(reinterpret_cast<uintptr_t>(handle));
}

std::vector<Range> Memory::ranges() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Range> all;
  for (auto &[handle, range] : ranges_)
    all.push_back(range);
  return all;
}

const Range *range_of(const std::vector<Range> &ranges, uint64_t begin, uint64_t bytes) {
  for (const Range &range : ranges)
    if (begin >= range.begin && bytes <= range.bytes && begin - range.begin <= range.bytes - bytes)
      return &range;
  return nullptr;
}

}  // namespace emu::adxl
