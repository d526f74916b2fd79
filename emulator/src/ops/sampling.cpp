// Sorting and random numbers. ATen's Mersenne twister generates the random numbers, with the seed
// that torch_npu passes. They are reproducible, but a device generates other numbers.
#include "kernels/kernels.h"
#include "ops/bind.h"

#include <cmath>

using namespace emu;

static void write_both(const std::tuple<Tensor, Tensor> &result, Tensor &values, Tensor &indices) {
  values.copy_(std::get<0>(result));
  indices.copy_(std::get<1>(result));
}
OP(aclnnTopk, [](Tensor a, int64_t k, int64_t dim, bool largest, bool sorted, Tensor values,
                 Tensor indices) {
  if (skips(a))
    indices.zero_();
  else
    write_both(at::topk(a, k, dim, largest, sorted), values, indices);
})
OP(aclnnSort,
   [](Tensor a, bool stable, int64_t dim, bool descending, Tensor values, Tensor indices) {
     if (skips(a))
       indices.zero_();
     else
       write_both(at::sort(a, stable, dim, descending), values, indices);
   })

static at::Generator seeded(int64_t seed, int64_t offset) {
  // Seed and offset are mixed, so that successive offsets do not give shifted copies of the same
  // sequence.
  uint64_t mixed = static_cast<uint64_t>(seed) + 0x9e3779b97f4a7c15ull * (offset + 1);
  return at::make_generator<at::CPUGeneratorImpl>(mixed);
}
// In a captured graph, seed and offset are in device memory, and are written again before each
// replay.
static at::Generator seeded_by(const Tensor &seed, const Tensor &offset, uint64_t inside) {
  return seeded(*static_cast<int64_t *>(seed.data_ptr()),
                *static_cast<int64_t *>(offset.data_ptr()) + static_cast<int64_t>(inside));
}

static void draw(const Tensor &p, int64_t count, bool replacement, at::Generator generator,
                 const Tensor &out) {
  if (skips(p))
    out.zero_();
  else
    out.copy_(at::multinomial(is_half(p) ? p.to(at::kFloat) : p, count, replacement, generator));
}
OP(aclnnMultinomial, [](Tensor p, int64_t count, bool replacement, int64_t seed, int64_t offset,
                        Tensor out) { draw(p, count, replacement, seeded(seed, offset), out); })
OP(aclnnMultinomialTensor,
   [](Tensor p, int64_t count, bool replacement, Tensor seed, Tensor offset, uint64_t inside,
      Tensor out) { draw(p, count, replacement, seeded_by(seed, offset, inside), out); })

// torch_npu requests values in [from, to). The values are drawn in float32 and rounded once to the
// type of the tensor.
static void uniform(const Tensor &a, double from, double to, at::Generator generator) {
  if (!skipping())
    a.copy_(at::empty(a.sizes(), at::kFloat).uniform_(from, to, generator));
}
OP(aclnnInplaceUniform, [](Tensor a, double from, double to, uint64_t seed, uint64_t offset) {
  uniform(a, from, to, seeded(seed, offset));
})
OP(aclnnInplaceUniformTensor,
   [](Tensor a, double from, double to, Tensor seed, Tensor offset, uint64_t inside) {
     uniform(a, from, to, seeded_by(seed, offset, inside));
   })
static void normal(const Tensor &a, float mean, float deviation, at::Generator generator) {
  if (!skipping())
    a.copy_(at::empty(a.sizes(), at::kFloat).normal_(mean, deviation, generator));
}
OP(aclnnInplaceNormal, [](Tensor a, float mean, float deviation, int64_t seed, int64_t offset) {
  normal(a, mean, deviation, seeded(seed, offset));
})
OP(aclnnInplaceNormalTensor,
   [](Tensor a, float mean, float deviation, Tensor seed, Tensor offset, uint64_t inside) {
     normal(a, mean, deviation, seeded_by(seed, offset, inside));
   })
OP(aclnnInplaceRandom,
   [](Tensor a, int64_t from, int64_t to, uint64_t seed, uint64_t offset) {
     a.copy_(at::empty(a.sizes(), at::kLong).random_(from, to, seeded(seed, offset)));
   })
