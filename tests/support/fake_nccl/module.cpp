// A backend with ProcessGroupNCCL's behaviour, over gloo and host tensors. See README.md for what it guarantees.
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/CPUAllocator.h>

#include <map>

#include "communicator.h"
#include "device_course.h"
#include "torch_differences.h"

namespace fake_nccl {

using c10d::OpType;
using TensorLists = std::vector<Tensors>;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
using Millis = std::chrono::milliseconds;

// Makes a gloo backend under a prefix of the group's store, for `rank` of `size`; blocks until all of them have come.
using Connect = std::function<std::pair<BackendPtr, std::vector<DevicePtr>>(const std::string&, int, int)>;

// ncclGroupStart and ncclGroupEnd count for each thread; what a thread launches while its count is not 0 waits for the
// last end (NCCL group.cc: thread_local ncclGroupDepth). An exception that leaves a section open leaves the count.
struct Group {
  int depth = 0;
  std::vector<std::pair<CommunicatorPtr, Operation>> waiting;
  static Group& mine() {
    static thread_local Group group;
    return group;
  }
};

// A stream that a thread has made for itself. The host does not play this one: waiting for a Work there makes the stream
// wait, and the host goes on. What the thread computes meanwhile is computed at once all the same, so it has to ask
// (`done`) before it touches what a message reads or writes; a missing check shows in the data that arrives.
class Stream {
 public:
  void follow(const LaunchPtr& launch) {
    std::lock_guard<std::mutex> guard(mutex_);
    behind_.push_back(launch);
  }
  // What it has been asked to wait for so far; an event recorded on it.
  std::vector<LaunchPtr> behind() {
    std::lock_guard<std::mutex> guard(mutex_);
    std::erase_if(behind_, [](const auto& launch) { return launch->done(); });
    return behind_;
  }
  static std::shared_ptr<Stream>& current() {
    static thread_local std::shared_ptr<Stream> stream;
    return stream;
  }

 private:
  std::mutex mutex_;
  std::vector<LaunchPtr> behind_;
};

struct Event {
  std::vector<LaunchPtr> behind;
  bool done() const {
    Sticky::check();
    return std::all_of(behind.begin(), behind.end(), [](const auto& launch) { return launch->done(); });
  }
  void wait() const {
    for (const auto& launch : behind) launch->wait();
    Sticky::check();
  }
};

// What a Work of ProcessGroupNCCL2 sees of its backend, to which it has a bare pointer (nccl2/WorkNCCL.cpp, checkStatus).
struct Owner {
  std::atomic<bool> alive{true}, failed{false};
  void check() const {
    if (!alive) die("a Work of nccl2 is asked when its backend has been destroyed");
  }
};
using OwnerPtr = std::shared_ptr<Owner>;

// Synchronous operations of this thread: they are on the current stream, which the host plays. It catches up when it has
// left the call; within it, it is launching (`catch_up`, called by the Python side). Only where the product reads the
// outputs within the call, which on a real device waits for them, it has to catch up at once.
//
// While it runs `ahead`, it does not stop for a Work that it waits for, either: on a device that orders streams, and a
// future of torch's is complete as soon as its operation is launched. Then it catches up at its next synchronous
// operation, where it is asked to, or never: what is queued behind a hold comes after what is taken here.
struct CurrentStream {
  static inline std::atomic<bool> atOnce{false}, ahead{false};
  static std::vector<LaunchPtr>& mine() {
    static thread_local std::vector<LaunchPtr> behind;
    return behind;
  }
  static void catchUp() {
    for (auto& launch : std::exchange(mine(), {})) launch->wait();
    Kernel::waitForAll();
    Sticky::check();
  }
};

// A place on the current stream: behind what the host has run ahead of, and behind the script's kernels.
struct FakeMark final : flashrecovery::DeviceMark {
  using Clock = Kernel::Clock;
  bool come() override {
    return (!kernel || kernel->done()) &&
           std::all_of(behind.begin(), behind.end(), [](const auto& launch) { return launch->done(); });
  }
  bool sameStream(const DeviceMark& other) const override { return stream == of(other).stream; }
  double secondsTo(const DeviceMark& later) const override {
    return std::chrono::duration<double>(of(later).at() - at()).count();
  }
  // When the device has come there.
  Clock::time_point at() const {
    auto latest = recorded;
    if (kernel) latest = std::max(latest, kernel->end());
    for (const auto& launch : behind) latest = std::max(latest, launch->ended());
    return latest;
  }
  static const FakeMark& of(const DeviceMark& mark) { return dynamic_cast<const FakeMark&>(mark); }
  const Clock::time_point recorded = Clock::now();
  const std::vector<LaunchPtr> behind = CurrentStream::mine();
  const KernelPtr kernel = Kernel::newest();
  const std::shared_ptr<Stream> stream = Stream::current();
};

// The Work of ProcessGroupNCCL orders streams (WorkNCCL::synchronizeStream); it never throws because of an abort. The
// host plays the current stream here, so waiting for its turn is waiting. With an `owner` it is one of ProcessGroupNCCL2,
// which throws once its communicator has failed or was aborted.
class FakeWork final : public c10d::Work {
 public:
  FakeWork(OpType type, Tensors outputs, LaunchPtr launch, OwnerPtr owner = nullptr)
      : Work(-1, type), outputs_(std::move(outputs)), launch_(std::move(launch)), owner_(std::move(owner)) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    auto future = future_;
    auto outs = outputs_;
    if (launch_ && CurrentStream::ahead)
      future->markCompleted(c10::IValue(outs));
    else if (launch_)
      launch_->whenDone([future, outs] { future->markCompleted(c10::IValue(outs)); });
  }
  bool isCompleted() override {
    if (owner_) owner_->check();
    return !launch_ || launch_->done() || (owner_ && owner_->failed);
  }
  bool isSuccess() const override { return !launch_ || (launch_->done() && !launch_->torn()); }
  std::exception_ptr exception() const override { return nullptr; }
  bool wait(Millis) override {
    synchronize();
    if (owner_ && owner_->failed) C10_THROW_ERROR(DistBackendError, "NCCL operation failed");
    return true;
  }
  void synchronize() override {
    if (owner_) owner_->check();
    if (!launch_) return;
    if (const auto& stream = Stream::current())
      stream->follow(launch_);
    else if (CurrentStream::ahead)
      CurrentStream::mine().push_back(launch_);
    else
      launch_->wait();
  }
  void blockCurrentStream() override { synchronize(); }
  void abort() override {}
  Tensors result() override { return outputs_; }
  FuturePtr getFuture() override {
    if (owner_) owner_->check();
    return future_;
  }

