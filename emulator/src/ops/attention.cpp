// FusedInferAttentionScore V3 and V4, computed by the attention kernel.
#include "ops/attention.h"

using namespace emu;
using kernels::Attention;
using kernels::Mask;
using kernels::Pages;

namespace {

// Strides between tokens, between heads, and between sequences (`batch`) in a tensor of the given
// layout, in elements.
struct RowStrides {
  int64_t batch, token, head;
};
RowStrides strides_of(const Tensor &t, FiaLayout layout, int64_t heads) {
  switch (layout) {
  case FiaLayout::TND:
    return {0, t.stride(0), t.stride(1)};
  case FiaLayout::BNSD:
    return {t.stride(0), t.stride(2), t.stride(1)};
  case FiaLayout::BSND:
    return {t.stride(0), t.stride(1), t.stride(2)};
  default:
    return {t.stride(0), t.stride(1), t.size(2) / heads};
  }
}

RowStrides out_strides_of(const FiaArguments &f) {
  const Tensor &t = f.out;
  switch (f.out_layout) {
  case FiaOut::BSND:
    return strides_of(t, FiaLayout::BSND, f.heads);
  case FiaOut::NBSD:
    return {t.stride(1), t.stride(2), t.stride(0)};
  case FiaOut::NTD:
    return {0, t.stride(1), t.stride(0)};
  default:
    return strides_of(t, f.layout, f.heads);
  }
}

Pages pages_of(const FiaArguments &f, const Tensor &t) {
  if (!f.paged()) {
    auto s = strides_of(t, f.layout, f.kv_heads);
    return {data_of(t), s.batch, s.token, s.head};
  }
  if (f.heads_first_pages())
    return {data_of(t), t.stride(0), t.stride(2), t.stride(1)};
  int64_t head = t.dim() == 4 ? t.stride(2) : t.size(2) / f.kv_heads;
  return {data_of(t), t.stride(0), t.stride(1), head};
}

int64_t length_at(const OptInts &lengths, int64_t i, int64_t otherwise) {
  if (!lengths || lengths->empty())
    return otherwise;
  return (*lengths)[lengths->size() == 1 ? 0 : i];
}

void bind_sequences(const FiaArguments &f, Attention &a, const RowStrides &q, const RowStrides &o) {
  for (int64_t b = 0; b < f.batch(); b++) {
    kernels::Sequence s{};
    s.batch = b;
    if (f.tnd()) {
      s.query_start = s.out_start = b ? (*f.query_lengths)[b - 1] : 0;
      s.query_count = (*f.query_lengths)[b] - s.query_start;
      s.kv_start = f.paged() || b == 0 ? 0 : (*f.kv_lengths)[b - 1];
      s.kv_count = (*f.kv_lengths)[b] - s.kv_start;
    } else {
      // The division has no remainder, because the batch stride is a multiple of the token stride.
      s.query_start = b * q.batch / q.token;
      s.out_start = b * o.batch / o.token;
      s.query_count = f.query_rows();
      if (f.query_rows() > 1)
        s.query_count = std::min(s.query_count, length_at(f.query_lengths, b, s.query_count));
      int64_t whole = f.layout == FiaLayout::BNSD ? f.key().size(2) : f.key().size(1);
      s.kv_count = length_at(f.kv_lengths, b, whole);
      if (!f.paged()) {
        s.kv_start = b * a.key.page_stride / a.key.token_stride;
        refuse_unless(s.kv_count <= whole, "actual_seq_lengths_kv ", s.kv_count, " of ", whole);
      }
    }
    a.sequences.push_back(s);
  }
}

void bind_mask(const FiaArguments &f, Attention &a) {
  // According to the document, sparse_mode has no effect if there is a single query row without
  // rope.
  bool single_row = !f.tnd() && f.query_rows() == 1 && !f.query_rope;
  if (f.sparse_mode >= 2) {
    a.mask = single_row            ? Mask::None
             : f.sparse_mode == 2 ? Mask::LeftUpCausal
             : f.sparse_mode == 3 ? Mask::RightDownCausal
                                  : Mask::Band;
    a.pre_tokens = f.pre_tokens;
    a.next_tokens = f.next_tokens;
    return;
  }
  if (!f.mask)
    return;
  const Tensor &m = *f.mask;
  a.mask = Mask::Explicit;
  a.mask_data = static_cast<const uint8_t *>(m.data_ptr());
  a.mask_row_stride = m.stride(-2);
  bool row_per_sequence = m.dim() == 2 && f.query_rows() == 1 && m.size(0) == f.batch();
  if (row_per_sequence)
    a.mask_batch_stride = m.stride(0);
  else if (m.dim() > 2 && m.size(0) > 1)
    a.mask_batch_stride = m.stride(0);
}

// The emulator does not read the elements of the compressed mask. The caller must guarantee that
// the mask is 1 above the diagonal and 0 elsewhere.
void require_triangle(const Tensor &mask) {
  auto *m = static_cast<const uint8_t *>(mask.data_ptr());
  int64_t row = mask.stride(-2), last = mask.size(-1) - 1;
  TORCH_CHECK(!m[0] && !m[last * row] && m[1] && m[last],
              "atten_mask must be 1 above the diagonal and 0 elsewhere");
}

TimedTask bind(FiaArguments f) {
  f.prepare();
  f.check();
  Attention a{};
  a.query = data_of(f.query);
  a.out = data_of(f.out);
  a.heads = f.heads;
  a.kv_heads = f.kv_heads;
  a.dim = f.head_dim();
  a.value_dim = f.value_dim();
  a.scale = static_cast<float>(f.scale);
  auto q = strides_of(f.query, f.layout, f.heads);
  auto o = out_strides_of(f);
  a.query_token_stride = q.token;
  a.query_head_stride = q.head;
  a.out_token_stride = o.token;
  a.out_head_stride = o.head;
  a.key = pages_of(f, f.key());
  a.value = pages_of(f, f.value());
  if (f.query_rope) {
    auto r = strides_of(*f.query_rope, f.layout, f.heads);
    a.query_rope = data_of(*f.query_rope);
    a.rope_token_stride = r.token;
    a.rope_head_stride = r.head;
    a.rope_dim = f.query_rope->size(-1) / (f.layout == FiaLayout::BSH ? f.heads : 1);
    a.key_rope = pages_of(f, *f.key_rope);
  }
  if (f.paged()) {
    a.block_table = f.block_table->data_ptr<int32_t>();
    a.block_table_stride = f.block_table->stride(0);
    a.page_size = f.block_size;
    a.page_count = f.key().size(0);
  }
  if (f.sinks)
    a.sinks = data_of(*f.sinks);
  bind_mask(f, a);
  bind_sequences(f, a, q, o);
  if (f.wants_lse) {
    a.lse = f.lse.data_ptr<float>();
    // Some rows see no key. As the log-sum-exp of such a row, the device's kernels for prompts, for
    // split fuse and for latents write 3e+99. This is +infinity in float32. The kernel for single
    // rows writes -3.40E+38. With all kernels, the results of such rows are zero.
    a.lse_without_keys = f.incremental() ? -3.40E+38f : INFINITY;
    // softmax_lse is [T, N, 1] with the layout TND, and [B, N, S, 1] with other layouts. The
    // device's kernels compute the place of a row in softmax_lse from the place of its token in
    // `out`. This place is right only if `out` has the same order as softmax_lse, or if each
    // sequence has one row.
    bool bns = !f.tnd(), in_order = f.layout == FiaLayout::BNSD && f.out_layout == FiaOut::AsQuery;
    bool by_row = bns && (in_order || f.query_rows() > 1);
    a.lse_token_stride = by_row ? 1 : f.heads;
    a.lse_head_stride = by_row ? f.query_rows() : 1;
    refuse_unless(!by_row || in_order || f.batch() == 1,
                  "softmax_lse of several sequences with several rows is only emulated for BNSD");
  }
  OptTensor triangle;
  if (settings().strict && f.sparse_mode >= 2)
    triangle = f.mask;
  int64_t ns = attention_ns(a);
  Task task = arithmetic([a = std::move(a), triangle] {
    AtenScope scope;
    if (triangle)
      require_triangle(*triangle);
    kernels::attention(a);
  });
  return {std::move(task), ns};
}

// Refuses the arguments for quantisation, shared prefixes, padding and position shifts, which are
// not emulated.
void refuse_extras(std::initializer_list<std::pair<const char *, const OptTensor *>> extras) {
  for (auto &[name, tensor] : extras)
    refuse_unless(!tensor->has_value(), name, " is not emulated");
}

}  // namespace

