// The gated delta rule (arXiv 2412.06464), in delta_rule.cpp. For each token and value head:
//   S = exp(g) S diag(exp(gk));  S = S + beta (v - S k) k';  out = S (scale q)
// S is [value_dim, key_dim], kept in float32 from one token to the next. Neighbouring value heads
// share a key head.
#pragma once

#include "kernels/kernels.h"

namespace emu::kernels {

struct DeltaRule {
  Data q, k;      // [tokens, key_heads, key_dim]
  Data v, out;    // [tokens, value_heads, value_dim]
  Data beta;      // [tokens, value_heads]
  const float *g;   // [tokens, value_heads]; null: no decay
  const float *gk;  // [tokens, value_heads, key_dim]; null: no decay
  Data read, written;  // [slots, value_heads, value_dim, key_dim]; may be the same memory
  int64_t key_heads, value_heads, key_dim, value_dim;
  float scale;
};

// The tokens of one request. `slots` has one entry for each token: the slot to which the state
// after this token is written; -1 if it is not written.
struct DeltaRequest {
  int64_t start, count, read_slot;
  const int32_t *slots;
};
void delta_rule(const DeltaRule &rule, const DeltaRequest &request);

}  // namespace emu::kernels
