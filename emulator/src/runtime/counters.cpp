#include "runtime/counters.h"

#include "runtime/device_time.h"
#include "runtime/errors.h"
#include "runtime/queue_pool.h"
#include "runtime/services.h"

#include <map>
#include <mutex>

namespace emu {

Counters &Counters::of(int device) {
  static Counters counters[kMaxDevices];
  return counters[device];
}

namespace {

// Counts, for each operator, how many times it was executed.
struct Operators {
  std::mutex mutex;
  std::map<std::string, long> counts;

  void add(const char *name) {
    std::lock_guard lock(mutex);
    counts[name]++;
  }
};
Operators g_ai_cpu[kMaxDevices], g_unaligned[kMaxDevices];

// Returns a JSON object whose values are whole numbers. The text is valid until the next call in
// this thread.
template <class Pairs> const char *as_json(const Pairs &values) {
  static thread_local std::string text;
  text = "{";
  for (auto &[name, value] : values)
    text += (text.size() > 1 ? ", \"" : "\"") + std::string(name) + "\": " + std::to_string(value);
  text += "}";
  return text.c_str();
}

}  // namespace

void count_traits(int device, LaunchTraits traits) {
  if (traits.unaligned) {
    count(Counters::of(device).unaligned_views);
    g_unaligned[device].add(traits.unaligned);
  }
  if (traits.ai_cpu) {
    count(Counters::of(device).ai_cpu);
    g_ai_cpu[device].add(traits.ai_cpu);
  }
}

void count_collective(int device, size_t bytes) {
  count(Counters::of(device).collectives);
  count(Counters::of(device).collective_bytes, static_cast<long>(bytes));
}
void count_careless_destroy(int device) { count(Counters::of(device).careless_destroys); }
void count_socket_bytes(int device, size_t bytes) {
  count(Counters::of(device).socket_bytes, static_cast<long>(bytes));
}

}  // namespace emu

// Returns the counters as a JSON object. A negative `device` means the calling thread's current
// device. Returns null if the device does not exist.
EMU_API const char *emulator_counters(int device) {
  using namespace emu;
  if (device < 0)
    device = current_device();
  if (device >= settings().devices)
    return nullptr;
  const Counters &c = Counters::of(device);
  StreamBudget::Held held = StreamBudget::of(device).held();
  const DeviceTime::Totals time = DeviceTime::of(device).totals();
  auto idle_ns = [&](Idle cause) { return time.idle[int(cause)]; };
  std::pair<const char *, long> values[] = {
      {"streams", held[StreamBudget::Streams]},
      {"captured", held[StreamBudget::Captured]},
      {"cascaded", held[StreamBudget::Cascaded]},
      {"domains", held[StreamBudget::Domains]},
      {"graph_domains", held[StreamBudget::GraphDomains]},
      {"available", StreamBudget::of(device).available()},
      {"graphs", c.graphs},
      {"external_waits", c.external_waits},
      {"external_wait_ns", c.external_wait_ns},
      {"task_updates", c.task_updates},
      {"queue_pool", QueuePool::of(device).size()},
      {"queues", QueuePool::of(device).bound()},
      {"queue_bindings", c.queue_bindings},
      {"collectives", c.collectives},
      {"collective_bytes", c.collective_bytes},
      {"socket_bytes", c.socket_bytes},
      {"careless_destroys", c.careless_destroys},
      {"host_syncs", c.host_syncs},
      {"ai_cpu", c.ai_cpu},
      {"ai_cpu_captured", c.ai_cpu_captured},
      {"unaligned_views", c.unaligned_views},
      {"modelled_busy_ns", time.busy},
      {"modelled_idle_host_ns", idle_ns(Idle::Host)},
      {"modelled_idle_event_ns", idle_ns(Idle::Event)},
      {"modelled_idle_external_ns", idle_ns(Idle::External)},
      {"modelled_idle_collective_ns", idle_ns(Idle::Collective)},
      {"modelled_idle_copy_ns", idle_ns(Idle::Copy)},
      {"modelled_idle_update_ns", idle_ns(Idle::Update)},
  };
  return as_json(values);
}

static const char *counts_of(emu::Operators *by_device, int device) {
  using namespace emu;
  if (device < 0)
    device = current_device();
  if (device >= settings().devices)
    return nullptr;
  std::lock_guard lock(by_device[device].mutex);
  return as_json(by_device[device].counts);
}

// Two functions: how many times each operator was executed on the AI CPU, and how many times on
// unaligned tensors. The argument and the result have the same form as in emulator_counters.
EMU_API const char *emulator_ai_cpu_operators(int device) {
  return counts_of(emu::g_ai_cpu, device);
}
EMU_API const char *emulator_unaligned_operators(int device) {
  return counts_of(emu::g_unaligned, device);
}
