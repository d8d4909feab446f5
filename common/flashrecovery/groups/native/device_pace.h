// How long a step is the device's own work, and for how long it waits in operations: with NCCL the host runs ahead of the
// device, so its clock does not tell. In one of ten steps a timed event is recorded before and behind each wait on the
// stream that computes; they are asked when they have come, at a later commit, and nothing ever waits for them.
//
// The stream is held up by a synchronous operation that is launched on it, where it is made to wait for a Work, while the
// host waits in an operation of gloo, and by DDP at the end of the backward pass, for futures. A step with a wait that is
// not seen (on another stream, for a future of the script's) says nothing.
#pragma once

#include "device_course.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace flashrecovery {

class DevicePace {
 public:
  using Mark = std::unique_ptr<DeviceMark>;
  static constexpr int64_t kHost = -1;

  static DevicePace& instance() {
    static auto* me = new DevicePace();  // never freed: operations end on threads that outlive static objects
    return *me;
  }
  // The script uses NCCL among several ranks, on devices of this type.
  void used(c10::DeviceType type) {
    if (used_) return;
    type_ = type;
    used_ = true;
  }
  // The step under way is measured.
  bool measures() const { return measures_; }

  // A step has been committed, on the thread of the script. Nanoseconds of own work in one that was measured; 0: there
  // is nothing new to say; kHost: this process does not use NCCL, and its host's clock tells.
  int64_t committed() {
    if (!used_) return kHost;
    std::lock_guard<std::mutex> guard(mutex_);
    try {
      if (now_) {
        end();
      } else if (past_) {
        if (past_->end->come()) return std::exchange(past_, std::nullopt)->own();
      } else if (++rested_ > kRest) {
        rested_ = 0;
        begin();
      }
    } catch (const c10::Error&) {  // the device has failed, which training hears by itself
      forget();
    }
    return 0;
  }
  // What comes next is no step like the others.
  void restart() {
    std::lock_guard<std::mutex> guard(mutex_);
    forget();
  }

  // The backward pass has been queued. What is queued up to gradientsWhole() waits for futures, and does little else.
  void backwardEnded() {
    if (!measures_) return;
    std::lock_guard<std::mutex> guard(mutex_);
    if (!now_) return;
    now_->backward = marked();
    now_->waitsBefore = now_->waits.size();
  }
  void gradientsWhole() {
    if (!measures_) return;
    std::lock_guard<std::mutex> guard(mutex_);
    if (!now_ || !now_->backward || now_->futures == 0) return;
    now_->waits.resize(now_->waitsBefore);  // of those within it, it is the whole
    now_->futures = 0;
    add(std::move(now_->backward), marked());
  }
  void futureTaken() {
    if (!measures_) return;
    std::lock_guard<std::mutex> guard(mutex_);
    if (now_) ++now_->futures;
  }

  // The current stream waits for as long as this lives, unless it turns out that it does not.
  class Wait {
   public:
    Wait() : on_(instance().measures()) {
      if (on_) before_ = instance().mark();
    }
    ~Wait() {
      if (on_) instance().waited(std::move(before_));
    }
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;
    void none() { on_ = false; }

   private:
    bool on_;
    Mark before_;
  };

 private:
  struct Step {
    Mark begin, end, backward;
    std::vector<std::pair<Mark, Mark>> waits;
    size_t waitsBefore = 0, futures = 0;
    bool unseen = false;  // a wait that is not known

    int64_t own() const {
      double seconds = begin->secondsTo(*end);
      for (const auto& [before, behind] : waits) seconds -= before->secondsTo(*behind);
      return std::max<int64_t>(std::llround(1e9 * seconds), 1);
    }
  };

  Mark mark() const {
    try {
      return DeviceMarks::make()(type_, true);
    } catch (const c10::Error&) {
      return nullptr;
    }
  }
  // On the stream of the step; null, and the step says nothing, where it is another one.
  Mark marked() {
    auto made = mark();
    if (made && made->sameStream(*now_->begin)) return made;
    now_->unseen = true;
    return nullptr;
  }
  void add(Mark before, Mark behind) {
    if (before && behind && now_->waits.size() < kMost)
      now_->waits.emplace_back(std::move(before), std::move(behind));
    else
      now_->unseen = true;
  }
  void waited(Mark before) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (now_) add(std::move(before), marked());
  }
  void begin() {
    auto here = mark();
    if (!here) return;
    now_.emplace();
    now_->begin = std::move(here);
    measures_ = true;
  }
  void end() {
    now_->end = marked();
    measures_ = false;
    if (!now_->unseen && now_->futures == 0) past_ = std::move(now_);
    now_.reset();
  }
  void forget() {
    measures_ = false;
    now_.reset();
    past_.reset();
  }

  static constexpr size_t kMost = 4096;
  static constexpr int kRest = 7;  // steps between an answer and the next one that is measured

  std::atomic<bool> used_{false}, measures_{false};
  std::atomic<c10::DeviceType> type_{c10::DeviceType::CPU};
  std::mutex mutex_;
  std::optional<Step> now_, past_;
  int rested_ = kRest;
};

}  // namespace flashrecovery
