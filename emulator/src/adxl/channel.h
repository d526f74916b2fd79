// A client's link to one peer. A thread moves the spans of a transfer, as a stream does on a real
// link.
#pragma once

#include "adxl/peer.h"
#include "adxl/streams.h"

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>

namespace emu::adxl {

struct Transfer {
  const TransferOp operation;
  const std::vector<TransferOpDesc> spans;
  TransferStatus status = TransferStatus::WAITING;  // under the channel's mutex
  std::string failure;
};

class Channel {
public:
  // The calling thread must use the engine's context. Throws a Refusal if too few stream ids are
  // free.
  Channel(Peer peer, std::vector<Range> local, int device);
  ~Channel();

  // Checks all spans before the first byte moves, and throws a Refusal if a span is not permitted.
  std::shared_ptr<Transfer> start(TransferOp operation, const std::vector<TransferOpDesc> &spans);
  // Waits for the end of a transfer. Throws a Refusal if the transfer fails. After the status
  // TIMEOUT, the transfer still goes on, and the channel refuses other transfers until the channel
  // is closed.
  void wait(const std::shared_ptr<Transfer> &transfer, int timeout_ms);
  TransferStatus status(const std::shared_ptr<Transfer> &transfer);  // throws a Refusal

  // Ends all transfers. After this call, the channel accesses no memory.
  void close();
  const Peer &peer() const { return peer_; }

private:
  const Peer peer_;
  const std::vector<Range> local_;  // registered before the link was made
  const int device_;
  const Domain domain_;
  const TransferStream stream_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Transfer>> queue_;
  std::atomic<bool> closed_{false};
  std::string broken_;  // why the link has failed
  std::thread thread_;

  void check(const TransferOpDesc &span) const;
  void work();
  std::string move(const Transfer &transfer) const;
};

}  // namespace emu::adxl
