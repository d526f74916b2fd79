// Routing in mixture-of-experts models: chooses experts, sorts rows by expert, and adds the
// experts' results.
#include "kernels/moe.h"
#include "ops/bind.h"
#include "target.h"

#include <algorithm>
#include <cstring>
#include <numeric>

using namespace emu;

// Rules: op-plugin document npu_moe_gating_top_k. x is float16, bfloat16 or float32, and may be
// strided. There are at most 2048 experts. If there are several groups, each group's size is
// rounded up to a multiple of 32; the sum of the rounded sizes is also at most 2048. A group has
// more than two experts. k is at most the number of experts in the kept groups. renorm must be 0.
OP(aclnnMoeGatingTopK,
   [](Tensor x, OptTensor bias, int64_t k, int64_t kept_groups, int64_t groups, int64_t group_mode,
      int64_t renorm, int64_t norm, bool wants_scores, double scale, double epsilon,
      Tensor weights, Tensor chosen, Tensor scores) -> Task {
     require_kernel_type("x", x);
     refuse_unless(x.dim() == 2, "x must have 2 dimensions, got ", x.sizes());
     int64_t experts = x.size(1);
     demand(experts <= 2048, experts, " experts, at most 2048");
     refuse_unless(groups > 0 && experts % groups == 0, experts,
                   " experts cannot be divided into group_count ", groups);
     int64_t size = experts / groups;
     demand(size > 2, "group_count ", groups, " leaves ", size,
            " experts in a group, more than 2 are needed");
     demand(groups == 1 || (size + 31) / 32 * 32 * groups <= 2048, "group_count ", groups,
            " with groups of ", size, ": padded to 32s they exceed 2048");
     refuse_unless(kept_groups >= 1 && kept_groups <= groups, "k_group ", kept_groups,
                   " is not 1 to group_count ", groups);
     refuse_unless(k >= 1 && k <= size * kept_groups, "k ", k, " is not 1 to ", size * kept_groups,
                   ", the experts of the chosen groups");
     refuse_unless(group_mode == 0 || group_mode == 1, "group_select_mode ", group_mode,
                   " is not 0 or 1");
     refuse_unless(norm == 0 || norm == 1, "norm_type ", norm, " is not 0 or 1");
     refuse_unless(renorm == 0, "renorm ", renorm, ", only 0 exists");
     if (bias) {
       require_same_type("bias", *bias, x);
       refuse_unless(bias->dim() == 1 && bias->size(0) == experts, "bias of shape ", bias->sizes(),
                     " for ", experts, " experts");
     }
     for (auto &[what, t] : {std::pair{"y", &weights}, {"expert_idx", &chosen}, {"out", &scores}})
       require_contiguous(what, *t);
     kernels::Gating g{};
     g.weights = data_of(weights);
     g.chosen = chosen.data_ptr<int32_t>();
     g.scores = wants_scores ? scores.data_ptr<float>() : nullptr;
     g.rows = x.size(0);
     g.experts = experts;
     g.k = k;
     g.groups = groups;
     g.kept_groups = kept_groups;
     g.group_by_two = group_mode == 1;
     g.sigmoid = norm == 1;
     g.scale = static_cast<float>(scale);
     g.epsilon = static_cast<float>(epsilon);
     return [=]() mutable {
       AtenScope scope;
       if (skipping()) {
         chosen.zero_();
         return;
       }
       Tensor dense = x.contiguous(), dense_bias = bias ? bias->contiguous() : Tensor();
       g.x = data_of(dense);
       g.bias = bias ? data_of(dense_bias) : kernels::Data{};
       kernels::gating(g);
     };
   })

// ---- rows sorted by expert

// Writes, for each choice, its position in the sorted rows. With `scatter`, writes for each sorted
// row the number of its choice.
static void write_index(const std::vector<int64_t> &to, bool scatter, int32_t *index) {
  for (size_t i = 0; i < to.size(); i++)
    if (!scatter)
      index[i] = static_cast<int32_t>(to[i]);
    else if (to[i] >= 0)
      index[to[i]] = static_cast<int32_t>(i);
}

