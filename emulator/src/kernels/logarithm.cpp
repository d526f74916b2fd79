// Logarithms of floats, written so that the compiler can use vector instructions.
//
// The method is that of Cephes (Moshier): x is (1 + f) * 2^e, where 1 + f is between sqrt(1/2) and
// sqrt(2), and a polynomial of f approximates log(1 + f). The error of log is below 1 unit in the
// last place, and the error of log1p below 2.5 units. The order of the additions matters, so the
// Makefile compiles this file without associative math.
#include "kernels/vector_math.h"

namespace emu::kernels {

static inline float log_of_parts(float f, float e) {
  float p = 7.0376836292e-2f;
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  float square = f * f;
  float small = f * square * p - 2.12194440e-4f * e - 0.5f * square;
  return (f + small) + 0.693359375f * e;  // the two factors of e add up to log(2)
}

// Returns the logarithm of 1 + rest. `sum` is 1 + rest, rounded. If `sum` is near 1, `rest` is more
// exact.
static inline float log_of_sum(float sum, float rest) {
  bool is_tiny = sum < 0x1p-126f;  // no normal number, or negative
  int bits = std::bit_cast<int>(is_tiny ? sum * 0x1p23f : sum);
  constexpr int root = 0x3f3504f3;  // sqrt(1/2)
  int exponent = (bits - root) >> 23;
  float f = std::bit_cast<float>(((bits - root) & 0x007fffff) + root) - 1.0f;
  f = exponent == 0 ? rest : f;
  float found = log_of_parts(f, static_cast<float>(exponent - (is_tiny ? 23 : 0)));
  found = sum == INFINITY ? sum : found;
  found = sum == 0 ? -INFINITY : found;
  return sum >= 0 ? found : NAN;
}

void log(const float *x, float *out, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    out[i] = log_of_sum(x[i], x[i] - 1.0f);
}
void log1p(const float *x, float *out, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    out[i] = log_of_sum(1.0f + x[i], x[i]);
}

}  // namespace emu::kernels
