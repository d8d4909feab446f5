// All objects of a class that this process has made and not destroyed.
#pragma once

#include <pthread.h>

#include <mutex>
#include <set>

namespace flashrecovery {

template <typename T>
class Living {
 public:
  static void add(T* one) {
    std::lock_guard<std::mutex> guard(instance().mutex_);
    instance().all_.insert(one);
  }
  // Before anything of it is destroyed.
  static void remove(T* one) {
    std::lock_guard<std::mutex> guard(instance().mutex_);
    instance().all_.erase(one);
  }
  // None of them is destroyed meanwhile. `each` must not make or destroy one, nor want the GIL, which a thread that
  // destroys one may hold.
  template <typename Each>
  static void visit(Each&& each) {
    std::lock_guard<std::mutex> guard(instance().mutex_);
    for (T* one : instance().all_) each(*one);
  }

 private:
  // Never destroyed: objects live longer than static ones.
  static Living& instance() {
    static auto* living = new Living;
    return *living;
  }

  // As in graveyard.h. What a forked child finds here is its parent's.
  Living() { ::pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); }, inChild); }
  static void inChild() {
    instance().all_.clear();
    instance().mutex_.unlock();
  }

  std::mutex mutex_;
  std::set<T*> all_;
};

}  // namespace flashrecovery
