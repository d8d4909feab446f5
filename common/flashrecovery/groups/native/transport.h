// A gloo transport whose waits can be given up.
//
// gloo moves every byte through `UnboundBuffer`s, and each blocked collective waits in one of them. Ours wrap
// gloo's own: `cut()` wakes all waiters in any of them, makes every later use throw, and destroys the inner
// buffer as soon as no thread is inside. gloo's network thread reaches a buffer only through a weak pointer, so once the
// inner buffer is gone no byte that still arrives can reach a tensor. No socket is touched, and the known hang of a
// gloo send that is queued when its connection closes cannot happen: the waiter is woken here, not by gloo.
#pragma once

#include "gloo_abi.h"

#include <c10/util/Exception.h>

#include <list>

namespace flashrecovery {

using Millis = std::chrono::milliseconds;
constexpr Millis kUnsetTimeout{-1};  // gloo: take the context's timeout

[[noreturn]] inline void throwAbandoned(const std::string& reason) {
  C10_THROW_ERROR(DistBackendError, "communication was abandoned: " + reason);
}

[[noreturn]] inline void unsupportedTransfer() {
  TORCH_CHECK(false, "one-sided gloo transfers are not supported by recoverable groups");
}

// What moves the bytes of an inner backend.
class Transport {
 public:
  virtual ~Transport() = default;
  // Ends every wait, now and later; thread-safe, idempotent.
  virtual void cut(const std::string& reason) = 0;
  // Through how many buffers or operations the network could still write to a tensor.
  virtual size_t live() const = 0;
};

class ManagedBuffer;

// What the buffers of one gloo device (one inner backend) share.
class TransportState final : public Transport {
 public:
  void cut(const std::string& reason) override;
  size_t live() const override {
    std::lock_guard<std::mutex> guard(mutex_);
    return buffers_.size();
  }

 private:
  friend class ManagedBuffer;
  mutable std::mutex mutex_;
  bool dead_ = false;
  std::string reason_;
  std::list<ManagedBuffer*> buffers_;
};

class ManagedBuffer final : public gloo::transport::UnboundBuffer {
 public:
  ManagedBuffer(
      std::shared_ptr<TransportState> state,
      gloo::transport::Context& outer,
      gloo::transport::Context& inner,
      void* memory,
      size_t bytes)
      : UnboundBuffer(memory, bytes), state_(std::move(state)), outer_(outer) {
    std::lock_guard<std::mutex> guard(state_->mutex_);
    if (state_->dead_) throwAbandoned(state_->reason_);
    inner_ = inner.createUnboundBuffer(memory, bytes);
    position_ = state_->buffers_.insert(state_->buffers_.end(), this);
  }

  ~ManagedBuffer() override {
    std::unique_ptr<UnboundBuffer> inner;  // destroyed outside of the lock: may wait for the network thread
    std::unique_lock<std::mutex> lock(state_->mutex_);
    inner = std::move(inner_);
    if (!inner) return;
    lock.unlock();
    inner.reset();
    lock.lock();
    state_->buffers_.erase(position_);
  }

  bool waitRecv(int* rank, Millis timeout) override {
    return use([&](UnboundBuffer& b) { return b.waitRecv(rank, resolve(timeout)); });
  }
  bool waitSend(int* rank, Millis timeout) override {
    return use([&](UnboundBuffer& b) { return b.waitSend(rank, resolve(timeout)); });
  }
  void abortWaitRecv() override {
    use([](UnboundBuffer& b) { return b.abortWaitRecv(), true; });
  }
  void abortWaitSend() override {
    use([](UnboundBuffer& b) { return b.abortWaitSend(), true; });
  }
  void send(int rank, uint64_t slot, size_t offset, size_t nbytes) override {
    use([&](UnboundBuffer& b) { return b.send(rank, slot, offset, nbytes), true; });
  }
  void recv(int rank, uint64_t slot, size_t offset, size_t nbytes) override {
    use([&](UnboundBuffer& b) { return b.recv(rank, slot, offset, nbytes), true; });
  }
  void recv(std::vector<int> ranks, uint64_t slot, size_t offset, size_t nbytes) override {
    use([&](UnboundBuffer& b) { return b.recv(std::move(ranks), slot, offset, nbytes), true; });
  }
  gloo::transport::KeyPointer getRemoteKey() const override { unsupportedTransfer(); }
  void put(const gloo::transport::RemoteKey&, uint64_t, size_t, size_t, size_t) override { unsupportedTransfer(); }
  void get(const gloo::transport::RemoteKey&, uint64_t, size_t, size_t, size_t) override { unsupportedTransfer(); }

 private:
  friend class TransportState;

  Millis resolve(Millis timeout) const { return timeout == kUnsetTimeout ? outer_.getTimeout() : timeout; }

