// Fused-infer attention, rotary embedding, paged KV cache writes.
#include "aten.h"

#include "ops/op_abi.h"

using namespace emu;

namespace {

enum class Layout { TND, BNSD, BSH };  // BSH stands for BSND as well: told apart by the rank

// What the many arguments of FusedInferAttentionScore come down to.
struct Attention {
  Tensor query, key, value;
  OptTensor mask, block_table, query_rope, key_rope;
  OptInts query_lengths, kv_lengths;  // TND: cumulative; paged: kv lengths per sequence
  int64_t heads, kv_heads, sparse_mode, block_size;
  double scale;
  Layout layout;

  int64_t batch() const {
    return layout == Layout::TND ? static_cast<int64_t>(query_lengths->size()) : query.size(0);
  }

  // Sequence b of a query-shaped tensor as [S, heads, D].
  Tensor query_of(const Tensor &t, int64_t b) const {
    if (layout == Layout::TND)
      return t.slice(0, b ? (*query_lengths)[b - 1] : 0, (*query_lengths)[b]);
    return per_batch(t, b, heads);
  }

  // Sequence b of a key-shaped tensor as [length, kv_heads, D].
  Tensor kv_of(const Tensor &t, int64_t b, int64_t length) const {
    if (block_table) {
      int64_t blocks = (length + block_size - 1) / block_size;
      Tensor pages = t.index_select(0, (*block_table)[b].slice(0, 0, blocks));
      bool heads_first =
          pages.dim() == 4 && pages.size(1) == kv_heads && pages.size(2) == block_size;
      if (heads_first)
        pages = pages.transpose(1, 2);
      return pages.reshape({blocks * block_size, kv_heads, -1}).slice(0, 0, length);
    }
    if (layout == Layout::TND) {
      int64_t start = kv_lengths && b ? (*kv_lengths)[b - 1] : 0;
      return t.slice(0, start, start + length);
    }
    return per_batch(t, b, kv_heads).slice(0, 0, length);
  }

  int64_t kv_length(int64_t b, int64_t query_length) const {
    if (kv_lengths && !kv_lengths->empty()) {
      const Ints &l = *kv_lengths;
      if (layout == Layout::TND && !block_table && b)
        return l[b] - l[b - 1];
      return l[l.size() == 1 ? 0 : b];
    }
    return layout == Layout::TND    ? query_length
           : layout == Layout::BNSD ? key.size(2)
                                    : key.size(1);
  }

  void mask_scores(Tensor &scores, int64_t b) const {
    int64_t rows = scores.size(1), columns = scores.size(2);
    auto causal = [&](int64_t diagonal) {
      return at::ones({rows, columns}, at::kBool).triu(diagonal);
    };
    if (sparse_mode == 3) {  // causal, aligned at the last query and the last key
      scores.masked_fill_(causal(columns - rows + 1), -INFINITY);
    } else if (sparse_mode == 2) {  // causal, aligned at the first
      scores.masked_fill_(causal(1), -INFINITY);
    } else if (mask) {
      Tensor m = mask->to(at::kBool);
      while (m.dim() > 2)
        m = m[m.size(0) > b ? b : 0];
      scores.masked_fill_(m.slice(0, 0, rows).slice(1, 0, columns), -INFINITY);
    }
  }

  void run(const Tensor &out) const {
    for (int64_t b = 0; b < batch(); b++) {
      Tensor q = query_of(query, b), o = query_of(out, b);
      int64_t length = kv_length(b, q.size(0));
      if (length == 0) {
        o.zero_();
        continue;
      }
      Tensor k = kv_of(key, b, length), v = kv_of(value, b, length);
      if (query_rope)
        q = at::cat({q, query_of(*query_rope, b)}, -1);
      if (key_rope)
        k = at::cat({k, kv_of(*key_rope, b, length)}, -1);
      auto heads_first = [](const Tensor &t) { return t.to(at::kFloat).transpose(0, 1); };
      int64_t group = heads / kv_heads;
      Tensor kf = heads_first(k).repeat_interleave(group, 0);
      Tensor vf = heads_first(v).repeat_interleave(group, 0);
      Tensor scores = at::matmul(heads_first(q), kf.transpose(1, 2)) * scale;
      mask_scores(scores, b);
      o.copy_(at::matmul(at::softmax(scores, -1), vf).transpose(0, 1));
    }
  }

private:
  Tensor per_batch(const Tensor &t, int64_t b, int64_t head_count) const {
    Tensor one = t[b];
    if (layout == Layout::BNSD)
      return one.transpose(0, 1);
    return one.dim() == 2 ? one.unflatten(1, {head_count, -1}) : one;
  }
};

Layout parse_layout(const std::string &name) {
  auto starts_with = [&](const char *prefix) { return name.rfind(prefix, 0) == 0; };
  if (starts_with("TND"))
    return Layout::TND;
  if (starts_with("BNSD"))
    return Layout::BNSD;
  TORCH_CHECK(starts_with("BS"), "FIA input layout ", name, " is not emulated");
  return Layout::BSH;
}

}  // namespace

