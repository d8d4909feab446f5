// What this rank's collectives delivered before its first step.
//
// A replacement runs the user's script from the top while no peer takes part. Its set-up collectives (a broadcast
// configuration, gathered objects, an agreed flag) must deliver what they delivered to the rank it replaces; the log
// has that, keyed by group name and the operation's number within its group. Large results are not kept: they are
// parameters, and state is restored anyway. Bytes are different: they are pickled objects, which nothing restores, so
// they are kept as long as there is room, and a replacement that would need a missing one is told so.
//
// An operation is answered if it is the recorded one: of the same name, on tensors of the same dtypes and shapes. If it
// is another one, the two set-ups have parted, and what comes next in the log was meant for other operations: the
// replacement is refused there, before it gets anything. Operations without a result (a barrier) are recorded, too.
#pragma once

#include "work.h"

#include <cstring>
#include <functional>
#include <map>

namespace flashrecovery {

class SetupLog {
 public:
  static constexpr size_t kMaxOpBytes = size_t{1} << 20;
  static constexpr size_t kMaxTotalBytes = size_t{32} << 20;
  using Refuse = std::function<void(const std::string& group, const char* difference)>;

  static SetupLog& instance() {
    static auto* log = new SetupLog;
    return *log;
  }

  bool recording() const { return recording_; }
  bool replaying() const { return replaying_; }

  void start() {
    std::lock_guard<std::mutex> guard(mutex_);
    recorded_.clear();
    total_ = 0;
    recording_ = true;
  }

  void record(const std::string& group, uint64_t seq, const char* op, const Tensors& outputs) {
    Entry entry;
    entry.op = op;
    for (const auto& t : outputs) entry.kinds.push_back(Kind::of(t));
    size_t bytes = 0;
    for (const auto& t : outputs) bytes += t.nbytes();
    const bool object = !outputs.empty() && outputs.front().scalar_type() == at::kByte;
    std::unique_lock<std::mutex> lock(mutex_);
    if (!recording_) return;
    entry.skipped = (!object && bytes > kMaxOpBytes) || total_ + bytes > kMaxTotalBytes;
    if (!entry.skipped) total_ += bytes;
    lock.unlock();
    for (const auto& t : outputs) entry.blobs.push_back(entry.skipped ? std::string() : toBytes(t));
    lock.lock();
    recorded_[{group, seq}] = std::move(entry);
  }

  std::string take() {
    std::lock_guard<std::mutex> guard(mutex_);
    recording_ = false;
    std::string out(kMagic);
    put(out, recorded_.size());
    for (const auto& [key, entry] : recorded_) {
      putText(out, key.first);
      put(out, key.second);
      putText(out, entry.op);
      put(out, entry.skipped ? 1 : 0);
      put(out, entry.blobs.size());
      for (size_t i = 0; i < entry.blobs.size(); ++i) {
        putText(out, entry.kinds[i].dtype);
        put(out, entry.kinds[i].shape.size());
        for (const auto n : entry.kinds[i].shape) put(out, static_cast<uint64_t>(n));
        putText(out, entry.blobs[i]);
      }
    }
    recorded_.clear();
    total_ = 0;
    return out;
  }

  // `refuse` is called with a group and where its set-up differs. What it throws goes to the script.
  void replay(const std::string& bytes, Refuse refuse) {
    std::map<Key, Entry> entries;
    size_t at = kMagic.size();
    TORCH_CHECK(bytes.compare(0, at, kMagic) == 0, "not a setup log of this version");
    for (uint64_t n = read(bytes, at); n > 0; --n) {
      Key key;
      key.first = readText(bytes, at);
      key.second = read(bytes, at);
      Entry entry;
      entry.op = readText(bytes, at);
      entry.skipped = read(bytes, at) != 0;
      for (uint64_t blobs = read(bytes, at); blobs > 0; --blobs) {
        Kind kind;
        kind.dtype = readText(bytes, at);
        for (uint64_t n = read(bytes, at); n > 0; --n) kind.shape.push_back(static_cast<int64_t>(read(bytes, at)));
        entry.kinds.push_back(std::move(kind));
        entry.blobs.push_back(readText(bytes, at));
      }
      entries[key] = std::move(entry);
    }
    std::lock_guard<std::mutex> guard(mutex_);
    replayed_ = std::move(entries);
    refuse_ = std::move(refuse);
    difference_.clear();
    replaying_ = true;
  }

  // Where the set-up of this process differs from the recorded one, as text; "" if nothing of it was seen to. To be asked
  // when the set-up is over.
  std::string difference() {
    std::lock_guard<std::mutex> guard(mutex_);
    if (!difference_.empty()) return difference_;
    for (const auto& [key, entry] : replayed_)
      if (!entry.asked)
        return c10::str(entry.op, " (operation ", key.second, " of group '", key.first, "') is not made this time");
    return "";
  }

