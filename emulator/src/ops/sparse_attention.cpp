// Sparse latent attention: LightningIndexer chooses keys, SparseFlashAttention attends to them.
#include "kernels/sparse.h"
#include "ops/bind.h"

#include <limits>

using namespace emu;

namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

// The arguments with which both operators describe the requests.
struct StepArguments {
  OptTensor query_lengths, kv_lengths, block_table;
  std::string layout_query, layout_kv;
  int64_t sparse_mode, pre_tokens, next_tokens;
};

void require_keys(const char *what, const Tensor &cache, const Tensor &query, int64_t width,
                  const std::string &layout) {
  require_same_type(what, cache, query);
  require_contiguous(what, cache);
  if (layout == "TND") {
    refuse_unless(cache.dim() == 3 && cache.size(0) && cache.size(1) == 1 && cache.size(2) == width,
                  what, " must be [T, 1, ", width, "], got ", cache.sizes());
    return;
  }
  refuse_unless(cache.dim() == 4 && cache.size(2) == 1 && cache.size(3) == width, what,
                " must be [blocks, block_size, 1, ", width, "], got ", cache.sizes());
  int64_t block_size = cache.size(1);
  demand(block_size % 16 == 0 && block_size <= 1024, "block_size ", block_size,
         " must be a multiple of 16 and at most 1024");
}

const int32_t *require_lengths(const char *what, const OptTensor &lengths, int64_t count) {
  refuse_unless(lengths.has_value(), what, " must be given with TND and PA_BSND");
  refuse_unless(lengths->scalar_type() == at::kInt && lengths->dim() == 1, what,
                " must be int32 of rank 1, got ", lengths->scalar_type(), " ", lengths->sizes());
  refuse_unless(lengths->size(0) == count, what, " has ", lengths->size(0), " entries for ", count,
                " requests");
  require_contiguous(what, *lengths);
  return lengths->data_ptr<int32_t>();
}

// Checks what both documents require of lengths and block tables. A device does not check the
// values in these tensors, but the emulator's kernels check all values.
kernels::StoredRequests bind_requests(const StepArguments &s, const Tensor &query,
                                     const Tensor &cache) {
  bool is_paged = s.layout_kv == "PA_BSND";
  refuse_unless(s.sparse_mode == 0 || s.sparse_mode == 3, "sparse_mode ", s.sparse_mode,
                " must be 0 or 3");
  refuse_unless(s.pre_tokens == kNoLimit && s.next_tokens == kNoLimit,
                "pre_tokens and next_tokens must be 2^63 - 1");
  refuse_unless(s.block_table.has_value() == is_paged, "block_table must be given with PA_BSND",
                ", and only with it");
  kernels::StoredRequests r{};
  r.rows = query.size(0);
  r.causal = s.sparse_mode == 3;
  if (is_paged) {
    const Tensor &table = *s.block_table;
    refuse_unless(table.scalar_type() == at::kInt && table.dim() == 2,
                  "block_table must be int32 of rank 2, got ", table.scalar_type(), " ",
                  table.sizes());
    require_contiguous("block_table", table);
    r.count = table.size(0);
    r.block_table = table.data_ptr<int32_t>();
    r.table_stride = table.stride(0);
    r.table_width = table.size(1);
    r.page_size = cache.size(1);
    r.page_count = cache.size(0);
  } else {
    r.count = s.query_lengths.has_value() ? s.query_lengths->numel() : 0;
    r.table_width = r.page_count = 1;
    r.page_size = cache.size(0);
  }
  r.query_ends = require_lengths("actual_seq_lengths_query", s.query_lengths, r.count);
  r.kv_lengths = require_lengths("the KV lengths", s.kv_lengths, r.count);
  return r;
}

Tensor require_queries(const char *what, const Tensor &query) {
  require_kernel_type(what, query);
  demand(is_half(query), what, " must be float16 or bfloat16, got ", query.scalar_type(),
         " (float32 only with strict=false)");
  refuse_unless(query.dim() == 3 && query.numel() > 0, what, " must be [T, N, D], not empty, got ",
                query.sizes());
  require_contiguous(what, query);
  return query;
}

