// Matrix products. For few rows, loops in this file read the weight once. For more rows, the
// product is computed in tiles; or, if the weight is transposed, by sgemm of the MKL that torch
// contains. Weights in float16 or bfloat16 are converted in parts that stay in the cache.
#include "kernels/vector_math.h"

#include <algorithm>

extern "C" void sgemm_(const char *transa, const char *transb, const int *m, const int *n,
                       const int *k, const float *alpha, const float *a, const int *lda,
                       const float *b, const int *ldb, const float *beta, float *c, const int *ldc);

namespace emu::kernels {
namespace {

#ifdef __AVX512F__
constexpr int64_t kFewRows = 4;             // measured: up to this number, plain loops are faster
#else
constexpr int64_t kFewRows = 8;
#endif
constexpr int64_t kFewRowsTransposed = 12;  // the same for a transposed weight
constexpr int64_t kPanelFloats = 128 * 1024;  // half a megabyte of converted weight

// Row-major out[m, n] = a[m, k] @ b[n, k]^T, computed as the transposed product in column-major
// order.
void sgemm_transposed(const float *a, int64_t a_stride, const float *b, int64_t b_stride,
                      float *out, int64_t out_stride, int64_t m, int64_t n, int64_t k) {
  const int rows = static_cast<int>(n), columns = static_cast<int>(m), inner = static_cast<int>(k);
  const int lda = static_cast<int>(b_stride), ldb = static_cast<int>(a_stride),
            ldc = static_cast<int>(out_stride);
  const float one = 1, zero = 0;
  sgemm_("T", "N", &rows, &columns, &inner, &one, b, &lda, a, &ldb, &zero, out,
         &ldc);
}

// b is [n, k]. Multiplies M rows of a by four rows of b at a time.
template <int M>
void dot_block(const float *a, int64_t a_stride, const float *b, int64_t b_stride, int64_t k,
               float *out, int64_t out_stride) {
  constexpr int N = 4;
  Floats sums[M][N] = {};
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    Floats bs[N];
    for (int n = 0; n < N; n++)
      bs[n] = load(b + n * b_stride + i);
    for (int m = 0; m < M; m++) {
      Floats as = load(a + m * a_stride + i);
      for (int n = 0; n < N; n++)
        sums[m][n] += as * bs[n];
    }
  }
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) {
      float sum = total<kLanes>(sums[m][n]);
      for (int64_t j = i; j < k; j++)
        sum += a[m * a_stride + j] * b[n * b_stride + j];
      out[m * out_stride + n] = sum;
    }
}

void dot_rows(const float *a, int64_t a_stride, const float *b, int64_t b_stride, int64_t k,
              float *out, int64_t out_stride, int64_t m) {
  constexpr int kRows = kRegisters == 32 ? 4 : 2;  // 16 or 8 sums, and four operands, in registers
  for (; m >= kRows; m -= kRows, a += kRows * a_stride, out += kRows * out_stride)
    dot_block<kRows>(a, a_stride, b, b_stride, k, out, out_stride);
  if (m == 3)
    dot_block<3>(a, a_stride, b, b_stride, k, out, out_stride);
  else if (m == 2)
    dot_block<2>(a, a_stride, b, b_stride, k, out, out_stride);
  else if (m == 1)
    dot_block<1>(a, a_stride, b, b_stride, k, out, out_stride);
}

void few_rows_transposed(const float *a, int64_t a_stride, const float *b, int64_t b_stride,
                         float *out, int64_t out_stride, int64_t m, int64_t n, int64_t k) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4)  // four rows of b stay in the first-level cache for all rows of a
    dot_rows(a, a_stride, b + i * b_stride, b_stride, k, out + i, out_stride, m);
  for (; i < n; i++)
    for (int64_t row = 0; row < m; row++) {
      float sum = 0;
      for (int64_t j = 0; j < k; j++)
        sum += a[row * a_stride + j] * b[i * b_stride + j];
      out[row * out_stride + i] = sum;
    }
}

