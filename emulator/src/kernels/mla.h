// Kernels around multi-head latent attention, in mla.cpp.
#pragma once

#include "kernels/kernels.h"

namespace emu::kernels {

// Moves the even elements of x before the odd ones, and then rotates by halves.
struct PairRotary {
  Data x, cos, sin, out;
  int64_t dim;
};
void rotate_pairs(const PairRotary &r, int64_t x_offset, int64_t angle_offset, int64_t out_offset);

// Rows [rms | rope] of kv: the first part goes to `latent`, normed; the second goes to `rope`,
// rotated.
struct LatentRows {
  Data kv, gamma, cos, sin;
  Data rope, latent;            // caches
  Data rope_copy, latent_copy;  // [rows, ...], copies of the rows; null unless requested
  const int64_t *slots;         // -1: the row is not cached
  // batch_slots: number of slots of each batch, which `slots` counts from 0; 0: `slots` counts over
  // the whole cache.
  int64_t rows, rows_per_batch, batch_slots;
  int64_t capacity, rms_dim, rope_dim;
  float epsilon;
};
void norm_rope_cache(const LatentRows &l);

}  // namespace emu::kernels
