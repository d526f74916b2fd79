// Kernels of mixture-of-experts layers, in moe.cpp.
#pragma once

#include "kernels/kernels.h"

namespace emu::kernels {

// Computes, for each row of logits, the scores of all experts, the chosen experts, and their
// weights.
struct Gating {
  Data x, bias;     // [rows, experts], [experts]; the bias affects the choice only
  Data weights;     // [rows, k]
  int32_t *chosen;  // [rows, k]
  float *scores;    // [rows, experts]; null unless requested
  int64_t rows, experts, k;
  int64_t groups, kept_groups;
  // If true, a group's score is the sum of its two highest scores of experts. Otherwise it is the
  // highest score.
  bool group_by_two;
  bool sigmoid;       // else softmax; only sigmoid's weights are normalised to a sum of one
  float scale, epsilon;
};
void gating(const Gating &g);

// Each token chooses experts. For each choice, `route` returns the index of its row after the rows
// are sorted by expert. The index is -1 if this rank does not have the expert, or if the expert's
// capacity is full. Choices of the same expert keep their order. `tokens` gets the number of
// choices of each expert in [first, end), before the capacity limits it. With capacity 0, there is
// no limit, and the rows of the experts follow each other without gaps.
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
