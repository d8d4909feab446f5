// Python bindings of the exchangeable backend. Objects of ours travel as c10d's own base types; binding them as classes
// of their own would need a holder that differs from c10d's.
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <map>
#include <optional>

#include "backend.h"
#include "ending.h"
#include "glance.h"
#include "sparse_backend.h"
#include "store.h"
#include "stream_hold.h"
#include "tables.h"
#include "termination.h"
#include "thread_states.h"

namespace {

using namespace flashrecovery;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using DevicePtr = std::shared_ptr<gloo::transport::Device>;

// A thread that wants the GIL back while the interpreter ends never returns.
class ReleasedGil {
 public:
  ~ReleasedGil() {
    const Ending::Visit visit;
    Ending::comeBack(visit);
    released_.reset();
  }

 private:
  std::optional<py::gil_scoped_release> released_{std::in_place};
};
using NoGil = py::call_guard<ReleasedGil>;

ManagedBase& managed(const BackendPtr& backend) {
  auto* own = dynamic_cast<ManagedBase*>(backend.get());
  TORCH_CHECK(own, "not a managed backend");
  return *own;
}

StopFlag& stopFlag(const StorePtr& store) {
  auto* own = dynamic_cast<AbandonableStore*>(store.get());
  TORCH_CHECK(own, "not an abandonable store");
  return *own->stop();
}

// The gloo device known by `key`, made by `make` if no group uses one now. Each gloo device runs a thread that wakes up
// 100 times a second, also when it is idle; one for all groups of a process is enough. Called with the GIL held.
DevicePtr sharedDevice(const std::string& key, const py::function& make) {
  static std::map<std::string, std::weak_ptr<gloo::transport::Device>> known;
  if (auto device = known[key].lock()) return device;
  auto made = make().cast<DevicePtr>();
  auto& entry = known[key];
  if (auto device = entry.lock()) return device;  // another thread has made one while the GIL was free
  entry = made;
  return made;
}

const std::shared_ptr<TransportState>& transport(const DevicePtr& device) {
  auto* own = dynamic_cast<ManagedDevice*>(device.get());
  TORCH_CHECK(own, "not a managed device");
  return own->state();
}

// A Python function to be called from any thread. Never freed: an operation on another thread may just be calling it.
std::function<void(const std::string&, const char*)> forever(py::object callback) {
  auto* kept = new py::object(std::move(callback));
  return [kept](const std::string& group, const char* op) {
    const Ending::Visit visit;
    Ending::comeBack(visit);
    py::gil_scoped_acquire gil;
    (*kept)(group, op);
  };
}

void setHook(py::object callback) {
  OperationHook::set = false;
  if (callback.is_none()) return;
  OperationHook::call = forever(std::move(callback));
  OperationHook::set = true;
}

void setOutsideHook(py::object callback) {
  OutsideHook::watched = false;
  OutsideHook::call = forever(std::move(callback));
}

// The same of what says whether an operation that has failed was cut short by a rank's death.
void setBetweenHook(py::object callback) {
  auto* kept = new py::object(std::move(callback));
  Between::explains = [kept](bool elsewhere) {
    const Ending::Visit visit;
    Ending::comeBack(visit);
    py::gil_scoped_acquire gil;
    return (*kept)(elsewhere).cast<bool>();
  };
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::module::import("torch.distributed");
  ThreadStates::holdWhileForking();

  // groups
  m.def("create", [](int rank, int size, std::string group, std::string kind, Millis timeout, bool own) -> BackendPtr {
    return c10::make_intrusive<ManagedBackend>(rank, size, std::move(group), std::move(kind), timeout, own);
  });
  m.def("stand_in", [](const BackendPtr& outer, bool on) { managed(outer).standIn(on); });
  m.def("recovery_here", [](bool on) { recoveryHere() = on; });
  m.def("stand_ins", [] { return standInCount().load(); });
  m.def("set_outside_hook", &setOutsideHook);
  m.def("set_between_hook", &setBetweenHook);
  m.def("between_steps", [](bool on) { Between::on = on; });
  m.def("watch_outside", [](bool on) { OutsideHook::watched = on && OutsideHook::call; });
  m.def(
      "exchange",
      [](const BackendPtr& outer, const std::vector<std::pair<std::string, BackendPtr>>& inners,
         const std::vector<DevicePtr>& devices) {
        std::vector<Inner> parts;
        for (const auto& [device, backend] : inners) parts.push_back({c10::Device(device).type(), backend});
        std::vector<std::shared_ptr<Transport>> transports;
        for (const auto& device : devices) transports.push_back(transport(device));
        for (const auto& inner : parts)
          if (const auto* sparse = dynamic_cast<SparseBackend*>(inner.backend.get())) transports.push_back(sparse->streams());
        managed(outer).exchange(std::move(parts), std::move(transports));
      },
      NoGil());
  m.def("renumber", [](const c10::intrusive_ptr<c10d::ProcessGroup>& group, const BackendPtr& outer, int rank, int size) {
    managed(outer).renumber(rank, size);
    Numbered<c10d::ProcessGroup>::set(*group, rank, size);
  });
  m.def("revive", [](const BackendPtr& b) { managed(b).revive(); }, NoGil());
  m.def("abandon", [](const BackendPtr& b, const std::string& why) { return managed(b).abandon(why); }, NoGil());
  m.def("start_abort", [](const BackendPtr& b) { managed(b).startAbort(); }, NoGil());
  m.def("reports_error", [](const BackendPtr& b) { return managed(b).reportsError(); }, NoGil());
  m.def("aborting", [](const BackendPtr& b) { return managed(b).aborting(); });
  m.def("close_section", [](const BackendPtr& b) { return managed(b).closeSection(); }, NoGil());
  m.def("undrained", [](const BackendPtr& b) { return managed(b).undrained(); }, NoGil());
  m.def("is_local", [](const BackendPtr& b) { return managed(b).local(); }, NoGil());
  m.def("is_abandoned", [](const BackendPtr& b) { return managed(b).isAbandoned(); });
  m.def("started", [](const BackendPtr& b) { return managed(b).started(); });
  m.def("timeout", [](const BackendPtr& b) { return managed(b).timeout(); });
  m.def(
      "pending",
      [](const BackendPtr& b) {
        std::vector<std::tuple<uint64_t, std::string, double, int, uint64_t, bool>> out;
        for (const auto& op : managed(b).pending())
          out.emplace_back(op.seq, op.name, op.since, op.ordinal.peer, op.ordinal.number, op.certain);
        return out;
      },
      NoGil());

  // gloo devices
  m.def("shared_device", &sharedDevice);
  m.def("wrap_device", [](DevicePtr device, Millis connectTimeout) -> DevicePtr {
    return std::make_shared<ManagedDevice>(std::move(device), connectTimeout);
  });
  m.def("live_buffers", [](const DevicePtr& device) { return transport(device)->live(); });

  // the recovery's own groups
  m.def(
      "sparse_backend",
      [](StorePtr store, int rank, int size, const std::string& host, Millis timeout) -> BackendPtr {
        return c10::make_intrusive<SparseBackend>(std::move(store), rank, size, host, timeout);
      },
      NoGil());
  m.attr("PACED_TAG") = SparseBackend::kPacedTag;
  m.def("pace_begin", [](uint64_t bytes, double window, double rate) {
    Pace::instance().begin(bytes, Pace::Seconds(window), rate);
  });
  m.def("pace_hurry", [] { Pace::instance().hurry(); });
  m.def("pace_held_s", [] { return Pace::instance().held().count(); });
  m.def("address_of", &addressOf);
  m.def("siphash", [](const std::string& key, const std::string& message) {
    Secret secret;
    TORCH_CHECK(key.size() == secret.size(), "a key has ", secret.size(), " bytes");
    std::copy(key.begin(), key.end(), secret.begin());
    const auto hash = SipHash::of(secret, reinterpret_cast<const uint8_t*>(message.data()), message.size());
    return py::bytes(reinterpret_cast<const char*>(hash.data()), hash.size());
  });

  // stores
  m.def("wrap_store", [](StorePtr store) -> StorePtr {
    return c10::make_intrusive<AbandonableStore>(std::move(store), std::make_shared<StopFlag>());
  });
  m.def("address_store", [](StorePtr store, int size) -> StorePtr {
    return c10::make_intrusive<AddressStore>(std::move(store), size);
  });
  m.def("stop_store", [](const StorePtr& store, const std::string& why) { stopFlag(store).raise(why); });
  m.def("resume_store", [](const StorePtr& store) { stopFlag(store).clear(); });

  // setup log
  m.def("log_start", [] { SetupLog::instance().start(); });
  m.def("log_take", [] { return py::bytes(SetupLog::instance().take()); });
  m.def("log_replay", [](const py::bytes& bytes, py::object refuse) {
    SetupLog::instance().replay(bytes, forever(std::move(refuse)));
  });
  m.def("log_difference", [] { return SetupLog::instance().difference(); });
  m.def("log_stop_replay", [] { SetupLog::instance().stopReplay(); });

  m.def("glance_at_random", [](uintptr_t python, uintptr_t numpy) {
    const auto parts = glanceAtRandom(python, numpy);
    return py::make_tuple(py::bytes(parts[0]), py::bytes(parts[1]), py::bytes(parts[2]));
  });
  m.def("count_gradients", &countGradients);
  m.def("glance_at_tensors", &glanceAtTensors);
  m.def("tensor_table", [](const py::list& tensors) { return kept(new TensorTable(tensors)); });
  m.def("tensors_digest", [](const py::capsule& table) { return of<TensorTable>(table).digest(); });
  m.def("parameter_table", [](const py::list& places) { return kept(new ParameterTable(places)); });
  m.def("parameters_trained", [](const py::capsule& table, bool again) { return of<ParameterTable>(table).trained(again); });
  m.def("parameters_flags", [](const py::capsule& table) { return of<ParameterTable>(table).flags(); });
  m.def("parameters_with_gradients", [](const py::capsule& table) { return of<ParameterTable>(table).gradients(); });
  m.def("item_table", [](const py::list& items, const py::list& sized, bool numbers) {
    return kept(new ItemTable(items, sized, numbers));
  });
  m.def("items_tensors", [](const py::capsule& table, size_t compared) { return of<ItemTable>(table).tensors(compared); });
  m.def("items_changed", [](const py::capsule& table) { return of<ItemTable>(table).changed(); });
  m.def("structure_table", [](const py::list& attributes, const py::list& states, const py::list& tensors) {
    return kept(new StructureTable(attributes, states, tensors));
  });
  m.def("structure_same", [](const py::capsule& table) { return of<StructureTable>(table).same(); });
  m.def("progress", [](const BackendPtr& b) {
    const auto& progress = managed(b).progress();
    return std::make_pair(progress.collectives(), progress.pairs());
  });
  m.def("underway_ns", [] { return Underway::nanoseconds(); });
  m.def("device_committed", [] { return DevicePace::instance().committed(); });
  m.def("device_restart", [] { DevicePace::instance().restart(); });
  m.def("device_measures", [] { return DevicePace::instance().measures(); });
  m.def("backward_ended", [] { DevicePace::instance().backwardEnded(); });
  m.def("gradients_whole", [] { DevicePace::instance().gradientsWhole(); });
  m.def("operations", [] { return operationCount().load(); });
  m.def("failures", [] { return failureCount().load(); });
  m.def("raised", [] { return raisedCount().load(); });
  m.def("set_hook", &setHook);
  m.def("stream_hold", [](uintptr_t words, Millis patience) { return kept(new StreamHold(words, patience)); });
  m.def("stream_hold_begin", [](const py::capsule& hold) { return of<StreamHold>(hold).hold(); });
  m.def("stream_hold_end", [](const py::capsule& hold, bool isVoid) { return of<StreamHold>(hold).letGo(isVoid); });
  m.def("bury", [](BackendPtr b) { Graveyard::instance().bury(std::move(b)); }, NoGil());
  m.def("on_device", [](const BackendPtr& b) {
    using Told = std::tuple<std::string, int, uint64_t, bool>;
    const auto told = [](const DeviceCourse::Operation& o) { return Told(o.name, o.ordinal.peer, o.ordinal.number, o.sends); };
    const auto look = managed(b).onDevice();
    std::vector<Told> ahead;
    for (const auto& operation : look.ahead) ahead.push_back(told(operation));
    return std::make_pair(ahead, look.newest ? std::optional<Told>(told(*look.newest)) : std::nullopt);
  });
  m.def("use_device_marks", [](uintptr_t make) { DeviceMarks::make() = *reinterpret_cast<DeviceMarks::Make*>(make); });
  m.def("discard", [](BackendPtr b) { Graveyard::instance().discard(std::move(b)); }, NoGil());
  m.def("discarding", [] { return Graveyard::instance().discarding(); });
  m.def("wait_buried", [](Millis deadline) { return Graveyard::instance().waitEmpty(deadline); }, NoGil());

  // the end of the process
  m.def("note_termination", &Termination::note);
  m.def("notes_termination", &Termination::notes);
  m.def("close_all", [](const std::string& why) { ManagedBase::closeAll(why); }, NoGil());
  m.def("close_to_threads", [](Millis deadline) { return Ending::close(deadline); }, NoGil());
}