  // An operation that needs no answer: of a group of one rank.
  void pass(const std::string& group, uint64_t seq) {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto it = replayed_.find({group, seq});
    if (it != replayed_.end()) it->second.asked = true;
  }

  void stopReplay() {
    std::lock_guard<std::mutex> guard(mutex_);
    replaying_ = false;
    replayed_.clear();
  }

  // Fills the outputs from the log. False if the log has no result of it; the caller then acts locally. Of an object of
  // another size only its source can ask (others are told the size first), and the source has what it needs.
  bool answer(const std::string& group, uint64_t seq, const char* op, const Tensors& outputs) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto it = replayed_.find({group, seq});
    if (it == replayed_.end()) return false;
    Entry& entry = it->second;
    entry.asked = true;
    std::vector<Kind> kinds;
    for (const auto& t : outputs) kinds.push_back(Kind::of(t));
    if (entry.op != op || entry.kinds != kinds) {
      const std::string difference = c10::str("operation ", seq, " of group '", group, "' is ", described(op, kinds),
                                              " and was ", described(entry.op, entry.kinds));
      if (difference_.empty()) difference_ = difference;
      const bool sourceOfObject = entry.op == op && isObject(entry.kinds) && isObject(kinds);
      const Refuse refuse = refuse_;
      lock.unlock();
      if (!sourceOfObject) refuse(group, difference.c_str());
      return false;
    }
    if (outputs.empty()) return false;
    if (entry.skipped) {
      TORCH_CHECK(
          outputs.front().scalar_type() != at::kByte,
          "an object that the script exchanges before its first step (operation ", seq, " of group '", group, "', ", op,
          ") was too large to be kept for a replacement; all of them together may have ", kMaxTotalBytes, " bytes");
      return false;
    }
    for (size_t i = 0; i < outputs.size(); ++i) fromBytes(entry.blobs[i], outputs[i]);
    return true;
  }

 private:
  using Key = std::pair<std::string, uint64_t>;
  struct Kind {
    std::string dtype;
    std::vector<int64_t> shape;

    static Kind of(const Tensor& t) { return {c10::toString(t.scalar_type()), t.sizes().vec()}; }
    bool operator==(const Kind&) const = default;
  };
  struct Entry {
    std::string op;
    bool skipped = false;
    std::vector<Kind> kinds;  // of the tensors
    std::vector<std::string> blobs;
    bool asked = false;  // of one that is replayed
  };
  static constexpr size_t kDescribed = 3;
  static inline const std::string kMagic = "FRSETUP2";

  static bool isObject(const std::vector<Kind>& kinds) {
    return kinds.size() == 1 && kinds.front().dtype == c10::toString(at::kByte) && kinds.front().shape.size() == 1;
  }
  static std::string described(const std::string& op, const std::vector<Kind>& kinds) {
    std::string out = op;
    for (size_t i = 0; i < kinds.size() && i < kDescribed; ++i)
      out += c10::str(i == 0 ? " of " : ", ", kinds[i].dtype, c10::IntArrayRef(kinds[i].shape));
    if (kinds.size() > kDescribed) out += c10::str(" and ", kinds.size() - kDescribed, " more");
    return out;
  }

  static std::string toBytes(const Tensor& t) {
    const Tensor plain = t.detach().cpu().contiguous();
    return std::string(static_cast<const char*>(plain.const_data_ptr()), plain.nbytes());
  }
  static void fromBytes(const std::string& bytes, const Tensor& t) {
    at::NoGradGuard guard;
    Tensor plain = at::empty(t.sizes(), t.options().device(at::kCPU).memory_format(at::MemoryFormat::Contiguous));
    std::memcpy(plain.mutable_data_ptr(), bytes.data(), bytes.size());
    t.detach().copy_(plain);
  }
  static void put(std::string& out, uint64_t value) { out.append(reinterpret_cast<const char*>(&value), sizeof value); }
  static void putText(std::string& out, const std::string& text) {
    put(out, text.size());
    out += text;
  }
  static uint64_t read(const std::string& in, size_t& at) {
    uint64_t value = 0;
    TORCH_CHECK(in.size() - at >= sizeof value, "setup log is cut off");
    std::memcpy(&value, in.data() + at, sizeof value);
    at += sizeof value;
    return value;
  }
  static std::string readText(const std::string& in, size_t& at) {
    const uint64_t n = read(in, at);
    TORCH_CHECK(in.size() - at >= n, "setup log is cut off");
    at += n;
    return in.substr(at - n, n);
  }

  std::mutex mutex_;
  std::atomic<bool> recording_{false};
  std::atomic<bool> replaying_{false};
  std::map<Key, Entry> recorded_;
  std::map<Key, Entry> replayed_;
  Refuse refuse_;
  std::string difference_;  // the first that was seen
  size_t total_ = 0;
};

}  // namespace flashrecovery
