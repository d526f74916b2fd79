// int8: the quantisation of activations for each token, as an operator of its own or after a norm
// or SwiGLU; and products of quantised matrices.
#include "ops/int4.h"
#include "ops/quant.h"
#include "ops/storage_formats.h"

using namespace emu;

// Rules: op-plugin document npu_dynamic_quant. x is float16 or bfloat16, has more than one
// dimension, and may be strided. smooth_scales is [last], or [groups, last]; in the second case,
// group_index (int32) contains the ends of the groups. Only int8 results are emulated.
OP(aclnnDynamicQuantV2,
   [](Tensor x, OptTensor smooth, OptTensor ends, int32_t type, Tensor out, Tensor scale,
      OptTensor) -> Task {
     require_kernel_type("x", x);
     demand(is_half(x), "x must be float16 or bfloat16, got ", x.scalar_type());
     refuse_unless(x.dim() > 1, "x must have more than one dimension");
     refuse_unless(type == ACL_INT8 && out.scalar_type() == at::kChar,
                   "dst_type other than int8 is not emulated");
     int64_t columns = x.size(-1), rows = columns ? x.numel() / columns : 0;
     refuse_unless(scale.numel() == rows, "scale of shape ", scale.sizes(), " for ", rows, " rows");
     refuse_unless(!ends || smooth, "group_index without smooth_scales");
     if (smooth) {
       require_same_type("smooth_scales", *smooth, x);
       refuse_unless(smooth->dim() == (ends ? 2 : 1) && smooth->size(-1) == columns,
                     "smooth_scales of shape ", smooth->sizes(), " for rows of ", columns);
     }
     if (ends)
       refuse_unless(ends->scalar_type() == at::kInt && ends->dim() == 1 &&
                         ends->size(0) == smooth->size(0),
                     "group_index must be int32, one for each row of smooth_scales");
     return arithmetic([=] {
       AtenScope scope;
       Tensor values = x.to(at::kFloat).reshape({rows, columns});
       if (smooth && !ends)
         values = values * smooth->to(at::kFloat);
       if (ends) {
         values = values.clone();
         int64_t start = 0;
         for (int64_t g = 0; g < ends->size(0); g++) {
           int64_t end = (*ends)[g].item<int32_t>();
           TORCH_CHECK(end >= start && end <= rows, "group_index ends group ", g, " at ", end);
           values.slice(0, start, end).mul_((*smooth)[g].to(at::kFloat));
           start = end;
         }
       }
       Tensor step = std::get<0>(values.abs().max(1, true)) / 127;
       // The step of a row of zeros is 0.
       Tensor quotient = at::where(step > 0, values / step, at::zeros({}, at::kFloat));
       out.copy_(quotient.round().view(out.sizes()));
       scale.copy_(step.view(scale.sizes()));
     });
   })

// ---- fused with the operator before: the result of that operator is quantised in float32, and not
// rounded to the type of the input first

// Rules: op-plugin document npu_add_rms_norm_dynamic_quant; document aclnnAddRmsNormDynamicQuantV2
// and its tiling. x1 and x2 are float16 or bfloat16, and have 2 to 8 dimensions. gamma has the same
// type, and one dimension. epsilon is greater than 0. The kernel computes the norm of the exact
// sum, and rounds the sum only for x_out.
OP(aclnnAddRmsNormDynamicQuantV2,
   [](Tensor x, Tensor residual, Tensor gamma, OptTensor smooth, OptTensor smooth_2, OptTensor beta,
      double epsilon, aclBoolArray *mask, Tensor out, Tensor, Tensor sum, Tensor scale,
      Tensor) -> Task {
     refuse_unless(is_half(x), "x1 must be float16 or bfloat16, got ", x.scalar_type());
     require_same_type("x2", residual, x);
     require_same_type("gamma", gamma, x);
     refuse_unless(x.dim() >= 2 && x.dim() <= 8, "x1 must have 2 to 8 dimensions, got ", x.dim());
     refuse_unless(residual.sizes() == x.sizes(), "x2 of shape ", residual.sizes(),
                   " differs from x1 ", x.sizes());
     refuse_unless(gamma.dim() == 1 && gamma.size(0) == x.size(-1), "gamma of shape ",
                   gamma.sizes(), " for rows of ", x.size(-1));
     demand(x.numel() > 0, "x1 must not be empty");
     refuse_unless(epsilon > 0, "epsilon must be above 0, got ", epsilon);
     refuse_unless(!mask || mask->values.size() == 2, "output_mask must have two elements");
     refuse_unless(!mask || (mask->values[0] && !mask->values[1]),
                   "only the first result is emulated");
     refuse_unless(!smooth && !smooth_2 && !beta, "smooth_scale and beta are not emulated");
     refuse_unless(out.scalar_type() == at::kChar && out.sizes() == x.sizes(),
                   "y_dtype other than int8 is not emulated");
     return arithmetic([=] {
       AtenScope scope;
       Tensor total = x.to(at::kFloat) + residual.to(at::kFloat);
       Tensor squares = at::mean(total * total, {-1}, true);
       Tensor normed = total * at::rsqrt(squares + epsilon) * gamma.to(at::kFloat);
       Tensor factors = 127. / largest_of(normed);
       write_int8(normed, factors, out);
       scale.copy_((1. / factors).view(scale.sizes()));
       sum.copy_(total);
     });
   })

