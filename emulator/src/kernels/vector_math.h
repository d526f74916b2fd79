// Conversions and exp, written so that the compiler can use vector instructions.
#pragma once

#include "kernels/kernels.h"

#include <bit>
#include <cmath>
#include <cstring>

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace emu::kernels {

// In C++, GCC 12 has _Float16 only for x86, and __fp16 only for Arm.
#ifdef __aarch64__
using Float16 = __fp16;
#else
using Float16 = _Float16;
#endif

// The floats of one vector register. Loads and stores need no alignment. The vector must not be
// wider than the machine's registers: GCC would keep it in memory, which takes ten times as long.
#ifdef __AVX512F__
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRegisters = 32;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif
template <int N> struct Vector {
  typedef float Type __attribute__((vector_size(4 * N)));
};
using Floats = Vector<kLanes>::Type;

inline Floats load(const float *p) {
  Floats v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float *p, Floats v) { memcpy(p, &v, sizeof v); }
template <int N> inline float total(typename Vector<N>::Type v) {
  if constexpr (N == 4) {
    return (v[0] + v[2]) + (v[1] + v[3]);
  } else {
    typename Vector<N / 2>::Type halves[2];
    memcpy(halves, &v, sizeof v);
    return total<N / 2>(halves[0] + halves[1]);
  }
}

inline float bf16_to_float(uint16_t h) { return std::bit_cast<float>(uint32_t(h) << 16); }
inline uint16_t float_to_bf16(float f) {  // to nearest even
  uint32_t bits = std::bit_cast<uint32_t>(f);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return uint16_t(f != f ? 0x7fc0u : rounded);
}

// The error is about 1 unit in the last place. The result is NaN for NaN, 0 for x < -87.3, and
// infinity for x > 88.7.
inline float fast_exp(float x) {
  constexpr float least = -87.33f, most = 88.72f;
  float bounded = x < least ? least : x > most ? most : x;
  float n = std::nearbyint(bounded * 1.44269504088896341f);
  float r = bounded - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // 2^n is multiplied as two factors, because 2^n may overflow although the product does not.
  int whole = int(n), half = whole / 2;
  float y = p * std::bit_cast<float>((half + 127) << 23) *
            std::bit_cast<float>((whole - half + 127) << 23);
  return x < least ? 0.0f : x > most ? INFINITY : y;
}

inline float element(Data d, int64_t i) {
  if (d.type == Type::F32)
    return static_cast<const float *>(d.p)[i];
  if (d.type == Type::BF16)
    return bf16_to_float(static_cast<const uint16_t *>(d.p)[i]);
  return static_cast<float>(static_cast<const Float16 *>(d.p)[i]);
}

// Returns the elements of `d` from `offset` on as floats. If `d` has another type, they are
// converted into `scratch`.
inline const float *as_floats(Data d, int64_t offset, int64_t count, float *scratch) {
  if (d.type == Type::F32)
    return static_cast<const float *>(d.p) + offset;
  load_floats(d, offset, scratch, count);
  return scratch;
}
// Returns the memory in which a row of `d` is computed. If the type of `d` is float, this is the
// row itself. Otherwise it is `scratch`, and commit() converts the row into `d`.
inline float *output_row(Data d, int64_t offset, float *scratch) {
  return d.type == Type::F32 ? static_cast<float *>(d.p) + offset : scratch;
}
inline void commit(Data d, int64_t offset, int64_t count, const float *computed) {
  if (d.type != Type::F32)
    store_floats(computed, d, offset, count);
}

// A buffer that grows and is never freed. Each thread has one for each place in the code that needs
// a buffer.
struct Scratch {
  std::vector<float> floats;
  float *of(int64_t count) {
    if (static_cast<int64_t>(floats.size()) < count)
      floats.resize(count);
    return floats.data();
  }
};

}  // namespace emu::kernels