// The log-sum-exp output is not written.
OP(aclnnFusedInferAttentionScoreV3,
   [](Tensor query, Tensors keys, Tensors values, OptTensor /* pse_shift */, OptTensor mask,
      OptInts query_lengths, OptInts kv_lengths, OptTensor /* dequant_scale1 */,
      OptTensor /* quant_scale1 */, OptTensor /* dequant_scale2 */, OptTensor /* quant_scale2 */,
      OptTensor /* quant_offset2 */, OptTensor /* antiquant_scale */,
      OptTensor /* antiquant_offset */, OptTensor block_table, OptTensor /* query_padding */,
      OptTensor /* kv_padding */, OptTensor /* key_antiquant_scale */,
      OptTensor /* key_antiquant_offset */, OptTensor /* value_antiquant_scale */,
      OptTensor /* value_antiquant_offset */, OptTensor /* key_shared_prefix */,
      OptTensor /* value_shared_prefix */, OptInts /* shared_prefix_length */, OptTensor query_rope,
      OptTensor key_rope, OptTensor /* key_rope_antiquant_scale */, int64_t heads, double scale,
      int64_t /* pre_tokens */, int64_t /* next_tokens */, std::string layout, int64_t kv_heads,
      int64_t sparse_mode, int64_t /* inner_precise */, int64_t block_size,
      int64_t /* antiquant_mode */, bool /* return_lse */, int64_t /* key_antiquant_mode */,
      int64_t /* value_antiquant_mode */, Tensor out, Tensor /* lse */) {
     Attention{.query = query,
               .key = keys.at(0),
               .value = values.at(0),
               .mask = mask,
               .block_table = block_table,
               .query_rope = query_rope,
               .key_rope = key_rope,
               .query_lengths = query_lengths,
               .kv_lengths = kv_lengths,
               .heads = heads,
               .kv_heads = kv_heads ? kv_heads : heads,
               .sparse_mode = sparse_mode,
               .block_size = block_size,
               .scale = scale,
               .layout = parse_layout(layout)}
         .run(out);
   })
// torch_npu asks for this one on the automatic task-group path; it has the same signature.
EMU_EXPORT_WORKSPACE_PHASE(aclnnFusedInferAttentionScoreV3GetMaxWorkspaceSize,
                           aclnnFusedInferAttentionScoreV3)

// ---- rotary embedding
static Tensor rotated(const Tensor &x, int64_t mode) {
  if (mode == 0) {  // halves
    auto halves = x.chunk(2, -1);
    return at::cat({-halves[1], halves[0]}, -1);
  }
  Tensor even = x.slice(-1, 0, x.size(-1), 2), odd = x.slice(-1, 1, x.size(-1), 2);
  return at::stack({-odd, even}, -1).flatten(-2);
}
OP(aclnnRotaryPositionEmbedding, [](Tensor x, Tensor cos, Tensor sin, int64_t mode, Tensor out) {
  Tensor f = x.to(at::kFloat);
  out.copy_(f * cos.to(at::kFloat) + rotated(f, mode) * sin.to(at::kFloat));
})

// ---- paged cache writes: cache mode "Norm", [blocks, block size, heads, D]; slot -1 is skipped
static void write_slots(const Tensor &cache, const Tensor &slots, const Tensor &rows) {
  Tensor kept = slots.to(at::kLong).ge(0).nonzero().view(-1);
  cache.view({cache.size(0) * cache.size(1), -1})
      .index_copy_(0, slots.to(at::kLong).index_select(0, kept),
                   rows.reshape({rows.size(0), -1}).index_select(0, kept));
}
OP(aclnnScatterPaKvCache,
   [](Tensor key, Tensor key_cache, Tensor slots, Tensor value, Tensor value_cache, OptTensor,
      OptTensor, OptTensor, std::string, std::string, Ints, Ints) {
     write_slots(key_cache, slots, key);
     write_slots(value_cache, slots, value);
   })
