// Sparse latent attention. The index keys of a request are read once for all its rows. The chosen
// latents are read once for all heads of a row.
#include "kernels/sparse.h"
#include "kernels/vector_math.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace emu::kernels {
namespace {

template <class... Parts> [[noreturn]] void fail(const Parts &...parts) {
  std::string message;
  auto add = [&message](const auto &part) {
    if constexpr (std::is_integral_v<std::decay_t<decltype(part)>>)
      message += std::to_string(part);
    else
      message += part;
  };
  (add(parts), ...);
  throw std::runtime_error(message);
}

struct Request {
  int64_t index, first_row, rows, first_key, keys;  // first_key: only without pages

  // Returns the number of keys that a row of the step sees.
  int64_t seen_by(const StoredRequests &r, int64_t row) const {
    return r.causal ? keys - rows + (row - first_row) + 1 : keys;
  }
};

Request request_at(const StoredRequests &r, int64_t index) {
  int64_t first = index ? r.query_ends[index - 1] : 0, end = r.query_ends[index];
  int64_t first_key = r.block_table || !index ? 0 : r.kv_lengths[index - 1];
  int64_t keys = r.kv_lengths[index] - first_key;
  if (end < first)
    fail("actual_seq_lengths_query decreases at request ", index, ": ", first, ", ", end);
  if (end > r.rows || (index == r.count - 1 && end != r.rows))
    fail("actual_seq_lengths_query reaches ", end, " at request ", index, ", but T is ", r.rows);
  if (!r.block_table && keys < 0)
    fail("actual_seq_lengths_kv decreases at request ", index);
  if (!r.block_table && first_key + keys > r.page_size)
    fail("actual_seq_lengths_kv reaches ", first_key + keys, " at request ", index,
         ", but there are ", r.page_size, " keys");
  if (r.block_table && (keys < 0 || keys > r.table_width * r.page_size))
    fail("the KV length of request ", index, " is ", keys, "; its block table has room for ",
         r.table_width * r.page_size);
  if (r.causal && end - first > keys)
    fail("request ", index, " has ", end - first, " query rows, more than its ", keys, " keys");
  return {index, first, end - first, first_key, keys};
}

// Returns the slot in which a request's key is.
int64_t slot_of(const StoredRequests &r, const Request &request, int64_t key) {
  if (!r.block_table)
    return request.first_key + key;
  int64_t page = r.block_table[request.index * r.table_stride + key / r.page_size];
  if (page < 0 || page >= r.page_count)
    fail("the block table of request ", request.index, " names block ", page, " of ", r.page_count);
  return page * r.page_size + key % r.page_size;
}

// totals[key] = sum over heads of weights[head] * relu(scores[head, key]).
void sum_heads(const float *scores, const float *weights, int64_t heads, int64_t keys,
               float *totals) {
  std::fill_n(totals, keys, 0.0f);
  for (int64_t h = 0; h < heads; h++)
    for (int64_t k = 0; k < keys; k++)
      totals[k] += weights[h] * std::max(scores[h * keys + k], 0.0f);
  for (int64_t k = 0; k < keys; k++)
    totals[k] = std::isnan(totals[k]) ? INFINITY : totals[k];  // as in a top-k of ATen
}

// If scores are equal, the key that comes first is chosen.
void write_greatest(const float *totals, int64_t keys, int64_t wanted, int32_t *chosen) {
  static thread_local std::vector<int32_t> order;
  order.resize(keys);
  std::iota(order.begin(), order.end(), 0);
  int64_t count = std::min(keys, wanted);
  std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](int32_t a, int32_t b) {
    return totals[a] != totals[b] ? totals[a] > totals[b] : a < b;
  });
  std::copy_n(order.begin(), count, chosen);
  std::fill(chosen + count, chosen + wanted, -1);
}

// A row names blocks of keys. Writes the keys of these blocks to `valid`.
void read_chosen(const SparseAttention &a, int64_t row, int64_t seen, std::vector<int32_t> &valid) {
  static thread_local std::vector<int64_t> named_by;  // the number of the last call that named a key
  static thread_local int64_t call = 0;
  named_by.resize(std::max<size_t>(named_by.size(), seen), 0);
  call++;
  valid.clear();
  const int32_t *chosen = a.chosen + row * a.wanted;
  int64_t count = std::find(chosen, chosen + a.wanted, -1) - chosen;
  for (int64_t i = count; i < a.wanted; i++)
    if (chosen[i] != -1)
      fail("sparse_indices of row ", row, " name key ", chosen[i], " behind a -1");
  for (int64_t i = 0; i < count; i++) {
    int64_t key = chosen[i] * a.block, end = std::min(key + a.block, seen);
    if (key < 0 || key >= seen)
      fail("sparse_indices of row ", row, " name key ", key, "; the row sees ", seen, " keys");
    if (std::exchange(named_by[key], call) == call)
      fail("sparse_indices of row ", row, " name key ", key, " twice");
    if (end < key + a.block && i + 1 < count)
      fail("sparse_indices of row ", row, " name key ", key, " before other blocks; the row sees ",
           end - key, " keys of its block");
    for (; key < end; key++)
      valid.push_back(static_cast<int32_t>(key));
  }
}

struct Softmax {
  float greatest, sum;
};

