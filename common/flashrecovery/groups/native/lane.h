// Operations of one stream, carried out in their order by their own thread.
#pragma once

#include "ending.h"
#include "streams.h"
#include "work.h"

#include <deque>

namespace flashrecovery {

// Completed by the thread that has carried it out.
class LaneWork final : public c10d::Work {
 public:
  LaneWork(c10d::OpType type, Tensors outputs)
      : Work(-1, type),
        outputs_(std::move(outputs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors())) {}

  void succeed() {
    future_->markCompleted(c10::IValue(outputs_));
    finish();
  }
  void fail(const std::exception_ptr& error) {
    future_->setError(error);
    finish(error);
  }
  Tensors result() override { return outputs_; }
  FuturePtr getFuture() override { return future_; }
  void abort() override {}
  void synchronize() override {}
  void blockCurrentStream() override {}

 private:
  Tensors outputs_;
  FuturePtr future_;
};

// After an operation that has failed, all later ones fail. The thread lives until the lane is gone and the last
// operation has ended; it is not joined, since it may be in a store that does not answer.
class Lane {
 public:
  using Body = std::function<void(Streams&)>;

  explicit Lane(const std::shared_ptr<Streams>& streams) : queue_(std::make_shared<Queue>()) {
    std::thread([streams, queue = queue_] { run(*streams, *queue); }).detach();
  }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;
  ~Lane() {
    std::lock_guard<std::mutex> guard(queue_->mutex);
    queue_->closed = true;
    queue_->changed.notify_all();
  }

  WorkPtr add(c10d::OpType type, Tensors outputs, Body body) {
    auto work = c10::make_intrusive<LaneWork>(type, std::move(outputs));
    std::lock_guard<std::mutex> guard(queue_->mutex);
    queue_->jobs.push_back({work, std::move(body)});
    queue_->changed.notify_all();
    return work;
  }

 private:
  struct Job {
    c10::intrusive_ptr<LaneWork> work;
    Body body;
  };
  struct Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Job> jobs;
    bool closed = false;
  };

  static void run(Streams& streams, Queue& queue) {
    std::exception_ptr failed;
    std::unique_lock<std::mutex> lock(queue.mutex);
    while (true) {
      queue.changed.wait(lock, [&] { return queue.closed || !queue.jobs.empty(); });
      if (queue.jobs.empty()) return;
      Job job = std::move(queue.jobs.front());
      queue.jobs.pop_front();
      lock.unlock();
      if (!failed) failed = carryOut(job.body, streams);
      if (failed)
        job.work->fail(failed);
      else
        job.work->succeed();
      Ending::drop(std::move(job));  // may free tensors: not under the lock
      lock.lock();
    }
  }

  static std::exception_ptr carryOut(const Body& body, Streams& streams) {
    try {
      body(streams);
    } catch (const std::exception&) {
      return std::current_exception();
    }
    return nullptr;
  }

  std::shared_ptr<Queue> queue_;
};

}  // namespace flashrecovery
