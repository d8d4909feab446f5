// XOR of buffers at the speed of memory: the arithmetic of parity (plan/parity/code.py says what is added to what).
//
// Plain loops over 64-byte rows of the compiler's own vectors, compiled for several instruction sets; the loader chooses
// one when the library is loaded. No dependency beyond the C library, and no state.

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(FLASHRECOVERY_ONE_TARGET)
#define CLONES __attribute__((target_clones("arch=skylake-avx512", "avx2", "default")))
#else
#define CLONES
#endif
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t kRow = 64;
constexpr size_t kTile = 16 << 10;  // of the sum, which then stays in the first-level cache while the sources pass by

typedef uint64_t Row __attribute__((vector_size(64), aligned(1), may_alias));

}  // namespace

// a ^= b
EXPORT CLONES void flashrecovery_xor_into(uint8_t* a, const uint8_t* b, size_t n) {
  size_t i = 0;
  for (; i + kRow <= n; i += kRow) *reinterpret_cast<Row*>(a + i) ^= *reinterpret_cast<const Row*>(b + i);
  for (; i < n; i++) a[i] ^= b[i];
}

// out = a ^ b; whether they differ. `out` may be `a` or `b`. Four rows are read before they are written: a store between
// the loads holds up the next ones.
EXPORT CLONES int flashrecovery_xor(uint8_t* out, const uint8_t* a, const uint8_t* b, size_t n) {
  Row seen = {};
  size_t i = 0;
  for (; i + 4 * kRow <= n; i += 4 * kRow) {
    const Row* left = reinterpret_cast<const Row*>(a + i);
    const Row* right = reinterpret_cast<const Row*>(b + i);
    const Row x0 = left[0] ^ right[0], x1 = left[1] ^ right[1], x2 = left[2] ^ right[2], x3 = left[3] ^ right[3];
    Row* to = reinterpret_cast<Row*>(out + i);
    to[0] = x0, to[1] = x1, to[2] = x2, to[3] = x3;
    seen |= (x0 | x1) | (x2 | x3);
  }
  uint64_t any = 0;
  for (int lane = 0; lane < 8; lane++) any |= seen[lane];
  for (; i < n; i++) {
    out[i] = a[i] ^ b[i];
    any |= out[i];
  }
  return any != 0;
}

// out = a ^ b, bypassing the caches: for a result that is not read soon, and that is neither `a` nor `b`. Otherwise the
// cache line that is written would be read first.
EXPORT CLONES void flashrecovery_xor_stream(uint8_t* out, const uint8_t* a, const uint8_t* b, size_t n) {
  size_t i = 0;
#ifdef __SSE2__
  if (reinterpret_cast<uintptr_t>(out) % 16 == 0) {
    for (; i + kRow <= n; i += kRow) {
      const Row x = *reinterpret_cast<const Row*>(a + i) ^ *reinterpret_cast<const Row*>(b + i);
      __m128i parts[4];
      memcpy(parts, &x, kRow);
      __m128i* to = reinterpret_cast<__m128i*>(out + i);
      _mm_stream_si128(to, parts[0]), _mm_stream_si128(to + 1, parts[1]);
      _mm_stream_si128(to + 2, parts[2]), _mm_stream_si128(to + 3, parts[3]);
    }
    _mm_sfence();  // what is written after this is seen after this
  }
#endif
  for (; i + kRow <= n; i += kRow)
    *reinterpret_cast<Row*>(out + i) = *reinterpret_cast<const Row*>(a + i) ^ *reinterpret_cast<const Row*>(b + i);
  for (; i < n; i++) out[i] = a[i] ^ b[i];
}

// sum ^= sources[0] ^ ... ^ sources[count - 1]; each is n bytes.
EXPORT CLONES void flashrecovery_xor_many(uint8_t* sum, const uint8_t* const* sources, size_t count, size_t n) {
  for (size_t start = 0; start < n; start += kTile) {
    const size_t end = n - start < kTile ? n : start + kTile;
    size_t s = 0;
    for (; s + 4 <= count; s += 4) {
      const uint8_t *b = sources[s], *c = sources[s + 1], *d = sources[s + 2], *e = sources[s + 3];
      size_t i = start;
      for (; i + kRow <= end; i += kRow)
        *reinterpret_cast<Row*>(sum + i) ^=
            (*reinterpret_cast<const Row*>(b + i) ^ *reinterpret_cast<const Row*>(c + i)) ^
            (*reinterpret_cast<const Row*>(d + i) ^ *reinterpret_cast<const Row*>(e + i));
      for (; i < end; i++) sum[i] ^= b[i] ^ c[i] ^ d[i] ^ e[i];
    }
    for (; s < count; s++) {
      const uint8_t* b = sources[s];
      size_t i = start;
      for (; i + kRow <= end; i += kRow)
        *reinterpret_cast<Row*>(sum + i) ^= *reinterpret_cast<const Row*>(b + i);
      for (; i < end; i++) sum[i] ^= b[i];
    }
  }
}

// Two columns from their sum and their sum with the second one `distance` rows later:
//   p[r] = a[r] ^ b[r],  q[r] = a[r] ^ b[r - distance]  ->  a[r] = q[r] ^ b[r - distance],  b[r] = p[r] ^ a[r].
// `rows` rows of 64 bytes; the result replaces its sources: a lies where q was, b where p was.
EXPORT CLONES void flashrecovery_unzip(uint8_t* p, uint8_t* q, size_t distance, size_t rows) {
  Row* b = reinterpret_cast<Row*>(p);
  Row* a = reinterpret_cast<Row*>(q);
  const size_t first = distance < rows ? distance : rows;
  for (size_t r = 0; r < first; r++) b[r] ^= a[r];
  for (size_t r = first; r < rows; r++) {
    const Row x = a[r] ^ b[r - distance];
    a[r] = x;
    b[r] ^= x;
  }
}