// Rules: op-plugin document npu_dequant_swiglu_quant. For A2 and A3 also document
// aclnnDequantSwigluQuantV2: x has two dimensions, its type is int32 or bfloat16, and the width of
// its rows is a multiple of 64. The second document also requires group_index on A2 and A3. The
// emulator does not require group_index, because op-plugin's document, the document of
// aclnnDequantSwigluQuant, the tiling and the kernel do not require it.
static Task swiglu_quant(const Tensor &x, std::initializer_list<const OptTensor *> others,
                         bool activate_left, const std::string &mode, const Tensor &out,
                         const Tensor &scale) {
  refuse_unless(mode == "dynamic", "quant_mode ", mode, " is not emulated, only dynamic");
  for (const OptTensor *other : others)
    refuse_unless(!*other || !(*other)->defined(), "scales, bias, offset and group_index are not "
                                                   "emulated");
  refuse_unless(is_half(x), "x of ", x.scalar_type(), " is not emulated, only bfloat16");
  demand(x.scalar_type() == at::kBFloat16, "x must be bfloat16 on this product, got ",
         x.scalar_type());
  demand(x.dim() == 2, "x must have two dimensions on this product, got ", x.dim());
  demand(x.size(-1) % 64 == 0, "rows of ", x.size(-1), " elements are no multiple of 64");
  refuse_unless(x.size(-1) % 2 == 0, "rows of ", x.size(-1), " elements have no halves");
  require_contiguous("x", x);
  return arithmetic([=] {
    AtenScope scope;
    auto halves = x.to(at::kFloat).chunk(2, -1);
    Tensor gate = halves[activate_left ? 0 : 1], up = halves[activate_left ? 1 : 0];
    write_int8_and_steps(at::silu(gate) * up, out, scale);
  });
}

OP(aclnnDequantSwigluQuant,
   [](Tensor x, OptTensor weight_scale, OptTensor row_scale, OptTensor bias, OptTensor smooth,
      OptTensor offset, OptTensor groups, bool activate_left, std::string mode, Tensor out,
      Tensor scale) -> Task {
     return swiglu_quant(x, {&weight_scale, &row_scale, &bias, &smooth, &offset, &groups},
                         activate_left, mode, out, scale);
   })
OP(aclnnDequantSwigluQuantV2,
   [](Tensor x, OptTensor weight_scale, OptTensor row_scale, OptTensor bias, OptTensor smooth,
      OptTensor offset, OptTensor groups, bool activate_left, std::string mode, int64_t type,
      std::string rounding, int64_t dim, int64_t variant, double, double, double, Tensor out,
      Tensor scale) -> Task {
     refuse_unless(type == ACL_INT8, "dst_type other than int8 is not emulated");
     demand(rounding.empty() || rounding == "rint", "round_mode must be rint, got ", rounding);
     demand(dim == -1, "activate_dim must be -1 on this product, got ", dim);
     refuse_unless(variant == 0, "swiglu_mode ", variant, " is not emulated, only 0");
     return swiglu_quant(x, {&weight_scale, &row_scale, &bias, &smooth, &offset, &groups},
                         activate_left, mode, out, scale);
   })

// ---- products

