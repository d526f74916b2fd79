// adxl::AdxlEngine: checks arguments and the rules of CANN's documents, and owns the links.
#include "adxl/channel.h"

#include "runtime/faults.h"

#include <functional>
#include <set>

namespace {

using namespace emu::adxl;

// CANN's time limit for a new link. With AutoConnect, TransferAsync makes a link if none exists.
constexpr int kAsyncConnectMs = 3000;

struct Options {
  bool auto_connect = false;
};

Options parse_options(const std::map<AscendString, AscendString> &options) {
  static const std::set<std::string> known{"adxl.BufferPool",       "adxl.LocalCommRes",
                                           "adxl.RdmaTrafficClass", "adxl.RdmaServiceLevel",
                                           "AutoConnect",           "BufferPool",
                                           "LocalCommRes",          "RdmaTrafficClass",
                                           "RdmaServiceLevel",      "EnableUseFabricMem",
                                           "GlobalResourceConfig"};
  Options parsed;
  bool has_pool = true;
  for (auto &[name, value] : options) {
    std::string key = name.GetString(), text = value.GetString();
    refuse_unless(known.count(key), PARAM_INVALID, "unsupported option ", key);
    if (key == "AutoConnect") {
      refuse_unless(text == "0" || text == "1", PARAM_INVALID, "the option AutoConnect is ", text,
                    ", but must be 0 or 1");
      parsed.auto_connect = text == "1";
    } else if (key == "adxl.BufferPool" || key == "BufferPool") {
      has_pool = text != "0:0";
    } else if (key == "EnableUseFabricMem") {
      refuse_unless(text.empty() || text == "0", UNSUPPORTED, "fabric memory is not emulated");
    } else if (key == "GlobalResourceConfig" || key == "LocalCommRes" ||
               key == "adxl.LocalCommRes") {
      refuse_unless(text.empty(), UNSUPPORTED, "the option ", key, " is not emulated");
    }
  }
  refuse_unless(!has_pool, UNSUPPORTED,
                "the pool of intermediate buffers is not emulated: set adxl.BufferPool to 0:0");
  return parsed;
}

// Runs the body of a call, and returns the call's status. If the body throws a Refusal, its text is
// stored for aclGetRecentErrMsg.
Status answered(const char *call, const std::function<void()> &body) {
  try {
    body();
    return SUCCESS;
  } catch (const Refusal &refusal) {
    emu::fail(int(refusal.status), "AdxlEngine::%s: %s", call, refusal.what());
    return refusal.status;
  } catch (const std::exception &error) {
    emu::fail(int(FAILED), "AdxlEngine::%s: %s", call, error.what());
    return FAILED;
  }
}

int device_of_thread() {
  int32_t device = -1;
  aclError e = aclrtGetDevice(&device);
  refuse_unless(!e, Status(e), "call aclrtSetDevice before Initialize");
  return device;
}

int physical(int device) {
  int32_t id = -1;
  aclrtGetPhyDevIdByLogicDevId(device, &id);
  return id;
}

// While this object exists, the thread uses a certain context. Afterwards, it uses its previous
// context again.
class CurrentContext {
public:
  explicit CurrentContext(aclrtContext context) {
    aclrtGetCurrentContext(&previous_);
    aclrtSetCurrentContext(context);
  }
  ~CurrentContext() {
    if (previous_)
      aclrtSetCurrentContext(previous_);
  }

private:
  aclrtContext previous_ = nullptr;
};

void check_timeout(int timeout_ms) {
  refuse_unless(timeout_ms > 0, PARAM_INVALID, "a timeout of ", timeout_ms, " ms is not above 0");
}

}  // namespace

namespace adxl {

class AdxlEngine::Impl {
public:
  Impl(const EngineName &name, const Options &options)
      : name_(name), options_(options), device_(device_of_thread()), self_(name, physical(device_)),
        memory_(device_) {
    aclrtGetCurrentContext(&context_);
    if (name.port)
      listener_ = std::make_unique<Listener>(name, self_.identity(), memory_, context_);
  }

  // Refuses a call if the thread does not use the context of Initialize. The documents of all calls
  // except Finalize and SendNotify require this context.
  void check_context() const {
    aclrtContext current = nullptr;
    aclrtGetCurrentContext(&current);
    demand(current == context_, PARAM_INVALID, "the thread has not the context of Initialize");
  }

  MemHandle add_memory(const MemDesc &memory, MemType type) {
    check_context();
    return memory_.add(memory, type);
  }

  void remove_memory(MemHandle handle) {
    check_context();
    refuse_unless(handle, PARAM_INVALID, "the handle is null");
    std::lock_guard<std::mutex> lock(mutex_);
    size_t links = links_.size() + (listener_ ? listener_->num_clients() : 0);
    demand(!links, FAILED, links, " links still use the memory: disconnect them first");
    memory_.remove(handle);
  }