// If all experts are active, CANN 9 (moe_v3_full_load_base.h, SortCompute) also sorts ids that
// belong to no expert, and counts nothing after the first such id.
static std::vector<int64_t> sorted_unfiltered(const kernels::Routing &r, bool &counted) {
  std::vector<int64_t> order(r.count), to(r.count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return r.experts[a] < r.experts[b]; });
  for (int64_t place = 0; place < r.count; place++)
    to[order[place]] = place;
  counted = r.count == 0 || r.experts[order[0]] >= 0;
  return to;
}

enum TokenCounts { Cumulative = 0, Counts = 1, Pairs = 2 };

static void write_tokens(const std::vector<int64_t> &tokens, int64_t first, int64_t kind,
                         const Tensor &out) {
  auto *p = out.data_ptr<int64_t>();
  int64_t sum = 0, pairs = 0;
  for (size_t e = 0; e < tokens.size(); e++) {
    sum += tokens[e];
    if (kind != Pairs)
      p[e] = kind == Cumulative ? sum : tokens[e];
    else if (tokens[e]) {
      p[2 * pairs] = first + static_cast<int64_t>(e);
      p[2 * pairs++ + 1] = tokens[e];
    }
  }
  if (kind == Pairs && pairs < out.size(0))
    p[2 * pairs] = p[2 * pairs + 1] = 0;  // ends the list
}

// Quantises rows as the kernel does (moe_v3_gather_dynamic_quant.h): the quotient is truncated to a
// float16, and then rounded to an integer, halves away from zero. The quotients of a row of zeros
// are NaN. We assume that the device converts NaN to 0.
static std::pair<Tensor, Tensor> quantised_rows(const Tensor &x) {
  AtenScope scope;
  Tensor rows = x.to(at::kFloat), steps = at::amax(at::abs(rows), {1}, true) / 127.;
  Tensor cut = at::bitwise_and((rows / steps).view(at::kInt), ~0x1fff).view(at::kFloat);
  Tensor rounded = at::sign(cut) * at::floor(at::abs(cut) + 0.5);
  return {at::nan_to_num(rounded, 0., 127., -128.).to(at::kChar), steps.squeeze(1)};
}

