// The backend that stands in every managed ProcessGroup: it forwards each operation to an inner backend that can be
// exchanged while the group, and every handle to it, stays the same.
#pragma once

#include "backend_base.h"

namespace flashrecovery {

class ManagedBackend final : public ManagedBase {
 public:
  using ManagedBase::ManagedBase;

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return run(OpType::BROADCAST, "broadcast", first(t), [&] { return t; },
               callOf([](Backend& b, auto&... a) { return b.broadcast(a...); }, t, o));
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return run(OpType::ALLREDUCE, "all_reduce", first(t), [&] { return t; },
               callOf([](Backend& b, auto&... a) { return b.allreduce(a...); }, t, o));
  }
  WorkPtr allreduce_sparse(Tensors& t, const c10d::AllreduceOptions& o) override {
    return run(OpType::_ALLREDUCE_SPARSE, "all_reduce_sparse", first(t), none,
               callOf([](Backend& b, auto&... a) { return b.allreduce_sparse(a...); }, t, o));
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    return run(OpType::ALLREDUCE_COALESCED, "all_reduce_coalesced", first(t), [&] { return t; },
               callOf([](Backend& b, auto&... a) { return b.allreduce_coalesced(a...); }, t, o));
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    return run(OpType::REDUCE, "reduce", first(t), [&] { return t; },
               callOf([](Backend& b, auto&... a) { return b.reduce(a...); }, t, o));
  }
  WorkPtr allgather(TensorLists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return run(OpType::ALLGATHER, "all_gather", first(in), [&] { return flat(out); },
               callOf([](Backend& b, auto&... a) { return b.allgather(a...); }, out, in, o));
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    return run(OpType::_ALLGATHER_BASE, "all_gather_into_tensor", in.device().type(), [&] { return Tensors{out}; },
               callOf([](Backend& b, auto&... a) { return b._allgather_base(a...); }, out, in, o));
  }
  WorkPtr allgather_coalesced(TensorLists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return run(OpType::ALLGATHER_COALESCED, "all_gather_coalesced", first(in), [&] { return flat(out); },
               callOf([](Backend& b, auto&... a) { return b.allgather_coalesced(a...); }, out, in, o));
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return run(OpType::_ALLGATHER_BASE, "all_gather_into_tensor_coalesced", first(in), [&] { return out; },
               callOf([](Backend& b, auto&... a) { return b.allgather_into_tensor_coalesced(a...); }, out, in, o));
  }
  WorkPtr gather(TensorLists& out, Tensors& in, const c10d::GatherOptions& o) override {
    return run(OpType::GATHER, "gather", first(in), [&] { return flat(out); },
               callOf([](Backend& b, auto&... a) { return b.gather(a...); }, out, in, o));
  }
  WorkPtr scatter(Tensors& out, TensorLists& in, const c10d::ScatterOptions& o) override {
    return run(OpType::SCATTER, "scatter", first(out), [&] { return out; },
               callOf([](Backend& b, auto&... a) { return b.scatter(a...); }, out, in, o));
  }
  WorkPtr reduce_scatter(Tensors& out, TensorLists& in, const c10d::ReduceScatterOptions& o) override {
    return run(OpType::REDUCE_SCATTER, "reduce_scatter", first(out), [&] { return out; },
               callOf([](Backend& b, auto&... a) { return b.reduce_scatter(a...); }, out, in, o));
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    return run(OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor", in.device().type(), [&] { return Tensors{out}; },
               callOf([](Backend& b, auto&... a) { return b._reduce_scatter_base(a...); }, out, in, o));
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    return run(kReduceScatterTensorCoalesced, "reduce_scatter_tensor_coalesced", first(in), [&] { return out; },
               callOf([](Backend& b, auto&... a) { return b.reduce_scatter_tensor_coalesced(a...); }, out, in, o));
  }
  WorkPtr alltoall_base(
      Tensor& out,
      Tensor& in,
      std::vector<int64_t>& outSplits,
      std::vector<int64_t>& inSplits,
      const c10d::AllToAllOptions& o) override {
    return run(OpType::ALLTOALL_BASE, "all_to_all_single", in.device().type(), [&] { return Tensors{out}; },
               callOf([](Backend& b, auto&... a) { return b.alltoall_base(a...); }, out, in, outSplits, inSplits, o));
  }
  WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override {
    return run(OpType::ALLTOALL, "all_to_all", first(in), [&] { return out; },
               callOf([](Backend& b, auto&... a) { return b.alltoall(a...); }, out, in, o));
  }
  WorkPtr send(Tensors& t, int rank, int tag) override {
    return run(OpType::SEND, "send", first(t), none,
               callOf([](Backend& b, auto&... a) { return b.send(a...); }, t, rank, tag), rank);
  }
  WorkPtr recv(Tensors& t, int rank, int tag) override {
    return run(OpType::RECV, "recv", first(t), [&] { return t; },
               callOf([](Backend& b, auto&... a) { return b.recv(a...); }, t, rank, tag), rank);
  }
  WorkPtr recvAnysource(Tensors& t, int tag) override {
    return run(OpType::RECVANYSOURCE, "recv_any", first(t), [&] { return t; },
               callOf([](Backend& b, auto&... a) { return b.recvAnysource(a...); }, t, tag));
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    const auto device = o.device ? o.device->type() : c10::DeviceType::CPU;
    return run(OpType::BARRIER, "barrier", device, none,
               callOf([](Backend& b, auto&... a) { return b.barrier(a...); }, o));
  }
  WorkPtr endCoalescing() override {
    return run(OpType::COALESCED, "coalesced", accelerator(), none,
               callOf([](Backend& b) { return b.endCoalescing(); }));
  }

