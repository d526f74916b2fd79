// Attention was computed separately over several parts of the keys. Merges these results by means
// of their log-sum-exps.
#include "kernels/kernels.h"
#include "kernels/vector_math.h"

#include <algorithm>
#include <cmath>

namespace emu::kernels {

void merge_attention(const MergedAttention &m) {
  static thread_local Scratch room;
  size_t shares = m.outs.size();
  std::vector<float> lse(shares);
  float *sums = room.of(2 * m.dim), *values = sums + m.dim;
  for (int64_t row = 0; row < m.rows; row++) {
    float top = -INFINITY, sum = 0;
    for (size_t i = 0; i < shares; i++) {
      lse[i] = m.infinity_is_empty && m.lses[i][row] == INFINITY ? -INFINITY : m.lses[i][row];
      top = std::max(top, lse[i]);
    }
    for (float x : lse)
      sum += std::exp(x - top);
    float total = top + std::log(sum);
    std::fill_n(sums, m.dim, 0.0f);
    for (size_t i = 0; i < shares; i++) {
      float weight = std::exp(lse[i] - total);
      load_floats(m.outs[i], row * m.dim, values, m.dim);
      for (int64_t d = 0; d < m.dim; d++)
        sums[d] += weight * values[d];  // zero times NaN is NaN, as on the device
    }
    store_floats(sums, m.out, row * m.dim, m.dim);
    if (m.lse)
      m.lse[row] = total;
  }
}

}  // namespace emu::kernels
