// What all operations of a managed backend share: choosing the inner backend, keeping records, abandoning, exchanging.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <array>
#include <deque>
#include <iterator>
#include <optional>
#include <thread>

#include "device_course.h"
#include "device_pace.h"
#include "ending.h"
#include "graveyard.h"
#include "inside.h"
#include "living.h"
#include "local_backend.h"
#include "progress.h"
#include "section.h"
#include "setup_log.h"
#include "torch_differences.h"
#include "work.h"

namespace flashrecovery {

using c10d::Backend;
using c10d::OpType;
using BackendPtr = c10::intrusive_ptr<Backend>;

// Called at the start of each operation with (group, operation); for fault injection only.
struct OperationHook {
  static inline std::atomic<bool> set{false};
  static inline std::function<void(const std::string&, const char*)> call;
};

// Called with (group, operation) when the script starts an operation while `watched`: between two steps.
struct OutsideHook {
  static inline std::atomic<bool> watched{false};
  static inline std::function<void(const std::string&, const char*)> call;
};

// One call of an operation. It can be made again, with copies of its arguments, when the caller has gone.
template <typename Function, typename... Arguments>
struct Call {
  Function function;
  std::tuple<Arguments&...> arguments;

  WorkPtr operator()(Backend& b) const {
    return std::apply([&](Arguments&... each) { return function(b, each...); }, arguments);
  }
  std::function<WorkPtr()> kept(BackendPtr by) const {
    using Copies = std::tuple<std::remove_const_t<Arguments>...>;
    return [by = std::move(by), function = function, copies = Copies(arguments)]() mutable {
      return std::apply([&](auto&... each) { return function(*by, each...); }, copies);
    };
  }
};
template <typename Function, typename... Arguments>
Call<Function, Arguments...> callOf(Function function, Arguments&... arguments) {
  return {std::move(function), std::tie(arguments...)};
}

// Whether this thread carries out operations of the recovery on groups of the script: these are not the script's, so
// they are not counted, and no stand-in answers them.
inline bool& recoveryHere() {
  static thread_local bool on = false;
  return on;
}

// Where c10d keeps the number and the size of a group, in ProcessGroup and in Backend alike. It has no way to change
// them, and declares them const; but they are members of objects on the heap, which are read again at every use.
template <typename Base>
struct Numbered : Base {
  static void set(Base& one, int rank, int size) {
    const_cast<int&>(one.*(&Numbered::rank_)) = rank;
    const_cast<int&>(one.*(&Numbered::size_)) = size;
  }
};

// One inner backend and the device types whose tensors it serves.
struct Inner {
  c10::DeviceType device;
  BackendPtr backend;
};

struct PendingOp {
  uint64_t seq;
  std::string name;
  double since;
  Ordinal ordinal;
  bool certain;  // it tells its own end; of the others only the waiting for them is known
};

class ManagedBase : public Backend {
 public:
  // `own`: one of the recovery's own groups, whose operations are none of the script's.
  ManagedBase(int rank, int size, std::string group, std::string kind, std::chrono::milliseconds timeout, bool own)
      : Backend(rank, size), group_(std::move(group)), kind_(std::move(kind)), timeout_(timeout), own_(own) {
    local_ = c10::make_intrusive<LocalBackend>(rank, size, kind_ == "nccl");
    Living<ManagedBase>::add(this);
  }
  ~ManagedBase() override {
    Living<ManagedBase>::remove(this);
    bury(inners_);
  }

  // ---- exchange -------------------------------------------------------------------------------------------------

  // Puts new inner backends in place (none: the local stand-in) and clears an abandonment.
  void exchange(std::vector<Inner> inners, std::vector<std::shared_ptr<Transport>> transports) {
    std::vector<std::shared_ptr<Transport>> oldTransports;
    Records oldRecords;  // destroyed after the lock is released: they may hold tensors
    for (auto& inner : inners)
      if (getBoundDeviceId() && inner.device != c10::DeviceType::CPU) inner.backend->setBoundDeviceId(getBoundDeviceId());
    std::unique_lock<std::mutex> lock(mutex_);
    *std::exchange(replaced_, std::make_shared<std::atomic<bool>>(false)) = true;
    inners_.swap(inners);
    oldTransports.swap(transports_);
    transports_ = std::move(transports);
    oldRecords.swap(records_);
    abandoned_ = false;
    seq_ = 0;
    progress_.reset();
    course_.reset();
    lock.unlock();
    for (auto& transport : oldTransports) transport->cut("the group was exchanged");
    bury(inners);
  }