 private:
  Tensors outputs_;
  LaunchPtr launch_;  // null: of a group that has not ended
  const OwnerPtr owner_;
  FuturePtr future_;
};

// All communicators of the process, for who waits for the whole device.
struct Device {
  std::mutex mutex;
  std::vector<std::weak_ptr<Communicator>> communicators;
  static Device& instance() {
    static auto* device = new Device;
    return *device;
  }
  void add(const CommunicatorPtr& made) {
    std::lock_guard<std::mutex> guard(mutex);
    std::erase_if(communicators, [](const auto& known) { return known.expired(); });
    communicators.push_back(made);
  }
  std::vector<CommunicatorPtr> all() {
    std::lock_guard<std::mutex> guard(mutex);
    std::vector<CommunicatorPtr> alive;
    for (const auto& known : communicators)
      if (auto communicator = known.lock()) alive.push_back(std::move(communicator));
    return alive;
  }
  // torch.cuda.synchronize(): everything queued on whatever stream has happened. What waits in a group that was never
  // ended is not queued, so it is not waited for: its events complete.
  void synchronize() {
    for (const auto& communicator : all()) communicator->synchronize();
    Kernel::waitForAll();
    Sticky::check();
  }
};

class FakeNccl final : public Backend {
 public:
  // `name`: "nccl" (ProcessGroupNCCL), "nccl2" or "nccl-lazy".
  FakeNccl(int rank, int size, Connect connect, std::string name)
      : Backend(rank, size),
        name_(std::move(name)),
        owner_(name_ == "nccl" ? nullptr : std::make_shared<Owner>()),
        connect_(std::move(connect)) {
    globalRank(rank);
  }
  ~FakeNccl() override {
    if (owner_) owner_->alive = false;
  }

  // The process's rank, as every backend takes it: that of the first one (ProcessGroupNCCL::globalRank, called in its
  // constructor). -1 without any.
  static int globalRank(int ofNew = -1) {
    static std::atomic<int> first{-1};
    int none = -1;
    if (ofNew >= 0) first.compare_exchange_strong(none, ofNew);
    return first;
  }

