#include "ops/work.h"

#include "rates.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace emu {
namespace {

double memory_us(double bytes, double efficiency) {
  return bytes / (rates().hbm_tb_s * efficiency) / 1e6;
}
double compute_us(double operations, double tflops, double efficiency) {
  return operations / (tflops * efficiency) / 1e6;
}
int64_t kernel_ns(double us, double floor_us) {
  return microseconds(std::max(us, floor_us) + rates().gap_us);
}

// The efficiency was measured for products of n x n matrices. Between two measured sizes, it is
// interpolated by the logarithm of the size. A product of another shape has the efficiency of the n
// x n product with the same number of operations.
double product_efficiency(const Product &p) {
  const Rates &r = rates();
  double size = std::log2(std::max(std::cbrt(p.m * p.n * p.k), 1.));
  if (size <= 10)
    return r.matmul_1024;
  if (size <= 11)
    return r.matmul_1024 + (size - 10) * (r.matmul_2048 - r.matmul_1024);
  if (size <= 12)
    return r.matmul_2048 + (size - 11) * (r.matmul_4096 - r.matmul_2048);
  return r.matmul_4096;
}

// Returns how many bytes of memory a tensor uses. An expanded dimension counts as one element.
double bytes_of(const at::Tensor &t) {
  if (!t.defined())
    return 0;
  double elements = 1;
  for (int64_t d = 0; d < t.dim(); d++)
    elements *= t.stride(d) == 0 && t.size(d) > 0 ? 1 : t.size(d);
  return elements * t.element_size();
}

// An operator that reads or writes only the indexed rows of some operands. All bytes of its other
// operands count.
struct IndexedRule {
  const char *op;
  std::initializer_list<size_t> tables;
};
const IndexedRule kIndexed[] = {
    {"aclnnEmbedding", {0}},
    {"aclnnIndexSelect", {0}},
    {"aclnnGather", {0}},
    {"aclnnTake", {0}},
    {"aclnnIndex", {0}},
    {"aclnnIndexPutImpl", {0}},
    {"aclnnScatterNdUpdate", {0}},
    {"aclnnInplaceIndexCopy", {0}},
    {"aclnnInplaceIndexFill", {0}},
    {"aclnnInplaceScatter", {0}},
    {"aclnnInplaceScatterValue", {0}},
    {"aclnnRopeWithSinCosCache", {3}},
    {"aclnnScatterPaKvCache", {1, 4}},
    {"aclnnKvRmsNormRopeCache", {5, 6}},
};

// An in-place operator reads and writes its result, so the result's bytes count twice. The
// operators in this list write their result without reading it.
bool reads_its_result(const char *op) {
  if (strncmp(op, "aclnnInplace", 12))
    return false;
  for (const char *only_writes : {"Copy", "Zero", "One", "Fill", "Uniform", "Normal", "Random",
                                  "Bernoulli"})
    if (!strncmp(op + 12, only_writes, strlen(only_writes)))
      return false;
  return true;
}

double moved_bytes(const char *op, const std::vector<at::Tensor> &tensors) {
  const IndexedRule *rule = nullptr;
  for (const IndexedRule &r : kIndexed)
    if (!strcmp(r.op, op))
      rule = &r;
  double bytes = 0, tables = 0;
  for (size_t i = 0; i < tensors.size(); i++) {
    bool is_table = rule && std::find(rule->tables.begin(), rule->tables.end(), i) !=
                                rule->tables.end();
    (is_table ? tables : bytes) += bytes_of(tensors[i]);
  }
  if (rule)
    return bytes + std::min(tables, bytes);
  return bytes + (reads_its_result(op) && !tensors.empty() ? bytes_of(tensors[0]) : 0);
}

double memory_efficiency(const char *op) {
  auto is_one_of = [op](std::initializer_list<const char *> names) {
    return std::any_of(names.begin(), names.end(), [op](auto name) { return !strcmp(name, op); });
  };
  const Rates &r = rates();
  if (is_one_of({"aclnnSoftmax", "aclnnLogSoftmax", "aclnnLogSumExp"}))
    return r.softmax_memory;
  if (is_one_of({"aclnnArgMax", "aclnnArgMin", "aclnnMaxDim", "aclnnMinDim"}))
    return r.argmax_memory;
  if (is_one_of({"aclnnSort", "aclnnTopk", "aclnnMultinomial", "aclnnMultinomialTensor"}))
    return r.sort_memory;
  return r.vector_memory;
}

}  // namespace

