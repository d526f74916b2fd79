// GroupedMatmul: one product per expert. The sizes of the groups are in device memory, so they are
// read when the task runs.
#include "ops/grouped_matmul.h"
#include "ops/matmul.h"
#include "ops/storage_formats.h"

using namespace emu;
using kernels::MatMul;

void emu::check_list(const OptTensor &list, int64_t kind, int64_t groups, bool single) {
  refuse_unless(list, "group_list must be given where x is one tensor");
  refuse_unless(list->scalar_type() == at::kLong && list->dim() == 1 && list->is_contiguous(),
                "group_list must be int64 of rank 1, got ", list->scalar_type(), " ",
                list->sizes());
  refuse_unless(list->numel() == groups, "group_list has ", list->numel(), " entries for ", groups,
                " groups");
  refuse_unless(kind == 0 || kind == 1, "group_list_type ", kind,
                " is not emulated (int8 only), 0 and 1 are");
  demand(kind == 0 || groups > 1, "group_list must not have one entry with group_list_type 1");
  demand(groups <= (single ? 1024 : 128), groups, " groups, at most ", single ? 1024 : 128);
}

void emu::require_rows(const Tensor &x) {
  refuse_unless(x.stride(1) == 1 || x.size(1) == 1 || x.is_contiguous(),
                "x must have contiguous rows, got strides ", x.strides());
}

int64_t emu::grouped_ns(const Tensors &x, const Tensors &weight) {
  double rows = 0, weight_bytes = 0, groups = 0;
  for (const Tensor &t : x)
    rows += t.size(0);
  for (const Tensor &t : weight) {
    weight_bytes += t.nbytes();
    groups += t.dim() == 3 ? t.size(0) : 1;
  }
  double used = std::max(std::min(groups, rows), 1.);
  double columns = weight[0].size(-1) * (weight[0].scalar_type() == at::kInt ? 8 : 1);
  return product_ns({used, rows / used, columns, double(x[0].size(1)),
                     x[0].scalar_type(), weight_bytes * used / groups});
}

void emu::refuse_all(std::initializer_list<std::pair<const char *, const Tensors *>> lists) {
  for (auto &[name, list] : lists)
    for (const Tensor &t : *list)
      refuse_unless(t.numel() == 0, name, " is not emulated");
}

