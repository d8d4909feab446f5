// The part of gloo's public transport interface that we implement and call, declared here because the torch wheel
// ships no gloo headers. Only the order of the virtual functions and the size of the objects matter; both are
// checked when a group is made (see transport.h). Written against the gloo that torch 2.13 contains.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace gloo {
class IStore;

namespace transport {
class RemoteKey;

// Stands for std::unique_ptr<RemoteKey> as a return type (both are returned in memory of the caller's); never used.
struct KeyPointer {
  ~KeyPointer() {}
  void* key = nullptr;
};

class UnboundBuffer {
 public:
  UnboundBuffer(void* memory, size_t bytes) : ptr(memory), size(bytes) {}
  virtual ~UnboundBuffer() = 0;

  void* const ptr;
  const size_t size;

  virtual bool waitRecv(int* rank, std::chrono::milliseconds timeout) = 0;
  virtual bool waitSend(int* rank, std::chrono::milliseconds timeout) = 0;
  virtual void abortWaitRecv() = 0;
  virtual void abortWaitSend() = 0;
  virtual void send(int rank, uint64_t slot, size_t offset, size_t nbytes) = 0;
  virtual void recv(int rank, uint64_t slot, size_t offset, size_t nbytes) = 0;
  virtual void recv(std::vector<int> ranks, uint64_t slot, size_t offset, size_t nbytes) = 0;
  virtual KeyPointer getRemoteKey() const = 0;
  virtual void put(const RemoteKey& key, uint64_t slot, size_t offset, size_t roffset, size_t nbytes) = 0;
  virtual void get(const RemoteKey& key, uint64_t slot, size_t offset, size_t roffset, size_t nbytes) = 0;
};

class Pair;  // only ever held by reference to gloo's own pointer

class Context {
 public:
  Context(int rank, int size);
  virtual ~Context();

  const int rank;
  const int size;

  virtual std::unique_ptr<Pair>& getPair(int rank);
  virtual std::unique_ptr<Pair>& createPair(int rank) = 0;
  virtual void createAndConnectAllPairs(std::shared_ptr<IStore> store);
  virtual std::unique_ptr<UnboundBuffer> createUnboundBuffer(void* ptr, size_t size) = 0;
  virtual KeyPointer deserializeRemoteKey(const std::string& text) = 0;

  void setTimeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  std::chrono::milliseconds getTimeout() const { return timeout_; }

 protected:
  struct Opaque;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Opaque>> pairs_;
  std::chrono::milliseconds timeout_;
  std::vector<std::unique_ptr<Opaque>> pendingOperations_;
  std::vector<std::unique_ptr<Opaque>> expectedNotifications_;
};

class Device {
 public:
  virtual ~Device() = 0;
  virtual std::string str() const = 0;
  virtual const std::string& getPCIBusID() const = 0;
  virtual int getInterfaceSpeed() const = 0;
  virtual bool hasGPUDirect() const = 0;
  virtual std::shared_ptr<Context> createContext(int rank, int size) = 0;
};

}  // namespace transport
}  // namespace gloo