float *require_sums(const char *what, const OptTensor &sums, int64_t rows, int64_t heads) {
  refuse_unless(sums.has_value() && sums->scalar_type() == at::kFloat &&
                    sums->sizes() == at::IntArrayRef({1, rows, heads}),
                what, " must be float32 [1, ", rows, ", ", heads, "]");
  require_contiguous(what, *sums);
  return sums->data_ptr<float>();
}

// Checks the tensor of chosen keys: [T, 1, sparse_size], the indices of the keys to which each row
// attends.
void require_choice(const Tensor &chosen, int64_t rows) {
  require_contiguous("sparse_indices", chosen);
  refuse_unless(chosen.scalar_type() == at::kInt && chosen.dim() == 3 && chosen.size(0) == rows &&
                    chosen.size(1) == 1 && chosen.size(2) > 0,
                "sparse_indices must be int32 [T, 1, sparse_size], got ", chosen.scalar_type(), " ",
                chosen.sizes());
}

void require_heads(int64_t heads) {
  demand(heads <= 128 && !(heads & (heads - 1)), "query has ", heads,
         " heads; they must be a power of two up to 128");
}

// Returns the largest possible number of keys. The real lengths are in device memory, so the
// modelled time assumes that each request fills its block table.
double longest_keys(const kernels::StoredRequests &r) {
  return static_cast<double>(r.table_width) * r.page_size;
}

TimedTask attend_task(const kernels::SparseAttention &a) {
  kernels::Attention timed{};  // each row reads its chosen keys
  timed.query = a.query;
  timed.heads = a.heads;
  timed.kv_heads = 1;
  timed.dim = timed.value_dim = a.dim;
  timed.rope_dim = a.rope_dim;
  kernels::Sequence one{};
  one.query_count = 1;
  one.kv_count = std::min(a.wanted * a.block, static_cast<int64_t>(longest_keys(a.requests)));
  timed.sequences.assign(a.requests.rows, one);
  return {arithmetic([a] { kernels::attend_to_chosen(a); }), attention_ns(timed)};
}

}  // namespace

// Rules: document aclnnLightningIndexer and lightning_indexer_tiling.cpp of ops-transformer. query
// is [T, N, 128], with at most 64 heads. key is [blocks, block_size, 1, 128]. weights is [T, N],
// and has the type of query (newer releases also accept float32). With pages, the scores are not
// returned.
OP(aclnnLightningIndexer,
   [](Tensor query, Tensor key, Tensor weights, OptTensor query_lengths, OptTensor key_lengths,
      OptTensor block_table, std::string layout_query, std::string layout_key, int64_t wanted,
      int64_t sparse_mode, int64_t pre_tokens, int64_t next_tokens, bool returns_values,
      Tensor chosen, OptTensor) -> TimedTask {
     require_queries("query", query);
     int64_t rows = query.size(0), heads = query.size(1), dim = query.size(2);
     demand(dim == 128, "D must be 128, got ", dim);
     demand(heads <= 64, "query has ", heads, " heads, at most 64");
     refuse_unless(layout_query == "TND" && layout_key == "PA_BSND", "layouts ", layout_query,
                   " and ", layout_key, " are not emulated, only TND and PA_BSND");
     refuse_unless(!returns_values, "return_value is not possible with PA_BSND");
     refuse_unless((wanted >= 1 && wanted <= 2048) || (wanted <= 8192 && wanted % 1024 == 0),
                   "sparse_count ", wanted, " must be 1 to 2048, or 3072, 4096, ... or 8192");
     require_keys("key", key, query, dim, layout_key);
     require_same_type("weights", weights, query);
     require_contiguous("weights", weights);
     refuse_unless(weights.sizes() == query.sizes().slice(0, 2), "weights of shape ",
                   weights.sizes(), " for query ", query.sizes());
     require_contiguous("sparse_indices", chosen);
     refuse_unless(chosen.scalar_type() == at::kInt && chosen.numel() == rows * wanted,
                   "sparse_indices must be int32 [T, 1, sparse_count], got ", chosen.scalar_type(),
                   " ", chosen.sizes());
     kernels::KeyChoice c{};
     c.requests = bind_requests({query_lengths, key_lengths, block_table, layout_query, layout_key,
                                 sparse_mode, pre_tokens, next_tokens},
                                query, key);
     c.query = data_of(query);
     c.weights = data_of(weights);
     c.keys = data_of(key);
     c.heads = heads;
     c.dim = dim;
     c.wanted = wanted;
     c.chosen = chosen.data_ptr<int32_t>();
     double requests = std::max<double>(c.requests.count, 1), keys = longest_keys(c.requests);
     int64_t ns = product_ns({requests, rows * heads / requests, keys, double(dim),
                              query.scalar_type(),
                              requests * keys * dim * double(query.element_size())});
     return {arithmetic([c] { kernels::choose_keys(c); }), ns};
   })

