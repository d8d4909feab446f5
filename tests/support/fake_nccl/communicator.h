// A communicator of the fake and its stream: operations over gloo, one after the other, on a separate thread.
//
// What it does as NCCL does:
//   * a peer that is gone lets an operation wait for ever, on the device; the host is told only by `error()`
//     (ProcessGroupNCCL.cpp, checkForNCCLErrorsInternal: only the watchdog and getError() look at asynchronous errors);
//   * an abort ends what is under way wherever it is, and leaves NaN in its outputs; what was queued behind it runs on
//     that, and counts as having happened (NCCL init.cc, commReclaim: kernels see the abort flag and leave);
//   * an abort while a thread launches, and any use afterwards, ends the process (pytorch#149418: the communicator's
//     memory is freed at the abort).
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <ATen/ATen.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>

#include <unistd.h>

#include "transport.h"

namespace fake_nccl {

using Tensors = std::vector<at::Tensor>;
using c10d::Backend;
using BackendPtr = c10::intrusive_ptr<Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using DevicePtr = std::shared_ptr<gloo::transport::Device>;

// A rule of NCCL or of the driver has been broken: a real process would crash, or hang for ever.
[[noreturn]] inline void die(const std::string& why) {
  std::fprintf(stderr, "fake NCCL: %s\n", why.c_str());
  std::fflush(stderr);
  std::abort();
}

// A kernel has failed: from then on every call that has to do with the device raises, from any thread, until the process
// ends (CUDA's sticky errors, such as an illegal memory access).
struct Sticky {
  static inline std::atomic<int> failed{0};  // a cudaError_t
  static void check() {
    const int code = failed;
    if (code == 0) return;
    const char* text = code == kContained ? "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error"
                                          : "CUDA error: an illegal memory access";
    throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, code, text);
  }
  static constexpr int kIllegalAddress = 700, kContained = 226;
};

// GPUs that are joined by NVLink map each other's memory. A process that ends takes its own away from those that have
// communicators open. `FAKE_NCCL_DOMAIN`: a directory with a file RANK.PID for each process that the domain has had.
class Domain {
 public:
  // A communicator is made: any process that has ended by now is no part of it.
  static void look() { ended(); }
  // Has a process of the domain ended since communicators were made?
  static bool hasLostSomebody() { return ended() > 0; }
  // Leaves a file WHAT.PID there, for tests: "aborted" while the process has no communicator open, "faulted" for good.
  static void note(const std::string& what, bool on = true) {
    const char* directory = std::getenv("FAKE_NCCL_DOMAIN");
    if (directory == nullptr) return;
    const auto file = std::filesystem::path(directory) / (what + "." + std::to_string(getpid()));
    if (on)
      std::ofstream(file).flush();
    else
      std::filesystem::remove(file);
  }

 private:
  static int ended() {
    static std::mutex mutex;
    static std::set<std::string> known;
    const char* directory = std::getenv("FAKE_NCCL_DOMAIN");
    if (directory == nullptr) return 0;
    std::lock_guard<std::mutex> guard(mutex);
    int found = 0;
    for (const auto& file : std::filesystem::directory_iterator(directory)) {
      const std::string pid = file.path().extension().string().substr(1);
      if (hasEnded(pid)) found += known.insert(pid).second;
    }
    return found;
  }
  static bool hasEnded(const std::string& pid) {
    std::ifstream file("/proc/" + pid + "/stat");
    std::string stat;
    if (!std::getline(file, stat)) return true;
    std::istringstream behindName(stat.substr(stat.rfind(')') + 1));
    std::string state, parent, group, session, terminal, foreground;
    unsigned long flags = 0;
    behindName >> state >> parent >> group >> session >> terminal >> foreground >> flags;
    return (flags & 0x4) != 0;  // PF_EXITING: its memory is given back, and its connections end after that
  }
};

// Where a switch of the fake itself stands: `FAKE_NCCL_...`.
inline long setting(const char* name, long otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atol(value);
}

// For so long after its data has come a kernel still transfers: `FAKE_NCCL_TRANSFER_MS`.
inline std::chrono::milliseconds transferTime() { return std::chrono::milliseconds(setting("FAKE_NCCL_TRANSFER_MS", 0)); }

