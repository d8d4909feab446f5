// Bytes between two ranks over TCP. Every wait ends as soon as its Stop is raised, at its deadline, or when the peer has
// gone; no thread is ever left in a system call.
#pragma once

#include "stop_flag.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace flashrecovery {

using Deadline = std::chrono::steady_clock::time_point;

[[noreturn]] inline void throwLost(const std::string& what, int error) {
  C10_THROW_ERROR(DistBackendError, what + ": " + std::strerror(error));
}

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

// A flag that is raised once, for ever, and that poll() sees.
class Stop {
 public:
  Stop() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (event_.get() < 0) throwLost("eventfd", errno);
  }
  void raise(const std::string& reason) {
    if (raised()) return;
    flag_.raise(reason);
    const uint64_t one = 1;
    (void)!::write(event_.get(), &one, sizeof one);  // stays readable: every later poll() returns at once
  }
  bool raised() const { return flag_.raised(); }
  void check() const { flag_.check(); }
  int fd() const { return event_.get(); }

 private:
  FileDescriptor event_;
  StopFlag flag_;
};

// Sleeps until one of `waits` is ready or the stop is raised; raises then, and at the deadline.
inline void pollUntil(pollfd* waits, size_t count, const Stop& stop, Deadline deadline, const std::string& what) {
  std::array<pollfd, 3> all{};
  TORCH_INTERNAL_ASSERT(count < all.size());
  std::copy(waits, waits + count, all.begin());
  all[count] = {stop.fd(), POLLIN, 0};
  while (true) {
    const auto left = std::chrono::duration_cast<Millis>(deadline - std::chrono::steady_clock::now()).count();
    const int ready = left <= 0 ? 0 : ::poll(all.data(), count + 1, static_cast<int>(std::min<int64_t>(left, 60'000)));
    stop.check();
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) throwLost(what, errno);
    if (left <= 0) throwLost(what, ETIMEDOUT);
  }
}

struct Endpoint {
  std::string host;
  uint16_t port = 0;
};

namespace detail {

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

inline AddressList numeric(const Endpoint& endpoint) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int failed = ::getaddrinfo(endpoint.host.c_str(), std::to_string(endpoint.port).c_str(), &hints, &found);
  TORCH_CHECK(!failed, "not a network address: ", endpoint.host);
  return AddressList(found, &::freeaddrinfo);
}

inline FileDescriptor open(const addrinfo& address) {
  FileDescriptor fd(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (fd.get() < 0) throwLost("socket", errno);
  return fd;
}

inline void atOnce(const FileDescriptor& fd) {
  const int on = 1;
  ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

}  // namespace detail

// Where the system sorts by priority, what is sent on it comes after everything else. Elsewhere it is no error.
inline void sendLast(const FileDescriptor& fd) {
  const int priority = 2;  // TC_PRIO_BULK
  ::setsockopt(fd.get(), SOL_SOCKET, SO_PRIORITY, &priority, sizeof priority);
}

// The beginning of Linux's tcp_info (linux/tcp.h, 4.6 and later), of which libc's header has only the half.
struct TcpInfo {
  uint8_t flags[8];
  uint32_t counts[24];
  uint64_t rates[4];
  uint32_t segments[3];
  uint32_t leastRoundTripUs;
};

// Bytes in the system's buffers cannot be held back any more. So limit the buffer of a connection that reaches `rate`
// bytes a second to what leaves it within `time`, plus twice the bytes in flight, so that it stays as fast. The minimum
// round trip counts: the usual one includes the queue that is to be avoided. Returns how much to write at once: the
// system accepts a whole piece if there is room for one byte.
inline size_t keepLittleUnderWay(int fd, double rate, std::chrono::duration<double> time) {
  TcpInfo info{};
  socklen_t size = sizeof info;
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) || size < sizeof info) return 64 << 10;
  const double bytes = std::clamp(rate * (time.count() + 2e-6 * info.leastRoundTripUs), 32e3, 64e6);
  const int kept = static_cast<int>(bytes);  // the system doubles it, for what it needs itself
  ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &kept, sizeof kept);
  return static_cast<size_t>(std::min(bytes / 2, 1e6));
}

// A listening socket on a port of the system's choice, and that port.
inline std::pair<FileDescriptor, uint16_t> listenOn(const std::string& host) {
  const auto address = detail::numeric({host, 0});
  auto fd = detail::open(*address);
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  auto* plain = reinterpret_cast<sockaddr*>(&bound);
  if (::bind(fd.get(), address->ai_addr, address->ai_addrlen) || ::listen(fd.get(), 1024) ||
      ::getsockname(fd.get(), plain, &size))
    throwLost("cannot listen on " + host, errno);
  const bool six = bound.ss_family == AF_INET6;
  const auto port = six ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port : reinterpret_cast<sockaddr_in*>(&bound)->sin_port;
  return {std::move(fd), ntohs(port)};
}

