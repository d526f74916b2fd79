// The table of rules. Its types are the types for which A2 and A3 (DAV_2201) have a kernel,
// according to the functions IsAiCoreSupport of ops-math c419332 and ops-nn e5c3fa9 (August 2026).
// In November 2025 the types were the same, unless a rule's comment says more.
#include "ops/ai_cpu.h"

#include "target.h"

#include <cstring>

namespace emu {
namespace {

using at::ScalarType;
constexpr auto F = at::kFloat, H = at::kHalf, B = at::kBFloat16, I8 = at::kChar, U8 = at::kByte,
               I16 = at::kShort, I32 = at::kInt, I64 = at::kLong, BOOL = at::kBool;

template <ScalarType... types> bool is_one_of(ScalarType type) {
  return ((type == types) || ...);
}
// These rules depend only on the type of the input, or on the type of the result.
template <ScalarType... types> bool by_input(const Operands &o) {
  return !is_one_of<types...>(o.tensors.front().scalar_type());
}
template <ScalarType... types> bool by_result(const Operands &o) {
  return !is_one_of<types...>(o.tensors.back().scalar_type());
}

bool floor_division(const Operands &o) {  // a division that rounds the quotient down
  return o.numbers.at(0) == 2 && by_result<F, H, B, I32, I8, U8>(o);
}

// scatter_elements.cpp, UseScatterElementsV2. In November 2025, the AI CPU also ran
// multiplications, and rows that a vector core would have to load in more than 50 parts.
bool scatter(const Operands &o) {
  const at::Tensor &data = o.tensors.at(0), &index = o.tensors.at(1);
  if (by_input<F, H, B, I32, I8, U8>(o))
    return true;
  int64_t rank = data.dim(), dim = o.numbers.at(0);
  int64_t axis = dim < 0 ? dim + rank : dim;
  if (rank == 0)
    return false;
  if (axis != 0 && axis != rank - 1)
    return true;
  for (int64_t d = 0; d < std::min(rank, index.dim()); d++)
    if (data.size(d) != index.size(d) && d != axis && d != 0 && d != rank - 1)
      return true;
  if (!cann_before(9))
    return false;
  bool multiplies = o.numbers.size() > 1 && o.numbers[1] == 2;
  int64_t bytes = data.element_size() + (data.element_size() == 2 ? 4 : 0);
  int64_t part = 192 * 1024 / 2 / bytes;
  return multiplies || (data.size(axis) + part - 1) / part > 50;
}

const AiCpuRule kRules[] = {
    {"aclnnCumsum", "ops-math cumsum.cpp", by_result<F, H, B, I32>},
    {"aclnnReduceSum", "ops-math reduce_sum_op.cpp", by_result<F, H, B, I32, I64>},
    {"aclnnMean", "ops-math reduce_mean.cpp", by_result<F, H, B>},
    {"aclnnProd", "ops-math reduce_prod.cpp", by_result<F, H, B, I32, I64, I8, U8>},
    {"aclnnProdDim", "ops-math reduce_prod.cpp", by_result<F, H, B, I32, I64, I8, U8>},
    {"aclnnMax", "ops-math reduce_max.cpp", by_input<F, H, B, I32, I64, I8, U8, BOOL>},
    {"aclnnMin", "ops-math reduce_min.cpp", by_input<F, H, B, I32, I64, I8, U8, BOOL>},
    {"aclnnAmax", "ops-math reduce_max.cpp", by_input<F, H, B, I32, I64, I8, U8, BOOL>},
    {"aclnnAmin", "ops-math reduce_min.cpp", by_input<F, H, B, I32, I64, I8, U8, BOOL>},
    {"aclnnArgMax", "ops-math argmax_v2.cpp", by_input<F, H, B, I32, I64>},
    {"aclnnArgMin", "ops-math argmin.cpp", by_input<F, H, B, I64>},
    {"aclnnSort", "ops-math sort.cpp", by_input<F, H, B>},
    {"aclnnTopk", "ops-math topk.cpp", by_input<F, H, B>},
    {"aclnnAdd", "ops-math add.cpp", by_result<F, H, B, I32, I64, I8, U8, BOOL>},
    {"aclnnSub", "ops-math sub.cpp", by_result<F, H, B, I32, I64, I8, U8, BOOL>},
    {"aclnnMul", "ops-math mul.cpp", by_result<F, H, B, I32, I64, I8, U8, BOOL>},
    {"aclnnFloorDivide", "ops-math floordiv.cpp", by_result<F, H, B, I32, I8, U8>},
    {"aclnnFloorDivides", "ops-math floordiv.cpp", by_result<F, H, B, I32, I8, U8>},
    {"aclnnInplaceFloorDivide", "ops-math floordiv.cpp", by_input<F, H, B, I32, I8, U8>},
    {"aclnnInplaceFloorDivides", "ops-math floordiv.cpp", by_input<F, H, B, I32, I8, U8>},
    {"aclnnDivMod", "ops-math floordiv.cpp", floor_division},
    {"aclnnDivMods", "ops-math floordiv.cpp", floor_division},
    {"aclnnInplaceDivMod", "ops-math floordiv.cpp", floor_division},
    {"aclnnInplaceDivMods", "ops-math floordiv.cpp", floor_division},
    {"aclnnFmodTensor", "ops-math mod.cpp", by_result<F, H, B, I32, I8, U8>},
    {"aclnnFmodScalar", "ops-math mod.cpp", by_result<F, H, B, I32, I8, U8>},
    {"aclnnPowTensorTensor", "ops-math pow.cpp", by_result<F, H, B, I32, I8, U8>},
    {"aclnnMaximum", "ops-math maximum.cpp", by_result<F, H, B, I32, I64, I8, BOOL>},
    {"aclnnMinimum", "ops-math minimum.cpp", by_result<F, H, B, I32, I64, I8, BOOL>},
    {"aclnnAbs", "ops-math abs.cpp", by_input<F, H, B, I32, I64>},
    {"aclnnNeg", "ops-math neg.cpp", by_input<F, H, B, I32, I64, I8>},
    {"aclnnSign", "ops-math sign.cpp", by_input<F, H, B, I32, BOOL>},
    {"aclnnBitwiseAndTensor", "ops-math bitwiseand.cpp", by_result<I16, I32, I64, BOOL>},
    {"aclnnBitwiseOrTensor", "ops-math bitwise_or.cpp", by_result<I16, I32, I64, BOOL>},
    {"aclnnBitwiseXorTensor", "ops-math bitwise_xor.cpp", by_result<I16, I32, I64, BOOL>},
    {"aclnnScatter", "ops-nn scatter_elements.cpp", scatter},
    {"aclnnInplaceScatter", "ops-nn scatter_elements.cpp", scatter},
    {"aclnnScatterValue", "ops-nn scatter_elements.cpp", scatter},
    {"aclnnInplaceScatterValue", "ops-nn scatter_elements.cpp", scatter},
    {"aclnnScatterAdd", "ops-nn scatter_elements.cpp", scatter},
    {"aclnnInplaceMaskedScatter", "ops-nn masked_scatter.cpp",
     by_input<F, H, B, I32, I64, I16, I8, U8>},
    {"aclnnNonzero", "ops-nn nonzero.cpp", by_input<F, H, B, I8, U8, BOOL>},
    {"aclnnNonzeroV2", "ops-nn nonzero.cpp", by_input<F, H, B, I8, U8, BOOL>},
    {"aclnnFlip", "ops-nn reverse_v2.cpp", by_input<F, H, I32, I16, I64>},
};

}  // namespace

const AiCpuRule *find_ai_cpu_rule(const char *op) {
  for (const AiCpuRule &rule : kRules)
    if (!strcmp(rule.op, op))
      return &rule;
  return nullptr;
}

}  // namespace emu
