// Rotary position embedding. It rotates pairs of elements: one element from each half, or
// neighbours (interleaved).
#include "kernels/vector_math.h"

namespace emu::kernels {

static void rotate_row(const Rotary &r, const float *x, const float *cos, const float *sin,
                       float *out) {
  int64_t half = r.rotated / 2;
  if (r.interleaved) {
    for (int64_t i = 0; i < half; i++) {
      out[2 * i] = x[2 * i] * cos[2 * i] - x[2 * i + 1] * sin[2 * i];
      out[2 * i + 1] = x[2 * i + 1] * cos[2 * i + 1] + x[2 * i] * sin[2 * i + 1];
    }
  } else {
    for (int64_t i = 0; i < half; i++) {
      out[i] = x[i] * cos[i] - x[half + i] * sin[i];
      out[half + i] = x[half + i] * cos[half + i] + x[i] * sin[half + i];
    }
  }
  for (int64_t i = r.rotated; i < r.dim; i++)
    out[i] = x[i];
}

void rotary(const Rotary &r) {
  static thread_local Scratch room;
  float *x = room.of(4 * r.dim), *cos_copy = x + r.dim, *sin_copy = cos_copy + r.dim;
  float *out = sin_copy + r.dim;
  for (int64_t a = 0; a < r.size[0]; a++)
    for (int64_t b = 0; b < r.size[1]; b++)
      for (int64_t c = 0; c < r.size[2]; c++) {
        int64_t at = a * r.x_stride[0] + b * r.x_stride[1] + c * r.x_stride[2];
        int64_t to = a * r.out_stride[0] + b * r.out_stride[1] + c * r.out_stride[2];
        int64_t angle = a * r.angle_stride[0] + b * r.angle_stride[1] + c * r.angle_stride[2];
        load_floats(r.x, at, x, r.dim);
        rotate_row(r, x, as_floats(r.cos, angle, r.rotated, cos_copy),
                   as_floats(r.sin, angle, r.rotated, sin_copy), out);
        store_floats(out, r.out, to, r.dim);
      }
}

}  // namespace emu::kernels
