// Mixture of experts: chooses experts, sorts rows by expert, and adds the experts' results.
#include "kernels/moe.h"
#include "kernels/vector_math.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace emu::kernels {

// ---- gating

static void softmax(float *x, int64_t count) {
  float greatest = *std::max_element(x, x + count), sum = 0;
  for (int64_t i = 0; i < count; i++)
    sum += x[i] = fast_exp(x[i] - greatest);
  for (int64_t i = 0; i < count; i++)
    x[i] /= sum;
}

// Finds the unmarked expert with the greatest score, marks it and returns it. If scores are equal,
// the first expert wins.
static int64_t take_greatest(const float *x, char *taken, int64_t count) {
  int64_t best = 0;
  for (int64_t i = 1; i < count; i++)
    if (!taken[i] && (taken[best] || x[i] > x[best]))
      best = i;
  taken[best] = 1;
  return best;
}

// Marks all experts that are not in one of the best groups, so that they are not chosen.
static void drop_groups(const Gating &g, const float *x, char *taken) {
  int64_t size = g.experts / g.groups;
  std::vector<float> worth(g.groups);
  std::vector<char> kept(g.groups, 0);
  for (int64_t group = 0; group < g.groups; group++) {
    float first = -INFINITY, second = -INFINITY;
    for (const float *p = x + group * size; p < x + (group + 1) * size; p++) {
      second = std::max(second, std::min(first, *p));
      first = std::max(first, *p);
    }
    worth[group] = g.group_by_two ? first + second : first;
  }
  for (int64_t i = 0; i < g.kept_groups; i++)
    take_greatest(worth.data(), kept.data(), g.groups);
  for (int64_t group = 0; group < g.groups; group++)
    std::fill_n(taken + group * size, size, !kept[group]);
}

void gating(const Gating &g) {
  std::vector<float> scores(g.experts), bias(g.experts, 0.0f), order(g.experts), weights(g.k);
  std::vector<char> taken(g.experts);
  if (g.bias.p)
    load_floats(g.bias, 0, bias.data(), g.experts);
  for (int64_t row = 0; row < g.rows; row++) {
    load_floats(g.x, row * g.experts, scores.data(), g.experts);
    if (g.sigmoid)
      for (float &s : scores)
        s = 1.0f / (1.0f + fast_exp(-s));
    else
      softmax(scores.data(), g.experts);
    if (g.scores)
      std::copy(scores.begin(), scores.end(), g.scores + row * g.experts);
    for (int64_t e = 0; e < g.experts; e++)
      order[e] = scores[e] + bias[e];
    std::fill(taken.begin(), taken.end(), 0);
    if (g.groups > 1)
      drop_groups(g, order.data(), taken.data());
    float sum = 0;
    for (int64_t i = 0; i < g.k; i++) {
      int64_t expert = take_greatest(order.data(), taken.data(), g.experts);
      g.chosen[row * g.k + i] = static_cast<int32_t>(expert);
      sum += weights[i] = scores[expert];
    }
    float factor = g.scale / (g.sigmoid ? sum + g.epsilon : 1.0f);
    for (float &w : weights)
      w *= factor;
    store_floats(weights.data(), g.weights, row * g.k, g.k);
  }
}

// ---- routing

std::vector<int64_t> route(const Routing &r, std::vector<int64_t> &tokens) {
  int64_t experts = r.end - r.first;
  auto place = [&](int64_t i) {  // index of the expert of choice i among the active experts, or -1
    int64_t expert = r.experts[i] - r.first;
    return expert >= 0 && expert < experts ? expert : -1;
  };
  tokens.assign(experts, 0);
  for (int64_t i = 0; i < r.count; i++)
    if (int64_t expert = place(i); expert >= 0)
      tokens[expert]++;
  std::vector<int64_t> next(experts, 0), to(r.count, -1);
  for (int64_t e = 0; e < experts; e++)
    next[e] = r.capacity ? e * r.capacity : e ? next[e - 1] + tokens[e - 1] : 0;
  for (int64_t i = 0; i < r.count; i++) {
    int64_t expert = place(i);
    if (expert >= 0 && !(r.capacity && next[expert] == (expert + 1) * r.capacity))
      to[i] = next[expert]++;
  }
  return to;
}

// ---- combining

static void require_inside(const char *what, int64_t index, int64_t limit) {
  if (index < 0 || index >= limit)
    throw std::runtime_error(std::string(what) + " " + std::to_string(index) +
                             " lies outside 0.." + std::to_string(limit - 1));
}

void combine(const Combine &c) {
  static thread_local Scratch row_room, bias_room, skip_room, sum_room;
  int64_t columns = c.columns;
  float *sum = sum_room.of(columns);
  for (int64_t t = 0; t < c.tokens; t++) {
    std::fill_n(sum, columns, 0.0f);
    for (const Data *skip : {&c.skip1, &c.skip2})
      if (skip->p) {
        const float *x = as_floats(*skip, t * columns, columns, skip_room.of(columns));
        for (int64_t i = 0; i < columns; i++)
          sum[i] += x[i];
      }
    for (int64_t k = 0; k < c.k; k++) {
      int64_t source = c.sources[t * c.token_stride + k * c.choice_stride];
      if (source == -1 && c.may_miss)
        continue;
      require_inside("expanded_src_to_dst_row", source, c.limit);
      float scale = 1;
      if (c.scales.p)
        load_floats(c.scales, t * c.k + k, &scale, 1);
      const float *x = as_floats(c.rows, source * columns, columns, row_room.of(columns));
      for (int64_t i = 0; i < columns; i++)
        sum[i] += scale * x[i];
      if (!c.bias.p)
        continue;
      int64_t expert = c.experts[t * c.k + k];
      require_inside("expert_for_source_row", expert, c.expert_count);
      const float *bias = as_floats(c.bias, expert * columns, columns, bias_room.of(columns));
      for (int64_t i = 0; i < columns; i++)
        sum[i] += scale * bias[i];
    }
    store_floats(sum, c.out, t * columns, columns);
  }
}

}  // namespace emu::kernels
