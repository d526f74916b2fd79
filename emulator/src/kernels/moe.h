// Kernels of mixture-of-experts layers, in moe.cpp.
#pragma once

#include "kernels/kernels.h"

namespace emu::kernels {

// For each row of logits: the scores of all experts, the chosen experts, and their weights.
struct Gating {
  Data x, bias;     // [rows, experts], [experts]; the bias affects the choice only
  Data weights;     // [rows, k]
  int32_t *chosen;  // [rows, k]
  float *scores;    // [rows, experts]; null unless requested
  int64_t rows, experts, k;
  int64_t groups, kept_groups;
  // Whether a group's score is the sum of its two best experts' scores; else it is its best score.
  bool group_by_two;
  bool sigmoid;       // else softmax; only sigmoid's weights are normalised to a sum of one
  float scale, epsilon;
};
void gating(const Gating &g);

// The place of each choice of an expert when rows are sorted by expert; -1: this rank does not have
// the expert. Choices of one expert keep their order. `tokens` counts the choices of each expert in
// [first, end), before the capacity limits them. capacity 0: the experts' rows follow each other
// without gaps.
struct Routing {
  const int32_t *experts;
  int64_t count, first, end, capacity;
};
std::vector<int64_t> route(const Routing &r, std::vector<int64_t> &tokens);

// out[t] = skip1[t] + skip2[t] + sum over k of scale[t, k] * (rows[source] + bias[expert[t, k]]).
struct Combine {
  Data rows, out, skip1, skip2, bias, scales;  // all except rows and out may be null
  const int32_t *sources;                      // -1: no row came back
  const int32_t *experts;                      // [tokens, k], of the bias
  int64_t tokens, k, columns, limit;
  int64_t token_stride, choice_stride;  // strides of sources
  int64_t expert_count;
  bool may_miss;  // whether sources may be -1
};
void combine(const Combine &c);

}  // namespace emu::kernels
