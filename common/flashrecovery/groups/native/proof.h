// How the two ends of a connection show each other that they know a secret, without sending it.
//
// Who dials begins with a random number, who listens answers with one of its own and its proof, and who dials ends with
// its proof: a MAC under the secret over both numbers, over who the two are, and over which of them proves. So a proof
// is good for this connection and for this end of it, and what was overheard or answered elsewhere opens nothing. Who
// listens proves first: a stranger that listens in its place gets nothing but a random number. Each secret belongs to one
// rank's side of one group in one generation, so a proof is good for these alone, too.
#pragma once

#include <sys/random.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace flashrecovery {

using Bits128 = std::array<uint8_t, 16>;
using Secret = Bits128;
using Nonce = Bits128;
using Proof = Bits128;

// From the kernel's generator. False: it failed, and errno says how.
inline bool draw(Bits128& into) { return ::getrandom(into.data(), into.size(), 0) == static_cast<ssize_t>(into.size()); }

// Looks at every byte, wherever the first difference is: the time says nothing about how much of a guess was right.
inline bool same(const Bits128& one, const Bits128& other) {
  volatile uint8_t different = 0;
  for (size_t i = 0; i < one.size(); ++i) different = different | (one[i] ^ other[i]);
  return different == 0;
}

// SipHash-2-4 with 128 bits of output (Aumasson, Bernstein: "SipHash: a fast short-input PRF", 2012, and its reference
// implementation's 128-bit variant).
class SipHash {
 public:
  static Bits128 of(const Secret& key, const uint8_t* data, size_t bytes) {
    SipHash state(load(key.data(), 8), load(key.data() + 8, 8));
    const size_t whole = bytes / 8 * 8;
    for (size_t at = 0; at < whole; at += 8) state.take(load(data + at, 8));
    state.take(load(data + whole, bytes - whole) | static_cast<uint64_t>(bytes) << 56);
    Bits128 out;
    state.c_ ^= 0xee;
    state.finish(out.data());
    state.b_ ^= 0xdd;
    state.finish(out.data() + 8);
    return out;
  }

 private:
  SipHash(uint64_t low, uint64_t high)
      : a_(low ^ 0x736f6d6570736575),
        b_(high ^ 0x646f72616e646f6d ^ 0xee),
        c_(low ^ 0x6c7967656e657261),
        d_(high ^ 0x7465646279746573) {}

  static uint64_t load(const uint8_t* from, size_t bytes) {
    uint64_t word = 0;
    for (size_t i = 0; i < bytes; ++i) word |= static_cast<uint64_t>(from[i]) << 8 * i;
    return word;
  }
  void rounds(int number) {
    for (; number > 0; --number) {
      a_ += b_, b_ = std::rotl(b_, 13) ^ a_, a_ = std::rotl(a_, 32);
      c_ += d_, d_ = std::rotl(d_, 16) ^ c_;
      a_ += d_, d_ = std::rotl(d_, 21) ^ a_;
      c_ += b_, b_ = std::rotl(b_, 17) ^ c_, c_ = std::rotl(c_, 32);
    }
  }
  void take(uint64_t word) {
    d_ ^= word;
    rounds(2);
    a_ ^= word;
  }
  void finish(uint8_t* to) {
    rounds(4);
    const uint64_t word = a_ ^ b_ ^ c_ ^ d_;
    for (int i = 0; i < 8; ++i) to[i] = static_cast<uint8_t>(word >> 8 * i);
  }

  uint64_t a_, b_, c_, d_;
};

// The dialling rank's first words: who it is, and for which stream it comes.
struct Hello {
  uint64_t magic;
  Nonce nonce;
  uint32_t rank;
  int32_t tag;
};
static_assert(sizeof(Hello) == 32);

// The listening rank's.
struct Answer {
  Nonce nonce;
  Proof proof;
};
static_assert(sizeof(Answer) == 32);

enum class Side : uint32_t { kListens = 1, kDials = 2 };

// What both have said of themselves. `listener` is a rank, which the dialling one expects there.
struct Introduction {
  Hello hello;
  Nonce answer;
  uint32_t listener;
};

inline Proof prove(const Secret& secret, const Introduction& said, Side side) {
  struct {
    Hello hello;
    Nonce answer;
    uint32_t listener;
    Side side;
  } const proved{said.hello, said.answer, said.listener, side};
  static_assert(sizeof proved == 56, "every byte is set");
  return SipHash::of(secret, reinterpret_cast<const uint8_t*>(&proved), sizeof proved);
}

}  // namespace flashrecovery
