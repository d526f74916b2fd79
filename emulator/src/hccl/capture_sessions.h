// The capture to which a collective belongs. All ranks of a communicator must replay the graph of
// one capture; graphs of different captures do not pair, even with the same operators (HCCL's
// user_guide/constraints.md). So every capture with collectives of a communicator has a number, the
// same on all ranks, and the calls of its replays carry this number.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace emu::hccl {

class Communicator;

// One capture, owned by the tasks that it recorded.
class CaptureSession {
public:
  const uint32_t number;  // from 1

  CaptureSession(uint32_t number, std::shared_ptr<Communicator> communicator);
  ~CaptureSession();
  CaptureSession(const CaptureSession &) = delete;

  void replayed() { replayed_ = true; }

private:
  const std::shared_ptr<Communicator> communicator_;
  std::atomic<bool> replayed_{false};
};

// The captures of one rank. Ranks count in the same way without communication, because they capture
// in lockstep. A failed capture may have reached the communicator on some ranks only. So a rank
// tells the others the number of a capture that was dropped before its first replay, and no rank
// uses that number, or a smaller one.
class CaptureSessions {
public:
  using Dropped = std::atomic<uint32_t>;  // the highest such number of a rank

  void share(std::vector<Dropped *> of_ranks, uint32_t rank);  // the others read this rank's number
  // The session of a graph that is being captured, by its id.
  std::shared_ptr<CaptureSession> of(uint32_t graph,
                                     const std::shared_ptr<Communicator> &communicator);
  void drop(uint32_t number);

private:
  std::mutex mutex_;
  std::map<uint32_t, std::weak_ptr<CaptureSession>> by_graph_;
  std::vector<Dropped *> dropped_;
  uint32_t rank_ = 0, last_ = 0;
};

}  // namespace emu::hccl
