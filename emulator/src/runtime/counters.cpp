#include "runtime/counters.h"

#include "runtime/errors.h"
#include "runtime/queue_pool.h"
#include "runtime/services.h"

namespace emu {

Counters &Counters::of(int device) {
  static Counters counters[kMaxDevices];
  return counters[device];
}

void count_collective(int device) { count(Counters::of(device).collectives); }

}  // namespace emu

// A JSON object of whole numbers; a negative device is the current one of the calling thread. The
// text is valid until the thread's next call. Null for a device that there is not.
EMU_API const char *emulator_counters(int device) {
  using namespace emu;
  static thread_local std::string text;
  if (device < 0)
    device = current_device();
  if (device >= settings().devices)
    return nullptr;
  const Counters &c = Counters::of(device);
  StreamBudget::Held held = StreamBudget::of(device).held();
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
  };
  text = "{";
  for (auto &[name, value] : values)
    text += (text.size() > 1 ? ", \"" : "\"") + std::string(name) + "\": " + std::to_string(value);
  text += "}";
  return text.c_str();
}
