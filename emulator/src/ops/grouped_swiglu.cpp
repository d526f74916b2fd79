// One product per expert, followed by SwiGLU and quantisation. The sums of the products and the
// results of SwiGLU stay in float32 until they are quantised.
#include "ops/grouped_matmul.h"
#include "ops/quant.h"
#include "ops/storage_formats.h"
#include "target.h"

using namespace emu;

namespace {

// Checks a stack of int8 matrices, [groups, in, out]. The operators set the format of the weight to
// FRACTAL_NZ, whatever the caller says. So the format does not show whether a weight is in ND. The
// storage sizes show the format: for a weight in ND, torch_npu passes a single number. Such a
// weight is refused.
void check_weight(const aclTensor &weight, int64_t in, int64_t out) {
  const Tensor &t = weight.t;
  refuse_unless(weight.storage_shape.size() == 5,
                "the storage of weight must have 5 dimensions (FRACTAL_NZ), got ",
                weight.storage_shape.size());
  refuse_unless(t.defined() && t.scalar_type() == at::kChar, "weight must be int8, got ",
                weight.dtype, "; other types are not emulated");
  refuse_unless(t.dim() == 3, "weight of ", t.dim(), " dimensions is not emulated, only of 3");
  refuse_unless(t.size(1) == in && t.size(2) == out, "weight ", t.sizes(), " for x of ", in,
                " and weight_scale of ", out, " columns");
}

// Rules: documents aclnnGroupedMatmulSwigluQuantWeightNZ and ...WeightNzV2, int8; sources
// aclnn_grouped_matmul_swiglu_quant.cpp and its tiling. Rows after the last group are not written.
// The kernel writes int8 rows one after another into the memory of a vector core, which can only be
// addressed in steps of 32 bytes. So the number of columns must be a multiple of 64.
TimedTask bind(const Tensor &x, const aclTensor &weight, const Tensor &weight_scale,
               const Tensor &x_scale, const Tensor &list, int64_t list_type, const Tensor &out,
               const Tensor &scale) {
  refuse_unless(x.scalar_type() == at::kChar && x.dim() == 2, "x must be int8 of two dimensions, ",
                "got ", x.scalar_type(), " ", x.sizes());
  auto type = weight_scale.scalar_type();
  refuse_unless(weight_scale.dim() == 2 && (is_half(weight_scale) || type == at::kFloat),
                "weight_scale must be float32, float16 or bfloat16 of two dimensions, got ", type,
                " ", weight_scale.sizes());
  int64_t rows = x.size(0), columns = weight_scale.size(1);
  check_weight(weight, x.size(1), columns);
  int64_t groups = weight.t.size(0);
  NzMatrices matrices(weight);
  refuse_unless(weight_scale.size(0) == groups, "weight_scale ", weight_scale.sizes(), " for ",
                groups, " groups");
  refuse_unless(x_scale.scalar_type() == at::kFloat && x_scale.dim() == 1 &&
                    x_scale.size(0) == rows,
                "x_scale must be float32, one for each of ", rows, " rows");
  refuse_unless(list.scalar_type() == at::kLong && list.dim() == 1, "group_list must be int64 of "
                "one dimension, got ", list.scalar_type(), " ", list.sizes());
  refuse_unless(list.numel() >= 1 && list.numel() <= groups, "group_list has ", list.numel(),
                " entries for ", groups, " groups");
  refuse_unless(list_type == 0 || list_type == 1, "group_list_type ", list_type, " is not 0 or 1");
  demand(columns <= 10240, "weight has ", columns, " columns, at most 10240");
  demand(x.size(1) < 65536, "x has ", x.size(1), " columns, must be below 65536");
  demand(columns % 64 == 0, columns, " columns of weight are no multiple of 64");
  demand(chip() != Chip::Other, "only A2 and A3 have this operator for int8");
  refuse_unless(out.scalar_type() == at::kChar && out.size(0) == rows &&
                    out.size(1) * 2 == columns && scale.scalar_type() == at::kFloat &&
                    scale.numel() == rows,
                "output ", out.sizes(), " and output_scale ", scale.sizes(), " for ", rows,
                " rows and ", columns, " columns");
  Task task = arithmetic([=] {
    AtenScope scope;
    Tensor ends = list.contiguous();
    each_group(ends, list_type, rows, [&](int64_t group, int64_t start, int64_t end) {
      Tensor sum = at::matmul(x.slice(0, start, end).to(at::kDouble),
                              matrices.matrix(group).to(at::kDouble))  // exact
                       .to(at::kFloat);
      sum = sum * x_scale.slice(0, start, end).unsqueeze(1) * weight_scale[group].to(at::kFloat);
      auto halves = sum.chunk(2, -1);
      write_int8_and_steps(at::silu(halves[0]) * halves[1], out.slice(0, start, end),
                           scale.slice(0, start, end));
    });
  });
  // The int32 sums are written to memory and read again, because the vector cores begin when the
  // cube unit has ended.
  double sums = static_cast<double>(rows) * columns * 4;
  return {task, grouped_ns({x}, {weight.t}) + vector_phase_ns(sums + out.numel())};
}

}  // namespace

OP(aclnnGroupedMatmulSwigluQuantWeightNZ,
   [](Tensor x, aclTensor *weight, OptTensor bias, OptTensor offset, Tensor weight_scale,
      Tensor x_scale, Tensor list, Tensor out, Tensor scale, OptTensor) -> TimedTask {
     refuse_unless(weight, "null aclTensor");
     refuse_unless(!bias && !offset, "bias and offset are not emulated");
     return bind(x, *weight, weight_scale, x_scale, list, 0, out, scale);
   })
// The sources of CANN 8.5 (November 2025) do not contain this operator.
OP(aclnnGroupedMatmulSwigluQuantWeightNzV2,
   [](Tensor x, aclTensorList *weight, Tensors weight_scale, Tensors assist, OptTensor bias,
      Tensor x_scale, OptTensor smooth, Tensor list, int64_t dequant_mode, int64_t dequant_type,
      int64_t quant_mode, int64_t list_type, Ints, Tensor out, Tensor scale) -> TimedTask {
     refuse_unless(weight && weight->tensors.size() == 1 && weight->tensors[0] &&
                       weight_scale.size() == 1,
                   "weight and weight_scale must be lists of one tensor; more are not emulated");
     demand(!cann_before(9), "CANN 8.5 does not have this operator");
     refuse_all({{"weight_assist_matrix", &assist}});
     refuse_unless(!bias && !smooth, "bias and smooth_scale are not emulated beside int8");
     refuse_unless(dequant_mode == 0 && quant_mode == 0, "dequant_mode ", dequant_mode,
                   " and quant_mode ", quant_mode, " must be 0 for int8");
     demand(dequant_type == 0, "dequant_dtype must be float32 (0) on this product, got ",
            dequant_type);
     refuse_unless(list.numel() == weight_scale[0].size(0), "group_list has ", list.numel(),
                   " entries for ", weight_scale[0].size(0), " groups");
     return bind(x, *weight->tensors[0], weight_scale[0], x_scale, list, list_type, out, scale);
   })
