// Kernels of sparse latent attention, in sparse.cpp: the choice of keys, and attention to the chosen
// keys.
#pragma once

#include "kernels/kernels.h"

namespace emu::kernels {

// The requests of a step. Their lengths are in device memory, so a kernel reads and checks them when
// it runs.
struct PagedRequests {
  const int32_t *query_ends;  // [count], cumulative; the last one is the number of rows
  const int32_t *kv_lengths;  // [count]
  const int32_t *block_table;
  int64_t table_stride, table_width, page_size, page_count;
  int64_t count, rows;
  bool causal;  // whether a row sees only the keys up to its own token
};

struct KeyChoice {
  PagedRequests requests;
  Data query;    // [rows, heads, dim]
  Data weights;  // [rows, heads]
  Data keys;     // pages of [page_size, dim]
  int64_t heads, dim, wanted;
  int32_t *chosen;  // [rows, wanted]; the chosen keys come first, then -1
};
// Chooses the keys with the greatest sums over heads of weight * relu(query . key).
void choose_keys(const KeyChoice &c);

struct SparseAttention {
  PagedRequests requests;
  Data query, query_rope;   // [rows, heads, dim], [rows, heads, rope_dim]
  Data latents, rope_keys;  // pages of [page_size, dim] and [page_size, rope_dim]
  const int32_t *chosen;    // [rows, wanted], as choose_keys writes them
  Data out;                 // [rows, heads, dim]
  int64_t heads, dim, rope_dim, wanted;
  float scale;
};
// Attends to the chosen latents, which are keys and values. Throws if a row names a key that it
// does not see, names a key twice, or names a key after a -1.
void attend_to_chosen(const SparseAttention &a);

}  // namespace emu::kernels
