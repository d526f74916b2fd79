// Tasks that wait for a word in device memory, tasks that write such a word, and host callbacks.
// torch_npu 2.13 uses such words for torch.npu.ExternalEvent.
#include "runtime/counters.h"
#include "runtime/graph.h"

#include <acl/acl.h>
#include <acl/error_codes/rt_error_codes.h>

using namespace emu;

static std::mutex g_value_mutex;
static std::condition_variable g_value_changed;
// With modelled time: the time at which each word was last written.
static std::map<const void *, int64_t> g_written_ns;

static bool value_matches(uint64_t x, uint64_t v, uint32_t condition) {
  switch (condition) {
  case ACL_STREAM_WAIT_VALUE_EQ:
    return x == v;
  case ACL_STREAM_WAIT_VALUE_GEQ:
    return static_cast<int64_t>(x - v) >= 0;
  case ACL_STREAM_WAIT_VALUE_AND:
    return (x & v) != 0;
  default:  // NOR
    return ~(x | v) != 0;
  }
}

static uint64_t read_word(const void *address) {
  return __atomic_load_n(static_cast<const uint64_t *>(accessible(address)), __ATOMIC_ACQUIRE);
}

static std::string word_name(const void *address, uint64_t value) {
  char text[96];
  snprintf(text, sizeof text, "the external event at %p: it holds %llu, wanted %llu", address,
           static_cast<unsigned long long>(read_word(address)),
           static_cast<unsigned long long>(value));
  return text;
}

EMU_API aclError aclrtValueWrite(void *address, uint64_t value, uint32_t, aclrtStream stream) {
  return launch(stream, TaskKind::ExternalTask, "aclrtValueWrite", [=] {
    Lock lock(g_value_mutex);
    __atomic_store_n(static_cast<uint64_t *>(accessible(address)), value, __ATOMIC_RELEASE);
    if (t_timeline)
      g_written_ns[address] = t_timeline->ns();
    g_value_changed.notify_all();
  });
}
EMU_API aclError aclrtValueWait(void *address, uint64_t value, uint32_t condition,
                                aclrtStream stream) {
  Stream *s = stream_of(stream);
  return launch(stream, TaskKind::ExternalTask, "aclrtValueWait",
                [=, device = s->device, captured = s->captured()] {
    ExternalWait counted(device, captured);
    auto ready = [=] { return value_matches(read_word(address), value, condition); };
    if (spin_until(ready) && !t_timeline)
      return;
    Lock lock(g_value_mutex);
    wait_or_throw(lock, g_value_changed, ready, [=] { return word_name(address, value); });
    if (t_timeline)
      counted.modelled(t_timeline->wait_until(g_written_ns[address], Idle::External));
  });
}

// ---- host callbacks

EMU_API aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void *argument) {
  return launch(stream, TaskKind::HostCallback, "aclrtLaunchHostFunc", [=] { function(argument); });
}

struct Callback {
  aclrtCallback function;
  void *argument;
  bool done = false;
};
static std::mutex g_callback_mutex;
static std::condition_variable g_callback_changed;
static std::deque<std::shared_ptr<Callback>> g_callbacks;

EMU_API aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return 0; }
EMU_API aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return 0; }

EMU_API aclError aclrtLaunchCallback(aclrtCallback function, void *argument,
                                     aclrtCallbackBlockType block, aclrtStream stream) {
  return launch(stream, TaskKind::HostCallback, "aclrtLaunchCallback", [=] {
    Lock lock(g_callback_mutex);
    auto callback = std::make_shared<Callback>(Callback{function, argument});
    g_callbacks.push_back(callback);
    g_callback_changed.notify_all();
    if (block == ACL_CALLBACK_BLOCK)
      wait_or_throw(
          lock, g_callback_changed, [=] { return callback->done; },
          [] { return std::string("a host callback"); });
  });
}
EMU_API aclError aclrtProcessReport(int32_t timeout_ms) {
  Lock lock(g_callback_mutex);
  auto limit = std::chrono::milliseconds(timeout_ms < 0 ? 100 : timeout_ms);
  if (!g_callback_changed.wait_for(lock, limit, [] { return !g_callbacks.empty(); }))
    return ACL_ERROR_RT_REPORT_TIMEOUT;
  auto callback = g_callbacks.front();
  g_callbacks.pop_front();
  lock.unlock();
  callback->function(callback->argument);
  lock.lock();
  callback->done = true;
  g_callback_changed.notify_all();
  return 0;
}
