// How far the device has come in a group's operations. The host runs ahead of it: a rank may have launched what the others
// wait for, and its device never comes to it, because something that was queued before does not end.
#pragma once

#include "progress.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace flashrecovery {

// A place in what a stream has queued.
struct DeviceMark {
  virtual ~DeviceMark() = default;
  virtual bool come() = 0;  // the device has come to it; any thread may ask
  virtual bool sameStream(const DeviceMark& other) const = 0;
  virtual double secondsTo(const DeviceMark& later) const = 0;  // of timed marks to which the device has come
};

// Makes marks on the calling thread's current stream; null where there is no device, and where the stream captures what
// is queued. `timed`: the device takes the time when it comes there. Exchanged by tests only.
struct DeviceMarks {
  using Make = std::function<std::unique_ptr<DeviceMark>(c10::DeviceType, bool timed)>;
  static Make& make() {
    static auto* make = new Make(&onDevice);
    return *make;
  }

 private:
  // Events are used again: to make one costs more than to record it.
  struct OfDevice final : DeviceMark {
    OfDevice(const c10::Stream& where, bool timed) : stream(where), event(take(where.device_type(), flagOf(timed))) {
      event.record(stream);
    }
    ~OfDevice() override {
      const std::lock_guard<std::mutex> guard(mutex());
      auto& kept = free(event.flag());
      if (kept.size() < kKept) kept.push_back(std::move(event));
    }
    bool come() override { return event.query(); }
    bool sameStream(const DeviceMark& other) const override { return stream == of(other).stream; }
    double secondsTo(const DeviceMark& later) const override { return event.elapsedTime(of(later).event) / 1e3; }
    const c10::Stream stream;
    c10::Event event;

   private:
    static constexpr size_t kKept = 256;
    static const OfDevice& of(const DeviceMark& mark) { return dynamic_cast<const OfDevice&>(mark); }
    static c10::EventFlag flagOf(bool timed) {
      return timed ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT;
    }
    static std::mutex& mutex() {
      static auto* mutex = new std::mutex;  // never freed: marks outlive static objects
      return *mutex;
    }
    static std::vector<c10::Event>& free(c10::EventFlag flag) {
      static auto* events = new std::map<c10::EventFlag, std::vector<c10::Event>>;
      return (*events)[flag];
    }
    static c10::Event take(c10::DeviceType type, c10::EventFlag flag) {
      const std::lock_guard<std::mutex> guard(mutex());
      const auto here = c10::impl::VirtualGuardImpl(type).getDevice();
      auto& kept = free(flag);
      if (kept.empty() || kept.back().device() != here) return c10::Event(type, flag);
      c10::Event event = std::move(kept.back());
      kept.pop_back();
      return event;
    }
  };
  static std::unique_ptr<DeviceMark> onDevice(c10::DeviceType type, bool timed) {
    if (type == c10::DeviceType::CPU) return nullptr;
    const c10::impl::VirtualGuardImpl device(type);
    const c10::Stream stream = device.getStream(device.getDevice());
    if (captures(device, stream)) return nullptr;
    return std::make_unique<OfDevice>(stream, timed);
  }
  // Into a graph: an event that is recorded there may not be asked. Torch tells from some version on.
  template <typename Device>
  static bool captures(const Device& device, const c10::Stream& stream) {
    if constexpr (requires { device.isStreamCapturing(stream); }) return device.isStreamCapturing(stream);
    return false;
  }
};

// Of one group, since it was last attached.
class DeviceCourse {
 public:
  struct Operation {
    const char* name;
    Ordinal ordinal;
    bool sends;
  };
  struct Look {
    std::vector<Operation> ahead;     // the host has launched them, and the device has not come to them
    std::optional<Operation> newest;  // that the device has come to. No send: that ends without its peer, perhaps
  };

  // It is launched next, on the current stream.
  void launches(const Operation& operation, c10::DeviceType type) {
    if (operation.ordinal.peer == Ordinal::UNKNOWN) return;
    try {
      auto mark = DeviceMarks::make()(type, false);
      if (!mark) return;
      std::lock_guard<std::mutex> guard(mutex_);
      if (marks_.size() >= kLook)
        while (marks_.size() > kKept && marks_.front().second->come()) marks_.pop_front();
      if (marks_.size() >= kMost) marks_.pop_front();
      marks_.emplace_back(operation, std::move(mark));
    } catch (const c10::Error&) {  // the device has failed, which training hears by itself
    }
  }
  Look look() {
    Look look;
    std::lock_guard<std::mutex> guard(mutex_);
    try {
      for (const auto& [operation, mark] : marks_)
        if (!mark->come())
          look.ahead.push_back(operation);
        else if (!operation.sends)
          look.newest = operation;
    } catch (const c10::Error&) {
      return {};
    }
    return look;
  }
  void reset() {
    Marks old;
    std::lock_guard<std::mutex> guard(mutex_);
    old.swap(marks_);
  }

 private:
  using Marks = std::deque<std::pair<Operation, std::unique_ptr<DeviceMark>>>;
  static constexpr size_t kKept = 16, kLook = 64, kMost = 8192;

  std::mutex mutex_;
  Marks marks_;
};

}  // namespace flashrecovery
