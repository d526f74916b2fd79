#include "hccl/door.h"

#include <vector>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

namespace emu::hccl {

constexpr size_t kVisitors = 256;
constexpr std::chrono::milliseconds kSilence{5000}, kSilenceInACrowd{500};

bool equal_in_constant_time(const Secret &a, const Secret &b) {
  volatile unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); i++)
    difference = difference | (a[i] ^ b[i]);
  return difference == 0;
}

void Door::accept_all() {
  auto now = std::chrono::steady_clock::now();
  for (;;) {
    bool is_full = visitors_.size() == kVisitors;
    if (is_full && now - visitors_.front().since < kSilenceInACrowd)
      return;
    int file = accept4(listener_.file(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (file < 0)
      return;
    int yes = 1;
    setsockopt(file, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    if (is_full)
      visitors_.pop_front();
    visitors_.push_back({Socket(file), now, {}});
  }
}

// The bytes after the secret are read only if the secret is correct.
bool Door::listen_to(Visitor &v, bool *has_proved) const {
  auto *words = reinterpret_cast<char *>(&v.hello);
  for (size_t end : {sizeof v.hello.question, sizeof v.hello}) {
    if (v.heard < end) {
      ptrdiff_t part = receive_some(v.socket, words + v.heard, end - v.heard);
      if (part < 0)
        return false;
      v.heard += part;
      if (v.heard < end)
        return std::chrono::steady_clock::now() - v.since < kSilence;
    }
    if (!equal_in_constant_time(v.hello.question, question_))
      return false;
  }
  *has_proved = true;
  return true;
}

void Door::attend(int ms, const Admit &admit) {
  // If the number of open connections is at its maximum, new connections are not accepted, and do
  // not wake this thread.
  bool is_full = visitors_.size() == kVisitors;
  std::vector<pollfd> files{{is_full ? -1 : listener_.file(), POLLIN, 0}};
  for (const Visitor &v : visitors_)
    files.push_back({v.socket.file(), POLLIN, 0});
  poll(files.data(), files.size(), ms);
  accept_all();
  for (auto v = visitors_.begin(); v != visitors_.end();) {
    bool has_proved = false;
    if (!listen_to(*v, &has_proved)) {
      v = visitors_.erase(v);
    } else if (has_proved) {
      Visitor proved = std::move(*v);
      v = visitors_.erase(v);
      admit(proved.hello, std::move(proved.socket));
    } else {
      ++v;
    }
  }
}

}  // namespace emu::hccl
