// Kernels around multi-head latent attention, in mla.cpp.
#pragma once

#include "kernels/kernels.h"

namespace emu::kernels {

// Moves the elements of x with an even index to the first half, and the other elements to the
// second half. Then rotates pairs: one element from each half.
struct PairRotary {
  Data x, cos, sin, out;
  int64_t dim;
};
void rotate_pairs(const PairRotary &r, int64_t x_offset, int64_t angle_offset, int64_t out_offset);

// Each row of kv has two parts, [rms | rope]. The first part is normed and written to `latent`. The
// second part is rotated and written to `rope`.
struct LatentRows {
  Data kv, gamma, cos, sin;
  Data rope, latent;            // caches
  Data rope_copy, latent_copy;  // [rows, ...], copies of the rows; null unless requested
  const int64_t *slots;         // -1: the row is not cached
  // batch_slots: number of slots of each batch. If it is not 0, `slots` are indexes within the
  // batch's slots; if it is 0, they are indexes in the whole cache.
  int64_t rows, rows_per_batch, batch_slots;
  int64_t capacity, rms_dim, rope_dim;
  float epsilon;
};
void norm_rope_cache(const LatentRows &l);

}  // namespace emu::kernels
