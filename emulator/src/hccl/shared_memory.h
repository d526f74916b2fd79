// Named shared memory of this machine, and functions that wait for words in this memory.
#pragma once

#include "hccl/patience.h"
#include "runtime/services.h"
#include "runtime/spin.h"

#include <atomic>
#include <cstdint>
#include <string>

namespace emu::hccl {

// A name begins with the id of the process that made it, so that a later process can remove the
// memory that a killed process left. Names are unique over all hosts.
std::string new_name();
void remove_stale_segments();

// Returns a name that is the same for all ranks of a communicator on this host. The first of these
// ranks makes the name, and stores it in shared memory whose name all ranks know. Two ranks get the
// same name if they share memory and a PID namespace. Then each of the two ranks can find out
// whether the other rank's process is alive.
std::string name_on_this_host(const std::string &communicator);
void forget_name_on_this_host(const std::string &communicator);

char *map_segment(const std::string &name, size_t bytes);  // created if necessary; throws
// memory without a name, which only this process uses
char *map_private(size_t bytes);
void unmap_segment(char *p, size_t bytes);
void remove_segment(const std::string &name);

void wait_on_word(std::atomic<uint32_t> &word, uint32_t seen, long microseconds);
void wake_word(std::atomic<uint32_t> &word);

// Waits until word >= at_least. The process that increases the word wakes the processes that sleep.
// `impatient` is called every kCheckMs during the wait.
template <class Impatient>
void wait_until(std::atomic<uint32_t> &word, std::atomic<uint32_t> &sleepers, uint32_t at_least,
                Impatient impatient) {
  auto reached = [&](uint32_t value) { return static_cast<int32_t>(value - at_least) >= 0; };
  for (int i = 0; i < 2000 && !oversubscribed(); i++) {
    if (reached(word))
      return;
    spin_once();
  }
  auto start = std::chrono::steady_clock::now();
  for (;;) {
    sleepers++;
    uint32_t seen = word;
    if (!reached(seen))
      wait_on_word(word, seen, kCheckMs * 1000);
    sleepers--;
    if (reached(word))
      return;
    if (std::chrono::steady_clock::now() - start >= std::chrono::milliseconds(kCheckMs))
      impatient();
  }
}

uint64_t process_start_time(int pid);  // 0 if there is no such process

}  // namespace emu::hccl
