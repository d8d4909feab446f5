// The stand-in inside a detached group: collectives as if every rank had this rank's data, complete at once.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "torch_differences.h"
#include "work.h"

namespace flashrecovery {

class LocalBackend final : public c10d::Backend {
 public:
  LocalBackend(int rank, int size, bool coalescing) : Backend(rank, size), coalescing_(coalescing) {}

  const std::string getBackendName() const override { return "local"; }
  bool supportsCoalescing() const override { return coalescing_; }
  void startCoalescing() override {}
  WorkPtr endCoalescing() override { return done(c10d::OpType::COALESCED, {}); }
  void setTimeout(std::chrono::milliseconds) override {}
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void monitoredBarrier(const c10d::BarrierOptions&, bool) override {}
  void waitForPendingWorks() override {}
  void enableCollectivesTiming() override {}
  void eagerConnectSingleDevice(at::Device) override {}

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions&) override { return done(c10d::OpType::BROADCAST, t); }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions&) override { return done(c10d::OpType::ALLREDUCE, t); }
  WorkPtr allreduce_sparse(Tensors& t, const c10d::AllreduceOptions&) override {
    return done(c10d::OpType::_ALLREDUCE_SPARSE, t);
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions&) override {
    return done(c10d::OpType::ALLREDUCE_COALESCED, t);
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions&) override { return done(c10d::OpType::REDUCE, t); }
  WorkPtr barrier(const c10d::BarrierOptions&) override { return done(c10d::OpType::BARRIER, {}); }
  WorkPtr send(Tensors& t, int, int) override { return done(c10d::OpType::SEND, t); }
  WorkPtr recv(Tensors& t, int, int) override { return done(c10d::OpType::RECV, t); }
  WorkPtr recvAnysource(Tensors& t, int) override { return done(c10d::OpType::RECVANYSOURCE, t); }

  WorkPtr allgather(TensorLists& out, Tensors& in, const c10d::AllgatherOptions&) override {
    for (size_t i = 0; i < in.size(); ++i)
      for (auto& slot : out[i]) copy(slot, in[i]);
    return done(c10d::OpType::ALLGATHER, out.empty() ? Tensors{} : out.front());
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions&) override {
    gather_into(out, in);
    return done(c10d::OpType::_ALLGATHER_BASE, {out});
  }
  WorkPtr allgather_coalesced(TensorLists& out, Tensors& in, const c10d::AllgatherOptions&) override {
    for (auto& list : out)
      for (size_t i = 0; i < in.size() && i < list.size(); ++i) copy(list[i], in[i]);
    return done(c10d::OpType::ALLGATHER_COALESCED, {});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions&) override {
    for (size_t i = 0; i < in.size(); ++i) gather_into(out[i], in[i]);
    return done(c10d::OpType::_ALLGATHER_BASE, out);
  }
  WorkPtr gather(TensorLists& out, Tensors& in, const c10d::GatherOptions& o) override {
    if (getRank() == o.rootRank && !out.empty())
      for (auto& slot : out.front()) copy(slot, in.front());
    return done(c10d::OpType::GATHER, out.empty() ? Tensors{} : out.front());
  }
  WorkPtr gather_single(Tensor& out, Tensor& in, const c10d::GatherOptions& o) {
    if (getRank() == o.rootRank) gather_into(out, in);
    return done(c10d::OpType::GATHER, {out});
  }
  WorkPtr scatter(Tensors& out, TensorLists& in, const c10d::ScatterOptions& o) override {
    if (getRank() == o.rootRank && !in.empty()) copy(out.front(), in.front().at(getRank()));
    return done(c10d::OpType::SCATTER, out);
  }
  WorkPtr reduce_scatter(Tensors& out, TensorLists& in, const c10d::ReduceScatterOptions&) override {
    for (size_t i = 0; i < out.size(); ++i) copy(out[i], in[i].at(getRank()));
    return done(c10d::OpType::REDUCE_SCATTER, out);
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions&) override {
    scatter_from(out, in);
    return done(c10d::OpType::_REDUCE_SCATTER_BASE, {out});
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions&) override {
    for (size_t i = 0; i < out.size(); ++i) scatter_from(out[i], in[i]);
    return done(kReduceScatterTensorCoalesced, out);
  }
  WorkPtr alltoall_base(
      Tensor& out,
      Tensor& in,
      std::vector<int64_t>&,
      std::vector<int64_t>&,
      const c10d::AllToAllOptions&) override {
    const auto n = std::min(out.numel(), in.numel());
    at::NoGradGuard guard;
    if (n > 0) out.view(-1).narrow(0, 0, n).copy_(in.reshape(-1).narrow(0, 0, n));
    return done(c10d::OpType::ALLTOALL_BASE, {out});
  }
  WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions&) override {
    for (size_t i = 0; i < out.size() && i < in.size(); ++i) copy(out[i], in[i]);
    return done(c10d::OpType::ALLTOALL, out);
  }

 private:
  static WorkPtr done(c10d::OpType type, Tensors outputs) {
    return c10::make_intrusive<DoneWork>(type, std::move(outputs));
  }
  // Sizes that would differ between real ranks are left alone.
  static void copy(Tensor& to, const Tensor& from) {
    at::NoGradGuard guard;
    if (to.numel() == from.numel() && to.numel() > 0) to.copy_(from.reshape(to.sizes()));
  }
  void gather_into(Tensor& out, const Tensor& in) const {
    at::NoGradGuard guard;
    if (in.numel() == 0 || out.numel() != in.numel() * getSize()) return;
    out.view({getSize(), -1}).copy_(in.reshape({1, -1}).expand({getSize(), -1}));
  }
  void scatter_from(Tensor& out, const Tensor& in) const {
    at::NoGradGuard guard;
    if (out.numel() == 0 || in.numel() != out.numel() * getSize()) return;
    out.copy_(in.reshape({getSize(), -1}).select(0, getRank()).view(out.sizes()));
  }

  const bool coalescing_;
};

}  // namespace flashrecovery
