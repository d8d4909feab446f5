// What versions of torch do not all have. The compiler looks for it in the headers that it is given; no version is asked.
//
// A method that only later versions declare (Backend's suspend, Store's listKeys, ...) carries no `override` here: where
// torch has it, it overrides it all the same.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>

namespace flashrecovery {

template <class Type>
constexpr Type reduceScatterTensorCoalesced() {
  if constexpr (requires { Type::REDUCE_SCATTER_TENSOR_COALESCED; }) {
    return Type::REDUCE_SCATTER_TENSOR_COALESCED;
  } else {
    return Type::_REDUCE_SCATTER_BASE;
  }
}
inline constexpr c10d::OpType kReduceScatterTensorCoalesced = reduceScatterTensorCoalesced<c10d::OpType>();

template <class Backend>
void suspend(Backend& backend) {
  if constexpr (requires { backend.suspend(); }) backend.suspend();
}

template <class Backend>
void resume(Backend& backend) {
  if constexpr (requires { backend.resume(); }) backend.resume();
}

template <class Stats, class Backend>
Stats memoryStats(Backend& backend) {
  if constexpr (requires { backend.getMemoryStats(); }) {
    return backend.getMemoryStats();
  } else {
    return {};
  }
}

// One tensor from each rank into one of the root's, which torch has from 2.15 on.
template <class Work, class Backend, class... Arguments>
Work gatherSingle(Backend& backend, Arguments&... arguments) {
  if constexpr (requires { backend.gather_single(arguments...); }) {
    return backend.gather_single(arguments...);
  } else {
    return {};
  }
}

template <class Backend>
void addEphemeralTimeout(Backend& backend, const std::chrono::milliseconds& timeout) {
  if constexpr (requires { backend.addEphemeralTimeout(timeout); }) backend.addEphemeralTimeout(timeout);
}

template <class Keys, class Store>
Keys listKeys(Store& store) {
  if constexpr (requires { store.listKeys(); }) {
    return store.listKeys();
  } else {
    return {};
  }
}

}  // namespace flashrecovery
