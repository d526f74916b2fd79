#include "runtime/faults.h"

#include "runtime/graph.h"
#include "runtime/services.h"

#include <acl/error_codes/rt_error_codes.h>

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
static std::atomic<long> g_calls{0};

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

// A fault that happens now.
struct Fault {
  FaultKind kind;
  double stall_s;
  std::string which;
};

bool is_for(const Settings &s, const Call &call) {
  int identity = g_identity >= 0 ? g_identity.load() : call.device;
  bool counts = s.fault_in_capture == call.in_capture || s.fault_op == kAllocation;
  return s.fault_op == call.name && counts && (s.fault_rank < 0 || s.fault_rank == identity);
}

// The fault of the settings, at the call that it is for.
std::optional<Fault> counted_fault(const Call &call) {
  const Settings &s = settings();
  if (!is_for(s, call) || ++g_calls != s.fault_call)
    return {};
  return Fault{s.fault_kind, s.stall_s, std::to_string(s.fault_call)};
}

// The fault that a file has armed, for the first call of all processes that it is for.
std::optional<Fault> armed_fault(const Call &call) {
  const std::string &path = settings().fault_file;
  if (path.empty() || access(path.c_str(), R_OK))
    return {};
  std::ifstream file(path);
  Settings armed;
  read_settings(armed, {std::istreambuf_iterator<char>(file), {}}, path.c_str());
  if (!is_for(armed, call) || unlink(path.c_str()))  // or another process was the first
    return {};
  return Fault{armed.fault_kind, armed.stall_s, "that a file has armed"};
}

std::optional<Fault> fault_of(const Call &call) {
  std::optional<Fault> fault = counted_fault(call);
  return fault ? fault : armed_fault(call);
}

void stall(double seconds) {
  auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (Clock::now() < end && !device_failed())
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

// Carries out the fault; true if the call fails.
bool strike(const Fault &fault) {
  switch (fault.kind) {
  case FaultKind::Stall:
    stall(fault.stall_s);
    return false;
  case FaultKind::Die:
    _exit(kKilled);
  default:
    return true;
  }
}

std::string describe(const char *what, const Fault &fault, const char *name) {
  return "injected fault in " + std::string(what) + " " + fault.which + " of " + name;
}

}  // namespace

Task with_fault(const char *name, int device, Task body) {
  const Settings &s = settings();
  bool may_be_due = !s.fault_in_capture && s.fault_op == name;
  if (!may_be_due && s.fault_file.empty())
    return body;
  return [body = std::move(body), name, device] {
    std::optional<Fault> fault = fault_of({name, device, false});
    if (fault && strike(*fault))
      throw std::runtime_error(describe("call", *fault, name));
    body();
  };
}

aclError fault_in_capture(const char *name, int device) {
  std::optional<Fault> fault = fault_of({name, device, true});
  if (fault && strike(*fault))
    return fail(ACL_ERROR_RT_INTERNAL_ERROR, "%s", describe("recording", *fault, name).c_str());
  return 0;
}

// Counted while a stream captures. One failure is enough: torch_npu's allocator tries again only
// outside captures.
aclError fault_in_allocation(int device) {
  if (!is_capturing(device))
    return 0;
  std::optional<Fault> fault = fault_of({kAllocation, device, true});
  if (!fault || !strike(*fault))
    return 0;
  return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "out of device memory: %s",
              describe("allocation", *fault, "a capture").c_str());
}

}  // namespace emu
