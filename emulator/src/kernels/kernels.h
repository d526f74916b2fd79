// Fused kernels, which get plain pointers. Everything is computed in float32 and rounded once at
// the end; bfloat16 and float16 are converted when they are read. These files must not use ATen,
// because they are compiled with KERNEL_FLAGS (see the Makefile).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace emu::kernels {

enum class Type { F32, BF16, F16 };
constexpr size_t bytes_of(Type t) { return t == Type::F32 ? 4 : 2; }

// A pointer to elements of one of the three types in device memory. In all other structures,
// strides are in elements.
struct Data {
  void *p = nullptr;
  Type type = Type::F32;
};

// ---- convert.cpp
void load_floats(Data from, int64_t offset, float *to, int64_t count);
void store_floats(const float *from, Data to, int64_t offset, int64_t count);

// ---- norm.cpp
struct RmsNorm {
  Data x, residual;  // residual.p null: plain norm
  Data gamma, out, sum;
  float *rstd;  // one per row; may be null
  int64_t rows, columns;
  float epsilon;
  float shift = 0;  // added to gamma
};
void rms_norm(const RmsNorm &n);

struct SwiGlu {
  Data x, out;
  int64_t rows, columns;  // of out; x has twice the columns: gate, then up
};
void swiglu(const SwiGlu &s);

// ---- rotary.cpp
struct Rotary {
  Data x, cos, sin, out;  // out may be x
  int64_t size[3];        // leading dimensions, outermost first; the last one (dim) is contiguous
  int64_t x_stride[3], out_stride[3], angle_stride[3];  // angle stride 0: broadcast
  int64_t dim;
  int64_t rotated;  // number of leading elements of dim that are rotated; equals dim if all are
  bool interleaved;
};
void rotary(const Rotary &r);

// ---- matmul.cpp
// out[m, n] = alpha * a @ b + beta * out; b is [k, n] or, transposed, [n, k] in memory. Rows of a, b
// and out are contiguous.
struct MatMul {
  Data a, b, out;
  int64_t m, n, k;
  int64_t a_stride, b_stride, out_stride;
  bool b_transposed;
};
void matmul(const MatMul &mm);

// ---- tiled_matmul.cpp: out[m, n] = a[m, k] @ b[k, n], all row-major floats, strides in floats
void tiled_matmul(const float *a, int64_t a_stride, const float *b, int64_t b_stride, float *out,
                   int64_t out_stride, int64_t m, int64_t n, int64_t k);

// ---- attention.cpp
// Keys or values as pages: token t of head h lies at
//   p + page[t / page_size] * page_stride + (t % page_size) * token_stride + h * head_stride.
struct Pages {
  Data data;
  int64_t page_stride = 0, token_stride = 0, head_stride = 0;
};
struct Sequence {
  int64_t query_start, query_count;  // rows of query, relative to `query`
  int64_t out_start;
  int64_t kv_start, kv_count;  // kv_start: first token if the keys are not paged
  int64_t batch;               // row of the block table, and of a mask with a batch dimension
};
enum class Mask { None, LeftUpCausal, RightDownCausal, Band, Explicit };
struct Attention {
  Data query, query_rope, out;
  float *lse = nullptr;                           // [rows, heads] if requested, else null
  float lse_without_keys = 0;                     // the value of lse for a row that sees no key
  int64_t query_token_stride, query_head_stride;  // of query
  int64_t rope_token_stride = 0, rope_head_stride = 0;
  int64_t out_token_stride, out_head_stride;
  int64_t lse_token_stride = 0, lse_head_stride = 0;
  Pages key, value, key_rope;
  const int32_t *block_table = nullptr;  // null: all keys are in one page
  int64_t block_table_stride = 0, page_size = 0, page_count = 0;
  int64_t heads, kv_heads, dim, value_dim, rope_dim = 0;
  float scale;
  Mask mask = Mask::None;
  int64_t pre_tokens = 0, next_tokens = 0;
  Data sinks{};  // if given, [heads]: a logit of each head that has no value
  const uint8_t *mask_data = nullptr;  // for an explicit mask: a non-zero element hides a key
  int64_t mask_batch_stride = 0, mask_row_stride = 0;
  std::vector<Sequence> sequences;
};
void attention(const Attention &a);  // throws if the block table names a page that does not exist

// ---- merge.cpp
// For each row: the sum of outs[i] * exp(lses[i] - lse), where lse = log sum exp(lses[i]). A row
// has `dim` elements.
struct MergedAttention {
  std::vector<const float *> lses;  // [rows] each
  std::vector<Data> outs;           // [rows, dim] each
  Data out;
  float *lse = nullptr;    // [rows] if requested, else null
  int64_t rows, dim;
  bool infinity_is_empty;  // a log-sum-exp of +infinity counts as one of -infinity
};
void merge_attention(const MergedAttention &m);

// ---- top_k_top_p.cpp Sets all logits of a row that are smaller than the k-th largest logit to
// -infinity.
void cut_top_k(float *row, int64_t n, int64_t k);
// Sets the logits that top-p removes to -infinity. Sorts only the logits near the cut. If the
// rounding of sums could decide which logits are removed, returns false and writes nothing.
// weights: exp(logit - greatest) of each logit, as float or double.
template <typename Weight>
bool cut_top_p(float *row, const Weight *weights, int64_t n, double p, float greatest);

// ---- logarithm.cpp: x and out may be the same memory
void log(const float *x, float *out, int64_t n);
void log1p(const float *x, float *out, int64_t n);

// ---- select.cpp
// Finds the first position of the greatest value in each row; a NaN counts as greatest, as in ATen.
void argmax_rows(Data x, int64_t rows, int64_t columns, int64_t row_stride, void *out,
                 bool out_is_int32);
enum class Order { Eq, Ne, Lt, Le, Gt, Ge };
// out[i] = x[i] <order> y, as 0 or 1
void compare(const float *x, float y, Order order, uint8_t *out, int64_t n);
// out[i] = mask[i] ? first[i] : second[i]. Each byte of the mask is 0 or 1. `out` may be one of the
// other arrays.
void choose_words(const uint8_t *mask, const uint32_t *first, const uint32_t *second, uint32_t *out,
                  int64_t n);
// out[i] = mask[i] ? word : out[i]
void fill_words(const uint8_t *mask, uint32_t word, uint32_t *out, int64_t n);

// ---- copy.cpp
// Source and destination have the same element type, up to five dimensions, and any strides (in
// elements).
struct StridedCopy {
  static constexpr int kMaxRank = 6;
  char *to;
  const char *from;
  int64_t element_bytes;
  int rank;
  int64_t size[kMaxRank], to_stride[kMaxRank], from_stride[kMaxRank];

  void merge_dimensions();  // call it once; makes contiguous runs longer and fewer
  void run() const;
};
// Copies of rows, each of `row_bytes` bytes. Throws if an index is not in [0, limit).
struct IndexedRows {
  char *to;
  const char *from;
  const void *index;
  bool index_is_int32;
  int64_t index_stride;  // in elements
  int64_t count, limit, row_bytes, to_stride_bytes, from_stride_bytes;
};
void gather_rows(const IndexedRows &g);   // to[i] = from[index[i]]
void scatter_rows(const IndexedRows &s);  // to[index[i]] = from[i]; index -1 is skipped

}  // namespace emu::kernels
