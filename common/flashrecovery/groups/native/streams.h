// Connections between ranks, made when two of them first need each other.
//
// A stream goes in one direction: the rank that sends on it opens it, and gives it a tag, so that two exchanges of the
// same ranks never wait for each other. Where a rank listens stands in the store, with a secret. Both ends of a connection
// prove that they know it (proof.h) before anything else is said. There is nothing to do for the ranks that never talk to
// each other: n ranks in a ring need n connections.
#pragma once

#include "proof.h"
#include "sockets.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <sys/resource.h>

#include <condition_variable>
#include <list>
#include <map>
#include <thread>

namespace flashrecovery {

class Streams final : public Transport {
 public:
  // One end of a stream. Used by one thread at a time.
  struct End {
    FileDescriptor socket;
    std::string peer;  // for messages
    uint64_t messages = 0;
  };

  // Listens on `host`, and says so in `store`. `timeout`: of everything that a peer has to do.
  Streams(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const std::string& host, Millis timeout)
      : store_(std::move(store)), rank_(rank), size_(size), timeout_(timeout) {
    if (!draw(secret_)) throwLost("getrandom", errno);
    uint16_t port = 0;
    std::tie(listener_, port) = listenOn(host);
    std::string entry(reinterpret_cast<const char*>(secret_.data()), secret_.size());
    entry.append(reinterpret_cast<const char*>(&port), sizeof port).append(host);
    store_->set(std::to_string(rank), std::vector<uint8_t>(entry.begin(), entry.end()));
    acceptor_ = std::thread([this] { acceptAll(); });
  }
  ~Streams() override {
    cut("the group was destroyed");
    acceptor_.join();
  }

  // ---- Transport ------------------------------------------------------------------------------------------------

  void cut(const std::string& reason) override {
    stop_.raise(reason);
    std::lock_guard<std::mutex> guard(mutex_);
    changed_.notify_all();
  }
  size_t live() const override { return writers_; }

  // ---- ends -----------------------------------------------------------------------------------------------------

