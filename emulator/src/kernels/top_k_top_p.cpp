// Top-k and top-p of one row of logits.
#include "kernels/kernels.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

namespace emu::kernels {

void cut_top_k(float *row, int64_t n, int64_t k) {
  static thread_local std::vector<float> greatest;
  greatest.resize(k);
  std::partial_sort_copy(row, row + n, greatest.begin(), greatest.end(), std::greater<>());
  float least = greatest.back();
  for (int64_t i = 0; i < n; i++)
    row[i] = row[i] < least ? -INFINITY : row[i];
}

// The relative error of a sum of millions of weights is smaller than this.
template <typename Weight>
static constexpr double kNear = std::is_same_v<Weight, float> ? 4e-6 : 1e-9;
template <typename Weight>
bool cut_top_p(float *row, const Weight *weights, int64_t n, double p, float greatest) {
  constexpr int kBuckets = 1024;
  // The loops below have no branches, so that the compiler can use vector instructions.
  static thread_local std::vector<int32_t> memory;
  memory.resize(n);
  int32_t *buckets = memory.data();
  for (int64_t i = 0; i < n; i++)
    buckets[i] = static_cast<int32_t>(std::min((greatest - row[i]) * 64, float(kBuckets - 1)));
  double sums[kBuckets] = {}, total = 0, above = 0;
  for (int64_t i = 0; i < n; i++)
    sums[buckets[i]] += weights[i];
  for (double sum : sums)
    total += sum;
  const double goal = p * total, near = kNear<Weight> * total;
  int cut = 0;
  while (cut < kBuckets - 1 && above + sums[cut] < goal)
    above += sums[cut++];
  static thread_local std::vector<std::pair<float, int64_t>> found;
  found.clear();
  for (int64_t i = 0; i < n; i++)
    if (buckets[i] == cut)
      found.emplace_back(row[i], i);
  if (found.empty())
    return false;
  std::sort(found.begin(), found.end(), std::greater<>());
  auto last = found.begin();  // the last entry that is kept
  for (auto entry = found.begin(); entry != found.end(); ++entry) {
    bool is_first = above == 0;
    if (!is_first && std::abs(above - goal) < near)
      return false;
    if (!is_first && above > goal)
      break;
    last = entry;
    above += weights[entry->second];
  }
  if (above < goal + near)
    return false;
  for (int64_t i = 0; i < n; i++)
    row[i] = row[i] < last->first ? -INFINITY : row[i];
  for (auto entry = last + 1; entry != found.end(); ++entry)  // equal logits with smaller indices
    row[entry->second] = -INFINITY;
  return true;
}
template bool cut_top_p(float *, const float *, int64_t, double, float);
template bool cut_top_p(float *, const double *, int64_t, double, float);

}  // namespace emu::kernels
