// Products with one matrix of weights of four bits.
#include "ops/int4.h"
#include "ops/matmul.h"

#include "target.h"

using namespace emu;

Tensor emu::unpack_int4(const Tensor &packed) {
  auto shape = packed.sizes().vec();
  shape.back() *= 8;
  Tensor words = packed.contiguous(), values = at::empty(shape, at::kChar);
  auto *from = static_cast<const uint8_t *>(words.data_ptr());
  auto *to = values.data_ptr<int8_t>();
  for (size_t i = 0; i < words.nbytes(); i++) {
    to[2 * i] = static_cast<int8_t>(from[i] << 4) >> 4;
    to[2 * i + 1] = static_cast<int8_t>(from[i]) >> 4;
  }
  return values;
}

Tensor emu::float_scales(const Tensor &scales) {
  return scales.to(at::kInt).view(at::kFloat);
}

Tensor emu::dequantised(const Tensor &values, const Tensor &scale, const OptTensor &offset) {
  Tensor steps = values.to(at::kFloat);
  auto shape = steps.sizes().vec();
  int64_t groups = scale.dim() == 2 ? scale.size(0) : 1;
  Tensor grouped = steps.view({groups, shape[0] / groups, shape[1]});
  if (offset)
    grouped.add_(offset->to(at::kFloat).view({groups, 1, -1}));
  grouped.mul_(scale.to(at::kFloat).view({groups, 1, -1}));
  return steps.to(scale.scalar_type());
}

// Rules for weights of four bits in ND: document aclnnWeightQuantBatchMatmulV2 and its source
// (CheckAntiquantGroupSize, CheckAntiquantParamShape, CheckXWeightDimValue, CheckBiasShape).
OP(aclnnWeightQuantBatchMatmulV2,
   [](Tensor x, Tensor weight, Tensor scale, OptTensor offset, OptTensor out_scale, OptTensor,
      OptTensor bias, int32_t group, Tensor out) -> TimedTask {
     refuse_unless(is_half(x), "x must be float16 or bfloat16, got ", x.scalar_type());
     refuse_unless(!out_scale, "results in int8 are not emulated");
     refuse_unless(weight.scalar_type() == at::kInt && weight.is_contiguous(),
                   "only weights of four bits in int32, not transposed, are emulated, got ",
                   weight.scalar_type());
     refuse_unless(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(0), "shapes ",
                   x.sizes(), " and ", weight.sizes(), " do not multiply");
     int64_t m = x.size(0), k = x.size(1), n = 8 * weight.size(1);
     refuse_unless(m > 0 && k > 0 && n > 0, "x and weight must not be empty");
     demand(k <= 65535 && n <= 65535, "k and n may be 65535, got ", k, " and ", n);
     refuse_unless(group == 0 || (group >= 32 && group < k && group % 32 == 0),
                   "antiquantGroupSize must be 0 or a multiple of 32 below k, ", k, ", got ", group);
     require_same_type("antiquantScale", scale, x);
     if (group)
       refuse_unless(scale.dim() == 2 && scale.size(0) == (k + group - 1) / group &&
                         scale.size(1) == n,
                     "antiquantScale must be [", (k + group - 1) / group, ", ", n, "], got ",
                     scale.sizes());
     else
       refuse_unless((scale.dim() == 1 || (scale.dim() == 2 && scale.size(0) == 1)) &&
                         (scale.numel() == 1 || scale.numel() == n),
                     "antiquantScale must be [1] or [", n, "] without groups, got ", scale.sizes());
     refuse_unless(group == 0 || k % group == 0, "groups of different sizes are not emulated");
     refuse_unless(scale.is_contiguous(), "antiquantScale must be contiguous");
     if (offset) {
       require_same_type("antiquantOffset", *offset, x);
       refuse_unless(offset->sizes() == scale.sizes() && offset->is_contiguous(),
                     "antiquantOffset must have the shape of antiquantScale");
     }
     if (bias) {
       auto wanted = x.scalar_type() == at::kBFloat16 ? at::kFloat : at::kHalf;
       demand(bias->scalar_type() == wanted, "bias must be ", wanted, " with x of ",
              x.scalar_type(), ", got ", bias->scalar_type());
       refuse_unless(bias->numel() == n && bias->size(-1) == n, "bias of shape ", bias->sizes(),
                     " for ", n, " columns");
     }
     require_same_type("y", out, x);
     refuse_unless(out.dim() == 2 && out.size(0) == m && out.size(1) == n, "y of shape ",
                   out.sizes());
     Task task = arithmetic([=] {
       AtenScope scope;
       Tensor floats = dequantised(unpack_int4(weight), scale, offset);
       if (!bias)
         return multiply_task(x, floats, out)();
       Tensor product = at::empty(out.sizes(), at::kFloat);
       multiply_task(x, floats, product)();
       out.copy_(product.add_(bias->to(at::kFloat)));
     });
     return {task, product_ns({1, double(m), double(n), double(k), x.scalar_type(),
                               double(weight.nbytes() + scale.nbytes())})};
   })

