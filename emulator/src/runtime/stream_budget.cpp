#include "runtime/stream_budget.h"

#include "target.h"

#include "runtime/errors.h"
#include "runtime/queue_pool.h"
#include "runtime/services.h"

#include <acl/error_codes/rt_error_codes.h>

#include <algorithm>
#include <numeric>

namespace emu {

static long total(const StreamBudget::Held &held) {
  return std::accumulate(held.begin(), held.end(), 0L);
}

StreamBudget &StreamBudget::of(int device) {
  static StreamBudget budgets[kMaxDevices];
  return budgets[device];
}

bool StreamBudget::take(Holder holder, long count) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (total(held_) + count > settings().streams)
    return false;
  held_[holder] += count;
  return true;
}

void StreamBudget::release(Holder holder, long count) {
  std::lock_guard<std::mutex> lock(mutex_);
  held_[holder] -= count;
}

StreamBudget::Held StreamBudget::held() {
  std::lock_guard<std::mutex> lock(mutex_);
  return held_;
}

long StreamBudget::available() { return settings().streams - total(held()); }

std::string StreamBudget::shortage() {
  Held h = held();
  return "stream resources are insufficient: " + std::to_string(total(h)) + " of " +
         std::to_string(settings().streams) + " are held (" + std::to_string(h[Streams]) +
         " by streams, " + std::to_string(h[Domains]) + " by communication domains, " +
         std::to_string(h[Captured] + h[Cascaded] + h[GraphDomains]) + " by captured graphs)";
}

// These numbers are from public notes and were never measured. In vllm-ascend's formula for
// streams, each graph needs one stream per domain with AIV, and two streams per domain with other
// modes. A comment in vllm-ascend says that AI CPU takes "up to rank_size (max 16) - 1 streams per
// collective communication domain on the device".
long streams_per_graph() {
  if (settings().hccl_streams_per_domain >= 0)
    return settings().hccl_streams_per_domain;
  return settings().hccl_expansion == HcclExpansion::Aiv ? 1 : 2;
}

long streams_per_domain(uint32_t ranks) {
  bool is_set = settings().hccl_streams_per_domain >= 0;
  if (is_set || settings().hccl_expansion != HcclExpansion::Aicpu)
    return streams_per_graph();
  return std::max(1L, std::min<long>(ranks, 16) - 1);
}

aclError open_domain(uint32_t ranks, int *device) {
  *device = current_device();
  // hccl docs, HCCL_OP_EXPANSION_MODE: A3 has AI_CPU and AIV.
  if (settings().strict && chip() == Chip::A3 &&
      settings().hccl_expansion == HcclExpansion::Ffts)
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT,
                "new communication domain: HCCL_OP_EXPANSION_MODE HOST is not documented for %s, "
                "which takes AI_CPU or AIV",
                settings().soc.c_str());
  if (take_running_streams(*device, StreamBudget::Domains, streams_per_domain(ranks)))
    return 0;
  return fail(ACL_ERROR_RT_RESOURCE_ALLOC_FAIL, "new communication domain: %s",
              StreamBudget::of(*device).shortage().c_str());
}

void close_domain(uint32_t ranks, int device) {
  StreamBudget::of(device).release(StreamBudget::Domains, streams_per_domain(ranks));
}

}  // namespace emu
