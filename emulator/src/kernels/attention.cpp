// Attention over keys and values in pages. For few query rows, a streaming softmax reads each key
// and each value only once for all query heads that share it. For many query rows, matrix products
// compute blocks of rows.
#include "kernels/vector_math.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace emu::kernels {
namespace {

// A tile of keys or values: rows of floats, in place or converted.
struct Tile {
  const float *rows;
  int64_t stride, count;
};

// scores[t] = q . tile[t]. A row consists of W vectors. W == 0 is for rows of any width.
template <int W> void dot_tile(const float *q, const Tile &tile, int64_t n, float *scores) {
  Floats qs[W ? W : 1];
  for (int w = 0; w < W; w++)
    qs[w] = load(q + w * kLanes);
  for (int64_t t = 0; t < tile.count; t++) {
    const float *key = tile.rows + t * tile.stride;
    if constexpr (W > 0) {
      Floats sum = qs[0] * load(key);
      for (int w = 1; w < W; w++)
        sum += qs[w] * load(key + w * kLanes);
      scores[t] = total<kLanes>(sum);
    } else {
      float sum = 0;
      for (int64_t i = 0; i < n; i++)
        sum += q[i] * key[i];
      scores[t] = sum;
    }
  }
}

// sums += weights @ tile.
template <int W>
void add_tile(const float *weights, const Tile &tile, int64_t n, float *sums) {
  if constexpr (W > 0) {
    constexpr int kBlock = std::min(W, kRegisters / 2);  // vectors of sums that stay in registers
    static_assert(W % kBlock == 0);
    for (int first = 0; first < W * kLanes; first += kBlock * kLanes) {
      Floats block[kBlock];
      for (int w = 0; w < kBlock; w++)
        block[w] = load(sums + first + w * kLanes);
      for (int64_t t = 0; t < tile.count; t++) {
        const float *value = tile.rows + t * tile.stride + first;
        for (int w = 0; w < kBlock; w++)
          block[w] += load(value + w * kLanes) * weights[t];
      }
      for (int w = 0; w < kBlock; w++)
        store(sums + first + w * kLanes, block[w]);
    }
  } else {
    for (int64_t t = 0; t < tile.count; t++) {
      const float *value = tile.rows + t * tile.stride;
      for (int64_t i = 0; i < n; i++)
        sums[i] += weights[t] * value[i];
    }
  }
}

template <class Function> void with_width(int64_t n, Function function) {
  if (n == 64)
    function(std::integral_constant<int, 64 / kLanes>());
  else if (n == 128)
    function(std::integral_constant<int, 128 / kLanes>());
  else
    function(std::integral_constant<int, 0>());
}

bool is_finite(float x) { return (std::bit_cast<uint32_t>(x) & 0x7f800000) != 0x7f800000; }

// Whether all n values are finite. Only the bits of the exponents are checked, which is fast.
template <class Bits> bool all_finite_bits(const Bits *x, int64_t n, Bits exponent) {
  Bits found = 0;  // of the elements' type, so that the loop becomes vector instructions
  for (int64_t i = 0; i < n; i++)
    found |= Bits((x[i] & exponent) == exponent);
  return !found;
}
bool all_finite(Data d, int64_t offset, int64_t n) {
  if (d.type == Type::F32)
    return all_finite_bits<uint32_t>(static_cast<const uint32_t *>(d.p) + offset, n, 0x7f800000);
  return all_finite_bits<uint16_t>(static_cast<const uint16_t *>(d.p) + offset, n,
                                   d.type == Type::BF16 ? 0x7f80 : 0x7c00);
}

constexpr int64_t kTile = 64;         // tokens, and query rows of one block
constexpr int64_t kStreamedRows = 8;  // at most; for so few rows, gathering keys saves no time

// Computes the attention of one sequence and one key-value head.
class Worker {
public:
  Worker(const Attention &attention, const Sequence &sequence, int64_t kv_head)
      : a(attention), s(sequence), kv_head(kv_head), group(a.heads / a.kv_heads) {}