// Rules: document aclnnQuantMatmulV5, about int8 for x1 and int32 for x2, and its source
// (CheckDtypeA8W4Int, CheckScaleDimRangeA8W4, CheckA8W4KDim). out = (x1 @ (x2 * x2Scale)) *
// x1Scale. The cube unit multiplies x1 - 8 instead of x1. Callers pass the correction as the
// argument sums: the sum of 8 * x2 * x2Scale over the rows of x2.
TimedTask emu::bind_int4_weight(const Tensor &a, const Tensor &b, const OptTensor &row_scale,
                                const OptTensor &scale, const OptTensor &sums,
                                const OptTensor &bias, int64_t group, const Tensor &out) {
  refuse_unless(a.scalar_type() == at::kChar, "x1 must be int8 with x2 of int32, got ",
                a.scalar_type());
  refuse_unless(is_half(out), "output_dtype ", out.scalar_type(), " with x2 of int32");
  refuse_unless(!bias, "bias must be null with x2 of int32");
  refuse_unless(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0) && b.is_contiguous(),
                "shapes ", a.sizes(), " and ", b.sizes(), " do not multiply");
  int64_t m = a.size(0), k = a.size(1), n = 8 * b.size(1);
  refuse_unless(m > 0 && n > 0, "x1 and x2 must not be empty");
  demand(k <= 29576, "k, ", k, ", may be 29576 with x2 of int32");
  refuse_unless(scale && scale->scalar_type() == at::kLong && row_scale &&
                    row_scale->scalar_type() == at::kFloat,
                "with x2 of int32, scale must be int64 and pertoken_scale float32");
  refuse_unless(sums && sums->scalar_type() == at::kFloat && sums->dim() == 1 &&
                    sums->numel() == n,
                "offset must be float32, one for each of ", n, " columns");
  bool by_group = scale->dim() == 2;
  if (by_group) {
    refuse_unless(group == 256, "the group size of k must be 256, got ", group);
    refuse_unless(k % 256 == 0, "k, ", k, ", must be a multiple of 256");
    refuse_unless(scale->size(0) == k / 256 && scale->size(1) == n, "scale must be [", k / 256,
                  ", ", n, "], got ", scale->sizes());
    refuse_unless(row_scale->dim() == 2 && row_scale->size(0) == m && row_scale->size(1) == 1,
                  "pertoken_scale must be [", m, ", 1], got ", row_scale->sizes());
  } else {
    // Since February 2026, the source allows scales that depend only on the output.
    demand(!cann_before(9), "scale must be [", k / 256, ", ", n, "] before CANN 9.0");
    refuse_unless(group == 0 && k % 2 == 0 && scale->dim() == 1 && scale->numel() == n &&
                      row_scale->dim() == 1 && row_scale->numel() == m,
                  "without groups, scale must be [", n, "] and pertoken_scale [", m, "]");
  }
  Task task = arithmetic([=] {
    AtenScope scope;
    int64_t groups = by_group ? k / 256 : 1;
    Tensor steps = float_scales(*scale).to(at::kDouble).view({groups, 1, n});
    Tensor weight = (unpack_int4(b).to(at::kDouble).view({groups, -1, n}) * steps).view({k, n});
    Tensor sum = at::matmul(a.to(at::kDouble) - 8, weight) + *sums;
    out.copy_(sum * row_scale->view({m, 1}));
  });
  return {task, product_ns({1, double(m), double(n), double(k), at::kChar,
                            double(b.nbytes() + scale->nbytes())})};
}