  void connect(const std::string &remote, int timeout_ms) {
    check_context();
    std::lock_guard<std::mutex> one(connect_mutex_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      refuse_unless(!links_.count(remote), ALREADY_CONNECTED, remote, " is connected already");
    }
    std::string fault = emu::planted_fault("adxl_connect", device_, [] { return false; });
    refuse_unless(fault.empty(), FAILED, fault);
    std::vector<Range> local = memory_.ranges();
    Peer peer(parse_name(remote), self_.identity(), local, timeout_ms);
    const CurrentContext current(context_);
    auto channel = std::make_shared<Channel>(std::move(peer), std::move(local), device_);
    std::lock_guard<std::mutex> lock(mutex_);
    links_[remote] = {channel};
  }

  // Closes the link to an engine. A new link to the same engine is made only after the old link has
  // ended all its accesses to memory. If the argument `only` is given, the link is closed only if
  // it uses this channel.
  void disconnect(const std::string &remote, int timeout_ms, const Channel *only = nullptr) {
    check_context();
    std::shared_ptr<Channel> channel;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = links_.find(remote);
      bool is_open = found != links_.end() && !found->second.is_closing;
      refuse_unless(is_open && (!only || found->second.channel.get() == only), NOT_CONNECTED,
                    remote, " is not connected");
      channel = found->second.channel;
      found->second.is_closing = true;
    }
    channel->close();
    Status left = channel->peer().leave(timeout_ms);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      links_.erase(remote);
    }
    refuse_unless(left == SUCCESS, TIMEOUT, remote, " did not confirm the end of the link within ",
                  timeout_ms, " ms");
  }

  void transfer(const std::string &remote, TransferOp operation,
                const std::vector<TransferOpDesc> &spans, int timeout_ms) {
    check_context();
    std::shared_ptr<Channel> channel = linked(remote, timeout_ms);
    try {
      channel->wait(channel->start(operation, spans), timeout_ms);
    } catch (const Refusal &) {
      unlink_automatically(remote, timeout_ms, *channel);
      throw;
    }
  }

  TransferReq start(const std::string &remote, TransferOp operation,
                    const std::vector<TransferOpDesc> &spans) {
    check_context();
    std::shared_ptr<Channel> channel = linked(remote, kAsyncConnectMs);
    std::shared_ptr<Transfer> transfer;
    try {
      transfer = channel->start(operation, spans);
    } catch (const Refusal &) {
      unlink_automatically(remote, kAsyncConnectMs, *channel);
      throw;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    requests_[next_] = {remote, channel, transfer};
    return reinterpret_cast<TransferReq>(next_++);
  }

  // After the transfer or the link of a request has ended, the status of the request can be queried
  // only once.
  TransferStatus status(TransferReq handle) {
    check_context();
    auto id = reinterpret_cast<uintptr_t>(handle);
    Request request;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = requests_.find(id);
      refuse_unless(found != requests_.end(), PARAM_INVALID, "there is no request ", id,
                    ", or it has ended");
      request = found->second;
    }
    TransferStatus now = TransferStatus::FAILED;
    try {
      refuse_unless(find(request.remote) == request.channel, NOT_CONNECTED,
                    "the link of the request has ended");
      now = request.channel->status(request.transfer);
      refuse_unless(now != TransferStatus::FAILED, FAILED, request.transfer->failure);
    } catch (const Refusal &refusal) {
      forget(id);
      if (refusal.status != NOT_CONNECTED)
        unlink_automatically(request.remote, kAsyncConnectMs, *request.channel);
      throw;
    }
    if (now != TransferStatus::WAITING)
      forget(id);
    return now;
  }

private:
  struct Link {
    std::shared_ptr<Channel> channel;
    bool is_closing = false;
  };
  struct Request {
    std::string remote;
    std::shared_ptr<Channel> channel;
    std::shared_ptr<Transfer> transfer;
  };

  const EngineName name_;
  const Options options_;
  const int device_;
  const Self self_;
  aclrtContext context_ = nullptr;
  Memory memory_;
  std::unique_ptr<Listener> listener_;
  std::mutex connect_mutex_;  // one link is made at a time
  std::mutex mutex_;          // guards the members below
  std::map<std::string, Link> links_;
  std::map<uintptr_t, Request> requests_;
  uintptr_t next_ = 1;

  std::shared_ptr<Channel> find(const std::string &remote) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = links_.find(remote);
    return found == links_.end() || found->second.is_closing ? nullptr : found->second.channel;
  }

  void forget(uintptr_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    requests_.erase(id);
  }

  std::shared_ptr<Channel> linked(const std::string &remote, int timeout_ms) {
    std::shared_ptr<Channel> channel = find(remote);
    if (!channel && options_.auto_connect) {
      try {
        connect(remote, timeout_ms);
      } catch (const Refusal &refusal) {
        refuse_unless(refusal.status == ALREADY_CONNECTED, NOT_CONNECTED, refusal.what());
      }
      channel = find(remote);
    }
    refuse_unless(channel != nullptr, NOT_CONNECTED, remote, " is not connected");
    return channel;
  }

  // With AutoConnect, a failed transfer ends its link.
  void unlink_automatically(const std::string &remote, int timeout_ms, const Channel &channel) {
    if (options_.auto_connect)
      answered("Disconnect", [&] { disconnect(remote, timeout_ms, &channel); });
  }
};