  void run() {
    read_tail();
    if (s.query_count <= kStreamedRows)
      for (int64_t row = 0; row < s.query_count; row++)
        stream_row(row);
    else
      blocks();
  }

private:
  const Attention &a;
  const Sequence &s;
  int64_t kv_head, group;
  // The vector that the values after the last key add to the result. The weight of these values is
  // zero, but zero times NaN or infinity is NaN. Null if all these values are finite.
  const float *tail = nullptr;

  int64_t page_of(int64_t token) const {
    if (!a.block_table)
      return 0;
    int64_t page = a.block_table[s.batch * a.block_table_stride + token / a.page_size];
    if (page < 0 || page >= a.page_count)
      throw std::runtime_error("attention: the block table of sequence " +
                               std::to_string(s.batch) + " names block " + std::to_string(page) +
                               " of " + std::to_string(a.page_count));
    return page;
  }

  // Element offset of a token's row.
  int64_t row_of(const Pages &pages, int64_t token, int64_t page) const {
    int64_t inside = a.block_table ? token % a.page_size : s.kv_start + token;
    return page * pages.page_stride + inside * pages.token_stride + kv_head * pages.head_stride;
  }

  // The row may attend to the tokens [first, second). An explicit mask can hide some of these
  // tokens.
  std::pair<int64_t, int64_t> visible(int64_t row) const {
    int64_t diagonal = s.kv_count - s.query_count + row;  // the row's own token
    switch (a.mask) {
    case Mask::LeftUpCausal:
      return {0, std::min(s.kv_count, row + 1)};
    case Mask::RightDownCausal:
      return {0, std::clamp<int64_t>(diagonal + 1, 0, s.kv_count)};
    case Mask::Band:
      return {std::clamp<int64_t>(diagonal - a.pre_tokens, 0, s.kv_count),
              std::clamp<int64_t>(diagonal + a.next_tokens + 1, 0, s.kv_count)};
    default:
      return {0, s.kv_count};
    }
  }
  const uint8_t *mask_row(int64_t row) const {
    if (a.mask != Mask::Explicit)
      return nullptr;
    return a.mask_data + s.batch * a.mask_batch_stride + row * a.mask_row_stride;
  }

  // The device reads whole blocks. The weights of values after the last key are zero, but zero
  // times NaN is NaN.
  void read_tail() {
    static thread_local Scratch room, values_room;
    int64_t end = s.kv_count;
    if (!a.block_table || s.query_count == 0 || end % a.page_size == 0)
      return;
    int64_t page = page_of(end - 1), block_end = (end / a.page_size + 1) * a.page_size;
    float *sums = nullptr;
    for (int64_t t = end; t < block_end; t++) {
      int64_t at = row_of(a.value, t, page);
      if (all_finite(a.value.data, at, a.value_dim))
        continue;
      if (!sums)
        std::fill_n(sums = room.of(a.value_dim), a.value_dim, 0.0f);
      const float *values = as_floats(a.value.data, at, a.value_dim, values_room.of(a.value_dim));
      for (int64_t i = 0; i < a.value_dim; i++)
        sums[i] += is_finite(values[i]) ? 0.0f : NAN;
    }
    tail = sums;
  }

  int64_t width() const { return a.dim + a.rope_dim; }

  void load_query(int64_t row, int64_t head, float *to) const {
    int64_t token = s.query_start + row;
    load_floats(a.query, token * a.query_token_stride + head * a.query_head_stride, to, a.dim);
    if (a.rope_dim)
      load_floats(a.query_rope, token * a.rope_token_stride + head * a.rope_head_stride, to + a.dim,
                  a.rope_dim);
    for (int64_t i = 0; i < width(); i++)
      to[i] *= a.scale;
  }

