// The requirements of FusedInferAttentionScore. The rules are from the op-plugin document
// npu_fused_infer_attention_score; each check names a section of this document. If a CANN release
// supports less than the document says, the rules of its tiling in ops-transformer apply: the
// tiling of November 2025 (c29bc10) for CANN 8.5, and the tiling of 2026 for CANN 9.
#include "ops/attention.h"
#include "target.h"

#include <cstdio>
#include <mutex>
#include <set>

namespace emu {

// The error code with which the tiling refuses a call.
constexpr int kTilingRefused = 561002;

template <class Condition, class... Parts>
static void must(const Condition &condition, const Parts &...parts) {
  if (!condition)
    throw Refusal(text(parts...), kTilingRefused);
}
template <class Condition, class... Parts>
static void should(const Condition &condition, const Parts &...parts) {
  if (settings().strict && !condition)
    refuse_unless_admitted(text(parts...), kTilingRefused);
}

void FiaArguments::prepare() {
  must(!keys.empty() && !values.empty(), "key and value are missing");
  must(keys.size() == 1 && values.size() == 1, "a list of keys is not emulated");
  if (kv_heads == 0)
    kv_heads = heads;
  std::string in = layout_name.substr(0, layout_name.find('_'));
  std::string to = in == layout_name ? "" : layout_name.substr(in.size() + 1);
  layout = in == "TND" ? FiaLayout::TND : in == "BNSD" ? FiaLayout::BNSD
           : in == "BSND" ? FiaLayout::BSND : FiaLayout::BSH;
  out_layout = to == "" ? FiaOut::AsQuery : to == "BSND" ? FiaOut::BSND
               : to == "NBSD" ? FiaOut::NBSD : FiaOut::NTD;
  static const std::set<std::string> known = {"TND",       "BNSD",      "BSND",     "BSH",
                                              "BNSD_BSND", "BNSD_NBSD", "BSND_NBSD", "BSH_NBSD",
                                              "TND_NTD"};
  must(known.count(layout_name), "input_layout ", layout_name, " is not emulated");
  size_t rank = layout == FiaLayout::TND || layout == FiaLayout::BSH ? 3 : 4;
  must(query.dim() == static_cast<int64_t>(rank), "query of rank ", query.dim(),
       " does not fit input_layout ", layout_name);
}

int64_t FiaArguments::batch() const {
  return tnd() ? (query_lengths ? static_cast<int64_t>(query_lengths->size()) : 0) : query.size(0);
}
int64_t FiaArguments::query_rows() const {
  return tnd() ? query.size(0) : layout == FiaLayout::BNSD ? query.size(2) : query.size(1);
}
int64_t FiaArguments::head_dim() const {
  return layout == FiaLayout::BSH ? query.size(-1) / std::max<int64_t>(heads, 1) : query.size(-1);
}
bool FiaArguments::heads_first_pages() const {
  return key().dim() == 4 && key().size(1) == kv_heads && key().size(2) == block_size;
}
int64_t FiaArguments::value_dim() const {
  bool flat = value().dim() == 3 && (paged() || layout == FiaLayout::BSH);
  return flat ? value().size(-1) / std::max<int64_t>(kv_heads, 1) : value().size(-1);
}

// Section "详细参数说明": query, key and value are float16 or bfloat16, and contiguous. strict=false also
// admits float32.
void FiaArguments::check_types() const {
  must(is_kernel_type(query), "query must be float16 or bfloat16, got ", query.scalar_type());
  should(is_half(query), "query must be float16 or bfloat16, got ", query.scalar_type(),
         " (float32 only with strict=false)");
  for (auto &[what, t] : {std::pair{"key", &key()}, {"value", &value()}, {"out", &out}})
    must(t->scalar_type() == query.scalar_type(), what, " must be ", query.scalar_type(), ", got ",
         t->scalar_type());
  for (auto &[what, t] : {std::pair{"query", &query}, {"key", &key()}, {"value", &value()}}) {
    should(t->is_contiguous(), what, " must be contiguous, got strides ", t->strides());
    must(t->stride(-1) == 1, what, " must have a contiguous last dimension");
  }
  must(query_rope.has_value() == key_rope.has_value(), "query_rope and key_rope go together");
}

// Section "各轴取值范围速查" and num_key_value_heads.
void FiaArguments::check_heads() const {
  must(heads > 0 && kv_heads > 0, "num_heads ", heads, ", num_key_value_heads ", kv_heads);
  must(heads % kv_heads == 0, "num_heads ", heads, " is not a multiple of num_key_value_heads ",
       kv_heads);
  should(latent() || heads / kv_heads <= 64, "num_heads / num_key_value_heads is ", heads / kv_heads,
         ", at most 64");
  should(heads <= 256 && kv_heads <= 256, "num_heads ", heads, ", at most 256");
  if (tnd())
    must(query.size(1) == heads, "query of shape ", query.sizes(), " has not num_heads ", heads);
  if (layout == FiaLayout::BNSD)
    must(query.size(1) == heads, "query of shape ", query.sizes(), " has not num_heads ", heads);
  if (layout == FiaLayout::BSND)
    must(query.size(2) == heads, "query of shape ", query.sizes(), " has not num_heads ", heads);
  int64_t dim = head_dim();
  should(dim <= 512, "head size ", dim, ", at most 512");
  should(dim % 16 == 0, "head size ", dim, " is not a multiple of 16");
}

// Section "MLA约束": the head size is 512 or 128, and rope adds 64 elements. All other dimensions of
// query_rope and key_rope are those of query and key.
void FiaArguments::check_rope() const {
  if (!query_rope)
    return;
  int64_t dim = head_dim(), in_row = layout == FiaLayout::BSH ? heads : 1;
  should(dim == 512 || dim == 128, "with query_rope the head size must be 512 or 128, got ", dim);
  must(query_rope->dim() == query.dim() &&
           query_rope->sizes().slice(0, query.dim() - 1) ==
               query.sizes().slice(0, query.dim() - 1),
       "query_rope of shape ", query_rope->sizes(), " does not fit query ", query.sizes());
  must(key_rope->dim() == key().dim() &&
           key_rope->sizes().slice(0, key().dim() - 1) == key().sizes().slice(0, key().dim() - 1),
       "key_rope of shape ", key_rope->sizes(), " does not fit key ", key().sizes());
  int64_t rope = query_rope->size(-1) / in_row;
  should(rope == 64, "query_rope must have D 64, got ", rope);
  bool flat = key_rope->dim() == 3 && (paged() || layout == FiaLayout::BSH);
  must(key_rope->size(-1) == rope * (flat ? kv_heads : 1), "key_rope of shape ", key_rope->sizes(),
       " has not D ", rope);
  for (auto &[what, t] : {std::pair{"query_rope", &*query_rope}, {"key_rope", &*key_rope}}) {
    must(t->scalar_type() == query.scalar_type(), what, " must be ", query.scalar_type(), ", got ",
         t->scalar_type());
    should(t->is_contiguous(), what, " must be contiguous, got strides ", t->strides());
    must(t->stride(-1) == 1, what, " must have a contiguous last dimension");
  }
}

// Section "MLA约束", head size 512. The document allows the layout NBSD only for more than one query
// row, but other projects use it for one row, too. The limit of 16 rows is from the section about
// input_layout. For TND, the limit is from the operator's tiling.
void FiaArguments::check_latent() const {
  if (out_layout == FiaOut::NBSD || out_layout == FiaOut::NTD)
    should(latent(), "input_layout ", layout_name, " needs query_rope and head size 512");
  if (!latent())
    return;
  should(heads <= 128 && (heads & (heads - 1)) == 0, "with head size 512 num_heads must be 1, 2, 4, ",
         "8, 16, 32, 64 or 128, got ", heads);
  should(kv_heads == 1, "with head size 512 num_key_value_heads must be 1, got ", kv_heads);
  should(sparse_mode == 0 || sparse_mode == 3 || sparse_mode == 4,
         "with head size 512 sparse_mode must be 0, 3 or 4, got ", sparse_mode);
  should(out_layout != FiaOut::BSND, "with head size 512 input_layout ", layout_name, " is excluded");
  if (cann_before(9)) {  // fused_infer_attention_score_tiling_check_feature.cpp, CheckFeatureMlaNoquant
    should(!tnd() || sparse_mode == 0 || sparse_mode == 3, "with head size 512 and TND sparse_mode ",
           "must be 0 or 3 on CANN 8.5, got ", sparse_mode);
    should(sparse_mode != 0 || !mask, "with head size 512 sparse_mode 0 takes no atten_mask on CANN ",
           "8.5");
    should(!wants_lse || !cann_before(8, 5, 1),  // vllm-ascend uses it on 8.5.1 (mla_cp.py)
           "with head size 512 softmax_lse is not given on CANN 8.5.0");
    should(paged() || sparse_mode == 4, "with head size 512 a block_table is needed on CANN 8.5");
  }
  should(query.numel() > 0, "query must not be empty");
  int64_t rows = tnd() ? 0 : query_rows();
  for (size_t i = 0; tnd() && i < query_lengths->size(); i++)
    rows = std::max(rows, (*query_lengths)[i] - (i ? (*query_lengths)[i - 1] : 0));
  should(rows <= 16, "with head size 512 a sequence may have 16 query rows, one has ", rows);
}

// Section "TND布局约束": both lists of lengths are given, they are cumulative, and there are at most
// 4096 sequences. The last query length is the number of query rows. In other layouts, there is one
// length for all sequences, or at least one length for each sequence.
void FiaArguments::check_lengths() const {
  if (!tnd()) {
    int64_t length = kv_lengths ? static_cast<int64_t>(kv_lengths->size()) : 1;
    must(length == 1 || length >= batch(), "actual_seq_lengths_kv has ", length, " entries for ",
         batch(), " sequences");
    return;
  }
  must(query_lengths && !query_lengths->empty(), "actual_seq_lengths must be given with TND");
  must(kv_lengths && !kv_lengths->empty(), "actual_seq_lengths_kv must be given with TND");
  const Ints &q = *query_lengths, &kv = *kv_lengths;
  should(q.size() <= 4096, q.size(), " sequences, at most 4096");
  must(kv.size() == q.size(), "actual_seq_lengths has ", q.size(),
       " entries, actual_seq_lengths_kv ", kv.size());
  for (size_t i = 0; i < q.size(); i++) {
    must(q[i] >= (i ? q[i - 1] : 0), "actual_seq_lengths must not decrease: ", q);
    must(kv[i] >= (i && !paged() ? kv[i - 1] : 0), "actual_seq_lengths_kv ", kv,
         paged() ? " must not be negative" : " must be cumulative");
  }
  must(q.back() <= query.size(0), "actual_seq_lengths end at ", q.back(), ", query has ",
       query.size(0), " rows");
  should(q.back() == query.size(0), "actual_seq_lengths end at ", q.back(),
         ", but T (rows of query) is ", query.size(0));
  if (!paged())
    must(kv.back() <= key().size(0), "actual_seq_lengths_kv end at ", kv.back(), ", key has ",
         key().size(0), " rows");
}

// Section "PageAttention约束": the block table is int32 and has rank 2. The section also limits the
// block size and the layout of the cache.
void FiaArguments::check_pages() const {
  if (!paged())
    return;
  const Tensor &table = *block_table;
  must(table.scalar_type() == at::kInt, "block_table must be int32, got ", table.scalar_type());
  must(table.dim() == 2 && table.stride(1) == 1, "block_table must have rank 2, got shape ",
       table.sizes());
  must(kv_lengths && !kv_lengths->empty(), "actual_seq_lengths_kv must be given with a block_table");
  must(block_size > 0, "block_size must be given with a block_table");
  if (latent() && cann_before(9))  // CheckFeatureMlaNoquantPa
    should(block_size == 16 || block_size == 128, "block_size ", block_size,
           " must be 16 or 128 with head size 512 on CANN 8.5");
  else if (latent())
    should(block_size % 16 == 0 && block_size <= 512, "block_size ", block_size,
           " must be a multiple of 16 and at most 512 with head size 512");
  else if (tnd())  // section "TND布局约束"; check_tnd checks more
    should(block_size % 16 == 0 && block_size <= 1024, "block_size ", block_size,
           " must be a multiple of 16 and at most 1024 (TND)");
  else if (query_rows() > 1)
    should(block_size % 128 == 0 && block_size <= 512, "block_size ", block_size,
           " must be 128, 256, 384 or 512 where the query has several rows");
  else
    should(block_size % 16 == 0 && block_size <= 512, "block_size ", block_size,
           " must be a multiple of 16 and at most 512");
  must(table.size(0) >= batch(), "block_table has ", table.size(0), " rows for ", batch(),
       " sequences");
  // The operator's tiling requires that the block table has exactly one row per sequence. A
  // sequence that is padding has no query rows.
  if (tnd())
    should(table.size(0) == batch(), "block_table has ", table.size(0), " rows for ", batch(),
           " sequences: with TND actual_seq_lengths needs an entry for each row");
  int64_t longest = *std::max_element(kv_lengths->begin(), kv_lengths->end());
  must(table.size(1) * block_size >= longest, "block_table has ", table.size(1), " columns of ",
       block_size, " tokens, actual_seq_lengths_kv has ", longest);
  must(key().sizes().slice(0, key().dim() - 1) == value().sizes().slice(0, value().dim() - 1),
       "caches of key ", key().sizes(), " and value ", value().sizes());
  must(key().dim() == 3 || key().dim() == 4, "a cache of rank ", key().dim(), " is not emulated");
  int64_t tokens = heads_first_pages() ? key().size(2) : key().size(1);
  must(tokens == block_size, "the cache ", key().sizes(), " has not block_size ", block_size);
  int64_t width = key().dim() == 3 ? key().size(2) : kv_heads * key().size(3);
  must(width == kv_heads * head_dim(), "the cache ", key().sizes(), " has not ", kv_heads,
       " heads of ", head_dim());
  // There are two layouts of the cache. BnBsH is [blocks, block size, heads * D]. BnNBsD is
  // [blocks, heads, block size, D], and is not allowed with BSH and BSND. If a cache is stored as
  // [blocks, block size, heads, D], callers pass a view of rank 3.
  should(key().dim() == 3 || heads_first_pages(), "the cache ", key().sizes(),
         " must be [blocks, block_size, heads * D] or [blocks, heads, block_size, D]");
  if (layout == FiaLayout::BSH || layout == FiaLayout::BSND)
    should(key().dim() == 3, "with ", layout_name,
           " the cache must be [blocks, block_size, heads * D], got ", key().sizes());
}

// Section "Mask与序列长度参数".
void FiaArguments::check_mask() const {
  must(sparse_mode >= 0 && sparse_mode <= 4, "sparse_mode ", sparse_mode, " is not 0 to 4");
  must(sparse_mode != 1 || mask, "sparse_mode 1 needs an atten_mask");
  if (sparse_mode >= 2)
    should(mask, "sparse_mode ", sparse_mode, " needs the 2048 x 2048 atten_mask");
  if (!mask)
    return;
  auto type = mask->scalar_type();
  must(type == at::kBool || type == at::kChar || type == at::kByte,
       "atten_mask must be bool, int8 or uint8, got ", type);
  must(mask->dim() >= 2 && mask->stride(-1) == 1, "atten_mask of shape ", mask->sizes());
  if (sparse_mode >= 2) {
    should(mask->size(-1) == 2048 && mask->size(-2) == 2048 && mask->numel() == 2048 * 2048,
           "with sparse_mode ", sparse_mode, " atten_mask must be 2048 x 2048, got ",
           mask->sizes());
    return;
  }
  int64_t longest = paged() ? block_table->size(1) * block_size
                    : tnd() ? key().size(0)
                            : (layout == FiaLayout::BNSD ? key().size(2) : key().size(1));
  bool per_batch_row = mask->dim() == 2 && query_rows() == 1 && mask->size(0) == batch();
  must(mask->size(-1) >= (paged() ? *std::max_element(kv_lengths->begin(), kv_lengths->end())
                                  : longest) &&
           (per_batch_row || tnd() || mask->size(-2) >= query_rows()),
       "atten_mask ", mask->sizes(), " does not cover ", query_rows(), " x ", longest);
  if (paged())
    should(mask->size(-1) >= longest, "the last dimension of atten_mask, ", mask->size(-1),
           ", must be at least block_table columns * block_size, ", longest);
}

bool FiaArguments::incremental() const {
  return !tnd() && query_rows() == 1 && !query_rope && head_dim() == value_dim();
}

// fused_infer_attention_score_tiling.cpp of CANN 9, IsUsingFAI. In CANN 9, two kinds of calls use
// the tiling of CANN 8.5: calls with one query head per key head, and calls that the split-fuse
// tiling does not support.
bool FiaArguments::split_fuse() const {
  bool sizes = head_dim() <= 256 && value_dim() == head_dim();
  bool pages = !paged() || (key().dim() == 3 && block_size % 16 == 0 && block_size <= 512);
  return !cann_before(9) && tnd() && !query_rope && heads != kv_heads && inner_precise == 0 && sizes &&
         pages;
}

// vllm-ascend pads each step with sequences that have one row and no keys, and ignores the results
// of these rows. It is not known what a device returns for these rows. The probe tests this on a
// device (rules.attention.padded_row).
static void warn_of_rows_without_keys() {
  static std::once_flag once;
  std::call_once(once, [] {
    fprintf(stderr, "[emulator] warning: with sparse_mode 3 a sequence has one query row and no keys; "
                    "its result is 0 here, and is not known on a device\n");
  });
}

// prompt_flash_attention_tiling.cpp of 8.5: CheckInputShapeWhenLayoutIsTND, CheckPAWhenBaseApi.
void FiaArguments::check_tnd() const {
  if (!tnd() || latent())
    return;
  should(sparse_mode == 0 || sparse_mode == 3 || sparse_mode == 4,
         "with TND sparse_mode must be 0, 3 or 4, got ", sparse_mode);
  should(sparse_mode != 0 || !mask, "with TND sparse_mode 0 takes no atten_mask");
  const Ints &q = *query_lengths, &kv = *kv_lengths;
  for (size_t i = 0; sparse_mode == 3 && i < q.size(); i++) {
    // The split-fuse tiling accepts rows that see no keys, but no source defines the result of such
    // rows.
    int64_t rows = q[i] - (i ? q[i - 1] : 0), seen = kv[i] - (i && !paged() ? kv[i - 1] : 0);
    if (rows == 1 && seen == 0) {
      warn_of_rows_without_keys();
      continue;
    }
    should(rows <= seen, "with sparse_mode 3 sequence ", i, " has ", rows,
           " query rows, more than its ", seen, " keys");
  }
  // fused_infer_attention_score_tiling.cpp of CANN 9, CheckSparseModeParams.
  should(sparse_mode != 4 || -next_tokens <= pre_tokens, "with sparse_mode 4 pre_tokens ",
         pre_tokens, " and next_tokens ", next_tokens, " leave no key");
  if (split_fuse())
    return;
  const char *line = cann_before(9) ? " with TND on CANN 8.5"
                                   : " with TND, unless query heads share key heads, D is one and at "
                                     "most 256, and block_size a multiple of 16 up to 512";
  should(query.scalar_type() == at::kBFloat16, "query must be bfloat16", line, ", got ",
         query.scalar_type());
  int64_t dim = head_dim(), out_dim = value_dim();
  if (!query_rope)
    should(((dim == 64 || dim == 128) && out_dim == dim) || (dim == 192 && out_dim == 128) ||
               (dim == 192 && out_dim == 192 && heads == kv_heads),
           "head size ", dim, " with values of ", out_dim, " must be 64, 128, or 192 with 128", line);
  should(sparse_mode != 4 || out_dim == 64 || out_dim == 128, "with sparse_mode 4 values must have ",
         "D 64 or 128", line, ", got ", out_dim);
  if (!paged())
    return;
  should(block_size % 128 == 0, "block_size ", block_size, " must be a multiple of 128", line);
  int64_t blocks = 0;
  for (int64_t length : kv)
    blocks += (length + block_size - 1) / block_size;
  should(blocks > 0, "actual_seq_lengths_kv must not be all zero", line);
  // If two sequences share a block, the block counts twice.
  should(blocks <= key().size(0), "actual_seq_lengths_kv need ", blocks, " blocks, the cache has ",
         key().size(0), line);
}

// Document npu_fused_infer_attention_score_v2, learnable_sink: its type is bfloat16, it has one
// element for each query head, the layout is TND, and value heads have at most 128 elements.
// strict=false also admits the type of query. It is not documented whether softmax_lse includes the
// sink.
void FiaArguments::check_sinks() const {
  if (!sinks)
    return;
  must(sinks->dim() == 1 && sinks->size(0) == heads, "learnable_sink of shape ", sinks->sizes(),
       " must have one element for each of ", heads, " heads");
  must(is_kernel_type(*sinks) && sinks->is_contiguous(), "learnable_sink must be contiguous floats");
  should(sinks->scalar_type() == at::kBFloat16, "learnable_sink must be bfloat16, got ",
         sinks->scalar_type());
  should(tnd(), "learnable_sink is only supported with TND, got ", layout_name);
  should(value_dim() <= 128, "learnable_sink with value heads of ", value_dim(), ", at most 128");
  must(!wants_lse, "softmax_lse with learnable_sink is not emulated");
}

void FiaArguments::check() const {
  check_types();
  check_heads();
  check_rope();
  check_lengths();
  check_latent();
  check_pages();
  check_mask();
  check_tnd();
  check_sinks();
  should(inner_precise >= 0 && inner_precise <= 3, "inner_precise ", inner_precise);
  if (wants_lse)
    must(lse.scalar_type() == at::kFloat && lse.numel() == query.numel() / head_dim(),
         "softmax_lse of shape ", lse.sizes());
}

}  // namespace emu
