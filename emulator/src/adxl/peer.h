// The two ends of a link. A client connects to the address in the server's name. Both ends send
// their identities, and the server also sends its registered ranges. Then the client accesses the
// memory of the server's process directly, as a device does, even while the server's process is
// stopped. The connection stays open only to show that both ends are alive.
#pragma once

#include "adxl/memory.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace emu::adxl {

using Clock = std::chrono::steady_clock;

// The name of an engine: IP:PORT or IP, where an IPv6 address has square brackets. An engine
// without a port, or with port 0, does not listen.
struct EngineName {
  std::string text, ip;
  uint16_t port = 0;
};
EngineName parse_name(const std::string &text);  // throws a Refusal

class File {
public:
  File() = default;
  explicit File(int file) : file_(file) {}
  File(File &&other) noexcept : file_(std::exchange(other.file_, -1)) {}
  File &operator=(File &&other) noexcept {
    std::swap(file_, other.file_);
    return *this;
  }
  ~File();
  int get() const { return file_; }

private:
  int file_ = -1;
};

// The bytes of this structure are sent to the peer.
struct Identity {
  char magic[8];
  char engine[64];
  char host[40];
  int32_t pid, device;  // the physical device
  uint32_t roce;        // HCCL_INTRA_ROCE_ENABLE=1
  uint32_t num_ranges;  // a server sends its ranges after this structure
  // The peer reads the secret at this address in this process's memory. If the peer finds the
  // secret there, the peer accesses the right process.
  uint64_t secret_address;
  uint8_t secret[16];
};

class Self {
public:
  Self(const EngineName &name, int physical_device);
  Self(const Self &) = delete;  // peers know the address of the secret
  ~Self() { explicit_bzero(identity_.secret, sizeof identity_.secret); }
  const Identity &identity() const { return identity_; }

private:
  Identity identity_{};
};

class Peer {
public:
  // Connects, and checks what CANN's documents require of both ends. Throws a Refusal if this
  // fails.
  Peer(const EngineName &name, const Identity &self, const std::vector<Range> &local,
       int timeout_ms);

  const std::vector<Range> &ranges() const { return ranges_; }
  bool over_hccs() const { return hccs_; }
  // Returns whether the peer's process still has the memory of this link.
  bool is_alive() const;
  // Copies bytes between this process and the peer. Returns 0, or errno.
  int copy(TransferOp operation, uint64_t local, uint64_t remote, size_t bytes) const;
  // Tells the server that this link ends, and waits for the server's answer.
  Status leave(int timeout_ms) const;

private:
  File socket_;
  Identity identity_;
  std::vector<Range> ranges_;
  bool hccs_;

  void check_peer(const EngineName &name, const Identity &self,
                  const std::vector<Range> &local) const;
  void check_devices(const Identity &self, const std::vector<Range> &local) const;
};

// Owns a thread that answers clients at the address of an engine.
class Listener {
public:
  // Throws a Refusal if it cannot listen. `context` is the engine's context.
  Listener(const EngineName &name, const Identity &self, const Memory &memory,
           aclrtContext context);
  ~Listener();
  int num_clients() const { return num_clients_; }

private:
  const Identity self_;
  const Memory &memory_;
  const aclrtContext context_;
  File socket_, wake_;
  std::atomic<int> num_clients_{0};
  std::thread thread_;

  void serve();
};

}  // namespace emu::adxl
