// The inner backend of the recovery's own groups, over all ranks of a job: sends and receives between any two, and a few
// small collectives in log2(n) rounds. A rank is connected with those that it talks to, and with no other: gloo would
// connect every rank with every rank, which is n^2 connections at the start and in each recovery.
#pragma once

#include "lane.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace flashrecovery {

class SparseBackend final : public c10d::Backend {
 public:
  SparseBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const std::string& host, Millis timeout)
      : Backend(rank, size), streams_(std::make_shared<Streams>(std::move(store), rank, size, host, timeout)) {}
  ~SparseBackend() override { streams_->cut("the group was destroyed"); }

  const std::shared_ptr<Streams>& streams() const { return streams_; }

  const std::string getBackendName() const override { return "sparse"; }
  void setTimeout(Millis timeout) override { streams_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void waitForPendingWorks() override {}
  void abort() override { streams_->cut("the group was aborted"); }
  void shutdown() override { streams_->cut("the group was shut down"); }

  // From this tag on, what is sent is held back while training communicates (pace.h).
  static constexpr int kPacedTag = 1 << 20;

  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    const Tensor tensor = message(tensors, peer, tag);
    if (tag >= kPacedTag)
      return lane({kOut, peer, tag}).add(c10d::OpType::SEND, {}, [tensor, peer, tag](Streams& streams) {
        auto& end = streams.to(peer, tag, true);
        Sending out(end.socket.get(), end.peer, end.messages++, tensor.const_data_ptr(), tensor.nbytes());
        movePaced(out, streams.stop(), streams.deadline());
      });
    return lane({kOut, peer, tag}).add(c10d::OpType::SEND, {}, [tensor, peer, tag](Streams& streams) {
      auto& end = streams.to(peer, tag);
      Sending out(end.socket.get(), end.peer, end.messages++, tensor.const_data_ptr(), tensor.nbytes());
      move(&out, nullptr, streams.stop(), streams.deadline());
    });
  }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    const Tensor tensor = message(tensors, peer, tag);
    return lane({kIn, peer, tag}).add(c10d::OpType::RECV, tensors, [tensor, peer, tag](Streams& streams) {
      auto& end = streams.from(peer, tag);
      Receiving in(end.socket.get(), end.peer, end.messages++, tensor.mutable_data_ptr(), tensor.nbytes());
      streams.writing([&] { move(nullptr, &in, streams.stop(), streams.deadline()); });
    });
  }

  // Dissemination: after each round this rank knows of twice as many ranks that they have come.
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    return collective(c10d::OpType::BARRIER, {}, [](Streams& streams) {
      for (int distance = 1; distance < streams.size(); distance *= 2) round(streams, distance, nullptr, 0, nullptr, 0);
    });
  }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    TORCH_CHECK(
        inputs.size() == 1 && outputs.size() == 1 && outputs[0].size() == static_cast<size_t>(getSize()) &&
            inputs[0].device().is_cpu(),
        "all_gather takes one tensor in host memory here, and a list with one for each rank");
    return collective(c10d::OpType::ALLGATHER, outputs[0], [in = inputs[0], out = outputs[0]](Streams& streams) {
      const at::NoGradGuard guard;
      const Tensor rows = gather(streams, in);
      streams.writing([&] {
        for (size_t rank = 0; rank < out.size(); ++rank) out[rank].detach().copy_(rows[rank].view(out[rank].sizes()));
      });
    });
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions&) override {
    TORCH_CHECK(
        input.device().is_cpu() && output.device().is_cpu() && output.numel() == input.numel() * getSize(),
        "all_gather takes tensors in host memory here, the output as large as all inputs");
    return collective(c10d::OpType::_ALLGATHER_BASE, {output}, [in = input, out = output](Streams& streams) {
      const at::NoGradGuard guard;
      const Tensor rows = gather(streams, in);
      streams.writing([&] { out.detach().copy_(rows.view(out.sizes())); });
    });
  }
  // For a few numbers: every rank gathers everybody's, and reduces them in the same order.
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const auto op = options.reduceOp;
    const bool sum = op == c10d::ReduceOp::SUM;
    TORCH_CHECK(sum || op == c10d::ReduceOp::MAX, "all_reduce knows SUM and MAX here");
    TORCH_CHECK(tensors.size() == 1 && tensors[0].device().is_cpu(), "all_reduce takes one tensor in host memory here");
    return collective(c10d::OpType::ALLREDUCE, tensors, [tensor = tensors[0], sum](Streams& streams) {
      const at::NoGradGuard guard;
      const Tensor rows = gather(streams, tensor);
      const Tensor reduced = sum ? rows.sum(0, false, tensor.scalar_type()) : rows.amax(0);
      streams.writing([&] { tensor.detach().copy_(reduced.view(tensor.sizes())); });
    });
  }

 private:
  static constexpr size_t kPiece = 64 << 10;
  static constexpr std::chrono::microseconds kUnderWay{300};

  static void movePaced(Sending& out, const Stop& stop, Deadline deadline) {
    auto& pace = Pace::instance();
    const size_t piece = pace.rate() > 0 ? keepLittleUnderWay(out.fd(), pace.rate(), kUnderWay) : kPiece;
    while (!out.finished()) {
      stop.check();
      pace.await(stop);
      const size_t before = out.done();
      if (!out.step(piece)) {
        pollfd writable = out.wait();
        pollUntil(&writable, 1, stop, deadline, "a message that is not taken");
      }
      pace.sent(out.done() - before);
    }
  }

  enum Direction { kOut, kIn, kBoth };
  using LaneKey = std::tuple<Direction, int, int>;  // direction, peer, tag
  static constexpr int kCollectives = -1;           // their tag

  Tensor message(const Tensors& tensors, int peer, int tag) const {
    TORCH_CHECK(peer >= 0 && peer < getSize() && peer != getRank(), "no peer has rank ", peer);
    TORCH_CHECK(tag > kCollectives, "tag ", tag, ": 0 or more is allowed");
    TORCH_CHECK(
        tensors.size() == 1 && tensors[0].device().is_cpu() && tensors[0].is_contiguous(),
        "a message is one contiguous tensor in host memory here");
    return tensors[0].detach();
  }

  Lane& lane(const LaneKey& key) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto& found = lanes_[key];
    if (!found) found = std::make_unique<Lane>(streams_);
    return *found;
  }

  WorkPtr collective(c10d::OpType type, Tensors outputs, std::function<void(Streams&)> body) {
    return lane({kBoth, 0, kCollectives}).add(type, std::move(outputs), [body = std::move(body)](Streams& streams) {
      std::vector<int> targets;
      for (int distance = 1; distance < streams.size(); distance *= 2) targets.push_back(target(streams, distance));
      streams.lookUp(targets);
      body(streams);
    });
  }

  static int target(const Streams& streams, int distance) {
    return (streams.rank() - distance + streams.size()) % streams.size();
  }

  // One message to the rank `distance` before this one, and one from the rank so far after it.
  static void round(Streams& streams, int distance, const void* sent, size_t sentBytes, void* received, size_t receivedBytes) {
    auto& to = streams.to(target(streams, distance), kCollectives);
    Sending out(to.socket.get(), to.peer, to.messages++, sent, sentBytes);
    out.step();  // before waiting for the other rank, which waits for one, too
    auto& from = streams.from((streams.rank() + distance) % streams.size(), kCollectives);
    Receiving in(from.socket.get(), from.peer, from.messages++, received, receivedBytes);
    move(&out, &in, streams.stop(), streams.deadline());
  }

  // Bruck's algorithm. Row i is rank i's tensor, flat.
  static Tensor gather(Streams& streams, const Tensor& mine) {
    const int size = streams.size();
    const size_t row = mine.nbytes();
    const Tensor rows = at::empty({size, mine.numel()}, mine.options());
    rows[0].copy_(mine.reshape({-1}));
    char* data = static_cast<char*>(rows.mutable_data_ptr());
    for (int have = 1; have < size; have *= 2) {
      const size_t bytes = row * std::min(have, size - have);
      round(streams, have, data, bytes, data + have * row, bytes);
    }
    return rows.roll(streams.rank(), 0);  // row j was that of the rank j after this one
  }

  std::shared_ptr<Streams> streams_;
  std::mutex mutex_;
  std::map<LaneKey, std::unique_ptr<Lane>> lanes_;
};

}  // namespace flashrecovery