OP(aclnnFusedInferAttentionScoreV3,
   [](Tensor query, Tensors keys, Tensors values, OptTensor pse_shift, OptTensor mask,
      OptInts query_lengths, OptInts kv_lengths, OptTensor dequant_scale1, OptTensor quant_scale1,
      OptTensor dequant_scale2, OptTensor quant_scale2, OptTensor quant_offset2,
      OptTensor antiquant_scale, OptTensor antiquant_offset, OptTensor block_table,
      OptTensor query_padding, OptTensor kv_padding, OptTensor key_scale, OptTensor key_offset,
      OptTensor value_scale, OptTensor value_offset, OptTensor key_prefix, OptTensor value_prefix,
      OptInts, OptTensor query_rope, OptTensor key_rope, OptTensor rope_scale, int64_t heads,
      double scale, int64_t pre_tokens, int64_t next_tokens, std::string layout, int64_t kv_heads,
      int64_t sparse_mode, int64_t inner_precise, int64_t block_size, int64_t, bool wants_lse,
      int64_t, int64_t, Tensor out, Tensor lse) -> TimedTask {
     refuse_extras({{"pse_shift", &pse_shift}, {"dequant_scale1", &dequant_scale1},
                    {"quant_scale1", &quant_scale1}, {"dequant_scale2", &dequant_scale2},
                    {"quant_scale2", &quant_scale2}, {"quant_offset2", &quant_offset2},
                    {"antiquant_scale", &antiquant_scale}, {"antiquant_offset", &antiquant_offset},
                    {"query_padding_size", &query_padding}, {"kv_padding_size", &kv_padding},
                    {"key_antiquant_scale", &key_scale}, {"key_antiquant_offset", &key_offset},
                    {"value_antiquant_scale", &value_scale},
                    {"value_antiquant_offset", &value_offset}, {"key_shared_prefix", &key_prefix},
                    {"value_shared_prefix", &value_prefix},
                    {"key_rope_antiquant_scale", &rope_scale}});
     return bind({query, keys, values, mask, block_table, query_rope, key_rope, query_lengths,
                  kv_lengths, heads, scale, pre_tokens, next_tokens, layout, kv_heads, sparse_mode,
                  inner_precise, block_size, wants_lse, out, lse});
   })
