// A fork while another thread makes or drops its Python thread state.
//
// In Python 3.11 and older a forked child waits for the lock of the list of thread states before it re-creates that
// lock (PyOS_AfterFork_Child in Modules/posixmodule.c; 3.12 does it the other way round). A native thread takes this
// lock without the GIL whenever it enters Python: gloo's and our own do so to drop a tensor that has a Python object.
// If a data loader's worker is forked in that moment, it hangs for ever. So the forking thread holds the lock during
// the fork.
#pragma once

#include <Python.h>

#if PY_VERSION_HEX < 0x030C0000

#include <pthread.h>

// The runtime's structure is private to Python; without C's atomics its header can be read as C++.
#define Py_BUILD_CORE 1
#undef HAVE_STD_ATOMIC
#undef _PyGC_FINALIZED
#include <internal/pycore_runtime.h>
#undef Py_BUILD_CORE

namespace flashrecovery {

class ThreadStates {
 public:
  // For the rest of the life of this process and of its children.
  static void holdWhileForking() {
    static const int registered = ::pthread_atfork(hold, release, release);
    TORCH_CHECK(registered == 0, "pthread_atfork: ", registered);
  }

 private:
  // fork() runs these on the forking thread; another one that forks at the same time waits in the first.
  static void hold() {
    PyThread_type_lock lock = _PyRuntime.interpreters.mutex;
    if (lock) PyThread_acquire_lock(lock, WAIT_LOCK);
    held() = lock;
  }
  static void release() {
    if (PyThread_type_lock lock = held()) {
      held() = nullptr;
      PyThread_release_lock(lock);
    }
  }
  static PyThread_type_lock& held() {
    static thread_local PyThread_type_lock lock = nullptr;
    return lock;
  }
};

}  // namespace flashrecovery

#else

namespace flashrecovery {
struct ThreadStates {
  static void holdWhileForking() {}
};
}  // namespace flashrecovery

#endif
