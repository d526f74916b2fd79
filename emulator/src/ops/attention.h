// The arguments of FusedInferAttentionScore that the emulator uses, and the checks of these
// arguments.
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
  // Whether the call is absorbed multi-head latent attention: all query heads share one key head,
  // which has 512 elements without rope and 64 with rope.
  bool latent() const { return query_rope && head_dim() == 512; }
  // Whether CANN runs the call with the kernel for one query row per sequence
  // (fused_infer_attention_score_tiling_info_parser.cpp, GetLegacyIfaFlag). CANN 9 replaces this
  // kernel by a new kernel with the same behaviour; the new kernel also counts.
  bool incremental() const;
  // Whether CANN 9 would use its split-fuse tiling for the call. This tiling is for grouped queries
  // in the layout TND.
  bool split_fuse() const;

  // Reads the layout, and sets defaults. Throws Refusal if the arguments are not valid.
  void prepare();
  // Checks the requirements of the documents. Throws a Refusal with the operator's error code.
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
