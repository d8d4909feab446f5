// What the worker looks at several times in every step, without Python in between: after a forward pass each line of
// interpreted code costs cache misses, and there are four ranks on a user's every few cores.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace flashrecovery {

// Changes whenever torch's, Python's or numpy's global stream is drawn from. All three are Mersenne Twisters: their
// position and a few words of their state tell one moment from all others that a program can get to.
// `python`: address of `int index; uint32_t state[624]`. `numpy`: of `uint32_t key[624]; int pos`, 0 if there is none.
// One part for each stream.
inline std::array<std::string, 3> glanceAtRandom(uintptr_t python, uintptr_t numpy) {
  constexpr size_t kWords = 624, kSome = 8 * sizeof(uint32_t);
  auto generator = at::detail::getDefaultCPUGenerator();
  auto* cpu = at::check_generator<at::CPUGeneratorImpl>(generator);
  std::array<std::string, 3> parts;
  size_t part = 0;
  const auto add = [&](const void* data, size_t bytes) { parts[part].append(static_cast<const char*>(data), bytes); };
  {
    std::lock_guard<std::mutex> lock(cpu->mutex_);
    const auto engine = cpu->engine().data();
    add(&engine.seed_, sizeof(engine.seed_));
    add(&engine.left_, sizeof(engine.left_));
    add(&engine.next_, sizeof(engine.next_));
    add(engine.state_.data(), kSome);
    const double normals[] = {cpu->next_float_normal_sample().value_or(0.0f), cpu->next_double_normal_sample().value_or(0.0)};
    const char have[] = {cpu->next_float_normal_sample().has_value(), cpu->next_double_normal_sample().has_value()};
    add(normals, sizeof(normals));
    add(have, sizeof(have));
  }
  part = 1;
  add(reinterpret_cast<const void*>(python), sizeof(int) + kSome);
  if (numpy) {
    part = 2;
    add(reinterpret_cast<const void*>(numpy), kSome);
    add(reinterpret_cast<const void*>(numpy + kWords * sizeof(uint32_t)), sizeof(int));
  }
  return parts;
}

// How many of the tensors have a gradient. (In Python, each look makes an object.)
inline size_t countGradients(const std::vector<at::Tensor>& tensors) {
  size_t count = 0;
  for (const auto& tensor : tensors) count += tensor.grad().defined();
  return count;
}

// A number that changes when one of the tensors does: by content where that lies on the host and takes at most
// `compared` bytes, else by version counter (which kernels that write behind autograd's back do not advance). With
// `compared` 0 no content is looked at.
inline uint64_t glanceAtTensors(const std::vector<at::Tensor>& tensors, size_t compared) {
  uint64_t seen = 0x9e3779b97f4a7c15ull;
  const auto mix = [&](uint64_t value) { seen = (seen ^ value) * 0xff51afd7ed558ccdull, seen ^= seen >> 32; };
  for (const auto& tensor : tensors) {
    if (!tensor.defined()) {
      mix(1);
      continue;
    }
    mix(reinterpret_cast<uintptr_t>(tensor.unsafeGetTensorImpl()));
    if (!tensor.is_inference()) mix(tensor._version());
    if (tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.nbytes() <= compared && tensor.is_contiguous())
      mix(std::hash<std::string_view>{}({static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()}));
  }
  return seen;
}

}  // namespace flashrecovery