// b is [k, n]. Computes M rows of out, one strip of columns at a time.
template <int M>
void strips(const float *a, int64_t a_stride, const float *b, int64_t b_stride, float *out,
            int64_t out_stride, int64_t n, int64_t k) {
  constexpr int kSums = kRegisters == 32 ? 16 : 12;
  constexpr int kVectors = kSums / M, kStrip = kVectors * kLanes;
  int64_t i = 0;
  for (; i + kStrip <= n; i += kStrip) {
    Floats sums[M][kVectors] = {};
    for (int64_t j = 0; j < k; j++)
      for (int v = 0; v < kVectors; v++) {
        Floats bs = load(b + j * b_stride + i + v * kLanes);
        for (int m = 0; m < M; m++)
          sums[m][v] += bs * a[m * a_stride + j];
      }
    for (int m = 0; m < M; m++)
      for (int v = 0; v < kVectors; v++)
        store(out + m * out_stride + i + v * kLanes, sums[m][v]);
  }
  for (int m = 0; m < M; m++) {
    for (int64_t c = i; c < n; c++)
      out[m * out_stride + c] = 0;
    for (int64_t j = 0; j < k; j++)
      for (int64_t c = i; c < n; c++)
        out[m * out_stride + c] += a[m * a_stride + j] * b[j * b_stride + c];
  }
}

void few_rows_plain(const float *a, int64_t a_stride, const float *b, int64_t b_stride, float *out,
                    int64_t out_stride, int64_t m, int64_t n, int64_t k) {
  for (; m >= 4; m -= 4, a += 4 * a_stride, out += 4 * out_stride)
    strips<4>(a, a_stride, b, b_stride, out, out_stride, n, k);
  if (m == 3)
    strips<3>(a, a_stride, b, b_stride, out, out_stride, n, k);
  else if (m == 2)
    strips<2>(a, a_stride, b, b_stride, out, out_stride, n, k);
  else if (m == 1)
    strips<1>(a, a_stride, b, b_stride, out, out_stride, n, k);
}

void multiply(const float *a, int64_t a_stride, const float *b, int64_t b_stride, bool transposed,
              float *out, int64_t out_stride, int64_t m, int64_t n, int64_t k) {
  if (transposed && m > kFewRowsTransposed)
    sgemm_transposed(a, a_stride, b, b_stride, out, out_stride, m, n, k);
  else if (transposed)
    few_rows_transposed(a, a_stride, b, b_stride, out, out_stride, m, n, k);
  else if (m > kFewRows)
    tiled_matmul(a, a_stride, b, b_stride, out, out_stride, m, n, k);
  else
    few_rows_plain(a, a_stride, b, b_stride, out, out_stride, m, n, k);
}

}  // namespace

void matmul(const MatMul &mm) {
  if (mm.m == 0 || mm.n == 0)
    return;
  if (mm.a.type == Type::F32 && mm.b.type == Type::F32 && mm.out.type == Type::F32 && mm.k > 0) {
    multiply(static_cast<float *>(mm.a.p), mm.a_stride, static_cast<float *>(mm.b.p), mm.b_stride,
             mm.b_transposed, static_cast<float *>(mm.out.p), mm.out_stride, mm.m, mm.n, mm.k);
    return;
  }
  static thread_local Scratch a_room, b_room, out_room;
  float *a = a_room.of(mm.m * mm.k);
  for (int64_t row = 0; row < mm.m; row++)
    load_floats(mm.a, row * mm.a_stride, a + row * mm.k, mm.k);
  int64_t width = std::clamp<int64_t>(kPanelFloats / std::max<int64_t>(mm.k, 1), 64, mm.n);
  width = std::min(width, mm.n);
  float *b = b_room.of(width * mm.k), *out = out_room.of(mm.m * width);
  for (int64_t start = 0; start < mm.n; start += width) {
    int64_t n = std::min(width, mm.n - start);
    if (mm.b_transposed)
      for (int64_t row = 0; row < n; row++)
        load_floats(mm.b, (start + row) * mm.b_stride, b + row * mm.k, mm.k);
    else
      for (int64_t row = 0; row < mm.k; row++)
        load_floats(mm.b, row * mm.b_stride + start, b + row * n, n);
    if (mm.k == 0)
      std::fill_n(out, mm.m * n, 0.0f);
    else
      multiply(a, mm.k, b, mm.b_transposed ? mm.k : n, mm.b_transposed, out, n, mm.m, n, mm.k);
    for (int64_t row = 0; row < mm.m; row++)
      store_floats(out + row * n, mm.out, row * mm.out_stride + start, n);
  }
}

}  // namespace emu::kernels
