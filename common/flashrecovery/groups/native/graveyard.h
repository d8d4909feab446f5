// Destroys old inner backends in the background: a gloo backend takes about 20 ms to close its connections, and a
// recovery must not wait for that.
#pragma once

#include "ending.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>
#include <thread>

namespace flashrecovery {

class Graveyard {
 public:
  // Never destroyed: a thread may still be in it when the process ends.
  static Graveyard& instance() {
    static auto* graveyard = new Graveyard;
    return *graveyard;
  }

  void bury(c10::intrusive_ptr<c10d::Backend> backend) {
    if (!backend) return;
    std::lock_guard<std::mutex> guard(mutex_);
    queue_.push_back(std::move(backend));
    if (digging_) return;
    digging_ = true;
    std::thread([this] { run(); }).detach();
  }

  // The same for one that has never been in use. One of NCCL is aborted first, on a thread of its own, and its connections
  // need not be whole for that; a process launches nothing beside an abort, so it counts until that has returned.
  void discard(c10::intrusive_ptr<c10d::Backend> backend) {
    if (!backend || !backend->getBackendName().starts_with("nccl")) return bury(std::move(backend));
    ++discarding_;
    std::thread([this, backend = std::move(backend)]() mutable {
      backend->abort();
      bury(std::move(backend));
      --discarding_;
    }).detach();
  }
  int discarding() const { return discarding_; }

  // Waits until everything is destroyed; false at the deadline.
  bool waitEmpty(std::chrono::milliseconds deadline) {
    std::unique_lock<std::mutex> lock(mutex_);
    return empty_.wait_for(lock, deadline, [this] { return !digging_; });
  }

 private:
  using Queue = std::deque<c10::intrusive_ptr<c10d::Backend>>;

  // A data loader may fork at any moment. The forking thread takes the lock first, so that the child does not inherit
  // it held by a thread that does not exist there.
  Graveyard() { ::pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); }, inChild); }

  // What waits here belongs to the parent: the child could not close its connections without the parent's threads.
  static void inChild() {
    auto& here = instance();
    new (&here.queue_) Queue;  // the old ones are never destroyed
    new (&here.empty_) std::condition_variable;
    here.digging_ = false;
    here.discarding_ = 0;
    here.mutex_.unlock();
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!queue_.empty()) {
      auto backend = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      Ending::drop(std::move(backend));  // gloo's threads end in here, and their operations hold tensors
      lock.lock();
    }
    digging_ = false;
    empty_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable empty_;
  Queue queue_;
  bool digging_ = false;
  std::atomic<int> discarding_{0};
};

}  // namespace flashrecovery