  // torch 2.15 calls these names. Its own defaults come to those above, but through a flag of the thread that refuses a
  // second operation within the first, on whatever group.
  WorkPtr all_gather_single(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) {
    return _allgather_base(out, in, o);
  }
  WorkPtr all_gather_single_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) {
    return allgather_into_tensor_coalesced(out, in, o);
  }
  WorkPtr reduce_scatter_single(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) {
    return _reduce_scatter_base(out, in, o);
  }
  WorkPtr reduce_scatter_single_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) {
    return reduce_scatter_tensor_coalesced(out, in, o);
  }
  WorkPtr all_to_all_single(
      Tensor& out,
      Tensor& in,
      std::vector<int64_t>& outSplits,
      std::vector<int64_t>& inSplits,
      const c10d::AllToAllOptions& o) {
    return alltoall_base(out, in, outSplits, inSplits, o);
  }
  WorkPtr gather_single(Tensor& out, Tensor& in, const c10d::GatherOptions& o) {
    return run(OpType::GATHER, "gather_single", in.device().type(), [&] { return Tensors{out}; },
               callOf([](Backend& b, auto&... a) { return gatherSingle<WorkPtr>(b, a...); }, out, in, o));
  }
  WorkPtr gather_into_tensor(Tensor& out, Tensor& in, const c10d::GatherOptions& o) { return gather_single(out, in, o); }

  void monitoredBarrier(const c10d::BarrierOptions& o, bool waitAll) override {
    auto call = [](Backend& b, auto& o, auto& waitAll) {
      try {
        b.monitoredBarrier(o, waitAll);
      } catch (const c10::Error& error) {  // says only that it is an error; a rank that did not come is our case
        C10_THROW_ERROR(DistBackendError, error.what_without_backtrace());
      }
      return WorkPtr();
    };
    run(OpType::BARRIER, "monitored_barrier", c10::DeviceType::CPU, none, callOf(call, o, waitAll));
  }

 private:
  static Tensors none() { return {}; }
  static c10::DeviceType first(const Tensors& t) { return t.empty() ? c10::DeviceType::CPU : t.front().device().type(); }
  static Tensors flat(const TensorLists& lists) {
    Tensors all;
    for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
    return all;
  }
};

}  // namespace flashrecovery
