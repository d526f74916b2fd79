// Kernels of mixture-of-experts layers, in moe.cpp.
#pragma once

#include "kernels/kernels.h"

namespace emu::kernels {

// Scores of all experts, the chosen ones and their weights, for each row of logits.
struct Gating {
  Data x, bias;     // [rows, experts], [experts]; the bias counts for the choice only
  Data weights;     // [rows, k]
  int32_t *chosen;  // [rows, k]
  float *scores;    // [rows, experts]; null unless asked for
  int64_t rows, experts, k;
  int64_t groups, kept_groups;
  bool group_by_two;  // the score of a group is that of its two best experts, else of its best one
  bool sigmoid;       // else softmax; only weights of sigmoid are normalised to a sum of one
  float scale, epsilon;
};
void gating(const Gating &g);

// The place of each choice of an expert when rows are sorted by expert; -1: its expert is not here.
// Choices of one expert keep their order. `tokens` counts the choices of each expert in [first,
// end), before the capacity cuts them. capacity 0: the experts' rows follow each other without
// gaps.
struct Routing {
  const int32_t *experts;
  int64_t count, first, end, capacity;
};
std::vector<int64_t> route(const Routing &r, std::vector<int64_t> &tokens);

// out[t] = skip1[t] + skip2[t] + sum over k of scale[t, k] * (rows[source] + bias[expert[t, k]]).
struct Combine {
  Data rows, out, skip1, skip2, bias, scales;  // all but rows and out may be null
  const int32_t *sources;                      // -1: no row came back
  const int32_t *experts;                      // [tokens, k], of the bias
  int64_t tokens, k, columns, limit;
  int64_t token_stride, choice_stride;  // of sources
  int64_t expert_count;
  bool may_miss;  // whether sources may be -1
};
void combine(const Combine &c);

}  // namespace emu::kernels
