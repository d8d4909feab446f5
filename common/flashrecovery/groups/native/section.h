// A section: what a thread launches between startCoalescing() and endCoalescing().
//
// NCCL counts open sections per thread and launches nothing of that thread while one is open. torch's
// `_coalescing_manager` does not end a section that an exception leaves (torch 2.13, distributed_c10d.py). So code that
// makes an operation fail within a section ends the section first, on the thread that has opened it.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "work.h"

namespace flashrecovery {

class Section {
 public:
  using Records = std::vector<std::shared_ptr<OpRecord>>;

  // This thread has opened a section on `backend`.
  void open(c10::intrusive_ptr<c10d::Backend> backend) {
    std::lock_guard<std::mutex> guard(mutex_);
    backend_ = std::move(backend);
    owner_ = std::this_thread::get_id();
    open_ = true;
  }
  bool isOpen() const { return open_; }
  bool openHere() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return open_ && owner_ == std::this_thread::get_id();
  }
  // Keeps the operation for the end of this thread's section, where it is launched. False if it has none.
  bool keep(const std::shared_ptr<OpRecord>& record) {
    if (!open_) return false;
    std::lock_guard<std::mutex> guard(mutex_);
    if (!open_ || owner_ != std::this_thread::get_id()) return false;
    kept_.push_back(record);
    return true;
  }
  // The operations of the section, which its end is about to launch.
  Records take() {
    std::lock_guard<std::mutex> guard(mutex_);
    return std::exchange(kept_, {});
  }
  // Ends it inside, too, and ignores errors: the original failure is reported elsewhere.
  void end() {
    c10::intrusive_ptr<c10d::Backend> backend;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      backend = backend_;
    }
    if (backend) {
      try {
        backend->endCoalescing();
      } catch (const std::exception& error) {
        TORCH_WARN("the end of an abandoned section: ", error.what());
      }
    }
    ended();
  }
  // It has been ended inside.
  void ended() {
    c10::intrusive_ptr<c10d::Backend> backend;  // these are released after the lock: they may hold tensors
    Records kept;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      backend.swap(backend_);
      kept.swap(kept_);
      open_ = false;
    }
    closed_.notify_all();
  }
  // Waits until none is open; false at the deadline.
  bool awaitClosed(std::chrono::milliseconds deadline) {
    std::unique_lock<std::mutex> lock(mutex_);
    return closed_.wait_for(lock, deadline, [this] { return !open_; });
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable closed_;
  std::atomic<bool> open_{false};
  std::thread::id owner_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  Records kept_;
};

}  // namespace flashrecovery