  void write(int64_t row, int64_t head, const float *sums, float divisor, float greatest) const {
    static thread_local Scratch room;
    float *out = room.of(a.value_dim);
    if (a.sinks.p && divisor > 0) {
      float sink;
      load_floats(a.sinks, head, &sink, 1);
      divisor += std::exp(sink - greatest);
    }
    float factor = divisor > 0 ? 1.0f / divisor : divisor == 0 ? 0.0f : divisor;
    for (int64_t i = 0; i < a.value_dim; i++)
      out[i] = divisor == 0 ? 0.0f : sums[i] * factor;  // a row without visible keys is zero
    for (int64_t i = 0; tail && divisor != 0 && i < a.value_dim; i++)
      out[i] += tail[i];
    int64_t token = s.out_start + row;
    store_floats(out, a.out, token * a.out_token_stride + head * a.out_head_stride, a.value_dim);
    if (a.lse)
      a.lse[token * a.lse_token_stride + head * a.lse_head_stride] =
          divisor == 0 ? a.lse_without_keys : greatest + std::log(divisor);
  }

  // Returns the keys of the tokens [first, first + count) of one page, as floats.
  Tile keys_of(int64_t first, int64_t count, int64_t page, float *room) const {
    int64_t at = row_of(a.key, first, page), n = width();
    if (a.key.data.type == Type::F32 && !a.rope_dim)
      return {static_cast<const float *>(a.key.data.p) + at, a.key.token_stride, count};
    for (int64_t t = 0; t < count; t++) {
      load_floats(a.key.data, at + t * a.key.token_stride, room + t * n, a.dim);
      if (a.rope_dim)
        load_floats(a.key_rope.data, row_of(a.key_rope, first + t, page), room + t * n + a.dim,
                    a.rope_dim);
    }
    return {room, n, count};
  }
  Tile values_of(int64_t first, int64_t count, int64_t page, float *room) const {
    int64_t at = row_of(a.value, first, page), n = a.value_dim;
    if (a.value.data.type == Type::F32)
      return {static_cast<const float *>(a.value.data.p) + at, a.value.token_stride, count};
    for (int64_t t = 0; t < count; t++)
      load_floats(a.value.data, at + t * a.value.token_stride, room + t * n, n);
    return {room, n, count};
  }
  int64_t tile_end(int64_t first, int64_t end) const {
    int64_t page_end = a.block_table ? (first / a.page_size + 1) * a.page_size : end;
    return std::min({first + kTile, page_end, end});
  }

  void stream_row(int64_t row) const {
    static thread_local Scratch room;
    int64_t n = width(), m = a.value_dim;
    float *queries = room.of(group * (n + m + kTile + 2) + kTile * std::max(n, m));
    float *sums = queries + group * n, *scores = sums + group * m;
    float *greatest = scores + group * kTile, *divisors = greatest + group;
    float *converted = divisors + group;
    for (int64_t g = 0; g < group; g++) {
      load_query(row, kv_head * group + g, queries + g * n);
      greatest[g] = -INFINITY;
      divisors[g] = 0;
    }
    std::fill_n(sums, group * m, 0.0f);
    auto [begin, end] = visible(row);
    const uint8_t *mask = mask_row(row);
    for (int64_t first = begin, last; first < end; first = last) {
      last = tile_end(first, end);
      int64_t count = last - first, page = page_of(first);
      Tile keys = keys_of(first, count, page, converted);
      with_width(n, [&](auto w) {
        for (int64_t g = 0; g < group; g++)
          dot_tile<w>(queries + g * n, keys, n, scores + g * kTile);
      });
      for (int64_t g = 0; g < group; g++)
        weigh(scores + g * kTile, mask ? mask + first : nullptr, count, greatest[g], divisors[g],
              sums + g * m);
      Tile values = values_of(first, count, page, converted);
      with_width(m, [&](auto w) {
        for (int64_t g = 0; g < group; g++)
          add_tile<w>(scores + g * kTile, values, m, sums + g * m);
      });
    }
    for (int64_t g = 0; g < group; g++)
      write(row, kv_head * group + g, sums + g * m, divisors[g], greatest[g]);
  }