namespace {

struct Grouped {
  std::vector<MatMul> products;  // one per group; if x is one tensor, each covers all its rows
  std::vector<OptTensor> bias;
  OptTensor list;  // null: each group has its own x
  bool cumulative;
};

void multiply_with_bias(const MatMul &mm, const Tensor &bias) {
  Tensor sum = at::empty({mm.m, mm.n}, at::kFloat), row = bias.to(at::kFloat);
  MatMul product = mm;
  product.out = data_of(sum);
  product.out_stride = mm.n;
  kernels::matmul(product);
  sum.add_(row);
  for (int64_t i = 0; i < mm.m; i++)
    kernels::store_floats(sum.data_ptr<float>() + i * mm.n, mm.out, i * mm.out_stride, mm.n);
}

kernels::Data shifted(kernels::Data d, int64_t elements) {
  return {static_cast<char *>(d.p) + elements * static_cast<int64_t>(bytes_of(d.type)), d.type};
}

void multiply(const Grouped &g, const MatMul &mm, int64_t group) {
  if (g.bias[group])
    multiply_with_bias(mm, *g.bias[group]);
  else
    kernels::matmul(mm);
}

void run(const Grouped &g) {
  AtenScope scope;
  if (g.list)
    return each_group(*g.list, g.cumulative ? 0 : 1, g.products[0].m,
                      [&](int64_t i, int64_t start, int64_t end) {
                        MatMul mm = g.products[i];
                        mm.a = shifted(mm.a, start * mm.a_stride);
                        mm.out = shifted(mm.out, start * mm.out_stride);
                        mm.m = end - start;
                        multiply(g, mm, i);
                      });
  for (size_t i = 0; i < g.products.size(); i++)
    if (g.products[i].m)
      multiply(g, g.products[i], i);
}

// Section "约束说明", table 2: the bias has the type of x, but its type is float32 if x is bfloat16.
void check_types(const Tensors &x, const Tensors &weight, const Tensors &bias) {
  for (const Tensor &t : x)
    require_kernel_type("x", t);
  for (const Tensor &t : weight)
    require_same_type("weight", t, x[0]);
  for (const Tensor &t : bias) {
    auto wanted = x[0].scalar_type() == at::kBFloat16 ? at::kFloat : x[0].scalar_type();
    require_kernel_type("bias", t);
    demand(t.scalar_type() == wanted, "bias must be ", wanted, " with x of ", x[0].scalar_type(),
           ", got ", t.scalar_type());
  }
  bool single = x.size() == 1 && weight.size() == 1;
  demand(single || x[0].scalar_type() != at::kFloat,
         "float32 needs x, weight and y of one tensor each");
}

// The other rules of section "约束说明", about inner dimensions, strides, and lengths of lists.
void check_shapes(const Tensors &x, const Tensors &weight) {
  for (const Tensor &t : x) {
    refuse_unless(t.dim() == 2, "x must have 2 dimensions, got ", t.sizes());
    require_rows(t);
    demand(t.size(1) < 65536, "the last dimension of x, ", t.size(1), ", must be below 65536");
  }
  bool single = weight.size() == 1 && weight[0].dim() == 3;
  for (const Tensor &t : weight) {
    refuse_unless(t.dim() == (single ? 3 : 2), "weight of shape ", t.sizes(),
                  ": one tensor of rank 3, or one of rank 2 for each group");
    bool plain = t.is_contiguous(), turned = t.transpose(-1, -2).is_contiguous();
    refuse_unless(plain || turned, "weight must be contiguous or a transposed view, got strides ",
                  t.strides());
    demand(t.size(plain ? -1 : -2) < 65536, "the inner dimension of weight ", t.sizes(),
           " must be below 65536");
    demand(plain == weight[0].is_contiguous() || turned == weight[0].transpose(-1, -2).is_contiguous(),
           "all weights must be transposed, or none");
  }
  demand(x.size() <= 128 && weight.size() <= 128, x.size(), " and ", weight.size(),
         " tensors, at most 128");
}

// Rules: op-plugin document npu_grouped_matmul, about calls without quantisation in which
// group_list is a tensor. According to the document, the groups together must contain all rows of
// x. But in other projects, ranks that have only some experts pass groups with fewer rows. In this
// case, the emulator does not write the remaining rows.
Task bind_grouped(const Tensors &x, const Tensors &weight, const Tensors &bias, const OptTensor &list,
                  int64_t split_item, int64_t group_type, int64_t list_type, int64_t activation,
                  const Tensors &y) {
  refuse_unless(!x.empty() && !weight.empty() && !y.empty(), "x, weight or y is empty");
  refuse_unless(activation == 0, "act_type ", activation, " is for quantised products, 0 else");
  refuse_unless(group_type == 0 || group_type == -1, "group_type ", group_type,
                " is not emulated, 0 and -1 are");
  check_types(x, weight, bias);
  check_shapes(x, weight);
  bool single = weight[0].dim() == 3;
  size_t groups = single ? weight[0].size(0) : weight.size();
  bool one_y = split_item == 2 || split_item == 3;
  refuse_unless(group_type == 0 ? one_y : split_item == 0 || split_item == 1, "split_item ",
                split_item, " does not go with group_type ", group_type);
  refuse_unless(y.size() == (one_y ? 1 : groups), "y has ", y.size(), " tensors for ", groups,
                " groups");
  refuse_unless(x.size() == groups || (one_y && x.size() == 1), "x has ", x.size(),
                " tensors for ", groups, " groups");
  if (group_type == -1)
    refuse_unless(!list && !single, "group_type -1 takes no group_list, and weights of rank 2");
  bool shared = one_y && x.size() == 1;
  if (shared)
    check_list(list, list_type, groups, single);
  refuse_unless(bias.empty() || bias.size() == weight.size(), "bias has ", bias.size(),
                " tensors, weight ", weight.size());
  Grouped g{};
  g.list = shared ? list : OptTensor();
  g.cumulative = list_type == 0;
  int64_t start = 0;
  for (size_t i = 0; i < groups; i++) {
    const Tensor &left = shared ? x[0] : x[i];
    Tensor out = one_y ? (shared ? y[0] : y[0].narrow(0, start, left.size(0))) : y[i];
    start += left.size(0);
    auto product = bind_product(left, single ? weight[0][i] : weight[i], out);
    refuse_unless(product && out.size(0) == left.size(0) && out.size(1) == product->n,
                  "y of shape ", out.sizes(), " does not fit x ", left.sizes());
    g.products.push_back(*product);
    OptTensor row;
    if (!bias.empty()) {
      row = single ? bias[0][i] : bias[i];
      refuse_unless(row->dim() == 1 && row->size(0) == product->n, "bias of shape ", row->sizes(),
                    " for ", product->n, " columns");
    }
    g.bias.push_back(row);
  }
  return arithmetic([g] { run(g); });
}

// Table 2, its rows about per-token quantisation: if the result is bfloat16, scales are bfloat16;
// if the result is float16, scales are float32.
void check_scales(const Tensor &x, const Tensor &weight, const Tensors &scale, const Tensors &rows,
                  const Tensor &y) {
  refuse_unless(is_half(y), "output_dtype ", y.scalar_type(), " of int8 is not emulated");
  auto wanted = y.scalar_type() == at::kBFloat16 ? at::kBFloat16 : at::kFloat;
  refuse_unless(scale.size() == 1 && scale[0].dim() == 2 && scale[0].size(0) == weight.size(0) &&
                    scale[0].size(1) == weight.size(2) && scale[0].is_contiguous(),
                "scale must be one tensor with a row for each of ", weight.size(0),
                " groups and a column for each of ", weight.size(2), " outputs");
  demand(scale[0].scalar_type() == wanted, "scale must be ", wanted, " for results of ",
         y.scalar_type(), ", got ", scale[0].scalar_type());
  refuse_unless(rows.size() == 1 && rows[0].scalar_type() == at::kFloat && rows[0].dim() == 1 &&
                    rows[0].size(0) == x.size(0) && rows[0].is_contiguous(),
                "per_token_scale must be one float32 tensor, one for each of ", x.size(0), " rows");
}

// Rules: the same document, about int8 with one scale for each row, and one scale for each output
// of a group.
//
// nz: the values of a weight in FRACTAL_NZ. If they are given, only the sizes of `weight` are used.
Task bind_quantised(const Tensors &x, const Tensors &weight, const std::optional<NzMatrices> &nz,
                    const Tensors &bias, const Tensors &scale, const Tensors &row_scale, const OptTensor &list,
                    int64_t split_item, int64_t group_type, int64_t list_type, int64_t activation,
                    const Tensors &y) {
  refuse_unless(x.size() == 1 && weight.size() == 1 && weight[0].dim() == 3 && y.size() == 1 &&
                    group_type == 0 && (split_item == 2 || split_item == 3),
                "int8 is emulated for x, weight and y of one tensor each, with group_type 0");
  refuse_unless(x[0].scalar_type() == at::kChar && weight[0].scalar_type() == at::kChar,
                "x and weight must both be int8, got ", x[0].scalar_type(), " and ",
                weight[0].scalar_type());
  refuse_unless(!is_given(bias) && activation == 0,
                "bias and act_type are not emulated beside int8");
  check_shapes(x, weight);
  check_list(list, list_type, weight[0].size(0), true);
  Tensor left = x[0], right = weight[0], rows = row_scale.empty() ? Tensor() : row_scale[0];
  check_scales(left, right, scale, row_scale, y[0]);
  refuse_unless(left.size(1) == right.size(1) && y[0].size(0) == left.size(0) &&
                    y[0].size(1) == right.size(2),
                "y of shape ", y[0].sizes(), " does not fit x ", left.sizes(), " and weight ",
                right.sizes());
  return arithmetic([=, out = y[0], steps = scale[0], ends = *list] {
    AtenScope scope;
    each_group(ends, list_type, left.size(0), [&](int64_t i, int64_t start, int64_t end) {
      Tensor matrix = nz ? nz->matrix(i) : right[i];
      Tensor sum = at::matmul(left.slice(0, start, end).to(at::kDouble),
                              matrix.to(at::kDouble));  // exact
      out.slice(0, start, end)
          .copy_(sum * steps[i].to(at::kFloat) * rows.slice(0, start, end).unsqueeze(1));
    });
  });
}

// Versions 4 and 5 differ only in a tuning hint.
Task bind_any(const Tensors &x, const Tensors &weight, const Tensors &bias, const Tensors &scale,
          const Tensors &offset, const Tensors &antiquant_scale, const Tensors &antiquant_offset,
          const Tensors &row_scale, const OptTensor &list, int64_t split_item, int64_t group_type,
          int64_t list_type, int64_t activation, const Tensors &y) {
  refuse_all({{"offset", &offset}});
  if (!weight.empty() && weight[0].scalar_type() == at::kInt)
    return bind_grouped_int4({x, weight, bias, scale, antiquant_scale, antiquant_offset, row_scale,
                              list, split_item, group_type, list_type, activation, y});
  refuse_all({{"antiquant_scale", &antiquant_scale},
              {"antiquant_offset", &antiquant_offset}});
  if (!x.empty() && x[0].scalar_type() == at::kChar)
    return bind_quantised(x, weight, {}, bias, scale, row_scale, list, split_item, group_type,
                          list_type, activation, y);
  refuse_all({{"scale", &scale}, {"per_token_scale", &row_scale}});
  return bind_grouped(x, weight, bias, list, split_item, group_type, list_type, activation, y);
}

}  // namespace

