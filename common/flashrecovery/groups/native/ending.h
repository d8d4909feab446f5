// The end of the interpreter, and what our threads must not do from then on.
//
// While CPython is finalized, up to version 3.13, a thread that wants the GIL is ended by unwinding its stack (take_gil
// in Python/ceval_gil.h calls pthread_exit; later versions let it sleep for ever). In C++ the unwinding reaches a
// destructor, which must not throw, and the whole process is aborted although its script has succeeded: "terminate
// called without an active exception". Two kinds of threads want the GIL this late:
//
// * Native threads that drop a tensor. If it has a Python object this needs the GIL, even if the reference is not the
//   last one (c10/util/intrusive_ptr.h, "PyObject preservation").
// * Python threads that return from a call that has released it.
//
// So both pass a gate here. The last exit handler before finalization closes it, and waits until no thread is inside.
// From then on, what native threads would drop is kept, and a thread that returns sleeps until the process is gone.
#pragma once

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <thread>
#include <utility>

namespace flashrecovery {

class Ending {
 public:
  // While there is one that is not empty, the interpreter is not finalized. Empty: that may have begun.
  class Visit {
   public:
    Visit() : inside_(instance().enter()) {}
    ~Visit() {
      if (inside_) instance().leave();
    }
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;
    explicit operator bool() const { return inside_; }

   private:
    const bool inside_;
  };

  // Destroys it, or keeps it for ever if it is too late. For what may hold a tensor, on a native thread.
  template <typename T>
  static void drop(T what) {
    const Visit visit;
    auto* moved = new T(std::move(what));
    if (visit) delete moved;
  }

  // Called, with a visit, by a thread that is about to take the GIL. Returns in time, or never.
  static void comeBack(const Visit& visit) {
    if (!visit && !instance().closedHere())
      while (true) ::pause();
  }

  // To be called by the thread that will finalize the interpreter, without the GIL. False: a thread is still inside at
  // the deadline.
  static bool close(std::chrono::milliseconds deadline) {
    auto& here = instance();
    here.closer_ = std::this_thread::get_id();
    here.closed_ = true;
    beforeTerminate() = std::get_terminate();
    std::set_terminate(terminate);
    const auto until = std::chrono::steady_clock::now() + deadline;
    while (here.inside_ > 0) {
      if (std::chrono::steady_clock::now() >= until) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return true;
  }

 private:
  // Never destroyed: threads come here as long as the process lives.
  static Ending& instance() {
    static auto* ending = new Ending;
    return *ending;
  }

  // Of all threads that are inside, a forked child has only the one that has forked.
  Ending() { ::pthread_atfork(nullptr, nullptr, [] { instance().inside_ = depth(); }); }

  static int& depth() {
    static thread_local int count = 0;
    return count;
  }
  bool enter() {
    ++inside_, ++depth();  // before the look: who closes counts after it has closed
    if (!closed_) return true;
    leave();
    return false;
  }
  void leave() { --inside_, --depth(); }

  // For threads that do not pass the gate, because they are in torch: the script's daemon threads, and ours that have
  // not ended in time. They sleep as they would with Python 3.14, but only for as long as process exit takes: after
  // that, something is waiting for them.
  [[noreturn]] static void terminate() {
    const bool isUnwound = !std::current_exception() && !instance().closedHere();
    if (isUnwound) std::this_thread::sleep_for(kLongestEnd);
    beforeTerminate()();
    std::abort();
  }
  static std::terminate_handler& beforeTerminate() {
    static std::terminate_handler handler = nullptr;
    return handler;
  }
  static constexpr std::chrono::seconds kLongestEnd{30};

  bool closedHere() const { return closed_ && closer_.load() == std::this_thread::get_id(); }

  std::atomic<int> inside_{0};
  std::atomic<bool> closed_{false};
  std::atomic<std::thread::id> closer_{};
};

}  // namespace flashrecovery
