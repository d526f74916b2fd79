// Streams, their worker threads, and synchronization.
#include "runtime/objects.h"

#include "runtime/counters.h"
#include "runtime/graph.h"
#include "runtime/queue_pool.h"
#include "runtime/services.h"

#include <acl/acl.h>
#include <acl/error_codes/rt_error_codes.h>

#include <algorithm>
#include <cstdio>
#include <stdexcept>

#include <pthread.h>

namespace emu {

// Duration of a sleep between two checks whether the device has stopped.
constexpr int64_t kSliceNs = 20000000;

std::atomic<bool> g_oversubscribed{false};
void set_oversubscribed() { g_oversubscribed = true; }
bool oversubscribed() { return g_oversubscribed; }

static std::mutex g_streams_mutex;
static std::vector<Stream *> g_streams;
static std::map<int, Stream *> g_default_streams;
static std::atomic<int> g_next_stream_id{0};

Stream::Stream(int device_) : device(device_), id(g_next_stream_id++), timeline_(device_) {
  Lock lock(g_streams_mutex);
  g_streams.push_back(this);
}

Stream::~Stream() {
  {
    Lock lock(mutex_);
    stopping_ = true;
    pushed_.notify_all();
  }
  if (worker_.joinable())
    worker_.join();
  Lock lock(g_streams_mutex);
  g_streams.erase(std::remove(g_streams.begin(), g_streams.end(), this), g_streams.end());
}

void Stream::post(const char *name, Task task) {
  bool wake;
  {
    Lock lock(mutex_);
    if (!worker_.joinable())
      worker_ = std::thread([this] { work(); });
    queue_.push_back({name, std::move(task), settings().timed ? host_ns(device) : 0});
    submitted_++;
    wake = sleeping_;
  }
  if (wake)
    pushed_.notify_one();
}

bool Stream::next(Item &item) {
  if (drained())
    spin_until([this] { return !drained(); });
  Lock lock(mutex_);
  while (queue_.empty() && !stopping_) {
    sleeping_ = true;
    pushed_.wait(lock);
    sleeping_ = false;
  }
  if (queue_.empty())
    return false;
  item = std::move(queue_.front());
  queue_.pop_front();
  return true;
}

void Stream::work() {
  t_device = device;
  t_where = "stream " + std::to_string(id);
  t_timeline = settings().timed ? &timeline_ : nullptr;
  pthread_setname_np(pthread_self(), "npu_stream");  // otherwise the thread has its creator's name
  Item item;
  while (next(item)) {
    running_ = item.name;
    run(item);
    item.task = nullptr;  // frees the task's objects before it counts as complete
    running_ = nullptr;
    completed_++;
    if (waiters_) {  // a waiter announces itself before it checks completed_
      Lock lock(mutex_);
      idle_.notify_all();
    }
  }
}

void Stream::run(const Item &item) {
  if (g_failures[device].code)
    return;
  try {
    if (t_timeline)
      t_timeline->begin(item.queued_ns);
    item.task();
  } catch (const std::exception &e) {
    stop_device(device, code_of(e),
                t_where + ", " + item.name + ": " + e.what());
  }
}

aclError Stream::synchronize(int timeout_ms) {
  if (!settings().timed)
    return wait(submitted_, timeout_ms);
  pay_host_time(device);
  // The call waits only for work that is queued now, not for work that other threads queue while it
  // waits.
  auto end = std::make_shared<int64_t>(0);
  post("synchronize", [end] { *end = t_timeline->ns(); });
  aclError error = wait(submitted_, timeout_ms);
  return error ? error : sleep(*end, timeout_ms);
}

aclError sleep_with_device(int device, int64_t until_ns, uint32_t aborts_before) {
  for (int64_t now = now_ns(); now < until_ns; now = now_ns()) {
    sleep_until_ns(std::min(until_ns, now + kSliceNs));
    if (aclError error = g_failures[device].report_since(aborts_before))
      return error;
  }
  return 0;
}

// Waits until the host's clock has reached the modelled time `until_ns`.
aclError Stream::sleep(int64_t until_ns, int timeout_ms) const {
  uint32_t aborts = g_failures[device].aborts;
  int64_t limit = now_ns() + timeout_ms * 1000000ll;
  if (timeout_ms < 0 || until_ns <= limit)
    return sleep_with_device(device, until_ns, aborts);
  if (aclError error = sleep_with_device(device, limit, aborts))
    return error;
  return fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT,
              "stream %d: synchronize timed out after %d ms, the device is busy for longer", id,
              timeout_ms);
}

aclError Stream::wait(uint64_t target, int timeout_ms) {
  uint32_t aborts = g_failures[device].aborts;
  auto reached = [&] { return completed_ >= target; };
  if (!reached() && !spin_until(reached)) {
    waiters_++;
    Lock lock(mutex_);
    bool done = true;
    if (timeout_ms < 0)
      idle_.wait(lock, reached);
    else
      done = idle_.wait_for(lock, std::chrono::milliseconds(timeout_ms), reached);
    waiters_--;
    if (!done) {
      const char *running = running_;
      return fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT,
                  "stream %d: synchronize timed out after %d ms in %s", id, timeout_ms,
                  running ? running : "no task");
    }
  }
  return g_failures[device].report_since(aborts);
}