OP(aclnnGroupedMatmulV4,
   [](Tensors x, Tensors weight, Tensors bias, Tensors scale, Tensors offset,
      Tensors antiquant_scale, Tensors antiquant_offset, Tensors per_token_scale, OptTensor list,
      Tensors, Tensors, Tensors, int64_t split_item, int64_t group_type, int64_t list_type,
      int64_t activation, Tensors y, Tensors, Tensors) -> TimedTask {
     Task task = bind_any(x, weight, bias, scale, offset, antiquant_scale, antiquant_offset, per_token_scale,
                 list, split_item, group_type, list_type, activation, y);
     return {task, grouped_ns(x, weight)};
   })
OP(aclnnGroupedMatmulV5,
   [](Tensors x, Tensors weight, Tensors bias, Tensors scale, Tensors offset,
      Tensors antiquant_scale, Tensors antiquant_offset, Tensors per_token_scale, OptTensor list,
      Tensors, Tensors, Tensors, int64_t split_item, int64_t group_type, int64_t list_type,
      int64_t activation, Ints, Tensors y, Tensors, Tensors) -> TimedTask {
     Task task = bind_any(x, weight, bias, scale, offset, antiquant_scale, antiquant_offset, per_token_scale,
                 list, split_item, group_type, list_type, activation, y);
     return {task, grouped_ns(x, weight)};
   })