OP(aclnnInplaceRandomTensor,
   [](Tensor a, int64_t from, int64_t to, Tensor seed, Tensor offset, uint64_t inside) {
     a.copy_(at::empty(a.sizes(), at::kLong).random_(from, to, seeded_by(seed, offset, inside)));
   })
OP(aclnnInplaceBernoulli, [](Tensor a, Scalar p, int64_t seed, int64_t offset) {
  a.copy_(at::empty(a.sizes(), at::kFloat).bernoulli_(p.toDouble(), seeded(seed, offset)));
})
OP(aclnnInplaceBernoulliTensor, [](Tensor a, Tensor p, int64_t seed, int64_t offset) {
  a.copy_(at::bernoulli(p.to(at::kFloat), seeded(seed, offset)).expand(a.sizes()));
})
OP(aclnnRandperm, [](int64_t n, int64_t seed, int64_t offset, Tensor out) {
  out.copy_(at::randperm(n, seeded(seed, offset)));
})

// Document npu_top_k_top_p: logits is [rows, vocabulary]. Dropped logits become -inf. Each row is
// sorted in ascending order, and equal logits are sorted by index. Top-k drops the logits that are
// less than the k-th logit from the end. Top-p drops logits from the beginning, as long as the sum
// of their probabilities does not exceed 1 - p, but never the last logit. Sums are computed in
// float64, so the order of the additions matters only if a sum is extremely close to 1 - p.
namespace {

void cut_by_sorting(const Tensor &row, int64_t k, std::optional<double> p) {
  auto [sorted, order] = at::sort(row, true, -1, false);
  int64_t n = row.size(0);
  if (k < n)
    sorted = sorted.masked_fill(sorted < sorted[n - k], -INFINITY);
  if (p) {
    Tensor sums = (sorted.to(at::kDouble) - sorted[n - 1]).exp().cumsum(-1);
    Tensor dropped = sums <= (1 - *p) * sums[n - 1];
    dropped[n - 1].fill_(false);
    sorted = sorted.masked_fill(dropped, -INFINITY);
  }
  row.scatter_(-1, order, sorted);
}

}  // namespace

OP(aclnnApplyTopKTopP, [](Tensor logits, OptTensor p, OptTensor k, Tensor out) {
  if (skipping())
    return;
  Tensor kept = logits.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true).contiguous();
  const int64_t n = kept.size(1);
  auto row_of = [&](int64_t i) { return kept.data_ptr<float>() + i * n; };
  Tensor greatest = kept.amax(-1);  // NaN if the row contains NaN
  const float *most = greatest.data_ptr<float>();
  Tensor counts = k ? k->to(at::kLong).contiguous() : Tensor();
  Tensor parts = p ? p->to(at::kDouble).contiguous() : Tensor();
  for (int64_t i = 0; i < kept.size(0); i++) {
    int64_t count = k ? counts.data_ptr<int64_t>()[i] : n;
    TORCH_CHECK(count > 0, "k is ", count, ", must be 1 or more");
    if (!std::isfinite(most[i]))
      cut_by_sorting(kept[i], count, p ? std::optional(parts.data_ptr<double>()[i]) : std::nullopt);
    else if (count < n)
      kernels::cut_top_k(row_of(i), n, count);
  }
  Tensor weights = p ? (kept - greatest.unsqueeze(1)).exp_() : Tensor();
  for (int64_t i = 0; p && i < kept.size(0); i++) {
    const double part = parts.data_ptr<double>()[i];
    const float *rough = weights.data_ptr<float>() + i * n;
    if (!std::isfinite(most[i]) || kernels::cut_top_p(row_of(i), rough, n, part, most[i]))
      continue;
    Tensor exact = (kept[i].to(at::kDouble) - most[i]).exp_();
    if (!kernels::cut_top_p(row_of(i), exact.data_ptr<double>(), n, part, most[i]))
      cut_by_sorting(kept[i], n, part);
  }
  out.copy_(kept);
})

// torch.npu._sleep calls this. One cycle counts as one nanosecond.
OP(aclnnSleep, [](Ints cycles) -> TimedTask {
  constexpr int64_t second = 1000000000;
  int64_t ns = cycles.at(0);
  if (settings().timed)
    return {[] {}, ns};
  return {[=] {
            timespec t{static_cast<time_t>(ns / second), static_cast<long>(ns % second)};
            nanosleep(&t, nullptr);
          },
          ns};
})
