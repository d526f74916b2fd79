// GroupedMatmul with weights of four bits. The rows are either floats, and the weights are
// converted to floats; or the rows are int8.
#include "ops/grouped_matmul.h"
#include "ops/int4.h"
#include "ops/matmul.h"

using namespace emu;

namespace {

// Rules: document aclnnGroupedMatmulV5, about the shapes of antiquantScale and antiquantOffset; and
// CheckGroupedMatmulAntiQuant in the operator's source, which refuses offsets that are null.
Task bind_float_rows(const GroupedCall &call, const Tensor &x, const Tensor &weight,
                     const Tensor &y) {
  refuse_all({{"scale", &call.scale}, {"per_token_scale", &call.row_scale}});
  refuse_unless(!is_given(call.bias), "bias is not emulated beside weights of four bits");
  check_list(call.list, call.list_type, weight.size(0), true);
  int64_t groups = weight.size(0), k = weight.size(1), n = 8 * weight.size(2);
  refuse_unless(is_given(call.antiquant_scale), "antiquantScale must not be null");
  refuse_unless(is_given(call.antiquant_offset), "antiquantOffset must not be null");
  const Tensor &scale = call.antiquant_scale[0], &offset = call.antiquant_offset[0];
  require_same_type("antiquantScale", scale, x);
  require_same_type("antiquantOffset", offset, x);
  bool by_group = scale.dim() == 3;
  refuse_unless((by_group || scale.dim() == 2) && scale.size(0) == groups && scale.size(-1) == n &&
                    (!by_group || k % scale.size(1) == 0),
                "antiquantScale must be [", groups, ", ", n, "], or [", groups,
                ", a divisor of ", k, ", ", n, "], got ", scale.sizes());
  refuse_unless(offset.sizes() == scale.sizes(), "antiquantOffset must have the shape of "
                "antiquantScale, got ", offset.sizes());
  refuse_unless(scale.is_contiguous() && offset.is_contiguous(),
                "antiquantScale and antiquantOffset must be contiguous");
  require_same_type("y", y, x);
  return arithmetic([=, list = *call.list, kind = call.list_type] {
    AtenScope scope;
    each_group(list, kind, x.size(0), [&](int64_t i, int64_t start, int64_t end) {
      Tensor floats = dequantised(unpack_int4(weight[i]), scale[i], offset[i]);
      multiply_task(x.slice(0, start, end), floats, y.slice(0, start, end))();
    });
  });
}

// Rules: the same document, about int8 for x and symmetric INT4 for weight; and
// GMMTiling::A8W4Tiling. The group list always contains numbers of rows, even if groupListType says
// otherwise. The cube unit multiplies x - 8 instead of x. Callers pass the correction as bias: the
// sum over k of 8 * weight * scale.
Task bind_int8_rows(const GroupedCall &call, const Tensor &x, const Tensor &weight,
                    const Tensor &y) {
  refuse_all({{"antiquant_scale", &call.antiquant_scale},
              {"antiquant_offset", &call.antiquant_offset}});
  check_list(call.list, call.list_type, weight.size(0), true);
  int64_t groups = weight.size(0), k = weight.size(1), n = 8 * weight.size(2);
  demand(call.list_type == 1 || groups == 1,
         "int8 rows with weights of four bits need group_list_type 1, got ", call.list_type);
  refuse_unless(k % 64 == 0, "k, ", k, ", must be a multiple of 64");
  demand(k <= 18432, "k, ", k, ", may be 18432");
  refuse_unless(is_given(call.bias) && call.bias[0].scalar_type() == at::kFloat &&
                    call.bias[0].sizes() == at::IntArrayRef({groups, n}),
                "bias must be float32, [", groups, ", ", n, "]");
  refuse_unless(is_given(call.scale) && call.scale[0].scalar_type() == at::kLong &&
                    call.scale[0].dim() == 3 && call.scale[0].size(0) == groups &&
                    call.scale[0].size(2) == n && call.scale[0].is_contiguous(),
                "scale must be int64, [", groups, ", groups of k, ", n, "]");
  Tensor scale = call.scale[0], bias = call.bias[0];
  int64_t parts = scale.size(1);
  refuse_unless(parts == 1 || parts * 256 == k, "scale must have one row or ", k / 256,
                " rows, for groups of 256, got ", parts);
  refuse_unless(is_given(call.row_scale) && call.row_scale[0].scalar_type() == at::kFloat &&
                    call.row_scale[0].dim() == 1 && call.row_scale[0].numel() == x.size(0),
                "per_token_scale must be one float32 tensor, one for each of ", x.size(0), " rows");
  refuse_unless(is_half(y), "output_dtype ", y.scalar_type(), " with weights of four bits");
  return arithmetic([=, list = *call.list, rows = call.row_scale[0]] {
    AtenScope scope;
    each_group(list, 1, x.size(0), [&](int64_t i, int64_t start, int64_t end) {
      Tensor steps = float_scales(scale[i]).to(at::kDouble).unsqueeze(1);
      Tensor values = unpack_int4(weight[i]).to(at::kDouble).view({parts, k / parts, n});
      Tensor sum = at::matmul(x.slice(0, start, end).to(at::kDouble) - 8,
                              (values * steps).view({k, n}));
      y.slice(0, start, end).copy_((sum + bias[i]) * rows.slice(0, start, end).unsqueeze(1));
    });
  });
}

}  // namespace

Task emu::bind_grouped_int4(const GroupedCall &call) {
  refuse_unless(call.x.size() == 1 && call.weight.size() == 1 && call.weight[0].dim() == 3 &&
                    call.y.size() == 1 && call.group_type == 0 &&
                    (call.split_item == 2 || call.split_item == 3),
                "weights of four bits are emulated for x, weight and y of one tensor each, with "
                "group_type 0");
  refuse_unless(call.activation == 0, "act_type is not emulated beside weights of four bits");
  const Tensor &x = call.x[0], &weight = call.weight[0], &y = call.y[0];
  refuse_unless(weight.is_contiguous(), "transposed weights of four bits are not emulated");
  refuse_unless(x.dim() == 2 && x.size(1) == weight.size(1) && y.dim() == 2 &&
                    y.size(0) == x.size(0) && y.size(1) == 8 * weight.size(2),
                "y of shape ", y.sizes(), " does not fit x ", x.sizes(), " and weight ",
                weight.sizes());
  require_rows(x);
  demand(x.size(1) < 65536 && y.size(1) < 65536, "the dimensions of weight must be below 65536");
  if (x.scalar_type() == at::kChar)
    return bind_int8_rows(call, x, weight, y);
  refuse_unless(is_half(x), "x must be float16, bfloat16 or int8 with weights of four bits, got ",
                x.scalar_type());
  return bind_float_rows(call, x, weight, y);
}
