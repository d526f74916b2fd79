#include "runtime/faults.h"

#include "runtime/graph.h"
#include "runtime/services.h"

#include <acl/error_codes/rt_error_codes.h>

#include <chrono>
#include <stdexcept>
#include <thread>

#include <unistd.h>

namespace emu {

constexpr int kKilled = 137;  // exit status that a shell reports after kill -9
constexpr const char *kAllocation = "alloc";

static std::atomic<int> g_identity{-1};
static std::atomic<long> g_calls[kFaults];

void set_fault_identity(int rank) {
  int none = -1;
  g_identity.compare_exchange_strong(none, rank);
}

static const Fault &fault(int i) { return settings().faults[i]; }

// Counts a call of a fault's operator; true if it is the one that the fault is for.
static bool is_due(int i, int device) {
  int identity = g_identity >= 0 ? g_identity.load() : device;
  bool mine = fault(i).rank < 0 || fault(i).rank == identity;
  return mine && ++g_calls[i] == fault(i).call;
}

static void sleep_for(double seconds, const std::function<bool()> &is_over) {
  auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (Clock::now() < end && !is_over())
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

// Carries out the fault; true if the call fails.
static bool strike(const Fault &f, const std::function<bool()> &is_over) {
  switch (f.kind) {
  case FaultKind::Stall:
    sleep_for(f.stall_s, is_over);
    return false;
  case FaultKind::Die:
    _exit(kKilled);
  default:
    return true;
  }
}

static bool never() { return false; }

// With what code the device stops, and what CANN's text has as the reason.
static std::pair<aclError, const char *> code_of(FaultKind kind) {
  switch (kind) {
  case FaultKind::Link:
    return {ACL_ERROR_RT_LINK_ERROR, "link error"};
  case FaultKind::Remote:
    return {ACL_ERROR_RT_SUSPECT_REMOTE_ERROR, "suspect remote error"};
  case FaultKind::Retry:
    return {ACL_ERROR_RT_COMM_OP_RETRY_FAIL, "hccl op retry failed"};
  case FaultKind::Memory:
    return {ACL_ERROR_RT_SUSPECT_DEVICE_MEM_ERROR, "suspect device mem error"};
  case FaultKind::Ecc:
    return {ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR, "hbm Multi-bit ECC error"};
  default:
    return {ACL_ERROR_RT_AICORE_EXCEPTION, nullptr};
  }
}

static std::string describe(const Fault &f, const char *call, const char *name) {
  const char *reason = code_of(f.kind).second;
  return "injected fault in " + std::string(call) + " " + std::to_string(f.call) + " of " + name +
         (reason ? std::string(", reason=[") + reason + "]" : "");
}

static Task with_fault(int i, const char *name, int device, Task body) {
  if (fault(i).op.empty() || fault(i).in_capture || fault(i).op != name)
    return body;
  return [body = std::move(body), i, name, device] {
    if (is_due(i, device) && strike(fault(i), device_failed))
      throw TaskError(code_of(fault(i).kind).first, describe(fault(i), "call", name));
    body();
  };
}

Task with_fault(const char *name, int device, Task body) {
  for (int i = 0; i < kFaults; i++)
    body = with_fault(i, name, device, std::move(body));
  return body;
}

aclError fault_in_capture(const char *name, int device) {
  for (const Fault &f : settings().faults) {
    if (f.op.empty() || !f.in_capture || f.op != name)
      continue;
    if (is_due(static_cast<int>(&f - settings().faults), device) && strike(f, device_failed))
      return fail(ACL_ERROR_RT_INTERNAL_ERROR, "%s", describe(f, "recording", name).c_str());
  }
  return 0;
}

// Counted while a stream captures. One failure is enough: torch_npu's allocator tries again only
// outside captures.
aclError fault_in_allocation(int device) {
  for (const Fault &f : settings().faults) {
    if (f.op != kAllocation || !is_capturing(device))
      continue;
    if (is_due(static_cast<int>(&f - settings().faults), device) && strike(f, device_failed))
      return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "out of device memory: %s",
                  describe(f, "allocation", "a capture").c_str());
  }
  return 0;
}

aclError fault_in_call(const char *name, int device) {
  for (const Fault &f : settings().faults) {
    if (f.op != name)
      continue;
    if (is_due(static_cast<int>(&f - settings().faults), device) && strike(f, never))
      return fail(ACL_ERROR_RT_INTERNAL_ERROR, "%s", describe(f, "call", name).c_str());
  }
  return 0;
}

}  // namespace emu