// Rules: op-plugin document npu_moe_init_routing_v2 (A2, A3). x and the ids may be strided
// (aclnn_moe_init_routing_v3.cpp copies them). Dynamic quantisation is emulated only without the
// argument scale. Outputs that the document calls invalid or meaningless are not written. These
// outputs are the rows after the last row for an active expert, and the counts if wants_tokens is
// false. In strict mode, the device stops if an id is not in [0, expert_num).
OP(aclnnMoeInitRoutingV3,
   [](Tensor x, Tensor experts, OptTensor scale, OptTensor offset, int64_t active_num,
      int64_t capacity, int64_t expert_num, int64_t drop_pad, int64_t tokens_kind,
      bool wants_tokens, int64_t quant_mode, Ints range, int64_t index_kind, Tensor rows,
      Tensor index, Tensor tokens, Tensor row_scale) -> Task {
     bool quantises = quant_mode == 1;
     refuse_unless((quantises || quant_mode == -1) && !offset, "quant_mode ", quant_mode,
                   " is not emulated");
     refuse_unless(!quantises || (!scale && drop_pad == 0),
                   "scale and drop_pad_mode 1 with quant_mode 1 are not emulated");
     refuse_unless(!quantises || x.scalar_type() != at::kChar, "x of int8 is quantised already");
     refuse_unless(is_kernel_type(x) || x.scalar_type() == at::kChar,
                   "x must be float16, bfloat16, float32 or int8, got ", x.scalar_type());
     refuse_unless(experts.scalar_type() == at::kInt, "expert_idx must be int32, got ",
                   experts.scalar_type());
     refuse_unless(x.dim() == 2 && experts.dim() == 2 && x.size(0) == experts.size(0), "x ",
                   x.sizes(), " and expert_idx ", experts.sizes(), " must have the same rows");
     if (range.empty())
       range = {0, expert_num};
     demand(expert_num > 0 && expert_num <= (tokens_kind == Pairs ? 5120 : 10240), "expert_num ",
            expert_num, ", at most 10240 (5120 with key and value)");
     refuse_unless(range.size() == 2 && range[0] >= 0 && range[0] < range[1] &&
                       range[1] <= expert_num,
                   "active_expert_range ", range, " does not lie in 0 to expert_num ", expert_num);
     refuse_unless(tokens_kind >= Cumulative && tokens_kind <= Pairs, "expert_tokens_num_type ",
                   tokens_kind, " is not 0 to 2");
     refuse_unless(index_kind == 0 || index_kind == 1, "row_idx_type ", index_kind,
                   " is not 0 or 1");
     refuse_unless(active_num >= -1, "active_num ", active_num, " is less than -1");
     refuse_unless(drop_pad == 0 || drop_pad == 1, "drop_pad_mode ", drop_pad, " is not 0 or 1");
     if (drop_pad) {
       refuse_unless(range[0] == 0 && range[1] == expert_num,
                     "active_expert_range must be all experts with drop_pad_mode 1, got ", range);
       refuse_unless(capacity > 0, "expert_capacity ", capacity, " with drop_pad_mode 1");
       demand(capacity < x.size(0), "expert_capacity ", capacity, " must be less than the ",
              x.size(0), " rows of x");
       refuse_unless(index_kind == 0, "row_idx_type 1 with drop_pad_mode 1");
     }
     if (scale)
       refuse_unless(scale->dim() == 1 && scale->size(0) == x.size(0) &&
                         scale->scalar_type() == at::kFloat,
                     "scale must be float32, one for each row of x, got ", scale->sizes());
     require_contiguous("expanded_x", rows);
     if (quantises)
       refuse_unless(rows.scalar_type() == at::kChar && row_scale.numel() == experts.numel(),
                     "expanded_x must be int8, and expanded_scale have one number for each choice");
     int64_t columns = x.size(1), k = experts.size(1);
     int64_t room = columns ? rows.numel() / columns : 0;
     refuse_unless(index.numel() == experts.numel(), "expanded_row_idx of shape ", index.sizes());
     // torch_npu reuses the default range of its first call in later calls, so callers must always
     // pass active_expert_range.
     int64_t counted = tokens_kind == Pairs ? 2 * expert_num : range[1] - range[0];
     refuse_unless(tokens.numel() == counted, "expert_tokens_count_or_cumsum of shape ",
                   tokens.sizes(), " for ", counted, " numbers");
     return [=] {
       AtenScope scope;
       Tensor ids = experts.contiguous();
       kernels::Routing r{ids.data_ptr<int32_t>(), ids.numel(), range[0], range[1],
                          drop_pad ? capacity : 0};
       for (int64_t i = 0; settings().strict && !skipping() && i < r.count; i++)
         TORCH_CHECK(r.experts[i] >= 0 && r.experts[i] < expert_num, "expert_idx ", r.experts[i],
                     " is not 0 to expert_num - 1, ", expert_num - 1);
       std::vector<int64_t> counts, to = kernels::route(r, counts);
       bool counted = true;
       if (!cann_before(9) && !drop_pad && range[0] == 0 && range[1] == expert_num)
         to = sorted_unfiltered(r, counted);
       write_index(to, index_kind == 1, index.data_ptr<int32_t>());
       if (wants_tokens && counted)
         write_tokens(counts, range[0], drop_pad ? Counts : tokens_kind, tokens);
       Tensor source = x.contiguous(), factors = scale ? *scale : Tensor();
       if (quantises) {
         if (skipping())
           return;
         std::tie(source, factors) = quantised_rows(x);
       }
       int64_t bytes = columns * source.element_size();
       auto *from = static_cast<const char *>(source.data_ptr());
       auto *out = static_cast<char *>(rows.data_ptr());
       if (drop_pad)
         memset(out, 0, room * bytes);
       if (drop_pad && scale)
         memset(row_scale.data_ptr(), 0, row_scale.nbytes());
       for (int64_t i = 0; i < r.count; i++) {
         if (to[i] < 0 || to[i] >= room)
           continue;
         memcpy(out + to[i] * bytes, from + i / k * bytes, bytes);
         if (factors.defined())
           row_scale.data_ptr<float>()[to[i]] =
               factors.data_ptr<float>()[i / k * factors.stride(0)];
       }
     };
   })

// ---- sum of results