// Returns the time of the cube unit in microseconds, without the kernel's minimum time and without
// the gap to the next kernel.
static double product_us(const Product &p) {
  const Rates &r = rates();
  bool is_int8 = p.type == at::kChar;
  double bytes_each = at::elementSize(p.type);
  // The cube unit computes float32 at a quarter of the speed of bfloat16.
  double peak = is_int8 ? r.int8_tflops : p.type == at::kFloat ? r.bf16_tflops / 4 : r.bf16_tflops;
  double efficiency = is_int8 ? r.int8_matmul : product_efficiency(p);
  double rows = p.batch * (p.m * p.k * bytes_each + p.m * p.n * std::max(bytes_each, 2.));
  return std::max(compute_us(2 * p.batch * p.m * p.n * p.k, peak, efficiency),
                  memory_us(rows + p.weight_bytes, r.weights_memory));
}

int64_t product_ns(const Product &p) { return kernel_ns(product_us(p), rates().matmul_us); }

int64_t product_phase_ns(const Product &p) { return microseconds(product_us(p)); }

int64_t product_ns(const at::Tensor &a, const at::Tensor &b) {
  if (a.numel() == 0 || b.numel() == 0)
    return kernel_ns(0, rates().matmul_us);
  double k = a.size(-1), n = b.dim() > 1 ? b.size(-1) : 1, rows = a.numel() / k;
  double batch = b.dim() > 2 ? b.numel() / (k * n) : 1;
  return product_ns({batch, rows / batch, n, k, a.scalar_type(), bytes_of(b)});
}

int64_t attention_ns(const kernels::Attention &a) {
  constexpr int64_t kMostDecodeRows = 16;
  const Rates &r = rates();
  bool is_latent = a.rope_dim > 0 && a.dim == 512, is_prefill = false;
  bool is_causal = a.mask == kernels::Mask::RightDownCausal || a.mask == kernels::Mask::LeftUpCausal;
  double pairs = 0, keys = 0, rows = 0;
  for (const kernels::Sequence &s : a.sequences) {
    double queries = s.query_count, length = s.kv_count;
    is_prefill |= s.query_count > kMostDecodeRows;
    pairs += queries * length - (is_causal ? queries * (std::min(queries, length) - 1) / 2 : 0);
    keys += queries > 0 ? length : 0;
    rows += queries;
  }
  double element = a.query.type == kernels::Type::F32 ? 4 : 2;
  double width = a.dim + a.rope_dim + a.value_dim;
  // In latent attention, the values are a part of the keys, so they are not read separately.
  double cache = keys * a.kv_heads * (is_latent ? a.dim + a.rope_dim : width) * element;
  double bytes = cache + rows * a.heads * width * element;
  return kernel_ns(std::max(compute_us(2 * a.heads * pairs * width, r.bf16_tflops,
                                       is_latent ? r.latent_attention : r.attention),
                            memory_us(bytes, r.cache_memory)),
                   is_prefill ? r.prefill_attention_us : r.decode_attention_us);
}

int64_t delta_rule_ns(double state_bytes, double operations) {
  const Rates &r = rates();
  return kernel_ns(std::max(compute_us(operations, r.bf16_tflops, r.attention),
                            memory_us(state_bytes, r.vector_memory)),
                   r.vector_us);
}

static int64_t exchange_ns(double fixed_us, double token_us, double rows, double hidden,
                           double choices, double ranks) {
  double doublings = std::max(std::log2(std::max(ranks, 1.) / 8), 0.);
  double share = hidden * choices / (7168 * 8);
  return microseconds(fixed_us + token_us * rows * share + rates().doubling_us * doublings +
                      rates().gap_us);
}
int64_t dispatch_ns(double rows, double hidden, double choices, double ranks) {
  return exchange_ns(rates().dispatch_us, rates().dispatch_token_us, rows, hidden, choices, ranks);
}
int64_t combine_ns(double rows, double hidden, double choices, double ranks) {
  return exchange_ns(rates().combine_us, rates().combine_token_us, rows, hidden, choices, ranks);
}

int64_t vector_phase_ns(double bytes) {
  return microseconds(memory_us(bytes, rates().vector_memory));
}

int64_t memory_ns(const char *op, bool on_ai_cpu, const std::vector<at::Tensor> &tensors) {
  const Rates &r = rates();
  double bytes = moved_bytes(op, tensors);
  if (on_ai_cpu)
    return microseconds(r.ai_cpu_us + bytes / r.ai_cpu_gb_s / 1e3 + r.gap_us);
  return kernel_ns(memory_us(bytes, memory_efficiency(op)), r.vector_us);
}

}  // namespace emu
