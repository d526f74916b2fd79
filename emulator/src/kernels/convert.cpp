// Conversions between float32 and the two half-width types, float16 and bfloat16.
#include "kernels/vector_math.h"

namespace emu::kernels {

static void load_f16(const uint16_t *from, float *to, int64_t count) {
  int64_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
#endif
  for (; i < count; i++)
    to[i] = static_cast<float>(std::bit_cast<Float16>(from[i]));
}

static void store_f16(const float *from, uint16_t *to, int64_t count) {
  int64_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= count; i += 8)
    _mm_storeu_si128((__m128i *)(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < count; i++)
    to[i] = std::bit_cast<uint16_t>(static_cast<Float16>(from[i]));
}

void load_floats(Data from, int64_t offset, float *to, int64_t count) {
  if (from.type == Type::F32) {
    memcpy(to, static_cast<const float *>(from.p) + offset, count * sizeof(float));
    return;
  }
  auto *p = static_cast<const uint16_t *>(from.p) + offset;
  if (from.type == Type::F16)
    return load_f16(p, to, count);
  for (int64_t i = 0; i < count; i++)
    to[i] = bf16_to_float(p[i]);
}

void store_floats(const float *from, Data to, int64_t offset, int64_t count) {
  if (to.type == Type::F32) {
    memcpy(static_cast<float *>(to.p) + offset, from, count * sizeof(float));
    return;
  }
  auto *p = static_cast<uint16_t *>(to.p) + offset;
  if (to.type == Type::F16)
    return store_f16(from, p, count);
  for (int64_t i = 0; i < count; i++)
    p[i] = float_to_bf16(from[i]);
}

}  // namespace emu::kernels
