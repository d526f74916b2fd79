// Root-mean-square norm, with or without the addition of a residual, and SwiGLU.
#include "kernels/vector_math.h"

namespace emu::kernels {

void rms_norm(const RmsNorm &n) {
  static thread_local Scratch x_room, residual_room, gamma_room, out_room;
  int64_t columns = n.columns;
  const float *gamma = as_floats(n.gamma, 0, columns, gamma_room.of(columns));
  float *copy = x_room.of(columns), *out_copy = out_room.of(columns);
  for (int64_t row = 0; row < n.rows; row++) {
    int64_t at = row * columns;
    const float *x = as_floats(n.x, at, columns, copy);
    if (n.residual.p) {
      const float *residual = as_floats(n.residual, at, columns, residual_room.of(columns));
      for (int64_t i = 0; i < columns; i++)
        copy[i] = x[i] + residual[i];
      store_floats(copy, n.sum, at, columns);
      // The norm is computed from the rounded sum that was stored, because later layers also use
      // the rounded sum.
      load_floats(n.sum, at, copy, columns);
      x = copy;
    }
    float squares = 0;
    for (int64_t i = 0; i < columns; i++)
      squares += x[i] * x[i];
    float rstd = 1.0f / std::sqrt(squares / static_cast<float>(columns) + n.epsilon);
    if (n.rstd)
      n.rstd[row] = rstd;
    float *out = output_row(n.out, at, out_copy);
    for (int64_t i = 0; i < columns; i++)
      out[i] = x[i] * rstd * (gamma[i] + n.shift);
    commit(n.out, at, columns, out);
  }
}

void swiglu(const SwiGlu &s) {
  static thread_local Scratch gate_room, up_room, out_room;
  int64_t columns = s.columns;
  float *gate_copy = gate_room.of(columns), *up_copy = up_room.of(columns);
  float *out_copy = out_room.of(columns);
  for (int64_t row = 0; row < s.rows; row++) {
    const float *gate = as_floats(s.x, row * 2 * columns, columns, gate_copy);
    const float *up = as_floats(s.x, row * 2 * columns + columns, columns, up_copy);
    float *out = output_row(s.out, row * columns, out_copy);
    for (int64_t i = 0; i < columns; i++)
      out[i] = gate[i] / (1.0f + fast_exp(-gate[i])) * up[i];
    commit(s.out, row * columns, columns, out);
  }
}

}  // namespace emu::kernels