  // Runs `call` on the inner buffer, keeping it alive meanwhile; gloo's own failures become DistBackendError.
  template <typename Call>
  bool use(Call&& call) {
    {
      std::lock_guard<std::mutex> guard(state_->mutex_);
      if (state_->dead_) throwAbandoned(state_->reason_);
      ++users_;
    }
    bool result = false;
    std::string failure;
    try {
      result = call(*inner_);
    } catch (const c10::Error&) {
      leave();
      throw;
    } catch (const std::exception& error) {
      failure = error.what();
      if (failure.empty()) failure = "gloo transport error";
    }
    leave();
    if (!failure.empty()) C10_THROW_ERROR(DistBackendError, failure);
    return result;
  }

  // Ends one use; throws if the transport was cut meanwhile, whatever the call returned.
  void leave() {
    std::unique_ptr<UnboundBuffer> inner;
    std::unique_lock<std::mutex> lock(state_->mutex_);
    --users_;
    if (!state_->dead_) return;
    if (users_ == 0 && inner_) {
      inner = std::move(inner_);
      lock.unlock();
      inner.reset();
      lock.lock();
      state_->buffers_.erase(position_);
    }
    const std::string reason = state_->reason_;
    lock.unlock();
    throwAbandoned(reason);
  }

  std::shared_ptr<TransportState> state_;
  gloo::transport::Context& outer_;
  std::unique_ptr<UnboundBuffer> inner_;
  std::list<ManagedBuffer*>::iterator position_;
  int users_ = 0;
};

inline void TransportState::cut(const std::string& reason) {
  std::list<std::unique_ptr<gloo::transport::UnboundBuffer>> idle;
  std::unique_lock<std::mutex> lock(mutex_);
  if (dead_) return;
  dead_ = true;
  reason_ = reason;
  for (auto it = buffers_.begin(); it != buffers_.end();) {
    ManagedBuffer* buffer = *it;
    if (buffer->users_ > 0) {
      buffer->inner_->abortWaitRecv();
      buffer->inner_->abortWaitSend();
      ++it;
    } else if (buffer->inner_) {
      idle.push_back(std::move(buffer->inner_));
      it = buffers_.erase(it);
    } else {
      ++it;  // being destroyed by its owner, who removes it
    }
  }
  // Still under the lock: `live() == 0` must mean that the inner buffers are gone. gloo's network thread never takes
  // this lock, so it cannot hold up the destruction.
  idle.clear();
}

class ManagedContext final : public gloo::transport::Context {
 public:
  ManagedContext(std::shared_ptr<Context> inner, std::shared_ptr<TransportState> state, Millis connectTimeout)
      : Context(inner->rank, inner->size),
        inner_(std::move(inner)),
        state_(std::move(state)),
        connectTimeout_(connectTimeout) {}

  std::unique_ptr<gloo::transport::Pair>& getPair(int rank) override { return inner_->getPair(rank); }
  std::unique_ptr<gloo::transport::Pair>& createPair(int rank) override { return inner_->createPair(rank); }
  void createAndConnectAllPairs(std::shared_ptr<gloo::IStore> store) override {
    inner_->setTimeout(std::min(connectTimeout_, getTimeout()));
    inner_->createAndConnectAllPairs(std::move(store));
  }
  std::unique_ptr<gloo::transport::UnboundBuffer> createUnboundBuffer(void* memory, size_t bytes) override {
    return std::make_unique<ManagedBuffer>(state_, *this, *inner_, memory, bytes);
  }
  gloo::transport::KeyPointer deserializeRemoteKey(const std::string&) override { unsupportedTransfer(); }

 private:
  std::shared_ptr<Context> inner_;
  std::shared_ptr<TransportState> state_;
  Millis connectTimeout_;
};

// A gloo device whose contexts can be cut. `connectTimeout` bounds the connection phase only; operations keep the
// timeout of their group.
class ManagedDevice final : public gloo::transport::Device {
 public:
  ManagedDevice(std::shared_ptr<Device> inner, Millis connectTimeout)
      : inner_(std::move(inner)), state_(std::make_shared<TransportState>()), connectTimeout_(connectTimeout) {}

  std::string str() const override { return inner_->str(); }
  const std::string& getPCIBusID() const override { return inner_->getPCIBusID(); }
  int getInterfaceSpeed() const override { return inner_->getInterfaceSpeed(); }
  bool hasGPUDirect() const override { return inner_->hasGPUDirect(); }
  std::shared_ptr<gloo::transport::Context> createContext(int rank, int size) override {
    auto inner = inner_->createContext(rank, size);
    // The one place where a gloo with another layout would show: refuse it instead of corrupting memory.
    TORCH_CHECK(
        inner && inner->rank == rank && inner->size == size,
        "the gloo inside this torch does not have the expected layout; recoverable groups cannot be used with it");
    return std::make_shared<ManagedContext>(std::move(inner), state_, connectTimeout_);
  }

  const std::shared_ptr<TransportState>& state() const { return state_; }

 private:
  std::shared_ptr<Device> inner_;
  std::shared_ptr<TransportState> state_;
  Millis connectTimeout_;
};

}  // namespace flashrecovery
