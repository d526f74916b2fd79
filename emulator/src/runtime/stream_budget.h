// Stream ids of a device: who holds how many.
#pragma once

#include <mutex>
#include <string>

namespace emu {

class StreamBudget {
public:
  enum Holder { Streams, Domains, Graphs };
  static StreamBudget &of(int device);

  bool take(Holder holder, long count);  // false, and takes nothing, if they are not there
  void release(Holder holder, long count);
  long available();
  std::string shortage();  // what holds them, for messages

private:
  std::mutex mutex_;
  long held_[3] = {};
  long held() const { return held_[0] + held_[1] + held_[2]; }
};

}  // namespace emu
