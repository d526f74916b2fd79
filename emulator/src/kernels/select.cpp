// The argmax of each row, comparisons with a number, and selections by masks.
#include "kernels/vector_math.h"

#include <algorithm>
#include <functional>

namespace emu::kernels {

// Returns the greatest of n values; NaN if any value is NaN. n may be 0.
static float greatest_of(const float *x, int64_t n) {
  Floats best = Floats{} - INFINITY;
  auto is_nan = best != best;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Floats values = load(x + i);
    best = values > best ? values : best;
    is_nan |= values != values;
  }
  float found = -INFINITY;
  bool has_nan = false;
  for (int lane = 0; lane < kLanes; lane++) {
    found = best[lane] > found ? best[lane] : found;
    has_nan |= is_nan[lane] != 0;
  }
  for (; i < n; i++) {
    found = x[i] > found ? x[i] : found;
    has_nan |= x[i] != x[i];
  }
  return has_nan ? NAN : found;
}

static int64_t argmax_row(const float *x, int64_t columns) {
  constexpr int64_t kBlock = 512;
  int64_t start = 0;  // of the first block that contains the greatest value
  float greatest = -INFINITY;
  for (int64_t i = 0; i < columns && greatest == greatest; i += kBlock) {
    float found = greatest_of(x + i, std::min(kBlock, columns - i));
    if (!(found <= greatest)) {  // greater, or NaN
      greatest = found;
      start = i;
    }
  }
  for (int64_t i = start; i < columns; i++)
    if (greatest == greatest ? x[i] == greatest : x[i] != x[i])
      return i;
  return 0;
}

void argmax_rows(Data x, int64_t rows, int64_t columns, int64_t row_stride, void *out,
                 bool out_is_int32) {
  static thread_local Scratch room;
  for (int64_t row = 0; row < rows; row++) {
    int64_t best =
        argmax_row(as_floats(x, row * row_stride, columns, room.of(columns)), columns);
    if (out_is_int32)
      static_cast<int32_t *>(out)[row] = static_cast<int32_t>(best);
    else
      static_cast<int64_t *>(out)[row] = best;
  }
}

template <class Test>
static void compare_each(const float *x, float y, uint8_t *out, int64_t n, Test test) {
  for (int64_t i = 0; i < n; i++)
    out[i] = test(x[i], y);
}
void compare(const float *x, float y, Order order, uint8_t *out, int64_t n) {
  switch (order) {
  case Order::Eq:
    return compare_each(x, y, out, n, std::equal_to<>());
  case Order::Ne:
    return compare_each(x, y, out, n, std::not_equal_to<>());
  case Order::Lt:
    return compare_each(x, y, out, n, std::less<>());
  case Order::Le:
    return compare_each(x, y, out, n, std::less_equal<>());
  case Order::Gt:
    return compare_each(x, y, out, n, std::greater<>());
  case Order::Ge:
    return compare_each(x, y, out, n, std::greater_equal<>());
  }
}

static inline uint32_t choose(uint32_t is_first, uint32_t first, uint32_t second) {
  return second ^ ((first ^ second) & -is_first);
}
void choose_words(const uint8_t *mask, const uint32_t *first, const uint32_t *second, uint32_t *out,
                  int64_t n) {
  for (int64_t i = 0; i < n; i++)
    out[i] = choose(mask[i], first[i], second[i]);
}
void fill_words(const uint8_t *mask, uint32_t word, uint32_t *out, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    out[i] = choose(mask[i], word, out[i]);
}

}  // namespace emu::kernels
