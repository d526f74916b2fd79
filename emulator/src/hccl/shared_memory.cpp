#include "hccl/shared_memory.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace emu::hccl {

static const char kPrefix[] = "emulated_hccl_";

std::string new_root_name() {
  static std::atomic<int> next{0};
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return kPrefix + std::to_string(getpid()) + "_" + std::to_string(process_start_time(getpid())) +
         "_" + std::to_string(now.tv_sec * 1000000000L + now.tv_nsec) + "_" +
         std::to_string(next++);
}

void remove_stale_segments() {
  std::error_code error;
  for (auto &entry : std::filesystem::directory_iterator("/dev/shm", error)) {
    std::string name = entry.path().filename();
    if (name.rfind(kPrefix, 0) != 0)
      continue;
    int pid = 0;
    unsigned long long started = 0;
    if (sscanf(name.c_str() + strlen(kPrefix), "%d_%llu", &pid, &started) == 2 &&
        process_start_time(pid) != started)
      std::filesystem::remove(entry.path(), error);
  }
}

char *map_segment(const std::string &name, size_t bytes) {
  int file = shm_open(("/" + name).c_str(), O_CREAT | O_RDWR, 0600);
  if (file < 0)
    throw std::runtime_error("HCCL: shared memory " + name + ": " + strerror(errno));
  void *p = MAP_FAILED;
  if (ftruncate(file, bytes) == 0)
    p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (p == MAP_FAILED)
    throw std::runtime_error("HCCL: mapping shared memory " + name + ": " + strerror(errno));
  return static_cast<char *>(p);
}

void unmap_segment(char *p, size_t bytes) { munmap(p, bytes); }
void remove_segment(const std::string &name) { shm_unlink(("/" + name).c_str()); }

void wait_on_word(std::atomic<uint32_t> &word, uint32_t seen, long microseconds) {
  timespec limit{microseconds / 1000000, microseconds % 1000000 * 1000};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}
void wake_word(std::atomic<uint32_t> &word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
}

uint64_t process_start_time(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  size_t end = text.rfind(')');  // the name may hold spaces and parentheses
  if (end == std::string::npos)
    return 0;
  char state = 0;
  unsigned long long start = 0;
  // Field 22; the state is field 3, the first one behind the name.
  if (sscanf(text.c_str() + end + 1,
             " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
             &state, &start) != 2)
    return 0;
  return state == 'Z' || state == 'X' ? 0 : start;
}

}  // namespace emu::hccl
