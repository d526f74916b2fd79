// Sorting and random numbers. The random streams are ATen's Mersenne twister seeded with what
// torch_npu passes: reproducible, but not the device's numbers.
#include "ops/bind.h"

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
  // Mixed, so that neighbouring offsets do not give shifted copies of one stream.
  uint64_t mixed = static_cast<uint64_t>(seed) + 0x9e3779b97f4a7c15ull * (offset + 1);
  return at::make_generator<at::CPUGeneratorImpl>(mixed);
}
// In a captured graph seed and offset lie in device memory, rewritten before each replay.
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

// torch_npu asks for values in [from, to); drawn in float32 and rounded once.
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

// Document npu_top_k_top_p: logits [rows, vocabulary]; what is cut off becomes -inf.
OP(aclnnApplyTopKTopP, [](Tensor logits, OptTensor p, OptTensor k, Tensor out) {
  if (skipping())
    return;
  auto [sorted, order] = at::sort(logits.to(at::kFloat), true, -1, false);
  if (k) {
    Tensor cut = (sorted.size(1) - k->to(at::kLong)).clamp_min(0).unsqueeze(1);
    sorted = sorted.masked_fill(sorted < sorted.gather(1, cut), -INFINITY);
  }
  if (p) {
    Tensor dropped = sorted.softmax(-1).cumsum(-1) <= 1 - p->to(at::kFloat).unsqueeze(1);
    dropped.select(1, -1).fill_(false);
    sorted = sorted.masked_fill(dropped, -INFINITY);
  }
  out.copy_(at::empty_like(sorted).scatter_(-1, order, sorted));
})

// torch.npu._sleep: one cycle counts as one nanosecond.
OP(aclnnSleep, [](Ints cycles) {
  constexpr int64_t second = 1000000000;
  timespec t{static_cast<time_t>(cycles.at(0) / second), static_cast<long>(cycles.at(0) % second)};
  nanosleep(&t, nullptr);
})