// Rules: source aclnn_grouped_matmul.cpp (TransWeightToNz, CheckQuantGMMWeightNz). The weight is in
// FRACTAL_NZ, and its matrices fill all blocks completely.
OP(aclnnGroupedMatmulWeightNz,
   [](Tensors x, aclTensorList *weight, Tensors bias, Tensors scale, Tensors offset,
      Tensors antiquant_scale, Tensors antiquant_offset, Tensors per_token_scale, OptTensor list,
      Tensors, Tensors, Tensors, int64_t split_item, int64_t group_type, int64_t list_type,
      int64_t activation, Ints, int64_t quant_group, Tensors y, Tensors, Tensors) -> TimedTask {
     refuse_all({{"offset", &offset},
                 {"antiquant_scale", &antiquant_scale},
                 {"antiquant_offset", &antiquant_offset}});
     refuse_unless(weight && weight->tensors.size() == 1 && weight->tensors[0] && quant_group == 0,
                   "FRACTAL_NZ is emulated for weight of one tensor, without groups of inputs");
     const Tensor &t = weight->tensors[0]->t;
     refuse_unless(t.defined() && t.dim() == 3 && t.scalar_type() == at::kChar && !x.empty(),
                   "FRACTAL_NZ is emulated for int8 weights of three dimensions");
     demand(t.size(1) % 16 == 0 && t.size(2) % 32 == 0, "weight ", t.sizes(),
            " does not fill the blocks of FRACTAL_NZ, 16 rows and 32 columns");
     Task task = bind_quantised(x, {t}, NzMatrices(*weight->tensors[0]), bias, scale,
                                per_token_scale, list, split_item, group_type, list_type,
                                activation, y);
     return {task, grouped_ns(x, {t})};
   })
