// Named shared memory of this machine, and waiting on words in it.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace emu::hccl {

// Names begin with this and the id of the process that made the communicator's root, so that a
// later process may remove what a killed one left.
std::string new_root_name();
void remove_stale_segments();

char *map_segment(const std::string &name, size_t bytes);  // created if need be; throws
void unmap_segment(char *p, size_t bytes);
void remove_segment(const std::string &name);

void wait_on_word(std::atomic<uint32_t> &word, uint32_t seen, long microseconds);
void wake_word(std::atomic<uint32_t> &word);

uint64_t process_start_time(int pid);  // 0 if there is no such process

}  // namespace emu::hccl