// Replaces scores by weights whose sum is 1. Returns the greatest score and the sum of the
// exponentials.
Softmax softmax(float *scores, int64_t count) {
  float top = *std::max_element(scores, scores + count), sum = 0;
  for (int64_t i = 0; i < count; i++)
    sum += scores[i] = fast_exp(scores[i] - top);
  for (int64_t i = 0; i < count; i++)
    scores[i] /= sum;
  return {top, sum};
}

void load_query(const SparseAttention &a, int64_t at, float *to) {
  int64_t width = a.dim + a.rope_dim;
  if (a.packed.rows)
    return load_floats(a.query, at * width, to, width);
  load_floats(a.query, at * a.dim, to, a.dim);
  load_floats(a.query_rope, at * a.rope_dim, to + a.dim, a.rope_dim);
}

// As on the device, latents from int8 are rounded to the query's type before they are multiplied.
void load_key(const SparseAttention &a, int64_t slot, float *to) {
  if (!a.packed.rows) {
    load_floats(a.latents, slot * a.dim, to, a.dim);
    return load_floats(a.rope_keys, slot * a.rope_dim, to + a.dim, a.rope_dim);
  }
  static thread_local std::vector<char> rounded;
  uint8_t *row = const_cast<uint8_t *>(a.packed.rows) + slot * a.packed.row_bytes;
  const int8_t *values = reinterpret_cast<int8_t *>(row);
  int64_t scales = a.dim + a.rope_dim * bytes_of(a.query.type);
  for (int64_t i = 0; i < a.dim; i++) {
    float scale;
    memcpy(&scale, row + scales + i / a.packed.tile * sizeof(float), sizeof(float));
    to[i] = values[i] * scale;
  }
  rounded.resize(a.dim * sizeof(float));
  Data room{rounded.data(), a.query.type};
  store_floats(to, room, 0, a.dim);
  load_floats(room, 0, to, a.dim);
  load_floats({row + a.dim, a.query.type}, 0, to + a.dim, a.rope_dim);
}

void attend_row(const SparseAttention &a, const Request &request, int64_t row) {
  static thread_local std::vector<int32_t> valid;
  static thread_local Scratch query_room, key_room, score_room, out_room;
  read_chosen(a, row, request.seen_by(a.requests, row), valid);
  int64_t count = valid.size(), width = a.dim + a.rope_dim;
  float *queries = query_room.of(a.heads * width), *keys = key_room.of(count * width);
  float *scores = score_room.of(a.heads * count), *out = out_room.of(a.heads * a.dim);
  for (int64_t h = 0; h < a.heads; h++)
    load_query(a, row * a.heads + h, queries + h * width);
  for (int64_t i = 0; i < a.heads * width; i++)
    queries[i] *= a.scale;
  for (int64_t i = 0; i < count; i++)
    load_key(a, slot_of(a.requests, request, valid[i]), keys + i * width);
  std::fill_n(out, a.heads * a.dim, 0.0f);  // the result of a row without keys
  for (float *values : {a.greatest, a.sums})
    if (values)
      std::fill_n(values + row * a.heads, a.heads, NAN);
  if (count) {
    matmul({{queries}, {keys}, {scores}, a.heads, count, width, width, width, count, true});
    for (int64_t h = 0; h < a.heads; h++) {
      Softmax found = softmax(scores + h * count, count);
      if (a.greatest)
        a.greatest[row * a.heads + h] = found.greatest, a.sums[row * a.heads + h] = found.sum;
    }
    matmul({{scores}, {keys}, {out}, a.heads, a.dim, count, count, width, a.dim, false});
  }
  store_floats(out, a.out, row * a.heads * a.dim, a.heads * a.dim);
}

}  // namespace

void choose_keys(const KeyChoice &c) {
  static thread_local Scratch key_room, query_room, weight_room, score_room, total_room;
  for (int64_t i = 0; i < c.requests.count; i++) {
    Request request = request_at(c.requests, i);
    int64_t last = request.first_row + request.rows, n = c.dim;
    float *keys = key_room.of(request.keys * n), *queries = query_room.of(c.heads * n);
    float *weights = weight_room.of(c.heads), *scores = score_room.of(c.heads * request.keys);
    float *totals = total_room.of(request.keys);
    for (int64_t k = 0; request.rows && k < request.keys; k++)
      load_floats(c.keys, slot_of(c.requests, request, k) * n, keys + k * n, n);
    for (int64_t row = request.first_row; row < last; row++) {
      int64_t seen = request.seen_by(c.requests, row);
      load_floats(c.query, row * c.heads * n, queries, c.heads * n);
      load_floats(c.weights, row * c.heads, weights, c.heads);
      if (seen)
        matmul({{queries}, {keys}, {scores}, c.heads, seen, n, n, n, seen, true});
      sum_heads(scores, weights, c.heads, seen, totals);
      write_greatest(totals, seen, c.wanted, c.chosen + row * c.wanted);
    }
  }
}

void attend_to_chosen(const SparseAttention &a) {
  for (int64_t i = 0; i < a.requests.count; i++) {
    Request request = request_at(a.requests, i);
    for (int64_t row = 0; row < request.rows; row++)
      attend_row(a, request, request.first_row + row);
  }
}

}  // namespace emu::kernels