  // Replaces scores by weights. The weights are relative to the greatest score of all tiles so far.
  // When a tile contains a greater score, the sum of the previous tiles is rescaled.
  void weigh(float *scores, const uint8_t *mask, int64_t count, float &greatest, float &divisor,
             float *sums) const {
    if (mask)
      for (int64_t t = 0; t < count; t++)
        scores[t] = mask[t] ? -INFINITY : scores[t];
    float top = greatest;
    for (int64_t t = 0; t < count; t++)
      top = scores[t] > top ? scores[t] : top;
    float base = top == -INFINITY ? 0.0f : top;
    if (greatest != top && divisor != 0) {
      float shrink = fast_exp(greatest - base);
      divisor *= shrink;
      for (int64_t i = 0; i < a.value_dim; i++)
        sums[i] *= shrink;
    }
    float sum = 0;
    for (int64_t t = 0; t < count; t++)
      scores[t] = fast_exp(scores[t] - base);
    for (int64_t t = 0; t < count; t++)
      sum += scores[t];
    divisor += sum;
    greatest = top;
  }

  void blocks() const {
    static thread_local Scratch key_room, value_room, query_room, score_room, sum_room;
    int64_t n = width(), m = a.value_dim, length = s.kv_count;
    float *keys = key_room.of(length * n), *values = value_room.of(length * m);
    for (int64_t t = 0; t < length; t++) {
      int64_t page = page_of(t);
      load_floats(a.key.data, row_of(a.key, t, page), keys + t * n, a.dim);
      if (a.rope_dim)
        load_floats(a.key_rope.data, row_of(a.key_rope, t, page), keys + t * n + a.dim, a.rope_dim);
      load_floats(a.value.data, row_of(a.value, t, page), values + t * m, m);
    }
    float *queries = query_room.of(kTile * n), *scores = score_room.of(kTile * length);
    float *sums = sum_room.of(kTile * m);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
      for (int64_t first = 0; first < s.query_count; first += kTile) {
        int64_t rows = std::min(kTile, s.query_count - first);
        int64_t seen = 0;  // tokens that some row of the block sees
        for (int64_t r = 0; r < rows; r++) {
          load_query(first + r, head, queries + r * n);
          seen = std::max(seen, visible(first + r).second);
        }
        if (seen == 0) {
          std::fill_n(sums, m, 0.0f);
          for (int64_t r = 0; r < rows; r++)
            write(first + r, head, sums, 0, 0);
          continue;
        }
        matmul({{queries}, {keys}, {scores}, rows, seen, n, n, n, seen, true});
        float divisors[kTile], greatest[kTile];
        for (int64_t r = 0; r < rows; r++)
          weigh_row(first + r, scores + r * seen, seen, divisors[r], greatest[r]);
        matmul({{scores}, {values}, {sums}, rows, m, seen, seen, m, m, false});
        for (int64_t r = 0; r < rows; r++)
          write(first + r, head, sums + r * m, divisors[r], greatest[r]);
      }
  }

  void weigh_row(int64_t row, float *scores, int64_t seen, float &divisor, float &top) const {
    auto [begin, end] = visible(row);
    const uint8_t *mask = mask_row(row);
    for (int64_t t = 0; mask && t < seen; t++)
      scores[t] = mask[t] ? -INFINITY : scores[t];
    top = -INFINITY;
    for (int64_t t = begin; t < end; t++)
      top = scores[t] > top ? scores[t] : top;
    float base = top == -INFINITY ? 0.0f : top, sum = 0;
    std::fill(scores, scores + std::min(begin, seen), 0.0f);
    for (int64_t t = begin; t < end; t++) {
      scores[t] = fast_exp(scores[t] - base);
      sum += scores[t];
    }
    std::fill(scores + std::max(end, begin), scores + seen, 0.0f);
    divisor = sum;
  }
};

}  // namespace

void attention(const Attention &a) {
  for (const Sequence &sequence : a.sequences)
    for (int64_t head = 0; head < a.kv_heads; head++)
      Worker(a, sequence, head).run();
}

}  // namespace emu::kernels