// Rules: op-plugin document npu_moe_finalize_routing, and further rules of the operator's tiling.
// With drop_pad_mode 0 and 2, the rows have rank 2, and there are exactly tokens * k rows. With
// modes 1 and 3, the rows have rank 3. skip2 is allowed only with skip1. A bias is allowed only
// with the list of experts, and has at least k experts. All tensors have the same type, but scales
// may be float32 if the rows are bfloat16. In modes 1 and 3, index -1 means a dropped row. In other
// modes, index -1 stops the device in strict mode, because the kernel would add whatever its buffer
// contains.
OP(aclnnMoeFinalizeRoutingV2,
   [](Tensor rows, Tensor sources, OptTensor skip1, OptTensor skip2, OptTensor bias,
      OptTensor scales, OptTensor experts, int64_t mode, Tensor out) -> Task {
     require_kernel_type("expanded_permuted_rows", rows);
     refuse_unless(mode >= 0 && mode <= 3, "drop_pad_mode ", mode, " is not 0 to 3");
     bool drops = mode % 2 == 1;
     refuse_unless(rows.dim() == (drops ? 3 : 2), "expanded_permuted_rows must have ",
                   drops ? 3 : 2, " dimensions with drop_pad_mode ", mode, ", got ", rows.sizes());
     refuse_unless(sources.dim() == 1 && sources.scalar_type() == at::kInt,
                   "expanded_src_to_dst_row must be int32 of rank 1, got ", sources.sizes());
     int64_t k = scales ? scales->size(-1) : 1, columns = rows.size(-1);
     int64_t tokens = k ? sources.numel() / k : 0;
     refuse_unless(k > 0 && tokens * k == sources.numel() && out.dim() == 2 &&
                       out.size(0) == tokens && out.size(1) == columns,
                   "expanded_src_to_dst_row of ", sources.numel(), " entries, k ", k,
                   ", do not fit the result ", out.sizes());
     demand(drops || rows.size(0) == sources.numel(), "expanded_permuted_rows has ", rows.size(0),
            " rows, expanded_src_to_dst_row ", sources.numel());
     demand(!skip2 || skip1, "skip2 is given without skip1");
     for (auto &[what, t] : {std::pair{"skip1", &skip1}, {"skip2", &skip2}, {"bias", &bias}})
       if (*t) {
         require_same_type(what, **t, rows);
         require_contiguous(what, **t);
         bool fits = t == &bias ? (*t)->dim() == 2 && (*t)->size(1) == columns
                                : (*t)->sizes() == out.sizes();
         refuse_unless(fits, what, " of shape ", (*t)->sizes(), " for the result ", out.sizes());
       }
     if (scales) {
       refuse_unless(scales->dim() == 2 && scales->size(0) == tokens && is_kernel_type(*scales),
                     "scales of shape ", scales->sizes(), " for ", tokens, " tokens");
       bool wider = rows.scalar_type() == at::kBFloat16 && scales->scalar_type() == at::kFloat;
       demand(wider || scales->scalar_type() == rows.scalar_type(), "scales must be ",
              rows.scalar_type(), ", got ", scales->scalar_type());
       require_contiguous("scales", *scales);
     }
     refuse_unless(!bias || experts, "bias needs expert_for_source_row");
     if (experts)
       refuse_unless(experts->scalar_type() == at::kInt && experts->is_contiguous() &&
                         experts->dim() == 2 && experts->size(0) == tokens &&
                         experts->size(1) == k,
                     "expert_for_source_row must be int32 [", tokens, ", ", k, "], got ",
                     experts->sizes());
     demand(!bias || bias->size(0) >= k, "bias of ", bias ? bias->size(0) : 0,
            " experts, fewer than k ", k);
     for (auto &[what, t] : {std::pair{"expanded_permuted_rows", &rows},
                             {"expanded_src_to_dst_row", &sources}, {"out", &out}})
       require_contiguous(what, *t);
     bool by_token = mode >= 2;
     kernels::Combine c{data_of(rows), data_of(out), data_of(skip1), data_of(skip2), data_of(bias),
                        data_of(scales)};
     c.sources = sources.data_ptr<int32_t>();
     c.experts = experts ? experts->data_ptr<int32_t>() : nullptr;
     c.tokens = tokens;
     c.k = k;
     c.columns = columns;
     c.limit = columns ? rows.numel() / columns : 0;
     c.token_stride = by_token ? k : 1;
     c.choice_stride = by_token ? 1 : tokens;
     c.expert_count = bias ? bias->size(0) : 0;
     c.may_miss = drops || !settings().strict;
     return arithmetic([c] { kernels::combine(c); });
   })
