// Interleaved rotary embedding, and the rows that multi-head latent attention writes to its cache.
#include "kernels/mla.h"
#include "kernels/vector_math.h"

#include <stdexcept>
#include <string>

namespace emu::kernels {

void rotate_pairs(const PairRotary &r, int64_t x_offset, int64_t angle_offset,
                  int64_t out_offset) {
  static thread_local Scratch x_room, cos_room, sin_room, out_room;
  int64_t half = r.dim / 2;
  const float *x = as_floats(r.x, x_offset, r.dim, x_room.of(r.dim));
  const float *cos = as_floats(r.cos, angle_offset, r.dim, cos_room.of(r.dim));
  const float *sin = as_floats(r.sin, angle_offset, r.dim, sin_room.of(r.dim));
  float *out = out_room.of(r.dim);
  for (int64_t i = 0; i < half; i++) {
    float even = x[2 * i], odd = x[2 * i + 1];
    out[i] = even * cos[i] - odd * sin[i];
    out[half + i] = odd * cos[half + i] + even * sin[half + i];
  }
  store_floats(out, r.out, out_offset, r.dim);
}

void norm_rope_cache(const LatentRows &l) {
  int64_t width = l.rms_dim + l.rope_dim, copies = l.rope_copy.p ? 1 : 0;
  for (int64_t row = 0; row < l.rows; row++) {
    int64_t slot = l.slots[row];
    if (slot < -1 || slot >= (l.batch_slots ? l.batch_slots : l.capacity))
      throw std::runtime_error("index " + std::to_string(slot) + " lies outside the cache");
    if (slot >= 0)
      slot += row / l.rows_per_batch * l.batch_slots;
    for (int64_t target = 0; target <= copies; target++) {
      int64_t to = target ? row : slot;
      if (to < 0)
        continue;
      rotate_pairs({l.kv, l.cos, l.sin, target ? l.rope_copy : l.rope, l.rope_dim},
                   row * width + l.rms_dim, row * l.rope_dim, to * l.rope_dim);
      auto element = [](Data d, int64_t offset) {
        return Data{static_cast<char *>(d.p) + offset * static_cast<int64_t>(bytes_of(d.type)),
                    d.type};
      };
      RmsNorm norm{};
      norm.x = element(l.kv, row * width);
      norm.gamma = l.gamma;
      norm.out = element(target ? l.latent_copy : l.latent, to * l.rms_dim);
      norm.rows = 1;
      norm.columns = l.rms_dim;
      norm.epsilon = l.epsilon;
      rms_norm(norm);
    }
  }
}

}  // namespace emu::kernels
