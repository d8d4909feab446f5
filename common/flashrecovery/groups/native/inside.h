// How many threads are within a call of an inner backend. NCCL frees a communicator at its abort, even if another
// thread is launching an operation on it; so an abort waits until no thread is inside.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

namespace flashrecovery {

class InsideCount {
 public:
  // Waits until no thread is inside; false at the deadline. Threads that enter meanwhile must be asked to leave.
  bool awaitEmpty(std::chrono::milliseconds deadline) const {
    const auto until = std::chrono::steady_clock::now() + deadline;
    while (count_ > 0) {
      if (std::chrono::steady_clock::now() >= until) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return true;
  }

 private:
  friend class Inside;
  std::atomic<int> count_{0};
};

// This thread is inside as long as it lives.
class Inside {
 public:
  explicit Inside(InsideCount& where) : where_(where) { ++where_.count_; }
  ~Inside() { --where_.count_; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  InsideCount& where_;
};

}  // namespace flashrecovery
