// A library for LD_PRELOAD that pauses single threads of a process at random system calls.
//
// A busy machine may stop one thread while the other threads of its process run. Then events happen
// in an unusual order. For example, one thread calls ``connect`` and is stopped. Before this thread
// sends anything, ZeroMQ's thread notices that the connection was refused. On an idle machine, such
// an order of events is rare. ``make test-paused`` runs the tests with this library, which makes
// such orders frequent.
//
// The environment variable PAUSES contains two numbers in seconds: the mean time between two pauses
// of a process, and the maximum length of most pauses. One pause in four may last up to three times
// as long.

#include <dlfcn.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

class Pauses {
  public:
    Pauses() {
        const char* lengths = std::getenv("PAUSES");
        is_on_ = lengths && std::sscanf(lengths, "%lf,%lf", &gap_s_, &longest_s_) == 2;
        next_ = later(2 * gap_s_);
    }

    // Pauses the calling thread if a pause is due. Does not change errno.
    void at_call() {
        if (!is_on_) return;
        const int error = errno;
        std::int64_t due = next_;
        // If a pause is due, a call pauses with probability 1/3. If every call paused, the thread
        // with the most calls would get all pauses.
        if (later(0) >= due && random() < 1.0 / 3 && next_.compare_exchange_strong(due, later(2 * gap_s_ * random()))) {
            const double most_s = random() < 0.25 ? 3 * longest_s_ : longest_s_;
            std::this_thread::sleep_for(Seconds(most_s * random()));
        }
        errno = error;
    }

  private:
    static std::int64_t later(double seconds) {
        return (Clock::now() + std::chrono::duration_cast<Clock::duration>(Seconds(seconds)))
            .time_since_epoch()
            .count();
    }

    static double random() {
        thread_local std::minstd_rand source{std::random_device{}()};
        return std::uniform_real_distribution<double>()(source);
    }

    bool is_on_ = false;
    double gap_s_ = 0, longest_s_ = 0;
    std::atomic<std::int64_t> next_{0};
};

Pauses& pauses() {
    static Pauses owned;
    return owned;
}

template <typename Function>
Function* real(Function*, const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

// PAUSE_BEFORE is for calls whose effects other threads see. PAUSE_AFTER is for calls that wait for
// other threads.
#define PAUSE_BEFORE(result, name, parameters, arguments)        \
    extern "C" result name parameters {                          \
        static auto* const next = real(&name, #name);            \
        pauses().at_call();                                      \
        return next arguments;                                   \
    }
#define PAUSE_AFTER(result, name, parameters, arguments)         \
    extern "C" result name parameters {                          \
        static auto* const next = real(&name, #name);            \
        const result got = next arguments;                       \
        pauses().at_call();                                      \
        return got;                                              \
    }

PAUSE_BEFORE(ssize_t, write, (int file, const void* data, size_t size), (file, data, size))
PAUSE_BEFORE(ssize_t, send, (int file, const void* data, size_t size, int flags), (file, data, size, flags))
PAUSE_BEFORE(ssize_t, sendmsg, (int file, const msghdr* message, int flags), (file, message, flags))
PAUSE_BEFORE(int, unlink, (const char* path), (path))
PAUSE_BEFORE(int, rename, (const char* from, const char* to), (from, to))
PAUSE_BEFORE(int, kill, (pid_t process, int number), (process, number))
PAUSE_AFTER(ssize_t, read, (int file, void* data, size_t size), (file, data, size))
PAUSE_AFTER(ssize_t, recv, (int file, void* data, size_t size, int flags), (file, data, size, flags))
PAUSE_AFTER(ssize_t, recvmsg, (int file, msghdr* message, int flags), (file, message, flags))
PAUSE_AFTER(int, poll, (pollfd* files, nfds_t count, int timeout), (files, count, timeout))
PAUSE_AFTER(int, epoll_wait, (int file, epoll_event* events, int most, int timeout), (file, events, most, timeout))
PAUSE_AFTER(int, connect, (int file, const sockaddr* address, socklen_t size), (file, address, size))
PAUSE_AFTER(int, accept4, (int file, sockaddr* address, socklen_t* size, int flags), (file, address, size, flags))
PAUSE_AFTER(int, listen, (int file, int waiting), (file, waiting))
