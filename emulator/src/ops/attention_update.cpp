// AttentionUpdate merges the results of several ranks. Each rank has computed attention over its
// part of the keys.
#include "ops/bind.h"
#include "target.h"

using namespace emu;

namespace {

// Rules: document aclnnAttentionUpdate and op_api/aclnn_attention_update.cpp of ops-transformer.
// Both lists have the same length sp, from 1 to 16. lse is float32 [rows]. local_out is [rows, D]
// in float32, float16 or bfloat16. D is a multiple of 8, and at most 512. All tensors of a list
// have the same shape, and all tensors are contiguous.
void check(const Tensors &lse, const Tensors &outs, int64_t type, const OptTensor &lse_out) {
  refuse_unless(type == 0 || type == 1, "update_type ", type, " must be 0 or 1");
  refuse_unless(lse_out.has_value() == (type == 1), "lse_out goes with update_type 1");
  refuse_unless(!lse.empty() && lse.size() == outs.size(), lse.size(), " tensors of lse for ",
                outs.size(), " of local_out");
  demand(lse.size() <= 16, lse.size(), " shares, at most 16");
  for (auto &[what, list, rank] : {std::tuple{"lse", &lse, 1}, {"local_out", &outs, 2}})
    for (const Tensor &t : *list) {
      refuse_unless(t.dim() == rank, what, " must have rank ", rank, ", got shape ", t.sizes());
      refuse_unless(t.sizes() == list->front().sizes(), what, " must have one shape, got ",
                    list->front().sizes(), " and ", t.sizes());
      require_contiguous(what, t);
    }
  for (const Tensor &t : lse)
    refuse_unless(t.scalar_type() == at::kFloat, "lse must be float32, got ", t.scalar_type());
  for (const Tensor &t : outs) {
    require_kernel_type("local_out", t);
    require_same_type("local_out", t, outs[0]);
  }
  int64_t dim = outs[0].size(1);
  demand(dim > 0 && dim % 8 == 0 && dim <= 512, "D of local_out is ", dim,
         ", must be a multiple of 8 and at most 512");
  refuse_unless(lse[0].size(0) == outs[0].size(0), "lse of shape ", lse[0].sizes(),
                " for local_out ", outs[0].sizes());
}

}  // namespace

OP(aclnnAttentionUpdate,
   [](Tensors lse, Tensors outs, int64_t type, Tensor out, OptTensor lse_out) -> Task {
     check(lse, outs, type, lse_out);
     refuse_unless(out.sizes() == outs[0].sizes(), "out of shape ", out.sizes(),
                   " for local_out ", outs[0].sizes());
     require_same_type("out", out, outs[0]);
     require_contiguous("out", out);
     kernels::MergedAttention m{};
     for (size_t i = 0; i < lse.size(); i++) {
       m.lses.push_back(lse[i].data_ptr<float>());
       m.outs.push_back(data_of(outs[i]));
     }
     m.out = data_of(out);
     m.lse = lse_out ? lse_out->data_ptr<float>() : nullptr;
     m.rows = out.size(0);
     m.dim = out.size(1);
     // Since December 2025, +infinity also means that a rank has no keys for a row. If no rank has
     // keys, the result is still NaN.
     m.infinity_is_empty = !cann_before(9);
     return arithmetic([m = std::move(m)] { kernels::merge_attention(m); });
   })
