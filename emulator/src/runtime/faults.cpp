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
static std::atomic<long> g_calls{0};

void set_fault_identity(int rank) {
  int none = -1;
  g_identity.compare_exchange_strong(none, rank);
}

// Counts a call of fault_op; true if it is the one that the fault is for.
static bool is_due(int device) {
  const Settings &s = settings();
  int identity = g_identity >= 0 ? g_identity.load() : device;
  bool mine = s.fault_rank < 0 || s.fault_rank == identity;
  return mine && ++g_calls == s.fault_call;
}

static void stall() {
  auto end = Clock::now() + std::chrono::duration<double>(settings().stall_s);
  while (Clock::now() < end && !device_failed())
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

// Carries out the fault; true if the call fails.
static bool strike() {
  switch (settings().fault_kind) {
  case FaultKind::Stall:
    stall();
    return false;
  case FaultKind::Die:
    _exit(kKilled);
  default:
    return true;
  }
}

static std::string describe(const char *call, const char *name) {
  return "injected fault in " + std::string(call) + " " + std::to_string(settings().fault_call) +
         " of " + name;
}

Task with_fault(const char *name, int device, Task body) {
  const Settings &s = settings();
  if (s.fault_op.empty() || s.fault_in_capture || s.fault_op != name)
    return body;
  return [body = std::move(body), name, device] {
    if (is_due(device) && strike())
      throw std::runtime_error(describe("call", name));
    body();
  };
}

aclError fault_in_capture(const char *name, int device) {
  const Settings &s = settings();
  if (s.fault_op.empty() || !s.fault_in_capture || s.fault_op != name)
    return 0;
  if (is_due(device) && strike())
    return fail(ACL_ERROR_RT_INTERNAL_ERROR, "%s", describe("recording", name).c_str());
  return 0;
}

// Counted while a stream captures. One failure is enough: torch_npu's allocator tries again only
// outside captures.
aclError fault_in_allocation(int device) {
  if (settings().fault_op != kAllocation || !is_capturing(device))
    return 0;
  if (!is_due(device) || !strike())
    return 0;
  return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "out of device memory: %s",
              describe("allocation", "a capture").c_str());
}

}  // namespace emu
