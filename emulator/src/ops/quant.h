// Functions with which fused operators convert their float32 results to rows in int8.
#pragma once

#include "ops/bind.h"

namespace emu {

// Returns the largest absolute value of each row, [rows, 1].
inline Tensor largest_of(const Tensor &rows) { return at::amax(at::abs(rows), {-1}, true); }

// Multiplies rows by their factors, and rounds. A row of zeros has an infinite factor, so its
// products are NaN. We assume that the device converts NaN to 0. This value has no effect, because
// the scale of such a row is 0.
inline void write_int8(const Tensor &rows, const Tensor &factors, const Tensor &out) {
  out.copy_(at::nan_to_num(at::round(rows * factors), 0., 127., -128.).view(out.sizes()));
}

// Writes rows in int8 to `out`, and the step of each row to `scale`.
inline void write_int8_and_steps(const Tensor &rows, const Tensor &out, const Tensor &scale) {
  Tensor steps = largest_of(rows) / 127.;
  write_int8(rows, 1. / steps, out);
  scale.copy_(steps.view(scale.sizes()));
}

}  // namespace emu