// Rules: op-plugin document npu_quant_matmul, the rows of table 2 about int8 inputs. The result is
// bfloat16 (scale is float32 or bfloat16), float16 (scale and pertoken_scale are float32), or
// int32. The other rows of the table (int8 results, prepared int64 scales, int4 rows) are not
// emulated; int4.cpp has the rules for int4 weights. An integer bias is added before the product is
// scaled.
//
// nz: the values of b if b is in FRACTAL_NZ. In this case, only the sizes of `b` are used.
static TimedTask quant_matmul(const Tensor &a, const Tensor &b, const std::optional<NzMatrices> &nz,
                              const OptTensor &row_scale, const OptTensor &scale,
                              const OptTensor &out_scale, const OptTensor &offset,
                              const OptTensor &bias, bool turn_a, bool turn_b, int64_t group,
                              const Tensor &out) {
  refuse_unless(a.scalar_type() == at::kChar && b.scalar_type() == at::kChar,
                "x1 and x2 must be int8, got ", a.scalar_type(), " and ", b.scalar_type());
  refuse_unless(!turn_a && !turn_b && group == 0 && !(out_scale && out_scale->numel()) && !offset,
                "transposed, grouped or offset products are not emulated");
  refuse_unless(a.dim() >= 2 && b.dim() >= 2 && a.size(-1) == b.size(-2), "shapes ", a.sizes(),
                " and ", b.sizes(), " do not multiply");
  demand(a.dim() <= 6 && b.dim() <= 6, "x1 and x2 may have 6 dimensions");
  demand(a.numel() > 0 && b.numel() > 0, "x1 and x2 must not be empty");
  demand(a.size(-1) <= 65535 && b.size(-1) <= 65535,
         "the last dimensions of x1 and x2 may be 65535");
  auto type = out.scalar_type();
  refuse_unless(type == at::kBFloat16 || type == at::kHalf || type == at::kInt, "output_dtype ",
                type, " is not emulated");
  int64_t columns = b.size(-1), rows = a.size(-2);
  refuse_unless(scale && scale->dim() == 1 &&
                    (scale->numel() == 1 || scale->numel() == columns),
                "scale must have 1 or ", columns, " elements");
  bool is_float = scale->scalar_type() == at::kFloat;
  refuse_unless(is_float || (scale->scalar_type() == at::kBFloat16 && type != at::kHalf),
                "scale of ", scale->scalar_type(), " for results of ", type);
  refuse_unless(type != at::kHalf || row_scale, "float16 results need a pertoken_scale");
  refuse_unless(type != at::kInt || !row_scale, "int32 results take no pertoken_scale");
  if (row_scale)
    refuse_unless(row_scale->scalar_type() == at::kFloat && row_scale->dim() == 1 &&
                      row_scale->numel() == rows,
                  "pertoken_scale must be float32, one for each of ", rows, " rows");
  if (bias)
    refuse_unless((bias->scalar_type() == at::kInt || type != at::kInt) &&
                      bias->size(-1) == columns && (bias->dim() == 1 || bias->dim() == 3),
                  "bias of ", bias->scalar_type(), " ", bias->sizes(), " for ", columns,
                  " columns");
  Task task = arithmetic([=] {
    AtenScope scope;
    Tensor right = nz ? nz->matrix(0) : b;
    Tensor sum = at::matmul(a.to(at::kDouble), right.to(at::kDouble));  // exact
    bool integers = bias && bias->scalar_type() == at::kInt;
    if (integers)
      sum = sum + *bias;
    if (type != at::kInt) {
      sum = sum * scale->to(at::kFloat);
      if (row_scale)
        sum = sum * row_scale->unsqueeze(-1);
      if (bias && !integers)
        sum = sum + bias->to(at::kFloat);
    }
    out.copy_(sum);
  });
  return {task, product_ns(a, b)};
}

OP(aclnnQuantMatmulV5,
   [](Tensor a, Tensor b, OptTensor row_scale, OptTensor scale, OptTensor out_scale, OptTensor,
      OptTensor offset, OptTensor sums, OptTensor bias, bool turn_a, bool turn_b, int64_t group,
      Tensor out) -> TimedTask {
     if (b.scalar_type() == at::kInt && a.scalar_type() != at::kInt)
       return bind_int4_weight(a, b, row_scale, scale, sums, bias, group, out);
     return quant_matmul(a, b, {}, row_scale, scale, out_scale, offset, bias, turn_a, turn_b, group,
                         out);
   })
// Document aclnnQuantMatmulWeightNz and its sources: the rules are the same, but x2 is in
// FRACTAL_NZ.
OP(aclnnQuantMatmulWeightNz,
   [](Tensor a, aclTensor *b, OptTensor row_scale, OptTensor scale, OptTensor out_scale, OptTensor,
      OptTensor offset, OptTensor, OptTensor bias, bool turn_a, bool turn_b, int64_t group,
      Tensor out) -> TimedTask {
     refuse_unless(b && b->t.defined() && b->t.scalar_type() == at::kChar, "x2 must be int8");
     refuse_unless(b->t.dim() == 2, "x2 ", b->t.sizes(), " in FRACTAL_NZ is not emulated, only of "
                   "two dimensions");
     return quant_matmul(a, b->t, NzMatrices(*b), row_scale, scale, out_scale, offset, bias, turn_a,
                         turn_b, group, out);
   })