// ---- the calls of programs

AdxlEngine::AdxlEngine() = default;
AdxlEngine::~AdxlEngine() = default;

Status AdxlEngine::Initialize(const AscendString &local_engine,
                              const std::map<AscendString, AscendString> &options) {
  return answered("Initialize", [&] {
    refuse_unless(!impl_, FAILED, "the engine is initialized already");
    impl_ = std::make_unique<Impl>(parse_name(local_engine.GetString()), parse_options(options));
  });
}

void AdxlEngine::Finalize() { impl_.reset(); }

#define REFUSE_UNLESS_INITIALIZED refuse_unless(impl_ != nullptr, FAILED, "call Initialize first")

Status AdxlEngine::RegisterMem(const MemDesc &memory, MemType type, MemHandle &handle) {
  return answered("RegisterMem", [&] {
    REFUSE_UNLESS_INITIALIZED;
    handle = impl_->add_memory(memory, type);
  });
}

Status AdxlEngine::DeregisterMem(MemHandle handle) {
  return answered("DeregisterMem", [&] {
    REFUSE_UNLESS_INITIALIZED;
    impl_->remove_memory(handle);
  });
}

Status AdxlEngine::Connect(const AscendString &remote_engine, int32_t timeout_ms) {
  return answered("Connect", [&] {
    REFUSE_UNLESS_INITIALIZED;
    check_timeout(timeout_ms);
    impl_->connect(remote_engine.GetString(), timeout_ms);
  });
}

Status AdxlEngine::Disconnect(const AscendString &remote_engine, int32_t timeout_ms) {
  return answered("Disconnect", [&] {
    REFUSE_UNLESS_INITIALIZED;
    check_timeout(timeout_ms);
    impl_->disconnect(remote_engine.GetString(), timeout_ms);
  });
}

Status AdxlEngine::TransferSync(const AscendString &remote_engine, TransferOp operation,
                                const std::vector<TransferOpDesc> &spans, int32_t timeout_ms) {
  return answered("TransferSync", [&] {
    REFUSE_UNLESS_INITIALIZED;
    check_timeout(timeout_ms);
    impl_->transfer(remote_engine.GetString(), operation, spans, timeout_ms);
  });
}

Status AdxlEngine::TransferAsync(const AscendString &remote_engine, TransferOp operation,
                                 const std::vector<TransferOpDesc> &spans, const TransferArgs &,
                                 TransferReq &request) {
  return answered("TransferAsync", [&] {
    REFUSE_UNLESS_INITIALIZED;
    request = impl_->start(remote_engine.GetString(), operation, spans);
  });
}

Status AdxlEngine::GetTransferStatus(const TransferReq &request, TransferStatus &status) {
  status = TransferStatus::FAILED;
  return answered("GetTransferStatus", [&] {
    REFUSE_UNLESS_INITIALIZED;
    refuse_unless(request, FAILED, "the request is null");
    status = impl_->status(request);
  });
}

Status AdxlEngine::GetCapability(FeatureType feature, int32_t &value) {
  return answered("GetCapability", [&] {
    refuse_unless(feature >= 0, PARAM_INVALID, "there is no feature ", int(feature));
    value = feature == AUTO_CONNECT;
  });
}

// ---- not emulated

static Status refused(const char *call) {
  return answered(call, [] { throw Refusal(UNSUPPORTED, "the call is not emulated"); });
}

Status AdxlEngine::SendNotify(const AscendString &, const NotifyDesc &, int32_t) {
  return refused("SendNotify");
}
Status AdxlEngine::GetNotifies(std::vector<NotifyDesc> &) { return refused("GetNotifies"); }
Status AdxlEngine::MallocMem(MemType, size_t, void **) { return refused("MallocMem"); }
Status AdxlEngine::ExportToShareableHandle(void *, aclrtMemFabricHandle &) {
  return refused("ExportToShareableHandle");
}
Status AdxlEngine::FreeMem(void *) { return refused("FreeMem"); }

}  // namespace adxl
