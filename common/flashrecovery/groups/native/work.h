// One operation: its record (for diagnosis, draining and the setup log) and the Work that a caller waits on.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "device_pace.h"
#include "ending.h"
#include "pace.h"
#include "progress.h"
#include "transport.h"
#include "underway.h"

#include <unistd.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>
#include <tuple>

namespace flashrecovery {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using TensorLists = std::vector<std::vector<Tensor>>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

inline double monotonicSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Operations that the script has started in this process.
inline std::atomic<uint64_t>& operationCount() {
  static std::atomic<uint64_t> count{0};
  return count;
}

// Operations of the script that failed or were abandoned, over the life of the process.
inline std::atomic<uint64_t>& failureCount() {
  static std::atomic<uint64_t> count{0};
  return count;
}

// Times that an operation of the script has raised, in a call or in a wait.
inline std::atomic<uint64_t>& raisedCount() {
  static std::atomic<uint64_t> count{0};
  return count;
}

// Operations that were answered by a stand-in, over the life of the process.
inline std::atomic<uint64_t>& standInCount() {
  static std::atomic<uint64_t> count{0};
  return count;
}

// While `on`, the script is between two steps, where nothing could catch an operation's error: one that a rank's death
// has cut short is answered by a stand-in. `explains` says whether it was that, in the thread that was waiting, or in
// another one, for who waits for a future.
struct Between {
  static inline std::atomic<bool> on{false};
  static inline std::function<bool(bool)> explains;
  static bool answers(bool elsewhere = false) { return on && explains && explains(elsewhere); }
};

// What the Works of one set of inner backends share. Set when the group gets others: a Work that has ended well before is
// not asked any more, for its communicator has been aborted.
using Replaced = std::shared_ptr<std::atomic<bool>>;

struct OpRecord {
  // `counts`: its failure is one of the script's operations'.
  OpRecord(uint64_t sequence, const char* opName, Ordinal place, bool tracksCompletion, bool counts)
      : seq(sequence), name(opName), ordinal(place), tracked(tracksCompletion), counts_(counts) {}

  const uint64_t seq;
  const char* const name;
  const Ordinal ordinal;
  const double since = monotonicSeconds();
  std::atomic<bool> tracked;          // the inner Work tells when it has finished with the tensors
  std::atomic<bool> settled{false};   // it has
  std::atomic<bool> released{false};  // waited for, or can no longer be waited for
  std::atomic<bool> abandoned{false};
  UnderwayPart underway;
  TrafficPart traffic;
  Replaced replaced;  // of the backends that it was started on

  // The inner Work has finished with the tensors.
  void settle() {
    underway.end();
    traffic.end();
    settled = true;
  }
  bool pending() const { return !settled && !abandoned && (tracked || !released); }

  void succeed() {
    std::function<void()> action;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      action.swap(onSuccess_);
    }
    if (action) action();
  }
  void setOnSuccess(std::function<void()> action) {
    std::lock_guard<std::mutex> guard(mutex_);
    onSuccess_ = std::move(action);
  }
  void fail() {
    if (!failed_.exchange(true) && counts_) ++failureCount();
  }
  // Returns what was to happen on success, for the caller to destroy where no lock is held.
  std::function<void()> abandon(const std::string& why) {
    fail();
    underway.end();
    traffic.end();
    std::function<void()> dropped;
    std::lock_guard<std::mutex> guard(mutex_);
    reason_ = why;
    dropped.swap(onSuccess_);
    abandoned = true;
    return dropped;
  }
  bool failed() const { return failed_; }
  bool counts() const { return counts_; }
  void raised() const {
    if (counts_) ++raisedCount();
  }
  void throwIfAbandoned() const {
    if (!abandoned) return;
    raised();
    std::unique_lock<std::mutex> lock(mutex_);
    const std::string why = reason_;
    lock.unlock();
    throwAbandoned(why);
  }

 private:
  const bool counts_;
  mutable std::mutex mutex_;
  std::atomic<bool> failed_{false};
  std::string reason_;
  std::function<void()> onSuccess_;
};

// Forwards to the inner Work; once abandoned it fails, whatever the inner one says (an aborted collective may
// "succeed" with garbage in its buffers).
class ManagedWork final : public c10d::Work {
 public:
  // `backend`: what has to live as long as the inner Work; null where that holds on to all it needs. `answer`: what a
  // stand-in would do, and gives; none if the operation was not begun between two steps.
  ManagedWork(
      WorkPtr inner,
      c10::intrusive_ptr<c10d::Backend> backend,
      std::shared_ptr<OpRecord> record,
      c10d::OpType type,
      c10::DeviceType device,
      std::function<WorkPtr()> answer)
      : Work(-1, type),
        backend_(std::move(backend)),
        inner_(std::move(inner)),
        record_(std::move(record)),
        device_(device),
        answers_(std::make_shared<Answers>(std::move(answer))) {}
  ~ManagedWork() override { release(); }

