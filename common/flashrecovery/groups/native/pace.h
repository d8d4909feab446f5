// When copies use the network: not while training communicates, as long as there is time for that (FFTrainer's priority
// of traffic). A copy has a window, from its begin to the moment when training needs it. Within it, what is sent on a
// paced stream is held back in small pieces whenever an operation of the script is under way. Nothing is held back when
// the window is over, when training waits for the copy, or when what is left takes the rest of the window anyway: so two
// ranks never wait for each other because of this.
#pragma once

#include "sockets.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <condition_variable>
#include <deque>

namespace flashrecovery {

// The script's operations that send something, from their launch to their end.
class Traffic {
 public:
  static Traffic& instance() {
    static auto* me = new Traffic();  // never freed: operations end on threads that outlive static objects
    return *me;
  }
  void begin() { ++count_; }
  void end() {
    if (--count_ == 0) changed_.notify_all();
  }
  // On a device an operation has not ended when the host has waited for it: what the calling thread's current stream
  // holds now counts until it has happened. Only while a copy is under way; else this costs nothing.
  void followStream(c10::DeviceType type) {
    if (!watched_ || type == c10::DeviceType::CPU) return;
    try {
      const c10::impl::VirtualGuardImpl device(type);
      c10::Event event(type);
      event.record(device.getStream(device.getDevice()));
      std::lock_guard<std::mutex> guard(mutex_);
      if (events_.size() == kEvents) events_.pop_front();
      events_.push_back(std::move(event));
    } catch (const c10::Error&) {  // the device has failed, which training hears by itself
    }
  }
  void watch(bool on) { watched_ = on; }

  bool underWay() {
    std::lock_guard<std::mutex> guard(mutex_);
    return count_ > 0 || onDevice();
  }
  // Sleeps until nothing is under way, at most `most`.
  void awaitNone(std::chrono::microseconds most) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, most, [&] { return count_ == 0 && !onDevice(); });
  }

 private:
  static constexpr size_t kEvents = 64;

  bool onDevice() {
    try {
      while (!events_.empty() && events_.front().query()) events_.pop_front();
    } catch (const c10::Error&) {  // the device has failed, which training hears by itself
      events_.clear();
    }
    return !events_.empty();
  }

  std::atomic<int64_t> count_{0};
  std::atomic<bool> watched_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::Event> events_;
};

// One operation's part in it: from begin() to the first end(), at the latest to its destruction.
class TrafficPart {
 public:
  TrafficPart() = default;
  TrafficPart(const TrafficPart&) = delete;
  TrafficPart& operator=(const TrafficPart&) = delete;
  ~TrafficPart() { end(); }
  void begin() {
    if (!on_.exchange(true)) Traffic::instance().begin();
  }
  void end() {
    if (on_.exchange(false)) Traffic::instance().end();
  }

 private:
  std::atomic<bool> on_{false};
};

class Pace {
 public:
  using Seconds = std::chrono::duration<double>;

  static Pace& instance() {
    static auto* me = new Pace();
    return *me;
  }

  // A copy of `bytes` begins, which is not needed for `window`. `rate`: bytes a second without throttling; 0: unknown.
  void begin(uint64_t bytes, Seconds window, double rate) {
    left_ = static_cast<int64_t>(bytes);
    held_ = 0;
    rate_ = rate;
    until_ = (std::chrono::steady_clock::now() + std::chrono::duration_cast<Deadline::duration>(window)).time_since_epoch().count();
    hurried_ = false;
    Traffic::instance().watch(true);
  }
  // It is needed now.
  void hurry() {
    hurried_ = true;
    Traffic::instance().watch(false);
  }
  double rate() const { return rate_; }
  // For how long the last copy has been held back.
  Seconds held() const { return std::chrono::duration_cast<Seconds>(Deadline::duration(held_.load())); }

  // Returns when the next piece may be sent.
  void await(const Stop& stop) {
    if (hurries() || !Traffic::instance().underWay()) return;
    const auto since = std::chrono::steady_clock::now();
    while (!hurries() && Traffic::instance().underWay()) {
      stop.check();
      Traffic::instance().awaitNone(kLook);
    }
    held_ += (std::chrono::steady_clock::now() - since).count();
  }
  void sent(size_t bytes) { left_ -= static_cast<int64_t>(bytes); }

 private:
  static constexpr std::chrono::microseconds kLook{1000};

  bool hurries() const {
    if (hurried_) return true;
    const auto left = Seconds(Deadline::duration(until_.load() - std::chrono::steady_clock::now().time_since_epoch().count()));
    const double rate = rate_;
    return left.count() <= (rate > 0 ? std::max<double>(left_, 0) / rate : 0);
  }

  std::atomic<int64_t> left_{0};
  std::atomic<Deadline::rep> until_{0}, held_{0};
  std::atomic<double> rate_{0};
  std::atomic<bool> hurried_{true};
};

}  // namespace flashrecovery