// Rules: document aclnnSparseFlashAttention of ops-transformer. attention_mode is 2. query is [T,
// N, 512], where N is 1, 2, 4, ... or 128. query_rope is [T, N, 64]. key and key_rope have one head,
// and are in pages or TND. The value is the key. In each row of indices, the valid indices come
// first, and then -1. With pages, the operator does not return the greatest scores and the sums,
// which are [1, T, N]. According to the document, the operator returns them only for training, but
// the code of release 9 has no such condition.
OP(aclnnSparseFlashAttention,
   [](Tensor query, Tensor key, Tensor value, Tensor chosen, OptTensor block_table,
      OptTensor query_lengths, OptTensor kv_lengths, OptTensor query_rope, OptTensor key_rope,
      double scale, int64_t sparse_block_size, std::string layout_query, std::string layout_kv,
      int64_t sparse_mode, int64_t pre_tokens, int64_t next_tokens, int64_t attention_mode,
      bool returns_sums, Tensor out, OptTensor greatest, OptTensor sums) -> TimedTask {
     require_queries("query", query);
     int64_t rows = query.size(0), heads = query.size(1), dim = query.size(2);
     refuse_unless(attention_mode == 2, "attention_mode must be 2, got ", attention_mode);
     refuse_unless(sparse_block_size == 1, "sparse_block_size ", sparse_block_size,
                   " is not emulated, only 1");
     bool is_paged = layout_kv == "PA_BSND";
     refuse_unless(layout_query == "TND" && (is_paged || layout_kv == "TND"), "layouts ",
                   layout_query, " and ", layout_kv,
                   " are not emulated, only TND with PA_BSND or TND");
     refuse_unless(!(returns_sums && is_paged), "return_softmax_lse is not possible with PA_BSND");
     require_heads(heads);
     demand(dim == 512, "D must be 512, got ", dim);
     refuse_unless(query_rope && key_rope, "query_rope and key_rope must be given");
     require_queries("query_rope", *query_rope);
     require_same_type("query_rope", *query_rope, query);
     int64_t rope = query_rope->size(2);
     demand(rope == 64, "the rotated part must have D 64, got ", rope);
     refuse_unless(query_rope->sizes().slice(0, 2) == query.sizes().slice(0, 2),
                   "query_rope of shape ", query_rope->sizes(), " for query ", query.sizes());
     require_keys("key", key, query, dim, layout_kv);
     require_keys("key_rope", *key_rope, query, rope, layout_kv);
     refuse_unless(key.sizes().slice(0, 2) == key_rope->sizes().slice(0, 2), "key ", key.sizes(),
                   " and key_rope ", key_rope->sizes(), " have different pages");
     refuse_unless(value.data_ptr() == key.data_ptr() && value.sizes() == key.sizes(),
                   "value must be the same tensor as key");
     require_choice(chosen, rows);
     require_same_type("attention_out", out, query);
     require_contiguous("attention_out", out);
     refuse_unless(out.sizes() == query.sizes(), "attention_out of shape ", out.sizes());
     kernels::SparseAttention a{};
     a.requests = bind_requests({query_lengths, kv_lengths, block_table, layout_query, layout_kv,
                                 sparse_mode, pre_tokens, next_tokens},
                                query, key);
     a.query = data_of(query);
     a.query_rope = data_of(*query_rope);
     a.latents = data_of(key);
     a.rope_keys = data_of(*key_rope);
     a.chosen = chosen.data_ptr<int32_t>();
     a.out = data_of(out);
     if (returns_sums) {
       a.greatest = require_sums("softmax_max", greatest, rows, heads);
       a.sums = require_sums("softmax_sum", sums, rows, heads);
     }
     a.heads = heads;
     a.dim = dim;
     a.rope_dim = rope;
     a.wanted = chosen.size(2);
     a.scale = static_cast<float>(scale);
     return attend_task(a);
   })

