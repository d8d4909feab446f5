// Tells waiters that waiting is over, and why.
#pragma once

#include "transport.h"

#include <atomic>
#include <condition_variable>

namespace flashrecovery {

class StopFlag {
 public:
  void raise(const std::string& reason) {
    std::lock_guard<std::mutex> guard(mutex_);
    reason_ = reason;
    raised_ = true;
    changed_.notify_all();
  }
  // Sleeps, but not longer than until the flag is raised.
  void sleep(std::chrono::microseconds duration) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, duration, [this] { return raised_.load(); });
  }
  void clear() { raised_ = false; }
  bool raised() const { return raised_; }
  void check() const {
    if (!raised_) return;
    std::unique_lock<std::mutex> lock(mutex_);
    const std::string reason = reason_;
    lock.unlock();
    throwAbandoned(reason);
  }

 private:
  std::atomic<bool> raised_{false};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::string reason_;
};

}  // namespace flashrecovery