  bool wait(std::chrono::milliseconds timeout) override {
    if (answers_->given()) return true;
    try {
      return waitForInner(timeout);
    } catch (const std::exception&) {
      if (!answers()) throw;
    }
    return true;
  }
  // A poller learns from this that it need not wait, and may never ask how the operation has ended.
  bool isCompleted() override {
    if (answers_->given()) return true;
    if (endedBefore()) return true;
    if (!record_->abandoned && !inner_->isCompleted()) return false;
    if ((record_->abandoned || inner_->exception()) && !answers()) record_->raised();
    return true;
  }
  bool isSuccess() const override {
    return answers_->given() || (!record_->abandoned && (endedBefore() || inner_->isSuccess()));
  }
  std::exception_ptr exception() const override {
    if (answers_->given()) return nullptr;
    try {
      record_->throwIfAbandoned();
    } catch (const std::exception&) {
      return std::current_exception();
    }
    return endedBefore() ? nullptr : inner_->exception();
  }
  int sourceRank() const override { return inner_->sourceRank(); }
  Tensors result() override { return inner_->result(); }
  void synchronize() override {
    if (answers_->given()) return;
    try {
      record_->throwIfAbandoned();
      if (endedBefore()) return;
      const DevicePace::Wait waits;
      inner_->synchronize();
      record_->throwIfAbandoned();
    } catch (const std::exception&) {
      if (!answers()) throw;
    }
  }
  void blockCurrentStream() override {
    const DevicePace::Wait waits;
    inner_->blockCurrentStream();
  }
  void abort() override { inner_->abort(); }
  // NCCL's never fails.
  FuturePtr getFuture() override {
    FuturePtr future = inner_->getFuture();
    if (!future) return future;
    DevicePace::instance().futureTaken();
    if (record_->tracked && answers_->possible() && isMainThread()) return answeredFuture(future);
    future->addCallback([record = record_](c10::ivalue::Future& ended) {
      if (ended.hasError()) record->raised();
    });
    return future;
  }
  FuturePtr getFutureResult() override { return inner_->getFutureResult(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

 private:
  // What a stand-in gives in the place of an error; once.
  class Answers {
   public:
    explicit Answers(std::function<WorkPtr()> answer) : answer_(std::move(answer)) {}
    bool possible() const { return static_cast<bool>(answer_); }
    bool given() const { return given_; }
    WorkPtr give() {
      std::lock_guard<std::mutex> guard(mutex_);
      if (given_) return told_;
      ++standInCount();
      if (answer_) told_ = answer_();
      given_ = true;
      return told_;
    }

   private:
    const std::function<WorkPtr()> answer_;
    std::mutex mutex_;
    std::atomic<bool> given_{false};
    WorkPtr told_;
  };

  // It has failed. Whether a stand-in has answered it now.
  bool answers() {
    if (!record_->counts() || !Between::answers()) return false;
    answers_->give();
    return true;
  }

  // A future that a stand-in completes where `future` fails since a rank has died. Whether it was that is asked on a
  // thread of its own: it may take as long as the stop takes to come, and gloo's are needed meanwhile.
  FuturePtr answeredFuture(const FuturePtr& future) {
    FuturePtr answered = future->createInstance(future->elementType());
    future->addCallback([answered, record = record_, answers = answers_](c10::ivalue::Future& ended) {
      if (!ended.hasError()) {
        answered->markCompleted(ended.constValue());
        return;
      }
      std::thread([answered, record, answers, error = ended.exception_ptr()]() mutable {
        complete(*answered, *record, *answers, error);
        Ending::drop(std::make_tuple(std::move(answered), std::move(record), std::move(answers), std::move(error)));
      }).detach();
    });
    return answered;
  }
  static void complete(c10::ivalue::Future& future, const OpRecord& record, Answers& answers, std::exception_ptr error) {
    try {
      if (answers.given() || Between::answers(true)) {
        future.markCompleted(answers.give()->getFuture()->constValue());
        return;
      }
    } catch (const std::exception&) {
      error = std::current_exception();
    }
    record.raised();
    future.setError(std::move(error));
  }
  static bool isMainThread() { return ::gettid() == ::getpid(); }

  // It ended, and not by an error, before the group got other inner backends.
  bool endedBefore() const { return *record_->replaced && !record_->abandoned && !record_->failed(); }

  bool waitForInner(std::chrono::milliseconds timeout) {
    record_->throwIfAbandoned();
    if (endedBefore()) return true;
    bool done = false;
    UnderwayPart waiting;
    if (!record_->tracked) waiting.begin();
    const DevicePace::Wait waits;
    try {
      done = inner_->wait(timeout);
    } catch (const std::exception&) {
      record_->fail();
      record_->throwIfAbandoned();
      record_->raised();
      throw;
    }
    record_->throwIfAbandoned();
    Traffic::instance().followStream(device_);
    release();
    if (done) record_->succeed();
    return done;
  }
  void release() {
    record_->released = true;
    if (!record_->tracked) record_->traffic.end();  // as far as anybody can tell
  }

  c10::intrusive_ptr<c10d::Backend> backend_;  // destroyed after the Work
  WorkPtr inner_;
  std::shared_ptr<OpRecord> record_;
  const c10::DeviceType device_;
  const std::shared_ptr<Answers> answers_;
};

// The Work of an operation that was complete at once.
class DoneWork final : public c10d::Work {
 public:
  DoneWork(c10d::OpType type, Tensors outputs) : Work(-1, type), outputs_(std::move(outputs)) {
    std::vector<c10::Device> devices;
    if (!outputs_.empty() && !outputs_.front().is_cpu()) devices.push_back(outputs_.front().device());
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), devices);
    future_->markCompleted(c10::IValue(outputs_));
    finish();
  }
  bool wait(std::chrono::milliseconds) override { return true; }
  Tensors result() override { return outputs_; }
  FuturePtr getFuture() override { return future_; }
  void abort() override {}
  int sourceRank() const override { return 0; }
  void synchronize() override {}
  void blockCurrentStream() override {}

 private:
  Tensors outputs_;
  FuturePtr future_;
};

}  // namespace flashrecovery