  // The group has other members from now on, and this rank another number in it. Only while nothing but the local
  // stand-in is inside: holders of the group find it with its new size when it is connected again.
  void renumber(int rank, int size) {
    std::lock_guard<std::mutex> guard(mutex_);
    TORCH_CHECK(inners_.empty(), "group ", group_, " is connected");
    Numbered<Backend>::set(*this, rank, size);
    local_ = c10::make_intrusive<LocalBackend>(rank, size, kind_ == "nccl");
  }

  // Clears an abandonment without an exchange; for groups of one rank, which no peer can break.
  void revive() {
    Records old;
    std::lock_guard<std::mutex> guard(mutex_);
    old.swap(records_);
    abandoned_ = false;
  }

  // While on, operations are answered locally, as if every rank had this rank's data. Nothing is sent, and the inner
  // backends stay as they are. Not for the recovery's own groups.
  void standIn(bool on) { standingIn_ = on && !own_; }

  // Fails everything pending and every later operation. Returns how many operations were pending.
  int abandon(const std::string& reason) {
    std::vector<std::shared_ptr<Transport>> transports;
    std::vector<std::function<void()>> dropped;  // destroyed after the lock is released: they may hold tensors
    int count = 0;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      if (inners_.empty()) return 0;
      reason_ = reason;
      abandoned_ = true;
      for (auto& record : records_) {
        if (!record->pending()) continue;
        dropped.push_back(record->abandon(reason));
        ++count;
      }
      if (getSize() > 1) transports = transports_;
    }
    for (auto& transport : transports) transport->cut(reason);
    return count;
  }

  // The process ends: everything pending fails, in every group, and every later operation, and all inner backends are
  // buried, so that no thread of theirs is left. Groups that torch does not know any more may still be there: a DDP module
  // has its own handle.
  static void closeAll(const std::string& reason) {
    Remains remains;  // destroyed at the end: they may hold tensors
    Living<ManagedBase>::visit([&](ManagedBase& one) { one.close(reason, remains); });
    for (auto& transport : remains.transports) transport->cut(reason);
    bury(remains.inners);
  }

  // Operations and buffers that could still touch a tensor.
  std::pair<size_t, size_t> undrained() const {
    std::lock_guard<std::mutex> guard(mutex_);
    size_t operations = 0, buffers = 0;
    for (const auto& record : records_) operations += record->tracked && !record->settled;
    for (const auto& transport : transports_) buffers += transport->live();
    return {operations, buffers};
  }

  // NCCL only: begins to abort the communicators of an abandoned group, on its own thread, without Python. First it
  // waits until no section is open and no thread is inside. The wait is bounded: after that a communicator hangs, most
  // likely in its creation, and an abort would free it while a thread uses it. Then it is not aborted at all,
  // `aborting()` stays true, and the process has to be replaced.
  void startAbort() {
    aborting_ = true;
    std::thread([here = self(), inners = snapshot()]() mutable {  // something else may stand here before it has begun
      here->abortInners(inners);
      bury(inners);
      Ending::drop(std::move(here));
    }).detach();
  }
  bool aborting() const { return aborting_; }

  // NCCL only: whether it reports an asynchronous error of the communicators in use. NCCL reports it only when asked.
  bool reportsError() {
    if (isAbandoned()) return false;
    for (auto& inner : snapshot())
      if (isNccl(*inner.backend) && inner.backend->getError() != c10d::ErrorType::SUCCESS) return true;
    return false;
  }

  // Ends the section that this thread has open, if it has one. True if another thread has one open: only that thread
  // could end it.
  bool closeSection() {
    if (section_.openHere()) section_.end();
    return section_.isOpen();
  }

