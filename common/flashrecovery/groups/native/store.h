// A c10d store whose waits can be given up.
//
// A client of a TCPStore is one connection with one lock: a blocked `get` can be woken from outside only by breaking the
// connection. So a wait asks the inner store again and again, at intervals that grow with the time already waited, and
// sleeps where `abandon` can wake it. That also lets other threads use the same client in between.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/exception.h>

#include <algorithm>
#include <map>

#include "stop_flag.h"
#include "torch_differences.h"

namespace flashrecovery {

class AbandonableStore final : public c10d::Store {
 public:
  using Bytes = std::vector<uint8_t>;
  using Keys = std::vector<std::string>;
  static constexpr std::chrono::microseconds kLongestSleep{25'000};  // 40 questions a second and rank

  AbandonableStore(c10::intrusive_ptr<Store> inner, std::shared_ptr<StopFlag> stop)
      : inner_(std::move(inner)), stop_(std::move(stop)) {}

  const std::shared_ptr<StopFlag>& stop() const { return stop_; }

  c10::intrusive_ptr<Store> clone() override {
    return c10::make_intrusive<AbandonableStore>(inner_->clone(), stop_);
  }
  using Store::set;
  void set(const std::string& key, const Bytes& value) override { return checked().set(key, value); }
  using Store::compareSet;
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    return checked().compareSet(key, expected, desired);
  }
  Bytes get(const std::string& key) override {
    wait({key});
    return checked().get(key);
  }
  int64_t add(const std::string& key, int64_t value) override { return checked().add(key, value); }
  bool deleteKey(const std::string& key) override { return checked().deleteKey(key); }
  bool check(const Keys& keys) override { return checked().check(keys); }
  int64_t getNumKeys() override { return checked().getNumKeys(); }
  void wait(const Keys& keys) override { wait(keys, getTimeout()); }
  void wait(const Keys& keys, const Millis& timeout) override {
    using Clock = std::chrono::steady_clock;
    using Micros = std::chrono::microseconds;
    const auto began = Clock::now();
    const auto limit = timeout > kNoTimeout ? timeout : kDefaultTimeout;
    while (!checked().check(keys)) {
      const auto waited = std::chrono::duration_cast<Micros>(Clock::now() - began);
      // The inner store's own wait, for its own error.
      if (waited >= limit) return checked().wait(keys, Millis(1));
      stop_->sleep(std::clamp<Micros>(waited / 8, Micros(200), kLongestSleep));
    }
  }
  const Millis& getTimeout() const noexcept override { return inner_->getTimeout(); }
  void setTimeout(const Millis& timeout) override { inner_->setTimeout(timeout); }
  void append(const std::string& key, const Bytes& value) override { checked().append(key, value); }
  std::vector<Bytes> multiGet(const Keys& keys) override {
    wait(keys);
    return checked().multiGet(keys);
  }
  void multiSet(const Keys& keys, const std::vector<Bytes>& values) override { checked().multiSet(keys, values); }
  bool hasExtendedApi() const override { return inner_->hasExtendedApi(); }
  void queuePush(const std::string& key, const Bytes& value) override { checked().queuePush(key, value); }
  Bytes queuePop(const std::string& key, bool block) override { return checked().queuePop(key, block); }
  int64_t queueLen(const std::string& key) override { return checked().queueLen(key); }
  Keys listKeys() { return flashrecovery::listKeys<Keys>(checked()); }
  void barrier(const std::string& key, int64_t world, const Millis& timeout) {
    const std::string release = key + "/fr_release";
    if (add(key + "/fr_count", 1) % world == 0) set(release, Bytes{1});
    wait({release}, timeout);
  }

 private:
  Store& checked() {
    stop_->check();
    return *inner_;
  }

  c10::intrusive_ptr<Store> inner_;
  std::shared_ptr<StopFlag> stop_;
};

// The store in which the members of one gloo group exchange their addresses.
//
// gloo asks for one member's address after the other, and waits for each before it gets it: four messages to a TCPStore
// for each member of each group, while one server answers all ranks. Here the first question for "PREFIX/RANK" gets the
// addresses of all ranks. Whatever else is asked goes to the inner store.
class AddressStore final : public c10d::Store {
 public:
  using Bytes = std::vector<uint8_t>;
  using Keys = std::vector<std::string>;

  AddressStore(c10::intrusive_ptr<Store> inner, int size) : inner_(std::move(inner)), size_(size) {}

  c10::intrusive_ptr<Store> clone() override { return c10::make_intrusive<AddressStore>(inner_->clone(), size_); }
  using Store::set;
  void set(const std::string& key, const Bytes& value) override { inner_->set(key, value); }
  using Store::compareSet;
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    return inner_->compareSet(key, expected, desired);
  }
  Bytes get(const std::string& key) override {
    getAll(key, getTimeout());
    const auto found = known_.find(key);
    return found == known_.end() ? inner_->get(key) : found->second;
  }
  int64_t add(const std::string& key, int64_t value) override { return inner_->add(key, value); }
  bool deleteKey(const std::string& key) override { return inner_->deleteKey(key); }
  bool check(const Keys& keys) override { return inner_->check(keys); }
  int64_t getNumKeys() override { return inner_->getNumKeys(); }
  void wait(const Keys& keys) override { wait(keys, getTimeout()); }
  void wait(const Keys& keys, const Millis& timeout) override {
    for (const auto& key : keys) {
      getAll(key, timeout);
      if (!known_.count(key)) inner_->wait({key}, timeout);
    }
  }
  const Millis& getTimeout() const noexcept override { return inner_->getTimeout(); }
  void setTimeout(const Millis& timeout) override { inner_->setTimeout(timeout); }

 private:
  // Those of all ranks, if `key` is an address that is not known yet.
  void getAll(const std::string& key, const Millis& timeout) {
    const auto digits = key.find_last_not_of("0123456789") + 1;
    if (digits == 0 || key[digits - 1] != '/' || digits == key.size() || known_.count(key)) return;
    const std::string prefix = key.substr(0, digits);
    Keys keys;
    for (int rank = 0; rank < size_; ++rank) keys.push_back(prefix + std::to_string(rank));
    if (std::find(keys.begin(), keys.end(), key) == keys.end()) return;
    inner_->wait(keys, timeout);
    auto values = inner_->multiGet(keys);
    for (size_t i = 0; i < keys.size(); ++i) known_[keys[i]] = std::move(values[i]);
  }

  c10::intrusive_ptr<Store> inner_;
  int size_;
  std::map<std::string, Bytes> known_;
};

}  // namespace flashrecovery