inline FileDescriptor connectTo(const Endpoint& endpoint, const Stop& stop, Deadline deadline, const std::string& what) {
  const auto address = detail::numeric(endpoint);
  auto fd = detail::open(*address);
  detail::atOnce(fd);
  if (::connect(fd.get(), address->ai_addr, address->ai_addrlen) == 0) return fd;
  if (errno != EINPROGRESS) throwLost(what, errno);
  pollfd writable{fd.get(), POLLOUT, 0};
  pollUntil(&writable, 1, stop, deadline, what);
  int error = 0;
  socklen_t size = sizeof error;
  if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size)) error = errno;
  if (error) throwLost(what, error);
  return fd;
}

// The address of a network interface, IPv4 if it has one; empty if it has none or does not exist.
inline std::string addressOf(const std::string& interface) {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all)) return "";
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(all, &::freeifaddrs);
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* one = all; one; one = one->ifa_next) {
      if (!one->ifa_addr || one->ifa_addr->sa_family != family || interface != one->ifa_name) continue;
      std::array<char, NI_MAXHOST> text{};
      const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
      if (::getnameinfo(one->ifa_addr, size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) == 0) return text.data();
    }
  }
  return "";
}

// What stands before every message: both sides must mean the same one.
struct MessageHead {
  uint64_t number;  // of the message on its connection, from 0
  uint64_t bytes;
};

// One message under way. `step` moves what can be moved at once and says whether that was anything.
class Sending {
 public:
  Sending(int fd, std::string peer, uint64_t number, const void* data, size_t bytes)
      : fd_(fd), peer_(std::move(peer)), head_{number, bytes}, data_(static_cast<const char*>(data)) {}

  bool finished() const { return done_ == sizeof head_ + head_.bytes; }
  int fd() const { return fd_; }
  size_t done() const { return done_; }
  pollfd wait() const { return {fd_, POLLOUT, 0}; }
  bool step(size_t most = SIZE_MAX) {
    const size_t ofHead = std::min(done_, sizeof head_), ofData = done_ - ofHead;
    iovec parts[2] = {
        {reinterpret_cast<char*>(&head_) + ofHead, sizeof head_ - ofHead},
        {const_cast<char*>(data_) + ofData, std::min<size_t>(most, head_.bytes - ofData)}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    const ssize_t sent = ::sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (sent < 0) throwLost("connection to " + peer_, errno);
    done_ += sent;
    return true;
  }

 private:
  int fd_;
  std::string peer_;
  MessageHead head_;
  const char* data_;
  size_t done_ = 0;
};

class Receiving {
 public:
  Receiving(int fd, std::string peer, uint64_t number, void* data, size_t bytes)
      : fd_(fd), peer_(std::move(peer)), expected_{number, bytes}, data_(static_cast<char*>(data)) {}

  bool finished() const { return done_ == sizeof head_ + expected_.bytes; }
  pollfd wait() const { return {fd_, POLLIN, 0}; }
  bool step() {
    const bool head = done_ < sizeof head_;
    char* to = head ? reinterpret_cast<char*>(&head_) + done_ : data_ + (done_ - sizeof head_);
    const size_t most = (head ? sizeof head_ : sizeof head_ + expected_.bytes) - done_;
    const ssize_t got = ::recv(fd_, to, most, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (got < 0) throwLost("connection from " + peer_, errno);
    if (got == 0) throwLost("connection from " + peer_, ECONNRESET);
    done_ += got;
    if (head && done_ == sizeof head_)
      TORCH_CHECK(
          head_.number == expected_.number && head_.bytes == expected_.bytes, peer_, " sends message ", head_.number,
          " of ", head_.bytes, " bytes where message ", expected_.number, " of ", expected_.bytes, " was expected");
    return true;
  }

 private:
  int fd_;
  std::string peer_;
  MessageHead head_{}, expected_;
  char* data_;
  size_t done_ = 0;
};

// Moves the messages side by side, each as fast as its peer lets it; either may be null.
inline void move(Sending* out, Receiving* in, const Stop& stop, Deadline deadline) {
  const auto active = [](auto* message) { return message && !message->finished(); };
  while (active(out) || active(in)) {
    stop.check();
    bool moved = false;
    if (active(out)) moved |= out->step();
    if (active(in)) moved |= in->step();
    if (moved) continue;
    std::array<pollfd, 2> waits;
    size_t count = 0;
    if (active(out)) waits[count++] = out->wait();
    if (active(in)) waits[count++] = in->wait();
    pollUntil(waits.data(), count, stop, deadline, "a message that does not come or is not taken");
  }
}

}  // namespace flashrecovery
