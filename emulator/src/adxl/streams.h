// The stream ids that a link uses. At each end, the link needs a communication domain of two ranks.
// At the client's end, it also needs a stream for transfers.
#pragma once

#include "adxl/refusal.h"

#include "runtime/services.h"

namespace emu::adxl {

inline std::string recent_error() {
  const char *text = aclGetRecentErrMsg();
  return text ? text : "";
}

// Takes stream ids of the calling thread's device. Throws a Refusal if too few ids are free.
class Domain {
public:
  Domain() {
    if (open_domain(kRanks, &device_))
      throw Refusal(FAILED, recent_error());
  }
  Domain(const Domain &) = delete;
  ~Domain() { close_domain(kRanks, device_); }

private:
  static constexpr uint32_t kRanks = 2;
  int device_ = -1;
};

class TransferStream {
public:
  TransferStream() {
    if (aclrtCreateStream(&stream_))
      throw Refusal(RESOURCE_EXHAUSTED, recent_error());
  }
  TransferStream(const TransferStream &) = delete;
  ~TransferStream() { aclrtDestroyStream(stream_); }

private:
  aclrtStream stream_ = nullptr;
};

}  // namespace emu::adxl
