#include "hccl/capture_sessions.h"

#include "hccl/communicator.h"

#include <algorithm>

namespace emu::hccl {

CaptureSession::CaptureSession(uint32_t number_, std::shared_ptr<Communicator> communicator)
    : number(number_), communicator_(std::move(communicator)) {}

CaptureSession::~CaptureSession() {
  if (replayed_)
    return;
  communicator_->sessions().drop(number);
  communicator_->tell_dropped(number);
}

void CaptureSessions::share(std::vector<Dropped *> of_ranks, uint32_t rank) {
  dropped_ = std::move(of_ranks);
  rank_ = rank;
}

std::shared_ptr<CaptureSession>
CaptureSessions::of(uint32_t graph, const std::shared_ptr<Communicator> &communicator) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (auto known = by_graph_[graph].lock())
    return known;
  std::erase_if(by_graph_, [](const auto &entry) { return entry.second.expired(); });
  communicator->hear_dropped();
  for (const Dropped *dropped : dropped_)
    last_ = std::max(last_, dropped->load());
  auto session = std::make_shared<CaptureSession>(++last_, communicator);
  by_graph_[graph] = session;
  return session;
}

void CaptureSessions::drop(uint32_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  Dropped &mine = *dropped_[rank_];
  mine = std::max(mine.load(), number);
}

}  // namespace emu::hccl
