// A scheduler that ends a job signals all of its processes (SIGTERM), in any order. A rank that ends by it at once takes
// along what it holds, before anybody could keep that. So it notes the signal, where its agent sees it, and lives on; the
// agent decides. What the script does with the signal itself is not touched: Python is not told of this, a handler of the
// script's takes its place, and programs that the script starts are without it.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>

namespace flashrecovery {

class Termination {
 public:
  // Count SIGTERMs in this 8-byte word of the first 4096 bytes of a shared file, from now on. False if the process has a
  // handler already, or ignores the signal.
  static bool note(int file, size_t word) {
    struct sigaction now {};
    if (sigaction(SIGTERM, nullptr, &now) != 0 || now.sa_handler != SIG_DFL) return false;
    void* page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (page == MAP_FAILED) return false;
    told() = static_cast<std::atomic<int64_t>*>(page) + word;
    self() = getpid();
    struct sigaction ours {};
    ours.sa_sigaction = &caught;
    ours.sa_flags = SA_SIGINFO | SA_RESTART;
    sigemptyset(&ours.sa_mask);
    return sigaction(SIGTERM, &ours, nullptr) == 0;
  }

  // Whether SIGTERM would be noted now: the script has set nothing else.
  static bool notes() {
    struct sigaction now {};
    return sigaction(SIGTERM, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) && now.sa_sigaction == &caught;
  }

 private:
  static std::atomic<int64_t>*& told() {
    static std::atomic<int64_t>* value = nullptr;
    return value;
  }
  static pid_t& self() {
    static pid_t value = 0;
    return value;
  }

  static void caught(int number, siginfo_t*, void*) {
    if (getpid() == self()) {
      told()->fetch_add(1);
      return;
    }
    // A fork of the script's: as it would be without us. The signal is delivered when this returns.
    signal(number, SIG_DFL);
    raise(number);
  }
};

}  // namespace flashrecovery
