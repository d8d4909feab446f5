// Holds back what a stream of the device has queued, until the host says whether it is to count.
//
// Two words of the host's memory, which the device reads: a number that grows with each hold, for which the stream waits
// (cuStreamWaitValue32), and a flag, which it copies once it goes on (1: the step is void). The flag is written first, and
// stores of the host to memory that is mapped for the device become visible in their order. Who waits for the stream
// itself before it has decided would wait for ever, so a hold ends by itself after a while, as void: then nothing has
// been applied, and the host may do it again.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

namespace flashrecovery {

class StreamHold {
 public:
  // `words`: address of `uint32_t number; float flag`, aligned to 8, both 0; it outlives this object. `patience`: of one
  // hold.
  StreamHold(uintptr_t words, std::chrono::milliseconds patience)
      : shared_(std::make_shared<Shared>(reinterpret_cast<std::atomic<uint32_t>*>(words), patience)) {
    std::thread([shared = shared_] { watch(*shared); }).detach();
  }
  ~StreamHold() {
    letGo(true);
    std::lock_guard<std::mutex> guard(shared_->mutex);
    shared_->over = true;
    shared_->changed.notify_all();
  }
  StreamHold(const StreamHold&) = delete;

  // Returns the number for which the stream has to wait. Let go of the one before first.
  uint32_t hold() {
    std::lock_guard<std::mutex> guard(shared_->mutex);
    shared_->held = true;
    shared_->until = Clock::now() + shared_->patience;
    shared_->changed.notify_all();
    return ++shared_->number;
  }
  // The stream goes on. False if the hold has ended by itself before.
  bool letGo(bool isVoid) {
    std::lock_guard<std::mutex> guard(shared_->mutex);
    if (!shared_->held) return false;
    shared_->release(isVoid);
    shared_->changed.notify_all();
    return true;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static_assert(sizeof(std::atomic<uint32_t>) == 4 && sizeof(std::atomic<float>) == 4);

  struct Shared {
    Shared(std::atomic<uint32_t>* words, std::chrono::milliseconds limit)
        : seen(words), flag(reinterpret_cast<std::atomic<float>*>(words + 1)), patience(limit) {}

    void release(bool isVoid) {
      flag->store(isVoid ? 1.0f : 0.0f, std::memory_order_release);
      seen->store(number, std::memory_order_release);
      held = false;
    }

    std::mutex mutex;
    std::condition_variable changed;
    std::atomic<uint32_t>* const seen;
    std::atomic<float>* const flag;
    const std::chrono::milliseconds patience;
    Clock::time_point until;
    uint32_t number = 0;
    bool held = false, over = false;
  };

  static void watch(Shared& shared) {
    std::unique_lock<std::mutex> lock(shared.mutex);
    while (!shared.over) {
      if (!shared.held)
        shared.changed.wait(lock);
      else if (shared.changed.wait_until(lock, shared.until) == std::cv_status::timeout && shared.held &&
               Clock::now() >= shared.until)
        shared.release(true);
    }
  }

  const std::shared_ptr<Shared> shared_;
};

}  // namespace flashrecovery
