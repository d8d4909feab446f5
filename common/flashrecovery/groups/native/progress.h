// How far a rank has come in one group: what tells the rank that others wait for from the ones that wait.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

namespace flashrecovery {

// Which operation of its kind one is: equal collectives have equal numbers on every rank of the group; the n-th send to
// a peer meets its n-th receive from this rank.
struct Ordinal {
  static constexpr int NO_PEER = -1;  // a collective
  static constexpr int UNKNOWN = -2;  // any rank may complete it

  int peer = NO_PEER;  // group rank
  uint64_t number = 0;
};

// Counts since the group was last attached.
class Progress {
 public:
  Ordinal collective() {
    std::lock_guard<std::mutex> guard(mutex_);
    return {Ordinal::NO_PEER, collectives_++};
  }
  Ordinal send(int peer) {
    std::lock_guard<std::mutex> guard(mutex_);
    return {peer, pairs_[peer].first++};
  }
  Ordinal receive(int peer) {
    std::lock_guard<std::mutex> guard(mutex_);
    return {peer, pairs_[peer].second++};
  }
  void startBatch() {
    std::lock_guard<std::mutex> guard(mutex_);
    batchFrom_ = collectives_;
  }
  // A coalesced launch is as far as its last collective; of sends and receives it does not say whose they are.
  Ordinal endBatch() {
    std::lock_guard<std::mutex> guard(mutex_);
    if (collectives_ == batchFrom_) return {Ordinal::UNKNOWN, 0};
    return {Ordinal::NO_PEER, collectives_ - 1};
  }
  void reset() {
    std::lock_guard<std::mutex> guard(mutex_);
    collectives_ = batchFrom_ = 0;
    pairs_.clear();
  }
  uint64_t collectives() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return collectives_;
  }
  // (peer, sent, received)
  std::vector<std::tuple<int, uint64_t, uint64_t>> pairs() const {
    std::lock_guard<std::mutex> guard(mutex_);
    std::vector<std::tuple<int, uint64_t, uint64_t>> out;
    for (const auto& [peer, counts] : pairs_) out.emplace_back(peer, counts.first, counts.second);
    return out;
  }

 private:
  mutable std::mutex mutex_;
  uint64_t collectives_ = 0, batchFrom_ = 0;
  std::map<int, std::pair<uint64_t, uint64_t>> pairs_;
};

}  // namespace flashrecovery
