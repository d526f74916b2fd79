// Matrix products, reductions, indexing, sorting, sampling, norms and activations.
#include "aten.h"

#include "ops/op_abi.h"

#include <ATen/CPUGeneratorImpl.h>

#include <time.h>

using namespace emu;

// ---- matrix products
OP(aclnnMm, [](Tensor a, Tensor b, Tensor out, int8_t) { at::mm_out(out, a, b); })
OP(aclnnMatmul, [](Tensor a, Tensor b, Tensor out, int8_t) { out.copy_(at::matmul(a, b)); })
OP(aclnnBatchMatMul, [](Tensor a, Tensor b, Tensor out, int8_t) { at::bmm_out(out, a, b); })
OP(aclnnAddmm, [](Tensor c, Tensor a, Tensor b, Scalar beta, Scalar alpha, Tensor out, int8_t) {
  at::addmm_out(out, c, a, b, beta, alpha);
})

// ---- reductions
OP(aclnnArgMax,
   [](Tensor a, int64_t dim, bool keep, Tensor out) { out.copy_(at::argmax(a, dim, keep)); })
OP(aclnnReduceSum, [](Tensor a, Ints dims, bool keep, aclDataType dtype, Tensor out) {
  out.copy_(at::sum(a, dims, keep, scalar_type(dtype)));
})
OP(aclnnMean, [](Tensor a, Ints dims, bool keep, aclDataType, Tensor out) {
  out.copy_(at::mean(a, dims, keep));
})
OP(aclnnAll, [](Tensor a, Ints dims, bool keep, Tensor out) {
  out.copy_(at::all(a.to(at::kBool), dims, keep));
})
OP(aclnnMax, [](Tensor a, Tensor out) { out.copy_(a.max()); })
OP(aclnnMin, [](Tensor a, Tensor out) { out.copy_(a.min()); })
OP(aclnnCumsum,
   [](Tensor a, int64_t dim, aclDataType, Tensor out) { out.copy_(at::cumsum(a, dim)); })

// ---- indexing
OP(aclnnIndexSelect, [](Tensor a, int64_t dim, Tensor index, Tensor out) {
  out.copy_(at::index_select(a, dim, index));
})
OP(aclnnEmbedding, [](Tensor weight, Tensor index, Tensor out) {
  out.copy_(at::index_select(weight, 0, index.reshape({-1})).view(out.sizes()));
})
OP(aclnnGather,
   [](Tensor a, int64_t dim, Tensor index, Tensor out) { out.copy_(at::gather(a, dim, index)); })
OP(aclnnScatterNdUpdate, [](Tensor a, Tensor indices, Tensor updates) {
  c10::List<OptTensor> index;
  for (const Tensor &column : indices.to(at::kLong).unbind(-1))
    index.push_back(column);
  a.index_put_(index, updates);
})

// The shape of the result depends on the data: aclGetViewShape reads it back from the aclTensor.
static void write_with_shape(aclTensor *out, const Tensor &result) {
  out->t = at::from_blob(out->t.data_ptr(), result.sizes(), out->t.options());
  out->t.copy_(result);
}
OP(aclnnMaskedSelect,
   [](Tensor a, Tensor mask, aclTensor *out) { write_with_shape(out, at::masked_select(a, mask)); })
OP(aclnnNonzero, [](Tensor a, aclTensor *out) { write_with_shape(out, at::nonzero(a)); })

// ---- sorting and sampling
OP(aclnnTopk,
   [](Tensor a, int64_t k, int64_t dim, bool largest, bool sorted, Tensor values, Tensor indices) {
     auto [v, i] = at::topk(a, k, dim, largest, sorted);
     values.copy_(v);
     indices.copy_(i);
   })
OP(aclnnSort,
   [](Tensor a, bool stable, int64_t dim, bool descending, Tensor values, Tensor indices) {
     auto [v, i] = at::sort(a, stable, dim, descending);
     values.copy_(v);
     indices.copy_(i);
   })
// Not the device's random stream.
OP(aclnnMultinomial, [](Tensor p, int64_t count, bool replacement, int64_t seed, int64_t offset,
                        Tensor out) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed) + offset);
  out.copy_(at::multinomial(p, count, replacement, generator));
})

// ---- norms and activations: fp32 inside, rounded once at the end
static Tensor normalized(const Tensor &x, double eps, Tensor &rstd) {
  Tensor f = x.to(at::kFloat);
  rstd = at::rsqrt(f.pow(2).mean({-1}, true) + eps);
  return f * rstd;
}
OP(aclnnRmsNorm, [](Tensor x, Tensor gamma, double eps, Tensor out, Tensor rstd_out) {
  Tensor rstd;
  out.copy_(normalized(x, eps, rstd) * gamma.to(at::kFloat));
  rstd_out.copy_(rstd.view(rstd_out.sizes()));
})
OP(aclnnAddRmsNorm,
   [](Tensor a, Tensor b, Tensor gamma, double eps, Tensor out, Tensor rstd_out, Tensor sum) {
     sum.copy_(a.to(at::kFloat) + b.to(at::kFloat));
     Tensor rstd;
     out.copy_(normalized(sum, eps, rstd) * gamma.to(at::kFloat));
     rstd_out.copy_(rstd.view(rstd_out.sizes()));
   })
OP(aclnnSoftmax, [](Tensor a, int64_t dim, Tensor out) { at::_softmax_out(out, a, dim, false); })
OP(aclnnSwiGlu, [](Tensor x, int64_t dim, Tensor out) {
  auto halves = x.chunk(2, dim);
  out.copy_(at::silu(halves[0].to(at::kFloat)) * halves[1].to(at::kFloat));
})

// torch.npu._sleep: one cycle counts as one nanosecond.
OP(aclnnSleep, [](Ints cycles) {
  constexpr int64_t second = 1000000000;
  timespec t{static_cast<time_t>(cycles.at(0) / second), static_cast<long>(cycles.at(0) % second)};
  nanosleep(&t, nullptr);
})
