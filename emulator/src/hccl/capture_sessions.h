// The capture to which a collective belongs. When the ranks of a communicator replay a graph, all
// ranks must have captured their graphs in the same capture. Graphs of different captures do not
// match, even if they have the same operators (HCCL's user_guide/constraints.md). So each capture
// that contains collectives of a communicator has a number, which is the same on all ranks. When
// the graph is replayed, each call contains this number.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace emu::hccl {

class Communicator;

// One capture. The tasks that were recorded in it own this object.
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

// The captures of one rank. All ranks give a capture the same number without communication, because
// they capture in lockstep. But if a capture fails, perhaps only some ranks have used the
// communicator during the capture. So if a rank drops a capture before its first replay, the rank
// tells the other ranks the number of this capture. Then no rank uses this number or a smaller
// number for a new capture.
class CaptureSessions {
public:
  using Dropped = std::atomic<uint32_t>;  // the highest number that a rank has dropped

  void share(std::vector<Dropped *> of_ranks, uint32_t rank);  // the others read this rank's number
  // Returns the session of the graph with this id, which is being captured.
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