// A kernel of the script's own on the current stream. What is launched later waits for it, and the host does not.
class Kernel {
 public:
  using Clock = std::chrono::steady_clock;
  bool done() const { return Clock::now() >= end_; }
  Clock::time_point end() const { return end_; }
  void wait() const {
    while (!done()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  // Less than 0 seconds: it never ends.
  static void launch(double seconds) {
    const auto end = seconds < 0 ? Clock::time_point::max()
                                 : Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    std::lock_guard<std::mutex> guard(mutex());
    last() = std::make_shared<const Kernel>(end);
  }
  // Null: none.
  static std::shared_ptr<const Kernel> newest() {
    std::lock_guard<std::mutex> guard(mutex());
    return last();
  }
  static void waitForAll() {
    if (const auto kernel = newest()) kernel->wait();
  }
  explicit Kernel(Clock::time_point end) : end_(end) {}

 private:
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static std::shared_ptr<const Kernel>& last() {
    static auto* kernel = new std::shared_ptr<const Kernel>;
    return *kernel;
  }
  const Clock::time_point end_;
};
using KernelPtr = std::shared_ptr<const Kernel>;

// What one call of the script does on the device.
struct Operation {
  std::function<WorkPtr(Backend&)> start;
  Tensors outputs;
  std::function<void()> after;  // on its outputs, e.g. the division of an average
};

// Operations that are launched together, and whether the device is through with them.
class Launch {
 public:
  explicit Launch(std::vector<Operation> operations) : operations_(std::move(operations)), before_(Kernel::newest()) {}

  bool mayBegin() const { return !before_ || before_->done(); }

  // Whether that was without an abort.
  void run(Backend& gloo, const std::function<void()>& peerGone) {
    if (!attempt(gloo)) {
      peerGone();  // returns at the abort
      tear();
    } else if (const auto time = transferTime(); time.count() > 0) {
      transferring_ = true;
      std::this_thread::sleep_for(time);
      transferring_ = false;
    }
    finish();
  }
  void tear() {
    at::NoGradGuard guard;
    for (auto& operation : operations_)
      for (auto& output : operation.outputs) {
        if (output.is_floating_point() || output.is_complex())
          output.fill_(std::numeric_limits<double>::quiet_NaN());
        else if (output.scalar_type() != at::kBool)
          output.fill_(77);
      }
    torn_ = true;
  }
  void finish() {
    std::vector<std::function<void()>> told;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      ended_ = Kernel::Clock::now();
      done_ = true;
      told.swap(listeners_);
    }
    changed_.notify_all();
    for (auto& listener : told) listener();
    operations_.clear();
  }
  void whenDone(std::function<void()> listener) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      if (!done_) {
        listeners_.push_back(std::move(listener));
        return;
      }
    }
    listener();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return done_.load(); });
  }
  bool done() const { return done_; }
  Kernel::Clock::time_point ended() const { return ended_; }  // of one that is done
  bool torn() const { return torn_; }
  bool transferring() const { return transferring_; }

 private:
  bool attempt(Backend& gloo) {
    try {
      std::vector<WorkPtr> works;
      for (auto& operation : operations_) works.push_back(operation.start(gloo));
      for (auto& work : works)
        if (work) work->wait();
      for (auto& operation : operations_)
        if (operation.after) operation.after();
    } catch (const std::exception&) {
      return false;
    }
    return true;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Operation> operations_;
  const KernelPtr before_;
  std::vector<std::function<void()>> listeners_;
  Kernel::Clock::time_point ended_;
  std::atomic<bool> done_{false}, torn_{false}, transferring_{false};
};
using LaunchPtr = std::shared_ptr<Launch>;

class Communicator {
  struct Shared;

 public:
  Communicator(BackendPtr gloo, const std::vector<DevicePtr>& devices) : shared_(std::make_shared<Shared>()) {
    Domain::look();
    if (open()++ == 0) Domain::note("aborted", false);
    for (const auto& device : devices)
      shared_->transports.push_back(std::dynamic_pointer_cast<flashrecovery::ManagedDevice>(device)->state());
    std::thread([shared = shared_, gloo = std::move(gloo)] { stream(*shared, *gloo); }).detach();
  }
  ~Communicator() { abort(); }

  // A thread is within the launch of something for as long as this lives.
  class Launching {
   public:
    explicit Launching(Communicator& communicator) : on_(communicator.shared_) {
      ++on_->launching;
      if (on_->aborted) die("an operation on a communicator that has been aborted");
    }
    ~Launching() { --on_->launching; }
    Launching(const Launching&) = delete;

   private:
    std::shared_ptr<Shared> on_;
  };