  const std::string getBackendName() const override { return name_; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(Millis) override {}
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void waitForPendingWorks() override {
    for (auto& [key, communicator] : communicators()) communicator->synchronize();
  }
  void eagerConnectSingleDevice(at::Device) override { communicator(kAll, getRank(), getSize()); }
  c10d::ErrorType getError() override {
    for (auto& [key, communicator] : communicators())
      if (communicator->failed()) return c10d::ErrorType::COMM_ERROR;
    return c10d::ErrorType::SUCCESS;
  }
  // Communicators that are just being made are not reached: ncclCommInitRankConfig blocks (pytorch#103264).
  void abort() override {
    aborted_ = true;
    if (owner_) owner_->failed = true;  // nccl2/ProcessGroupNCCL.cpp, abort: comm_state_ = ERROR
    const auto all = communicators();
    size_t failed = 0;
    for (auto& [key, communicator] : all) failed += communicator->failed();
    for (auto& [key, communicator] : all) communicator->abort();
    // The watchdog sleeps four times so long for each failed operation (ProcessGroupNCCL.cpp, 2.13, checkTimeout and the
    // dump signals), and the group's lock is held meanwhile.
    const Millis dump(setting("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", 15000));
    if (failed > 0 && !owner_) std::this_thread::sleep_for(4 * dump);
  }
  void shutdown() override { abort(); }
  size_t connected() { return communicators().size(); }

  void startCoalescing() override { ++Group::mine().depth; }
  WorkPtr endCoalescing() override {
    auto& group = Group::mine();
    if (--group.depth > 0) return work(OpType::COALESCED, {}, nullptr);
    auto waiting = std::exchange(group.waiting, {});
    std::map<CommunicatorPtr, std::vector<Operation>> by;
    Tensors outputs;
    for (auto& [communicator, operation] : waiting) {
      outputs.insert(outputs.end(), operation.outputs.begin(), operation.outputs.end());
      by[communicator].push_back(std::move(operation));
    }
    LaunchPtr last;
    for (auto& [communicator, operations] : by) {
      Communicator::Launching here(*communicator);
      last = std::make_shared<Launch>(std::move(operations));
      communicator->enqueue(last);
    }
    return work(OpType::COALESCED, outputs, last);
  }

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return collective(OpType::BROADCAST, o.asyncOp, t, [t, o](Backend& b) mutable { return b.broadcast(t, o); });
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    auto plain = o;
    return collective(OpType::ALLREDUCE, o.asyncOp, t, [t, plain, op = summed(o.reduceOp)](Backend& b) mutable {
      plain.reduceOp = op;
      return b.allreduce(t, plain);
    }, averaged(o.reduceOp, t));
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    return collective(OpType::ALLREDUCE_COALESCED, o.asyncOp, t,
                      [t, o](Backend& b) mutable { return b.allreduce_coalesced(t, o); });
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    auto plain = o;
    plain.reduceOp = summed(o.reduceOp);
    return collective(OpType::REDUCE, o.asyncOp, t, [t, plain](Backend& b) mutable { return b.reduce(t, plain); },
                      averaged(o.reduceOp, t));
  }
  WorkPtr allgather(TensorLists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return collective(OpType::ALLGATHER, o.asyncOp, flat(out),
                      [out, in, o](Backend& b) mutable { return b.allgather(out, in, o); });
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    return collective(OpType::_ALLGATHER_BASE, o.asyncOp, {out},
                      [out, in, o](Backend& b) mutable { return b._allgather_base(out, in, o); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return collective(OpType::_ALLGATHER_BASE, o.asyncOp, out,
                      [out, in, o](Backend& b) mutable { return b.allgather_into_tensor_coalesced(out, in, o); });
  }
  WorkPtr gather(TensorLists& out, Tensors& in, const c10d::GatherOptions& o) override {
    return collective(OpType::GATHER, o.asyncOp, flat(out),
                      [out, in, o](Backend& b) mutable { return b.gather(out, in, o); });
  }
  WorkPtr scatter(Tensors& out, TensorLists& in, const c10d::ScatterOptions& o) override {
    return collective(OpType::SCATTER, o.asyncOp, out,
                      [out, in, o](Backend& b) mutable { return b.scatter(out, in, o); });
  }
  WorkPtr reduce_scatter(Tensors& out, TensorLists& in, const c10d::ReduceScatterOptions& o) override {
    auto plain = o;
    plain.reduceOp = summed(o.reduceOp);
    return collective(OpType::REDUCE_SCATTER, o.asyncOp, out,
                      [out, in, plain](Backend& b) mutable { return b.reduce_scatter(out, in, plain); },
                      averaged(o.reduceOp, out));
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    auto plain = o;
    plain.reduceOp = summed(o.reduceOp);
    return collective(OpType::_REDUCE_SCATTER_BASE, o.asyncOp, {out},
                      [out, in, plain](Backend& b) mutable { return b._reduce_scatter_base(out, in, plain); },
                      averaged(o.reduceOp, {out}));
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    auto plain = o;
    plain.reduceOp = summed(o.reduceOp);
    return collective(flashrecovery::kReduceScatterTensorCoalesced, o.asyncOp, out,
                      [out, in, plain](Backend& b) mutable { return b.reduce_scatter_tensor_coalesced(out, in, plain); },
                      averaged(o.reduceOp, out));
  }
  WorkPtr alltoall_base(
      at::Tensor& out,
      at::Tensor& in,
      std::vector<int64_t>& outSplits,
      std::vector<int64_t>& inSplits,
      const c10d::AllToAllOptions& o) override {
    return collective(OpType::ALLTOALL_BASE, o.asyncOp, {out}, [out, in, outSplits, inSplits, o](Backend& b) mutable {
      return b.alltoall_base(out, in, outSplits, inSplits, o);
    });
  }
  WorkPtr send(Tensors& t, int rank, int) override {
    return pointToPoint(OpType::SEND, rank, {}, [t](Backend& b, int peer) mutable { return b.send(t, peer, 0); });
  }
  WorkPtr recv(Tensors& t, int rank, int) override {
    return pointToPoint(OpType::RECV, rank, t, [t](Backend& b, int peer) mutable { return b.recv(t, peer, 0); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    Tensors one{at::zeros({1})};
    return collective(OpType::BARRIER, o.asyncOp, one, [one](Backend& b) mutable { return b.allreduce(one); });
  }

 private:
  static constexpr const char* kAll = "all";

  WorkPtr collective(
      OpType type,
      bool asyncOp,
      const Tensors& outputs,
      std::function<WorkPtr(Backend&)> start,
      std::function<void()> after = {}) {
    return launch(type, asyncOp, communicator(kAll, getRank(), getSize()), {std::move(start), outputs, std::move(after)});
  }

  // Within a group all operations are the group's communicator's; a single one makes a communicator of the two ranks when
  // they first need it (ProcessGroupNCCL::pointToPoint: getKeySendRecv). It is asynchronous in any case.
  WorkPtr pointToPoint(
      OpType type, int peer, const Tensors& outputs, const std::function<WorkPtr(Backend&, int)>& start) {
    if (Group::mine().depth > 0 || name_ == "nccl2")
      return launch(type, true, communicator(kAll, getRank(), getSize()),
                    {[start, peer](Backend& b) { return start(b, peer); }, outputs, {}});
    const int low = std::min(getRank(), peer), high = std::max(getRank(), peer);
    const int other = peer == high ? 1 : 0;
    auto pair = communicator(std::to_string(low) + ":" + std::to_string(high), 1 - other, 2);
    return launch(type, true, pair, {[start, other](Backend& b) { return start(b, other); }, outputs, {}});
  }

  WorkPtr launch(OpType type, bool asyncOp, const CommunicatorPtr& on, Operation operation) {
    auto& group = Group::mine();
    const Tensors outputs = operation.outputs;
    if (group.depth > 0) {
      group.waiting.emplace_back(on, std::move(operation));
      return asyncOp || owner_ ? work(type, outputs, nullptr) : WorkPtr();
    }
    auto launched = std::make_shared<Launch>(std::vector<Operation>{std::move(operation)});
    {
      Communicator::Launching here(*on);
      on->enqueue(launched);
    }
    if (asyncOp || owner_) {
      if (CurrentStream::ahead) CurrentStream::mine().push_back(launched);  // who waits for its future says nothing
      return work(type, outputs, launched);
    }
    CurrentStream::mine().push_back(std::move(launched));
    if (CurrentStream::atOnce) CurrentStream::catchUp();
    return WorkPtr();
  }

  WorkPtr work(OpType type, const Tensors& outputs, LaunchPtr launch) const {
    return c10::make_intrusive<FakeWork>(type, outputs, std::move(launch), owner_);
  }

  CommunicatorPtr communicator(const std::string& key, int rank, int size) {
    // ProcessGroupNCCL2 looks before each launch (checkAndAbortIfTimedOutOrError).
    if (owner_ && (aborted_ || getError() != c10d::ErrorType::SUCCESS))
      TORCH_CHECK(false, "NCCL communicator was aborted after a previous error");
    if (aborted_) die("an operation of a group that has been aborted");
    {
      std::lock_guard<std::mutex> guard(mutex_);
      const auto known = communicators_.find(key);
      if (known != communicators_.end()) return known->second;
    }
    auto [gloo, devices] = connect_(key + "/", rank, size);
    auto made = std::make_shared<Communicator>(std::move(gloo), devices);
    Device::instance().add(made);
    std::lock_guard<std::mutex> guard(mutex_);
    return communicators_.emplace(key, made).first->second;
  }
  std::map<std::string, CommunicatorPtr> communicators() {
    std::lock_guard<std::mutex> guard(mutex_);
    return communicators_;
  }

  static c10d::ReduceOp summed(const c10d::ReduceOp& op) {
    return op == c10d::ReduceOp::AVG ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
  }
  std::function<void()> averaged(const c10d::ReduceOp& op, const Tensors& outputs) const {
    if (op != c10d::ReduceOp::AVG) return {};
    return [outputs, size = getSize()] {
      at::NoGradGuard guard;
      for (auto output : outputs) output.div_(size);
    };
  }
  static Tensors flat(const TensorLists& lists) {
    Tensors all;
    for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
    return all;
  }

  const std::string name_;
  const OwnerPtr owner_;  // null: ProcessGroupNCCL
  const Connect connect_;
  std::mutex mutex_;
  std::map<std::string, CommunicatorPtr> communicators_;
  std::atomic<bool> aborted_{false};
};

Connect unlocked(py::function connect) {
  auto* kept = new py::function(std::move(connect));  // never freed: a thread may just be calling it
  return [kept](const std::string& prefix, int rank, int size) {
    py::gil_scoped_acquire gil;
    return (*kept)(prefix, rank, size).cast<std::pair<BackendPtr, std::vector<DevicePtr>>>();
  };
}

}  // namespace fake_nccl

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace fake_nccl;
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<Event>(m, "Event").def("done", &Event::done).def("wait", &Event::wait, NoGil());
  py::class_<Stream, std::shared_ptr<Stream>>(m, "Stream")
      .def(py::init<>())
      .def("mark", [](Stream& stream) { return Event{stream.behind()}; });
  m.def("allocated", [](const at::Tensor& tensor) {
    return tensor.storage().data_ptr().get_deleter() == c10::GetCPUAllocator()->raw_deleter();
  });
  m.def("set_stream", [](std::shared_ptr<Stream> stream) {
    return std::exchange(Stream::current(), std::move(stream));
  });
  m.def("backend", [](int rank, int size, py::function connect, std::string name) -> BackendPtr {
    return c10::make_intrusive<FakeNccl>(rank, size, unlocked(std::move(connect)), std::move(name));
  });
  m.def("device", [](DevicePtr device, Millis connectTimeout) -> DevicePtr {
    return std::make_shared<flashrecovery::ManagedDevice>(std::move(device), connectTimeout);
  });
  m.def("connected", [](const BackendPtr& b) { return dynamic_cast<FakeNccl&>(*b).connected(); });
  m.def("catch_up", &CurrentStream::catchUp, NoGil());
  m.def("catch_up_at_once", [](bool on) { CurrentStream::atOnce = on; });
  m.def("run_ahead", [](bool on) { CurrentStream::ahead = on; });
  m.def("take_behind", [] { return Event{std::exchange(CurrentStream::mine(), {})}; });
  m.def("break_network", [] {
    for (const auto& communicator : Device::instance().all()) communicator->breakNetwork();
  });
  m.def("marks", [] {
    static const flashrecovery::DeviceMarks::Make make = [](c10::DeviceType, bool) { return std::make_unique<FakeMark>(); };
    return reinterpret_cast<uintptr_t>(&make);
  });
  m.def("launch_kernel", &Kernel::launch);
  m.def("global_rank", [] { return FakeNccl::globalRank(); });
  m.def("fail_kernels", [] { Sticky::failed = Sticky::kIllegalAddress; });
  m.def("check", &Sticky::check);
  m.def("group_depth", [] { return Group::mine().depth; });
  m.def("synchronize", [] { Device::instance().synchronize(); }, NoGil());
}
