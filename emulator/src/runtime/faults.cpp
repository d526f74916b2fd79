#include "runtime/faults.h"

#include "runtime/bad_memory.h"
#include "runtime/graph.h"
#include "runtime/services.h"
#include "runtime/timeline.h"

#include <acl/error_codes/rt_error_codes.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iterator>
#include <optional>
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

namespace {

struct Call {
  const char *name;
  int device;
  bool in_capture;
};

// A fault of the settings that happens at the present call.
struct Due {
  Fault fault;
  std::string which;
};

bool is_for(const Fault &f, const Call &call) {
  int identity = g_identity >= 0 ? g_identity.load() : call.device;
  bool counts = f.in_capture == call.in_capture || f.op == kAllocation;
  return f.op == call.name && counts && (f.rank < 0 || f.rank == identity);
}

// Each fault of the settings counts the calls that match it, and happens at one of these calls.
// Returns the fault that happens at this call, if any.
std::optional<Due> counted_fault(const Call &call) {
  std::optional<Due> due;
  for (int i = 0; i < kFaults; i++) {
    const Fault &f = settings().faults[i];
    if (is_for(f, call) && ++g_calls[i] == f.call)
      due = Due{f, std::to_string(f.call)};
  }
  return due;
}

// A fault can also be armed by a file, and then happens at the first matching call in any process.
// Returns this fault if it happens at the present call.
std::optional<Due> armed_fault(const Call &call) {
  const std::string &path = settings().fault_file;
  if (path.empty() || access(path.c_str(), R_OK))
    return {};
  std::ifstream file(path);
  Settings armed;
  read_settings(armed, {std::istreambuf_iterator<char>(file), {}}, path.c_str());
  if (!is_for(armed.faults[0], call) || unlink(path.c_str()))  // another process was faster
    return {};
  return Due{armed.faults[0], "that a file has armed"};
}

std::optional<Due> fault_of(const Call &call) {
  std::optional<Due> due = counted_fault(call);
  return due ? due : armed_fault(call);
}

void sleep_for(double seconds, const std::function<bool()> &is_over) {
  auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (Clock::now() < end && !is_over())
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

// Executes the fault. Returns true if the call must fail.
bool strike(const Fault &f, const std::function<bool()> &is_over) {
  switch (f.kind) {
  case FaultKind::Stall: {
    int64_t begun = now_ns();
    sleep_for(f.stall_s, is_over);
    if (t_timeline)  // the device has waited for the same time
      t_timeline->pass(now_ns() - begun, Idle::Host);
    return false;
  }
  case FaultKind::Die:
    _exit(kKilled);
  default:
    return true;
  }
}

bool never() { return false; }

// Returns the error code with which the device stops, and the reason as CANN words it.
std::pair<aclError, const char *> code_of(FaultKind kind) {
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

std::string describe(const char *what, const Due &due, const char *name) {
  const char *reason = code_of(due.fault.kind).second;
  return "injected fault in " + std::string(what) + " " + due.which + " of " + name +
         (reason ? std::string(", reason=[") + reason + "]" : "");
}

bool may_be_due(const char *name) {
  for (const Fault &f : settings().faults)
    if (!f.in_capture && f.op == name)
      return true;
  return !settings().fault_file.empty();
}

}  // namespace

bool wants_operands(const char *name) { return may_turn_bad() && may_be_due(name); }

// Makes a page of one of the operator's tensors bad. If the operator has no tensors, a page of
// HCCL's own memory becomes bad.
static void turn_bad(const Fault &f, int device, const std::vector<uintptr_t> *operands) {
  if (!operands || operands->empty())
    return turn_library_memory_bad(device);
  size_t last = operands->size() - 1;
  turn_bad(device, (*operands)[std::min<size_t>(f.operand, last)] + f.offset);
}

Task with_fault(const char *name, int device, const LaunchTraits &traits, Task body) {
  if (!may_be_due(name))
    return body;
  return [body = std::move(body), name, device, operands = traits.operands] {
    std::optional<Due> due = fault_of({name, device, false});
    if (due && due->fault.kind == FaultKind::Uce) {
      fprintf(stderr, "[emulator] injected fault in call %s of %s: memory turns bad\n",
              due->which.c_str(), name);
      turn_bad(due->fault, device, operands.get());
      check_memory();
    } else if (due && strike(due->fault, device_failed))
      throw TaskError(code_of(due->fault.kind).first, describe("call", *due, name));
    body();
  };
}

aclError fault_in_capture(const char *name, int device) {
  std::optional<Due> due = fault_of({name, device, true});
  if (due && strike(due->fault, device_failed))
    return fail(ACL_ERROR_RT_INTERNAL_ERROR, "%s", describe("recording", *due, name).c_str());
  return 0;
}

// Only allocations during a capture are counted. One failed allocation makes a capture fail,
// because torch_npu's allocator tries again only outside captures.
aclError fault_in_allocation(int device) {
  if (!is_capturing(device))
    return 0;
  std::optional<Due> due = fault_of({kAllocation, device, true});
  if (!due || !strike(due->fault, device_failed))
    return 0;
  return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "out of device memory: %s",
              describe("allocation", *due, "a capture").c_str());
}

aclError fault_in_call(const char *name, int device) {
  std::string text = planted_fault(name, device, never);
  return text.empty() ? 0 : fail(ACL_ERROR_RT_INTERNAL_ERROR, "%s", text.c_str());
}

std::string planted_fault(const char *name, int device, const std::function<bool()> &is_over) {
  std::optional<Due> due = fault_of({name, device, false});
  return due && strike(due->fault, is_over) ? describe("call", *due, name) : "";
}

}  // namespace emu
