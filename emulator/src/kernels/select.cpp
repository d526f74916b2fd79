// Row-wise argmax.
#include "kernels/vector_math.h"

#include <algorithm>

namespace emu::kernels {

static int64_t argmax_row(const float *x, int64_t columns) {
  // One maximum for each lane; without lanes, the compiler does not vectorise the search.
  float lanes[kLanes];
  std::fill(lanes, lanes + kLanes, -INFINITY);
  bool has_nan = false;
  int64_t whole = columns / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    for (int lane = 0; lane < kLanes; lane++) {
      float value = x[i + lane];
      lanes[lane] = value > lanes[lane] ? value : lanes[lane];
      has_nan |= value != value;
    }
  for (int64_t i = whole; i < columns; i++) {
    lanes[0] = x[i] > lanes[0] ? x[i] : lanes[0];
    has_nan |= x[i] != x[i];
  }
  float greatest = *std::max_element(lanes, lanes + kLanes);
  for (int64_t i = 0; i < columns; i++)
    if (has_nan ? x[i] != x[i] : x[i] == greatest)
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

}  // namespace emu::kernels