  // `last`: what is sent on it comes after everything else.
  End& to(int peer, int tag, bool last = false) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      const auto known = outgoing_.find({peer, tag});
      if (known != outgoing_.end()) return known->second;
    }
    const std::string name = "rank " + std::to_string(peer);
    const Entry entry = whereIs(peer);
    const auto until = deadline();
    End end{connectTo(entry.endpoint, stop_, until, "connecting to " + name), name};
    introduce(end, peer, tag, entry.secret, until);
    if (last) sendLast(end.socket);
    std::lock_guard<std::mutex> guard(mutex_);
    return outgoing_.emplace(Key{peer, tag}, std::move(end)).first->second;
  }

  End& from(int peer, int tag) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto there = [&] { return stop_.raised() || incoming_.count({peer, tag}); };
    const bool came = changed_.wait_until(lock, deadline(), there);
    stop_.check();
    if (!came) throwLost("rank " + std::to_string(peer) + " does not connect", ETIMEDOUT);
    return incoming_.at({peer, tag});  // nodes of a map stay where they are
  }

  // Where these ranks are, asked for at once.
  void lookUp(const std::vector<int>& peers) {
    std::vector<int> unknown;
    std::vector<std::string> keys;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      for (const int peer : peers)
        if (!entries_.count(peer)) unknown.push_back(peer);
    }
    if (unknown.empty()) return;
    for (const int peer : unknown) keys.push_back(std::to_string(peer));
    const auto found = store_->multiGet(keys);
    std::lock_guard<std::mutex> guard(mutex_);
    for (size_t i = 0; i < unknown.size(); ++i) entries_[unknown[i]] = parse(found.at(i));
  }

  const Stop& stop() const { return stop_; }
  Deadline deadline() const { return std::chrono::steady_clock::now() + timeout_.load(); }
  void setTimeout(Millis timeout) { timeout_ = timeout; }

  int rank() const { return rank_; }
  int size() const { return size_; }

  // What may write into a tensor: does not begin after the cut, and `live` counts it until it has ended.
  template <typename Action>
  void writing(Action&& action) {
    struct Count {
      std::atomic<size_t>& of;
      explicit Count(std::atomic<size_t>& counter) : of(counter) { ++of; }
      ~Count() { --of; }
    } const count(writers_);
    stop_.check();
    action();
  }

 private:
  using Key = std::pair<int, int>;  // (peer, tag)
  static constexpr uint64_t kMagic = 0x32304d4145525453;
  static constexpr size_t kOwnGuests = 8;
  static constexpr std::chrono::seconds kGuestTime{10};

  struct Entry {
    Endpoint endpoint;
    Secret secret;
  };

  // How many connections of this process have not proven who they are. More than a quarter of its file descriptors they
  // may not have, or strangers could keep it from opening anything; but each listener may always have a few.
  struct Seat {
    Seat() { ++taken(); }
    ~Seat() { --taken(); }
    Seat(const Seat&) = delete;
    Seat& operator=(const Seat&) = delete;

    static std::atomic<size_t>& taken() {
      static std::atomic<size_t> count{0};
      return count;
    }
    static bool left() {
      rlimit files{};
      const bool known = ::getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur != RLIM_INFINITY;
      return taken() < (known ? std::min<size_t>(files.rlim_cur / 4, 4096) : 4096);
    }
  };

  // A connection that has not proven who it is.
  struct Guest {
    explicit Guest(FileDescriptor&& accepted) : socket(std::move(accepted)), until(std::chrono::steady_clock::now() + kGuestTime) {}

    FileDescriptor socket;
    Deadline until;
    struct {
      Hello hello;
      Proof proof;
    } said{};
    size_t bytes = 0;  // of that
    Nonce answer{};
    Seat seat;
  };

  Entry whereIs(int peer) {
    lookUp({peer});
    std::lock_guard<std::mutex> guard(mutex_);
    return entries_.at(peer);
  }

  static Entry parse(const std::vector<uint8_t>& bytes) {
    Entry entry;
    constexpr size_t fixed = sizeof entry.secret + sizeof entry.endpoint.port;
    TORCH_CHECK(bytes.size() > fixed, "the store's entry of a rank is cut off");
    std::memcpy(entry.secret.data(), bytes.data(), entry.secret.size());
    std::memcpy(&entry.endpoint.port, bytes.data() + entry.secret.size(), sizeof entry.endpoint.port);
    entry.endpoint.host.assign(bytes.begin() + fixed, bytes.end());
    return entry;
  }

  // Who listens proves first that it knows the secret of rank `peer`; what does not gets nothing more.
  void introduce(const End& end, int peer, int tag, const Secret& secret, Deadline until) const {
    Introduction said{{kMagic, {}, static_cast<uint32_t>(rank_), tag}, {}, static_cast<uint32_t>(peer)};
    if (!draw(said.hello.nonce)) throwLost("getrandom", errno);
    sendAll(end, &said.hello, sizeof said.hello, until);
    Answer answer;
    receiveAll(end, &answer, sizeof answer, until);
    said.answer = answer.nonce;
    if (!same(prove(secret, said, Side::kListens), answer.proof))
      C10_THROW_ERROR(DistBackendError, "what listens where " + end.peer + " did does not know its secret");
    const Proof own = prove(secret, said, Side::kDials);
    sendAll(end, &own, sizeof own, until);
  }

  void sendAll(const End& end, const void* data, size_t bytes, Deadline until) const {
    for (const char* next = static_cast<const char*>(data); bytes > 0;) {
      const ssize_t sent = ::send(end.socket.get(), next, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0 && errno != EAGAIN && errno != EINTR) throwLost("connection to " + end.peer, errno);
      if (sent > 0) next += sent, bytes -= sent;
      pollfd writable{end.socket.get(), POLLOUT, 0};
      if (bytes > 0) pollUntil(&writable, 1, stop_, until, "connecting to " + end.peer);
    }
  }

  void receiveAll(const End& end, void* data, size_t bytes, Deadline until) const {
    for (char* next = static_cast<char*>(data); bytes > 0;) {
      pollfd readable{end.socket.get(), POLLIN, 0};
      pollUntil(&readable, 1, stop_, until, "connecting to " + end.peer);
      const ssize_t got = ::recv(end.socket.get(), next, bytes, MSG_DONTWAIT);
      if (got < 0 && errno != EAGAIN && errno != EINTR) throwLost("connection to " + end.peer, errno);
      if (got == 0) throwLost("connection to " + end.peer, ECONNRESET);
      if (got > 0) next += got, bytes -= got;
    }
  }

  // ---- the accepting thread -------------------------------------------------------------------------------------

  void acceptAll() {
    std::list<Guest> guests;
    while (!stop_.raised()) {
      std::vector<pollfd> waits{{stop_.fd(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
      for (const auto& guest : guests) waits.push_back({guest.socket.get(), POLLIN, 0});
      const int ready = ::poll(waits.data(), waits.size(), guests.empty() ? -1 : 1000);
      if (ready < 0 && errno != EINTR) TORCH_WARN("a rank can no longer be connected to: ", std::strerror(errno));
      if (ready < 0 && errno != EINTR) return;
      size_t place = 2;
      for (auto guest = guests.begin(); guest != guests.end(); ++place) {
        const bool stays = waits[place].revents ? listenTo(*guest) : std::chrono::steady_clock::now() < guest->until;
        guest = stays ? std::next(guest) : guests.erase(guest);
      }
      if (waits[1].revents) welcome(guests);
    }
  }

  void welcome(std::list<Guest>& guests) {
    FileDescriptor socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket.get() < 0) {
      if (errno == EMFILE || errno == ENFILE) std::this_thread::sleep_for(Millis(50));  // or this would spin
      return;
    }
    if (guests.size() >= kOwnGuests && !Seat::left()) guests.pop_front();
    guests.emplace_back(std::move(socket));
  }

  // Reads what a guest says: a Hello, and once that is answered, its proof. False: it is none any more.
  bool listenTo(Guest& guest) {
    const bool greets = guest.bytes < sizeof(Hello);
    const size_t all = greets ? sizeof(Hello) : sizeof guest.said;
    char* next = reinterpret_cast<char*>(&guest.said) + guest.bytes;
    const ssize_t got = ::recv(guest.socket.get(), next, all - guest.bytes, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    if (got <= 0) return false;
    guest.bytes += got;
    if (guest.bytes < all) return true;
    return greets ? answer(guest) : admit(guest);
  }

  bool answer(Guest& guest) {
    const Hello& hello = guest.said.hello;
    const auto own = static_cast<uint32_t>(rank_), ranks = static_cast<uint32_t>(size_);
    if (hello.magic != kMagic || hello.rank >= ranks || hello.rank == own) return refuse();
    if (!draw(guest.answer)) return false;
    const Answer said{guest.answer, prove(secret_, {hello, guest.answer, own}, Side::kListens)};
    guest.until = std::chrono::steady_clock::now() + kGuestTime;  // this process may have been stopped meanwhile
    const ssize_t sent = ::send(guest.socket.get(), &said, sizeof said, MSG_NOSIGNAL | MSG_DONTWAIT);
    return sent == static_cast<ssize_t>(sizeof said);  // a connection on which nothing was sent has room for it
  }

  bool admit(Guest& guest) {
    const Hello& hello = guest.said.hello;
    const Introduction said{hello, guest.answer, static_cast<uint32_t>(rank_)};
    if (!same(prove(secret_, said, Side::kDials), guest.said.proof)) return refuse();
    detail::atOnce(guest.socket);
    std::lock_guard<std::mutex> guard(mutex_);
    End end{std::move(guest.socket), "rank " + std::to_string(hello.rank)};
    incoming_.emplace(Key{static_cast<int>(hello.rank), hello.tag}, std::move(end));
    changed_.notify_all();
    return false;
  }

  static bool refuse() {
    TORCH_WARN_ONCE("a connection that does not know this rank's secret was refused");
    return false;
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_, size_;
  std::atomic<Millis> timeout_;
  Secret secret_{};
  FileDescriptor listener_;
  Stop stop_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, Entry> entries_;
  std::map<Key, End> outgoing_, incoming_;
  std::atomic<size_t> writers_{0};
  std::thread acceptor_;
};

}  // namespace flashrecovery
