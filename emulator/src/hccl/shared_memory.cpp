#include "hccl/shared_memory.h"

#include "settings.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace emu::hccl {

static const std::filesystem::path kFolder = "/dev/shm";
static const char kPrefix[] = "emulated_hccl_";
static const char kMeeting[] = "meeting_of_";

// The number of this process's PID namespace. Process ids are meaningful only within one namespace.
static unsigned long long process_ids() {
  struct stat entry;
  return stat("/proc/self/ns/pid", &entry) == 0 ? entry.st_ino : 0;
}

std::string new_name() {
  unsigned char random[16];
  if (getrandom(random, sizeof random, 0) != sizeof random)
    throw std::runtime_error(std::string("HCCL: getrandom: ") + strerror(errno));
  char text[33];
  for (size_t i = 0; i < sizeof random; i++)
    snprintf(text + 2 * i, 3, "%02x", random[i]);
  return kPrefix + std::to_string(getpid()) + "_" + std::to_string(process_start_time(getpid())) +
         "_" + std::to_string(process_ids()) + "_" + text;
}

// Whether the process that made this name has ended. False if this is not known.
static bool is_stale(const std::string &name) {
  int pid = 0;
  unsigned long long started = 0, ids = 0;
  const char *owner = name.c_str() + std::min(strlen(kPrefix), name.size());
  return sscanf(owner, "%d_%llu_%llu", &pid, &started, &ids) == 3 && ids == process_ids() &&
         process_start_time(pid) != started;
}

// Returns "" if the file does not exist or may not be read.
static std::string text_of_file(const std::filesystem::path &path) {
  std::ifstream file(path);
  return std::string((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
}

void remove_stale_segments() {
  std::error_code error;
  for (auto &entry : std::filesystem::directory_iterator(kFolder, error)) {
    std::string name = entry.path().filename();
    if (name.rfind(kMeeting, 0) == 0)
      name = text_of_file(entry.path());
    if (name.rfind(kPrefix, 0) == 0 && is_stale(name))
      std::filesystem::remove(entry.path(), error);
  }
}

static std::filesystem::path meeting_of(const std::string &communicator) {
  return kFolder / (kMeeting + communicator + "_" + std::to_string(process_ids()) + "_" +
                    settings().host);
}

std::string name_on_this_host(const std::string &communicator) {
  std::string mine = new_name();
  auto draft = kFolder / (mine + "_draft"), meeting = meeting_of(communicator);
  {
    std::ofstream file(draft);
    file << mine;
  }
  std::filesystem::permissions(draft, std::filesystem::perms(0600));
  if (link(draft.c_str(), meeting.c_str()) && errno != EEXIST)
    throw std::runtime_error("HCCL: shared memory " + meeting.string() + ": " + strerror(errno));
  unlink(draft.c_str());
  std::string agreed = text_of_file(meeting);
  return agreed.empty() ? mine : agreed;
}

void forget_name_on_this_host(const std::string &communicator) {
  unlink(meeting_of(communicator).c_str());
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

char *map_private(size_t bytes) {
  void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED)
    throw std::runtime_error(std::string("HCCL: memory: ") + strerror(errno));
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
  size_t end = text.rfind(')');  // the name may contain spaces and parentheses
  if (end == std::string::npos)
    return 0;
  char state = 0;
  unsigned long long start = 0;
  // The start time is field 22. The text after the name begins with field 3, the state.
  if (sscanf(text.c_str() + end + 1,
             " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
             &state, &start) != 2)
    return 0;
  return state == 'Z' || state == 'X' ? 0 : start;
}

}  // namespace emu::hccl