  bool local() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return inners_.empty();
  }
  bool isAbandoned() const { return abandoned_; }
  const std::string& group() const { return group_; }
  uint64_t started() const { return started_; }
  std::chrono::milliseconds timeout() const { return timeout_; }

  const Progress& progress() const { return progress_; }
  DeviceCourse::Look onDevice() { return course_.look(); }
  std::vector<PendingOp> pending() const {
    std::lock_guard<std::mutex> guard(mutex_);
    std::vector<PendingOp> out;
    for (const auto& r : records_)
      if (r->pending()) out.push_back({r->seq, r->name, r->since, r->ordinal, r->tracked});
    return out;
  }

  // ---- plain forwarding -----------------------------------------------------------------------------------------

  const std::string getBackendName() const override { return kind_; }
  bool supportsSplitting() const override { return false; }
  bool supportsCoalescing() const override { return kind_ == "nccl"; }
  bool supportsTimeEstimation() const override { return false; }
  void startCoalescing() override {
    if (standsIn()) return;
    if (!recoveryHere()) progress_.startBatch();
    Inside here(inside_);
    const BackendPtr inner = get(accelerator());
    inner->startCoalescing();
    if (inner != local_) section_.open(inner);
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    timeout_ = timeout;
    for (auto& inner : snapshot()) inner.backend->setTimeout(timeout);
  }
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
    for (auto& inner : snapshot()) flashrecovery::addEphemeralTimeout(*inner.backend, timeout);
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    for (auto& inner : snapshot()) return inner.backend->getBackendOptions();
    return c10::make_intrusive<Options>(kind_, timeout_);
  }
  void setSequenceNumberForGroup() override { get(accelerator())->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return get(accelerator())->getSequenceNumberForGroup(); }
  void waitForPendingWorks() override { get(accelerator())->waitForPendingWorks(); }
  void enableCollectivesTiming() override { get(accelerator())->enableCollectivesTiming(); }
  c10d::ErrorType getError() override { return get(accelerator())->getError(); }
  std::shared_ptr<c10::Allocator> getMemAllocator() override { return get(accelerator())->getMemAllocator(); }
  bool supportsTensorAlloc(c10::DeviceIndex d) override { return get(accelerator())->supportsTensorAlloc(d); }
  Tensor allocateTensor(long n, at::TensorOptions o) override { return get(accelerator())->allocateTensor(n, o); }
  void eagerConnectSingleDevice(at::Device d) override { get(d.type())->eagerConnectSingleDevice(d); }
  void abort() override {
    for (auto& inner : snapshot()) inner.backend->abort();
  }
  void shutdown() override {
    for (auto& inner : snapshot()) inner.backend->shutdown();
  }
  using MemoryStats = std::unordered_map<std::string, uint64_t>;
  void suspend() { flashrecovery::suspend(*get(accelerator())); }
  void resume() { flashrecovery::resume(*get(accelerator())); }
  MemoryStats getMemoryStats() { return memoryStats<MemoryStats>(*get(accelerator())); }

 protected:
  // The device type that operations without a tensor belong to.
  c10::DeviceType accelerator() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return inners_.empty() ? c10::DeviceType::CPU : inners_.back().device;
  }

  BackendPtr get(c10::DeviceType device) const {
    std::unique_lock<std::mutex> lock(mutex_);
    if (abandoned_) {
      const std::string reason = reason_;
      lock.unlock();
      if (!own()) ++failureCount(), ++raisedCount();
      throwAbandoned(reason);
    }
    for (const auto& inner : inners_)
      if (inner.device == device) return inner.backend;
    return inners_.empty() ? local_ : inners_.front().backend;
  }

  template <typename Outputs, typename Call>
  WorkPtr run(
      OpType type, const char* name, c10::DeviceType device, Outputs&& outputs, const Call& call, int peer = -1) {
    if (OperationHook::set && !recoveryHere()) OperationHook::call(group_, name);
    if (OutsideHook::watched && !own()) OutsideHook::call(group_, name);
    const bool endsSection = type == OpType::COALESCED && section_.openHere();
    if (standsIn() && !endsSection) {
      ++standInCount();
      return call(*local_);
    }
    try {
      return launch(type, name, device, std::forward<Outputs>(outputs), call, peer);
    } catch (const c10::DistError&) {
      if (section_.openHere()) {
        section_.end();
        throw;
      }
      if (own() || !Between::answers()) throw;
    }
    ++standInCount();
    return call(*local_);
  }

 private:
  template <typename Outputs, typename Call>
  WorkPtr launch(
      OpType type, const char* name, c10::DeviceType device, Outputs&& outputs, const Call& call, int peer) {
    std::optional<Inside> here(std::in_place, inside_);  // before the look whether it is abandoned
    const BackendPtr inner = get(device);
    const uint64_t seq = seq_++;
    const Ordinal ordinal = next(type, peer);
    ++started_;
    if (!own()) ++operationCount();
    auto& log = SetupLog::instance();
    const bool recorded = log.recording() && type != OpType::COALESCED;  // which is the end of a section of others
    if (log.replaying() && getSize() == 1) log.pass(group_, seq);
    if (log.replaying() && inner == local_ && getSize() > 1) {  // what stands alone has only its own data in any case
      const Tensors filled = outputs();
      if (log.answer(group_, seq, name, filled)) {
        if (recorded) log.record(group_, seq, name, filled);
        return c10::make_intrusive<DoneWork>(type, filled);
      }
    }
    if (inner == local_) {
      auto work = call(*inner);
      if (recorded) remember(seq, name, outputs());
      return work;
    }
    auto record = std::make_shared<OpRecord>(seq, name, ordinal, hasFuture(type), !own());
    if (record->tracked) record->underway.begin();
    if (!own() && sends(type)) record->traffic.begin();
    if (recorded && !recoveryHere())
      record->setOnSuccess([this_ = self(), seq, name, kept = outputs()] { this_->remember(seq, name, kept); });
    if (type == OpType::COALESCED)
      record->setOnSuccess([launched = section_.take()] {
        for (const auto& part : launched) part->succeed();
      });
    enlist(record);
    if (kind_ == "nccl" && type != OpType::COALESCED) course_.launches({name, ordinal, type == OpType::SEND}, device);
    if (kind_ == "nccl" && !own() && getSize() > 1) DevicePace::instance().used(accelerator());
    return finish(type, record, call, inner, here);
  }

  Ordinal next(OpType type, int peer) {
    if (recoveryHere()) return {Ordinal::UNKNOWN, 0};
    switch (type) {
      case OpType::SEND:
        return progress_.send(peer);
      case OpType::RECV:
        return progress_.receive(peer);
      case OpType::RECVANYSOURCE:
        return {Ordinal::UNKNOWN, 0};
      case OpType::COALESCED:
        return progress_.endBatch();
      default:
        return progress_.collective();
    }
  }

  using Records = std::deque<std::shared_ptr<OpRecord>>;

  struct Remains {
    std::vector<Inner> inners;
    std::vector<std::shared_ptr<Transport>> transports;
    Records records;
    std::vector<std::function<void()>> dropped;
  };

  void close(const std::string& reason, Remains& remains) {
    std::lock_guard<std::mutex> guard(mutex_);
    reason_ = reason;
    abandoned_ = true;
    for (auto& record : records_)
      if (record->pending()) remains.dropped.push_back(record->abandon(reason));
    moveTo(remains.records, records_);
    moveTo(remains.transports, transports_);
    moveTo(remains.inners, inners_);
  }
  template <typename Container>
  static void moveTo(Container& all, Container& some) {
    std::move(some.begin(), some.end(), std::back_inserter(all));
    some.clear();
  }

  // How long an abort waits for an open section, and for a launch: beyond that it is a communicator that hangs.
  void abortInners(const std::vector<Inner>& inners) {
    if (!section_.awaitClosed(kSectionWait) || !inside_.awaitEmpty(kLaunchWait)) return;
    for (auto& inner : inners) inner.backend->abort();
    aborting_ = false;
  }

  static constexpr std::chrono::milliseconds kSectionWait{2000};
  static constexpr std::chrono::milliseconds kLaunchWait{200};

  template <typename Call>
  WorkPtr finish(
      OpType type,
      const std::shared_ptr<OpRecord>& record,
      const Call& call,
      const BackendPtr& inner,
      std::optional<Inside>& here) {
    WorkPtr work;
    try {
      if (type == OpType::COALESCED) section_.ended();  // before the call: an abort need not wait for its launch
      DevicePace::Wait synchronous;
      work = call(*inner);
      if (work || section_.openHere()) synchronous.none();
      here.reset();  // what follows may read the outputs, and so wait for the device
    } catch (const c10::Error&) {
      record->settle();
      record->fail();
      record->throwIfAbandoned();
      record->raised();
      throw;
    } catch (const std::exception& error) {
      record->settle();
      record->fail();
      record->throwIfAbandoned();
      record->raised();
      C10_THROW_ERROR(DistBackendError, error.what());
    }
    const bool launchedLater = section_.keep(record);
    if (!work) {  // a synchronous operation of NCCL: it is ordered on the current stream, and there is nothing to wait for
      record->settle();
      if (!own()) Traffic::instance().followStream(accelerator());
      if (!launchedLater) record->succeed();
      return work;
    }
    FuturePtr future;
    if (record->tracked) {
      try {
        future = work->getFuture();
      } catch (const c10::Error&) {  // a gloo whose Work for this operation has none
        record->tracked = false;
        record->underway.end();
      }
    }
    if (future) {
      future->addCallback([record](c10::ivalue::Future& future) {
        if (future.hasError())
          record->fail();
        else
          record->succeed();
        record->settle();
      });
    }
    auto answer = Between::on && !own() ? call.kept(local_) : std::function<WorkPtr()>();
    return c10::make_intrusive<ManagedWork>(
        std::move(work), heldByWork(inner), record, type, accelerator(), std::move(answer));
  }

  static bool isNccl(const Backend& inner) { return inner.getBackendName().starts_with("nccl"); }

  // A Work of torch's newer NCCL backends ("nccl2", "nccl-lazy") has a bare pointer to its backend, which it asks for
  // errors (nccl2/WorkNCCL.cpp, checkStatus). A script may ask such a Work after the group was exchanged.
  BackendPtr heldByWork(const BackendPtr& inner) const {
    if (kind_ != "nccl") return {};
    return isNccl(*inner) && inner->getBackendName() != "nccl" ? inner : BackendPtr();
  }

  // Which Works of gloo tell their completion; the others complete inside wait().
  bool hasFuture(OpType type) const {
    if (kind_ != "gloo" || type == kReduceScatterTensorCoalesced) return false;
    switch (type) {
      case OpType::SEND:
      case OpType::RECV:
      case OpType::RECVANYSOURCE:
      case OpType::REDUCE_SCATTER:
      case OpType::_REDUCE_SCATTER_BASE:
      case OpType::COALESCED:
        return false;
      default:
        return true;
    }
  }

  // Whether it puts something on the network. A receive waits for what another rank sends, perhaps for long.
  static bool sends(OpType type) { return type != OpType::RECV && type != OpType::RECVANYSOURCE; }

  bool own() const { return own_ || recoveryHere(); }
  bool standsIn() const { return standingIn_ && !recoveryHere(); }

  void enlist(const std::shared_ptr<OpRecord>& record) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (abandoned_) {  // abandoned since get(): its transport is cut, but say it at the call
      const std::string reason = reason_;
      lock.unlock();
      throwAbandoned(reason);
    }
    while (!records_.empty() && !records_.front()->pending()) records_.pop_front();
    if (records_.size() > sweepAt_) {
      Records alive;
      for (auto& r : records_)
        if (r->pending()) alive.push_back(std::move(r));
      records_.swap(alive);
      sweepAt_ = std::max<size_t>(64, 2 * records_.size());
    }
    record->replaced = replaced_;
    records_.push_back(record);
  }

  void remember(uint64_t seq, const char* name, const Tensors& outputs) {
    if (!outputs.empty() || !own()) SetupLog::instance().record(group_, seq, name, outputs);
  }
  c10::intrusive_ptr<ManagedBase> self() {
    return c10::intrusive_ptr<ManagedBase>::unsafe_reclaim_from_nonowning(this);
  }
  std::vector<Inner> snapshot() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return inners_;
  }
  static void bury(std::vector<Inner>& inners) {
    for (auto& inner : inners) Graveyard::instance().bury(std::move(inner.backend));
    inners.clear();
  }

  const std::string group_;
  const std::string kind_;
  std::chrono::milliseconds timeout_;
  const bool own_;
  std::atomic<bool> standingIn_{false};
  mutable std::mutex mutex_;
  BackendPtr local_;
  std::vector<Inner> inners_;
  Replaced replaced_ = std::make_shared<std::atomic<bool>>(false);
  std::vector<std::shared_ptr<Transport>> transports_;
  Records records_;
  size_t sweepAt_ = 64;
  std::atomic<bool> abandoned_{false}, aborting_{false};
  std::string reason_;
  Progress progress_;
  DeviceCourse course_;
  std::atomic<uint64_t> seq_{0};
  std::atomic<uint64_t> started_{0};
  Section section_;
  InsideCount inside_;
};

}  // namespace flashrecovery
