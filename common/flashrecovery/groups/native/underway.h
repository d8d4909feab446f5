// How long the training thread has had an operation under way: what is left of a step is its own work. A slow rank has
// more of it than the others, whose time goes into waiting for it.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>

namespace flashrecovery {

// Time in which at least one operation of the main thread was under way; overlapping ones count once.
class Underway {
 public:
  static bool onMainThread() {
    static thread_local const bool main = ::syscall(SYS_gettid) == ::getpid();
    return main;
  }
  static void begin() {
    auto& me = instance();
    std::lock_guard<std::mutex> guard(me.mutex_);
    if (me.count_++ == 0) me.since_ = now();
  }
  static void end() {
    auto& me = instance();
    std::lock_guard<std::mutex> guard(me.mutex_);
    if (--me.count_ == 0) me.total_ += now() - me.since_;
  }
  static uint64_t nanoseconds() {
    auto& me = instance();
    std::lock_guard<std::mutex> guard(me.mutex_);
    return me.total_ + (me.count_ > 0 ? now() - me.since_ : 0);
  }

 private:
  static Underway& instance() {
    static auto* me = new Underway();  // never freed: operations end on threads that outlive static objects
    return *me;
  }
  static uint64_t now() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(since).count());
  }

  std::mutex mutex_;
  uint64_t count_ = 0, since_ = 0, total_ = 0;
};

// One operation's part in it: from begin() to the first end(), at the latest to its destruction.
class UnderwayPart {
 public:
  UnderwayPart() = default;
  UnderwayPart(const UnderwayPart&) = delete;
  UnderwayPart& operator=(const UnderwayPart&) = delete;
  ~UnderwayPart() { end(); }
  void begin() {
    if (Underway::onMainThread() && !on_.exchange(true)) Underway::begin();
  }
  void end() {
    if (on_.exchange(false)) Underway::end();
  }

 private:
  std::atomic<bool> on_{false};
};

}  // namespace flashrecovery
