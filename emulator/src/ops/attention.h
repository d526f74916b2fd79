// The arguments of FusedInferAttentionScore that the emulator uses, and their checks.
#pragma once

#include "ops/bind.h"

namespace emu {

enum class FiaLayout { TND, BNSD, BSND, BSH };
enum class FiaOut { AsQuery, BSND, NBSD, NTD };  // the part of input_layout after the _

struct FiaArguments {
  Tensor query;
  Tensors keys, values;
  OptTensor mask, block_table, query_rope, key_rope;
  OptInts query_lengths, kv_lengths;  // TND: cumulative, except kv_lengths of paged keys
  int64_t heads;
  double scale;
  int64_t pre_tokens, next_tokens;
  std::string layout_name;
  int64_t kv_heads, sparse_mode, inner_precise, block_size;
  bool wants_lse;
  Tensor out, lse;
  OptTensor sinks;  // learnable_sink

  FiaLayout layout = FiaLayout::TND;
  FiaOut out_layout = FiaOut::AsQuery;

  const Tensor &key() const { return keys.at(0); }
  const Tensor &value() const { return values.at(0); }
  bool paged() const { return block_table.has_value(); }
  bool tnd() const { return layout == FiaLayout::TND; }
  bool heads_first_pages() const;
  int64_t batch() const;
  int64_t query_rows() const;  // of one sequence; with TND, of all sequences
  int64_t head_dim() const;
  int64_t value_dim() const;
  // Multi-head latent attention after absorption: all query heads share one key head of 512 plus 64
  // elements.
  bool latent() const { return query_rope && head_dim() == 512; }
  // Whether CANN runs the call by the kernel for one query row per sequence, or by the kernel of
  // CANN 9 that replaces it and behaves in the same way
  // (fused_infer_attention_score_tiling_info_parser.cpp, GetLegacyIfaFlag).
  bool incremental() const;
  // Whether the call uses CANN 9's tiling for grouped queries in TND.
  bool split_fuse() const;

  // Reads the layout and fills in defaults; throws Refusal.
  void prepare();
  // The requirements of documents; throws Refusal with the code of the operator.
  void check() const;

private:
  void check_types() const;
  void check_heads() const;
  void check_rope() const;
  void check_latent() const;
  void check_lengths() const;
  void check_pages() const;
  void check_mask() const;
  void check_sinks() const;
  void check_tnd() const;
};

}  // namespace emu