OP(aclnnFusedInferAttentionScoreV4,
   [](Tensor query, Tensors keys, Tensors values, OptTensor pse_shift, OptTensor mask,
      OptInts query_lengths, OptInts kv_lengths, OptTensor dequant_scale1, OptTensor quant_scale1,
      OptTensor dequant_scale2, OptTensor quant_scale_out, OptTensor quant_offset_out,
      OptTensor antiquant_scale, OptTensor antiquant_offset, OptTensor block_table,
      OptTensor query_padding, OptTensor kv_padding, OptTensor key_scale, OptTensor key_offset,
      OptTensor value_scale, OptTensor value_offset, OptTensor key_prefix, OptTensor value_prefix,
      OptInts, OptTensor query_rope, OptTensor key_rope, OptTensor rope_scale,
      OptTensor query_scale, OptTensor sink, int64_t heads, double scale, int64_t pre_tokens,
      int64_t next_tokens, std::string layout, int64_t kv_heads, int64_t sparse_mode,
      int64_t inner_precise, int64_t block_size, int64_t, bool wants_lse, int64_t, int64_t, int64_t,
      Tensor out, Tensor lse) -> TimedTask {
     refuse_extras({{"pse_shift", &pse_shift}, {"dequant_scale1", &dequant_scale1},
                    {"quant_scale_p", &quant_scale1}, {"dequant_scale2", &dequant_scale2},
                    {"quant_scale_out", &quant_scale_out}, {"quant_offset_out", &quant_offset_out},
                    {"antiquant_scale", &antiquant_scale}, {"antiquant_offset", &antiquant_offset},
                    {"query_padding_size", &query_padding}, {"kv_padding_size", &kv_padding},
                    {"dequant_scale_key", &key_scale}, {"dequant_offset_key", &key_offset},
                    {"dequant_scale_value", &value_scale},
                    {"dequant_offset_value", &value_offset}, {"key_shared_prefix", &key_prefix},
                    {"value_shared_prefix", &value_prefix}, {"dequant_scale_key_rope", &rope_scale},
                    {"dequant_scale_query", &query_scale}});
     return bind({query, keys, values, mask, block_table, query_rope, key_rope, query_lengths,
                  kv_lengths, heads, scale, pre_tokens, next_tokens, layout, kv_heads, sparse_mode,
                  inner_precise, block_size, wants_lse, out, lse, sink});
   })
// torch_npu calls these functions for task groups. They have the same parameters as the
// GetWorkspaceSize functions.
EMU_EXPORT(aclnnFusedInferAttentionScoreV3GetMaxWorkspaceSize,
           emu_phase1_aclnnFusedInferAttentionScoreV3)
EMU_EXPORT(aclnnFusedInferAttentionScoreV4GetMaxWorkspaceSize,
           emu_phase1_aclnnFusedInferAttentionScoreV4)
