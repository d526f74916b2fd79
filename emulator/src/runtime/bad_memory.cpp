#include "runtime/bad_memory.h"

#include "runtime/objects.h"
#include "runtime/window.h"

#include <acl/error_codes/rt_error_codes.h>

#include <algorithm>
#include <csignal>
#include <cstring>

#include <sys/mman.h>

namespace emu {

namespace {

constexpr size_t kBadPage = 4096;  // unit of bad memory and of repairs
constexpr int kMostPages = 20;  // as many as CANN records per device (RT_MAX_RECORD_PA_NUM_PER_DEV)

// A bad page. The signal handler reads these fields without a lock.
struct Page {
  std::atomic<uintptr_t> address{0};  // the program's address; 0 means none
  std::atomic<bool> touched{false};
  int device = 0;
};
Page g_pages[kMostPages];

std::mutex g_bad_mutex;
std::vector<aclrtMemUceInfo> g_told[kMaxDevices];
struct sigaction g_handler_before;

thread_local uint32_t t_touched = 0;  // a bit for each page

void *alias_of(const Page &page) {
  return accessible(reinterpret_cast<void *>(page.address.load()));
}

// If a thread accesses a bad page, the access succeeds with the stored values, and the thread's
// task reports the access when it ends. If the fault is at another page, the previous signal
// handler is called.
void on_fault(int, siginfo_t *info, void *) {
  uintptr_t alias = reinterpret_cast<uintptr_t>(info->si_addr) / kBadPage * kBadPage;
  uintptr_t at = alias - kDeviceWindowBytes;
  for (int i = 0; i < kMostPages; i++)
    if (g_pages[i].address == at && at) {
      t_touched |= 1u << i;
      g_pages[i].touched = true;
      mprotect(alias_of(g_pages[i]), kBadPage, PROT_READ | PROT_WRITE);
      return;
    }
  sigaction(SIGSEGV, &g_handler_before, nullptr);
}

void install_handler() {
  static const bool once = [] {
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &g_handler_before);
    return true;
  }();
  (void)once;
}

// The caller must hold the mutex. Returns null if there are already as many bad pages as possible.
Page *new_page(int device, uintptr_t address) {
  for (Page &page : g_pages)
    if (!page.address || page.address == address) {
      page.device = device;
      page.touched = false;
      page.address = address;
      return &page;
    }
  return nullptr;
}

void protect(const Page &page) { mprotect(alias_of(page), kBadPage, PROT_NONE); }

// Returns the bad pages that this thread has accessed, as text. The pages stay bad.
std::string take_touched() {
  std::string text;
  Lock lock(g_bad_mutex);
  for (int i = 0; i < kMostPages; i++)
    if (t_touched & 1u << i && g_pages[i].address) {
      protect(g_pages[i]);
      char place[64];
      snprintf(place, sizeof place, "%s%zu bytes at %#zx", text.empty() ? "" : ", ", kBadPage,
               size_t(g_pages[i].address));
      text += place;
    }
  t_touched = 0;
  return "reason=[device mem error]: memory cannot be corrected, " + text;
}

}  // namespace

bool may_turn_bad() {
  for (const Fault &f : settings().faults)
    if (!f.op.empty() && f.kind == FaultKind::Uce)
      return true;
  return !settings().fault_file.empty();
}

void turn_bad(int device, uintptr_t address) {
  install_handler();
  Lock lock(g_bad_mutex);
  if (Page *page = new_page(device, address / kBadPage * kBadPage))
    protect(*page);
}

void turn_library_memory_bad(int device) {
  install_handler();
  uintptr_t address = reserve_window(kBadPage);
  map_new_window(address, kBadPage);
  Lock lock(g_bad_mutex);
  if (Page *page = new_page(device, address)) {
    page->touched = true;
    t_touched |= 1u << (page - g_pages);
  }
}

void check_memory() {
  if (t_touched)
    throw TaskError(ACL_ERROR_RT_DEVICE_MEM_ERROR, take_touched());
}

Task watched(Task body) {
  if (!may_turn_bad())
    return body;
  return [body = std::move(body)] {
    // Clears the bits of an earlier task that failed for another reason. This write also creates
    // the thread-local variable, so that the signal handler does not have to create the variable.
    t_touched = 0;
    body();
    check_memory();
  };
}

aclError check_memory_of_call(const char *call) {
  if (!t_touched)
    return 0;
  stop_device(current_device(), ACL_ERROR_RT_DEVICE_MEM_ERROR,
              std::string(call) + ": " + take_touched());
  return g_failures[current_device()].report();
}

void release_bad_memory(uintptr_t address, size_t bytes) {
  Lock lock(g_bad_mutex);
  for (Page &page : g_pages)
    if (page.address >= address && page.address < address + bytes)
      page.address = 0;
}

std::vector<aclrtMemUceInfo> told_bad_memory(int device) {
  Lock lock(g_bad_mutex);
  std::vector<aclrtMemUceInfo> &told = g_told[device];
  if (told.empty())
    for (const Page &page : g_pages)
      if (page.address && page.touched && page.device == device)
        told.push_back({reinterpret_cast<void *>(page.address.load()), kBadPage, {}});
  return told;
}

// After a repair, the contents of the memory are lost. The emulator requires that tasks were
// aborted before, and that only bad memory is repaired. As far as we know, CANN has no such
// requirements.
aclError repair_memory(int device, const aclrtMemUceInfo *ranges, size_t count) {
  if (count > kMostPages)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "%zu addresses to repair, at most %d", count,
                kMostPages);
  if (g_failures[device].code)
    return fail(ACL_ERROR_RT_PARAM_INVALID,
                "repair of memory: the tasks of device %d were not aborted", device);
  Lock lock(g_bad_mutex);
  for (size_t i = 0; i < count; i++) {
    auto address = reinterpret_cast<uintptr_t>(ranges[i].addr);
    auto page = std::find_if(std::begin(g_pages), std::end(g_pages), [&](const Page &p) {
      return p.address && p.address == address && p.device == device;
    });
    if (page == std::end(g_pages) || ranges[i].len != kBadPage)
      return fail(ACL_ERROR_RT_PARAM_INVALID, "repair of %zu bytes at %p: they are not faulty",
                  ranges[i].len, ranges[i].addr);
    mprotect(alias_of(*page), kBadPage, PROT_READ | PROT_WRITE);
    poison(address, kBadPage);
    page->address = 0;
  }
  g_told[device].clear();
  return 0;
}

}  // namespace emu
