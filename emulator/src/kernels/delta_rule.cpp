#include "kernels/delta_rule.h"
#include "kernels/vector_math.h"

namespace emu::kernels {
namespace {

// Multiplies each column of a state by exp(gk) of this column.
void decay_columns(float *state, int64_t key_dim, int64_t value_dim, const float *gk) {
  static thread_local Scratch room;
  float *decays = room.of(key_dim);
  for (int64_t i = 0; i < key_dim; i++)
    decays[i] = fast_exp(gk[i]);
  for (int64_t row = 0; row < value_dim; row++)
    for (int64_t i = 0; i < key_dim; i++)
      state[row * key_dim + i] *= decays[i];
}

// Updates the state of one head with one token. Writes the output of this token to `out`.
void step(float *state, int64_t key_dim, int64_t value_dim, const float *q, const float *k,
          const float *v, float decay, float beta, float scale, float *out) {
  for (int64_t row = 0; row < value_dim; row++) {
    float *s = state + row * key_dim;
    float known = 0, result = 0;
    for (int64_t i = 0; i < key_dim; i++)
      known += s[i] * k[i];
    float change = beta * (v[row] - decay * known);
    for (int64_t i = 0; i < key_dim; i++) {
      s[i] = decay * s[i] + change * k[i];
      result += s[i] * q[i];
    }
    out[row] = scale * result;
  }
}

}  // namespace

void delta_rule(const DeltaRule &r, const DeltaRequest &request) {
  static thread_local Scratch state_room, q_room, k_room, v_room, out_room;
  int64_t size = r.value_dim * r.key_dim, group = r.value_heads / r.key_heads;
  float *state = state_room.of(size), *result = out_room.of(r.value_dim);
  for (int64_t head = 0; head < r.value_heads; head++) {
    load_floats(r.read, (request.read_slot * r.value_heads + head) * size, state, size);
    for (int64_t t = 0; t < request.count; t++) {
      int64_t row = (request.start + t) * r.value_heads + head;
      int64_t key_at = ((request.start + t) * r.key_heads + head / group) * r.key_dim;
      const float *q = as_floats(r.q, key_at, r.key_dim, q_room.of(r.key_dim));
      const float *k = as_floats(r.k, key_at, r.key_dim, k_room.of(r.key_dim));
      const float *v = as_floats(r.v, row * r.value_dim, r.value_dim, v_room.of(r.value_dim));
      if (r.gk)
        decay_columns(state, r.key_dim, r.value_dim, r.gk + row * r.key_dim);
      step(state, r.key_dim, r.value_dim, q, k, v, r.g ? fast_exp(r.g[row]) : 1,
           element(r.beta, row), r.scale, result);
      store_floats(result, r.out, row * r.value_dim, r.value_dim);
      if (int64_t slot = request.slots[t]; slot >= 0)
        store_floats(state, r.written, (slot * r.value_heads + head) * size, size);
    }
  }
}

}  // namespace emu::kernels