Stream *stream_of(aclrtStream handle) {
  if (handle)
    return static_cast<Stream *>(handle);
  int device = current_device();
  static std::mutex creation;
  Lock one(creation);
  {
    Lock lock(g_streams_mutex);
    auto found = g_default_streams.find(device);
    if (found != g_default_streams.end())
      return found->second;
  }
  auto *stream = new Stream(device);
  StreamBudget::of(device).take(StreamBudget::Streams, 1);
  Lock lock(g_streams_mutex);
  return g_default_streams[device] = stream;
}

std::vector<Stream *> streams_of(int device) {
  Lock lock(g_streams_mutex);
  std::vector<Stream *> found;
  for (Stream *s : g_streams)
    if (s->device == device)
      found.push_back(s);
  return found;
}

void wait_or_throw(Lock &lock, std::condition_variable &cv, const std::function<bool()> &ready,
                   const std::function<std::string()> &what) {
  auto end = Clock::now() + std::chrono::seconds(settings().wait_s);
  while (!cv.wait_for(lock, std::chrono::milliseconds(20), ready)) {
    if (device_failed())
      throw std::runtime_error("given up, because the device failed, while waiting for " + what());
    if (Clock::now() > end)
      throw std::runtime_error("timeout after " + std::to_string(settings().wait_s) + " s: " +
                               t_where + " waits for " + what());
  }
}

}  // namespace emu

using namespace emu;

EMU_API aclError aclrtCreateStreamWithConfig(aclrtStream *out, uint32_t, uint32_t) {
  int device = current_device();
  if (!take_running_streams(device, StreamBudget::Streams, 1))
    return fail(ACL_ERROR_RT_RESOURCE_ALLOC_FAIL, "new stream failed: %s",
                StreamBudget::of(device).shortage().c_str());
  *out = new Stream(device);
  return 0;
}
EMU_API aclError aclrtCreateStream(aclrtStream *out) {
  return aclrtCreateStreamWithConfig(out, 0, 0);
}
EMU_API aclError aclrtDestroyStream(aclrtStream handle) {
  auto *s = static_cast<Stream *>(handle);
  if (s->captured())
    return fail(ACL_ERROR_RT_STREAM_CAPTURED, "stream %d is captured: destroy not permitted",
                s->id);
  s->synchronize(settings().wait_s * 1000);
  StreamBudget::of(s->device).release(StreamBudget::Streams, 1);
  delete s;
  return 0;
}
EMU_API aclError aclrtDestroyStreamForce(aclrtStream handle) { return aclrtDestroyStream(handle); }
// The abort of a single stream is not emulated. After such an abort, the stream's events would
// never be recorded.
EMU_API aclError aclrtStreamAbort(aclrtStream handle) {
  if (!handle)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "abort of no stream");
  auto *s = static_cast<Stream *>(handle);
  if (!s->drained())
    return fail(kNotEmulated, "the abort of stream %d, which has tasks, is not emulated", s->id);
  return 0;
}
// CANN returns the number of free hardware queues, not the number of free ids. If each stream has
// its own queue, both numbers are equal.
EMU_API aclError aclrtGetStreamAvailableNum(uint32_t *count) {
  int device = current_device();
  *count = settings().software_sq ? QueuePool::of(device).available()
                                  : StreamBudget::of(device).available();
  return 0;
}

EMU_API aclError aclrtStreamGetId(aclrtStream handle, int32_t *id) {
  *id = stream_of(handle)->id;
  return 0;
}
EMU_API aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return 0; }
EMU_API aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return 0; }
EMU_API aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue *) {
  return 0;
}

EMU_API aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus *status) {
  Stream *s = stream_of(handle);
  if (s->captured())
    return fail(ACL_ERROR_RT_STREAM_CAPTURED, "stream %d is captured: query not permitted", s->id);
  bool is_complete = s->idle();
  if (is_complete)
    pay_host_time(s->device);
  *status = is_complete ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return 0;
}

EMU_API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t timeout_ms) {
  Stream *s = stream_of(handle);
  if (s->captured())
    return fail(ACL_ERROR_RT_STREAM_CAPTURED, "stream %d is captured: synchronize not permitted",
                s->id);
  count(Counters::of(s->device).host_syncs);
  // This call is allowed while another thread captures, because torch_npu's random generator calls
  // it when the generator is used in a graph for the first time.
  return s->synchronize(timeout_ms);
}
EMU_API aclError aclrtSynchronizeStream(aclrtStream handle) {
  return aclrtSynchronizeStreamWithTimeout(handle, -1);
}
EMU_API aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
  if (aclError e = refuse_during_capture("aclrtSynchronizeDevice"))
    return e;
  count(Counters::of(current_device()).host_syncs);
  for (Stream *s : streams_of(current_device()))
    if (aclError e = s->synchronize(timeout_ms))
      return e;
  return 0;
}
EMU_API aclError aclrtSynchronizeDevice() { return aclrtSynchronizeDeviceWithTimeout(-1); }
