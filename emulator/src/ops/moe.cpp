// Mixture of experts: gating and grouped matrix products.
#include "aten.h"

#include "ops/op_abi.h"

using namespace emu;

OP(aclnnMoeGatingTopKSoftmax, [](Tensor logits, OptTensor /* finished */, int64_t k, Tensor weights,
                                 Tensor experts, Tensor rows) {
  auto [w, e] = at::topk(at::softmax(logits.to(at::kFloat), -1), k);
  weights.copy_(w);
  experts.copy_(e);
  int64_t tokens = logits.size(0);
  rows.copy_(at::arange(tokens * k).view({k, tokens}).t().view(rows.sizes()));
})

// Group list types: 0 gives cumulative ends, 1 gives counts. Only the rows (M) may be split.
static void grouped_matmul(const Tensors &x, const Tensors &weight, const Tensors &bias,
                           const OptTensor &group_list, int64_t group_type, int64_t group_list_type,
                           Tensors &out) {
  if (!group_list) {
    for (size_t i = 0; i < x.size(); i++)
      out[i].copy_(at::matmul(x[i].to(at::kFloat), weight[i].to(at::kFloat)));
    return;
  }
  TORCH_CHECK(group_type == 0 && x.size() == 1 && group_list_type <= 1,
              "grouped matmul: only group_type 0 with one input and list type 0 or 1 is emulated");
  auto of_expert = [](const Tensors &list, int64_t i) {
    return (list.size() == 1 ? list[0][i] : list[i]).to(at::kFloat);
  };
  Tensor ends = group_list->to(at::kLong);
  if (group_list_type == 1)
    ends = ends.cumsum(0);
  int64_t start = 0;
  for (int64_t i = 0; i < ends.size(0); i++) {
    int64_t end = ends[i].item<int64_t>();
    if (end > start) {
      Tensor y = at::matmul(x[0].slice(0, start, end).to(at::kFloat), of_expert(weight, i));
      if (!bias.empty())
        y = y + of_expert(bias, i);
      (out.size() == 1 ? out[0].slice(0, start, end) : out[i]).copy_(y);
    }
    start = end;
  }
}

// Ten list arguments carry quantisation scales and offsets, which are ignored.
OP(aclnnGroupedMatmulV4,
   [](Tensors x, Tensors weight, Tensors bias, Tensors, Tensors, Tensors, Tensors, Tensors,
      OptTensor group_list, Tensors, Tensors, Tensors, int64_t /* split_item */, int64_t group_type,
      int64_t group_list_type, int64_t /* activation */, Tensors out, Tensors,
      Tensors) { grouped_matmul(x, weight, bias, group_list, group_type, group_list_type, out); })
OP(aclnnGroupedMatmulV5,
   [](Tensors x, Tensors weight, Tensors bias, Tensors, Tensors, Tensors, Tensors, Tensors,
      OptTensor group_list, Tensors, Tensors, Tensors, int64_t /* split_item */, int64_t group_type,
      int64_t group_list_type, int64_t /* activation */, OptInts, Tensors out, Tensors,
      Tensors) { grouped_matmul(x, weight, bias, group_list, group_type, group_list_type, out); })