  void enqueue(const LaunchPtr& launch) {
    Sticky::check();
    const std::chrono::microseconds launchTime(setting("FAKE_NCCL_LAUNCH_US", 20));
    std::this_thread::sleep_for(launchTime);
    std::lock_guard<std::mutex> guard(shared_->mutex);
    if (shared_->aborted) die("a launch while its communicator was aborted");
    if (freeing() > 0) die("a launch while another communicator is aborted: its memory is freed, and both may block");
    shared_->queue.push_back(launch);
    shared_->newest = launch;
    shared_->changed.notify_all();
  }
  // The device is through with everything that was queued so far.
  void synchronize() {
    LaunchPtr newest;
    {
      std::lock_guard<std::mutex> guard(shared_->mutex);
      newest = shared_->newest;
    }
    if (newest) newest->wait();
  }
  // No connection of it works any more, and no rank has died.
  void breakNetwork() {
    for (const auto& transport : shared_->transports) transport->cut("the network is broken");
  }
  bool failed() const { return shared_->peerGone; }

  void abort() {
    if (shared_->launching > 0) die("an abort while another thread launches");
    if (!shared_->aborted && Domain::hasLostSomebody()) {  // too late
      Sticky::failed = Sticky::kContained;
      Domain::note("faulted");
    }
    {
      std::lock_guard<std::mutex> guard(shared_->mutex);
      if (shared_->aborted.exchange(true)) return;
      if (shared_->running && shared_->running->transferring()) {
        Domain::note("faulted");
        die("an abort while a kernel transfers (SXid 12028): the node is lost");
      }
      shared_->changed.notify_all();
    }
    for (const auto& transport : shared_->transports) transport->cut("aborted");
    std::unique_lock<std::mutex> lock(shared_->mutex);
    shared_->changed.wait(lock, [this] { return shared_->over; });
    lock.unlock();
    Kernel::waitForAll();  // it frees memory, which waits for the device
    // Its kernels have ended; the proxy thread has yet to look (proxy.cc, ncclProxyService: poll with 500 ms).
    if (const std::chrono::milliseconds time(setting("FAKE_NCCL_ABORT_MS", 0)); time.count() > 0) {
      ++freeing();
      std::this_thread::sleep_for(time);
      --freeing();
    }
    if (--open() == 0) Domain::note("aborted");
  }

 private:
  static std::atomic<int>& open() {  // of the process
    static std::atomic<int> count{0};
    return count;
  }
  static std::atomic<int>& freeing() {  // the same
    static std::atomic<int> count{0};
    return count;
  }
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<LaunchPtr> queue;
    LaunchPtr newest, running;
    std::vector<std::shared_ptr<flashrecovery::TransportState>> transports;
    std::atomic<bool> aborted{false}, peerGone{false};
    std::atomic<int> launching{0};
    bool over = false;
  };

  static void stream(Shared& shared, Backend& gloo) {
    std::unique_lock<std::mutex> lock(shared.mutex);
    while (true) {
      shared.changed.wait(lock, [&] { return shared.aborted || !shared.queue.empty(); });
      if (shared.queue.empty()) break;
      LaunchPtr next = std::move(shared.queue.front());
      shared.queue.pop_front();
      shared.running = next;
      lock.unlock();
      while (!next->mayBegin() && !shared.aborted) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (shared.aborted) {
        next->tear();
        next->finish();
      } else {
        next->run(gloo, [&] { waitForAbort(shared); });
      }
      next.reset();
      lock.lock();
      shared.running.reset();
    }
    shared.over = true;
    shared.changed.notify_all();
  }

  // The kernel waits for a peer that is gone. torch's watchdog ends the process if it is asked to.
  static void waitForAbort(Shared& shared) {
    shared.peerGone = true;
    const bool watched = setting("TORCH_NCCL_ASYNC_ERROR_HANDLING", 3) != 0;
    std::unique_lock<std::mutex> lock(shared.mutex);
    const auto aborted = [&] { return shared.aborted.load(); };
    if (!watched) return shared.changed.wait(lock, aborted);
    if (!shared.changed.wait_for(lock, std::chrono::milliseconds(200), aborted))
      die("the watchdog has seen an error, and TORCH_NCCL_ASYNC_ERROR_HANDLING is not 0");
  }

  std::shared_ptr<Shared> shared_;
};
using CommunicatorPtr = std::shared_ptr<Communicator>;

}  // namespace fake_nccl
