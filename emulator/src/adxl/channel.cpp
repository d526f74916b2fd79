#include "adxl/channel.h"

#include "runtime/faults.h"

#include <algorithm>
#include <cstring>

#include <pthread.h>

namespace emu::adxl {

// A transfer moves its bytes in pieces of this size. Between two pieces, it checks whether the link
// is closed.
constexpr size_t kPiece = 1 << 20;

Channel::Channel(Peer peer, std::vector<Range> local, int device)
    : peer_(std::move(peer)), local_(std::move(local)), device_(device),
      thread_([this] { work(); }) {}

Channel::~Channel() { close(); }

void Channel::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable())
    thread_.join();
}

void Channel::check(const TransferOpDesc &span) const {
  refuse_unless(span.local_addr && span.remote_addr, PARAM_INVALID, "a span has no address");
  demand(span.len, PARAM_INVALID, "the span at ", hex(span.local_addr), " has no bytes");
  const Range *local = range_of(local_, span.local_addr, span.len);
  const Range *remote = range_of(peer_.ranges(), span.remote_addr, span.len);
  // Bytes outside the registered ranges may belong to any object, so no setting permits to transfer
  // them.
  refuse_unless(local, PARAM_INVALID, "the ", span.len, " bytes at ", hex(span.local_addr),
                " of this engine were not registered when the link was made");
  refuse_unless(remote, PARAM_INVALID, "the ", span.len, " bytes at ", hex(span.remote_addr),
                " of the peer were not registered when the link was made");
  // This rule is from the document of the option adxl.BufferPool.
  demand(!peer_.over_hccs() || local->type == MEM_DEVICE || remote->type == MEM_DEVICE,
         PARAM_INVALID, "HCCS does not transfer from host to host");
}

std::shared_ptr<Transfer> Channel::start(TransferOp operation,
                                         const std::vector<TransferOpDesc> &spans) {
  refuse_unless(operation == READ || operation == WRITE, PARAM_INVALID, "operation ", operation);
  for (const TransferOpDesc &span : spans)
    check(span);
  auto transfer = std::make_shared<Transfer>(Transfer{operation, spans});
  std::lock_guard<std::mutex> lock(mutex_);
  refuse_unless(broken_.empty(), FAILED, "the link has failed before: ", broken_);
  refuse_unless(!closed_, NOT_CONNECTED, "the link is closed");
  queue_.push_back(transfer);
  changed_.notify_all();
  return transfer;
}

void Channel::wait(const std::shared_ptr<Transfer> &transfer, int timeout_ms) {
  std::unique_lock<std::mutex> lock(mutex_);
  bool over = changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] {
    return transfer->status != TransferStatus::WAITING;
  });
  if (!over)
    broken_ = "a transfer did not end within " + std::to_string(timeout_ms) + " ms";
  refuse_unless(over, TIMEOUT, broken_);
  refuse_unless(transfer->status == TransferStatus::COMPLETED, FAILED, transfer->failure);
}

TransferStatus Channel::status(const std::shared_ptr<Transfer> &transfer) {
  std::lock_guard<std::mutex> lock(mutex_);
  refuse_unless(broken_.empty(), FAILED, "the link has failed: ", broken_);
  return transfer->status;
}

void Channel::work() {
  pthread_setname_np(pthread_self(), "npu_adxl");
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return closed_ || !queue_.empty(); });
    if (queue_.empty())
      return;
    std::shared_ptr<Transfer> next = queue_.front();
    queue_.pop_front();
    std::string failure = closed_ ? "the link was closed" : broken_;
    if (failure.empty()) {
      lock.unlock();
      failure = move(*next);
      lock.lock();
    }
    next->failure = failure;
    next->status = failure.empty() ? TransferStatus::COMPLETED : TransferStatus::FAILED;
    if (broken_.empty())
      broken_ = failure;
    changed_.notify_all();
  }
}

// Returns "", or the reason why the transfer failed. Spans before the failed span have been moved.
std::string Channel::move(const Transfer &transfer) const {
  for (const TransferOpDesc &span : transfer.spans) {
    if (!peer_.is_alive())
      return "link error: the engine of the peer has ended";
    std::string fault = planted_fault("adxl_transfer", device_, [this] { return closed_.load(); });
    if (!fault.empty())
      return fault;
    for (size_t done = 0; done < span.len; done += kPiece) {
      if (closed_)
        return "the link was closed";
      size_t bytes = std::min(kPiece, span.len - done);
      int error = peer_.copy(transfer.operation, span.local_addr + done, span.remote_addr + done,
                             bytes);
      if (error)
        return std::string("link error: ") + strerror(error);
    }
  }
  return "";
}

}  // namespace emu::adxl
