// Kernels of sparse latent attention, in sparse.cpp: the choice of keys, and attention to the chosen
// keys.
#pragma once

#include "kernels/kernels.h"

namespace emu::kernels {

// The requests of a step. Their lengths are in device memory, so a kernel reads and checks them
// when it runs. Keys are either in pages, or follow each other without pages. Without pages, there
// is no block table, and the whole tensor counts as one page.
struct StoredRequests {
  const int32_t *query_ends;   // [count], cumulative; the last one is the number of rows
  const int32_t *kv_lengths;   // [count]; cumulative without pages
  const int32_t *block_table;  // null without pages
  int64_t table_stride, table_width, page_size, page_count;
  int64_t count, rows;
  bool causal;  // whether a row sees only the keys up to its own token
};

struct KeyChoice {
  StoredRequests requests;
  Data query;    // [rows, heads, dim]
  Data weights;  // [rows, heads]
  Data keys;     // pages of [page_size, dim]
  int64_t heads, dim, wanted;
  int32_t *chosen;  // [rows, wanted]; the chosen keys come first, then -1
};
// Chooses the keys with the greatest scores. A key's score is the sum over heads of weight *
// relu(query . key).
void choose_keys(const KeyChoice &c);

// Latents in int8. The bytes of a key are: dim values of int8, rope_dim values of the query's type,
// and one float for each tile of int8 values. The values of a tile are multiplied by its float.
struct Int8Latents {
  const uint8_t *rows = nullptr;  // pages of [page_size, row_bytes]; null if the latents are floats
  int64_t row_bytes, tile;
};

struct SparseAttention {
  StoredRequests requests;
  Data query, query_rope;   // [rows, heads, dim], [rows, heads, rope_dim]
  Data latents, rope_keys;  // pages of [page_size, dim] and [page_size, rope_dim]
  Int8Latents packed;       // in place of latents and rope_keys; query is [rows, heads, dim + rope_dim]
  const int32_t *chosen;    // [rows, wanted], as choose_keys writes them; indices of blocks
  Data out;                 // [rows, heads, dim]
  // [rows, heads]: the greatest score, and the sum of exp(score - greatest score); null if the
  // caller does not need them. For rows without keys, no source defines these values, so the kernel
  // writes NaN.
  float *greatest, *sums;
  int64_t heads, dim, rope_dim, wanted;
  float scale;
  int64_t block = 1;  // number of neighbouring keys in a block
};
// Each row attends to those keys of its chosen blocks that it sees. The latents are both keys and
// values. Throws if a row names a block twice, names a block after a -1, or sees no key of a block
// that it names. Also throws if a row sees only a part of a block, and names further blocks after
// this block. In this case, the device would leave out keys of the last block, because it reads
// only as many keys as the row sees.
void attend_to_chosen(const SparseAttention &a);

}  // namespace emu::kernels