// Rules: README and kv_quant_sparse_flash_attention_tiling.cpp of ops-transformer. query is [T, N,
// 576]: 512 elements for latents, and 64 rotated elements. N is 1, 2, 4, ... or 128. A key is a row
// of 656 bytes: 512 values of int8, 64 elements of the type of query, and 4 floats, one for each
// 128 values. attention_out is [T, N, 512]. sparse_indices contains numbers of blocks. A block has
// sparse_block_size keys: 1, 2, 4, 8 or 16. The size of a page is a multiple of 16. The aclnn
// function that torch_npu calls returns no sums.
OP(aclnnKvQuantSparseFlashAttention,
   [](Tensor query, Tensor key, Tensor value, Tensor chosen, OptTensor key_scale,
      OptTensor value_scale, OptTensor block_table, OptTensor query_lengths, OptTensor kv_lengths,
      double scale, int64_t key_mode, int64_t value_mode, int64_t sparse_block_size,
      std::string layout_query, std::string layout_kv, int64_t sparse_mode, int64_t pre_tokens,
      int64_t next_tokens, int64_t attention_mode, int64_t scale_mode, int64_t tile, int64_t rope,
      Tensor out) -> TimedTask {
     require_queries("query", query);
     int64_t rows = query.size(0), heads = query.size(1), dim = query.size(2) - rope;
     refuse_unless(key_mode == 2 && value_mode == 2, "key_quant_mode ", key_mode,
                   " and value_quant_mode ", value_mode, " must be 2");
     refuse_unless(!key_scale && !value_scale, "key_dequant_scale and value_dequant_scale are ",
                   "reserved; the scales are in the rows of key");
     refuse_unless(attention_mode == 2, "attention_mode must be 2, got ", attention_mode);
     refuse_unless(scale_mode == 1, "quant_scale_repo_mode must be 1, got ", scale_mode);
     refuse_unless(tile == 128, "tile_size must be 128, got ", tile);
     refuse_unless(rope == 64, "rope_head_dim must be 64, got ", rope);
     demand(sparse_block_size > 0 && sparse_block_size <= 16 &&
                !(sparse_block_size & (sparse_block_size - 1)),
            "sparse_block_size ", sparse_block_size, " must be a power of two up to 16");
     refuse_unless(layout_query == "TND" && layout_kv == "PA_BSND", "layouts ", layout_query,
                   " and ", layout_kv, " are not emulated, only TND and PA_BSND");
     require_heads(heads);
     refuse_unless(dim == 512, "query must have D 576, got ", query.size(2));
     int64_t row_bytes = dim + rope * query.element_size() + dim / tile * 4;
     refuse_unless(key.scalar_type() == at::kChar, "key must be int8, got ", key.scalar_type());
     require_keys("key", key, key, row_bytes, layout_kv);
     refuse_unless(value.data_ptr() == key.data_ptr() && value.sizes() == key.sizes(),
                   "value must be the same tensor as key");
     require_choice(chosen, rows);
     require_same_type("attention_out", out, query);
     require_contiguous("attention_out", out);
     refuse_unless(out.sizes() == at::IntArrayRef({rows, heads, dim}), "attention_out of shape ",
                   out.sizes());
     kernels::SparseAttention a{};
     a.requests = bind_requests({query_lengths, kv_lengths, block_table, layout_query, layout_kv,
                                 sparse_mode, pre_tokens, next_tokens},
                                query, key);
     a.query = data_of(query);
     a.packed = {static_cast<const uint8_t *>(key.data_ptr()), row_bytes, tile};
     a.chosen = chosen.data_ptr<int32_t>();
     a.out = data_of(out);
     a.heads = heads;
     a.dim = dim;
     a.rope_dim = rope;
     a.wanted = chosen.size(2);
     a.scale = static_cast<float>(scale);
     a.block = sparse_block_size;
     return attend_task(a);
   })
