// Comparisons, logical and bitwise operators, selection by masks.
#include "ops/op_abi.h"

using namespace emu;

#define BINARY_OF(SECOND, NAME, F)                                                                 \
  OP(aclnn##NAME, [](Tensor a, SECOND b, Tensor out) {                                             \
    if (!are_mask_bits(a))                                                                         \
      out.copy_(at::F(a, b));                                                                      \
  })                                                                                               \
  OP(aclnnInplace##NAME, [](Tensor a, SECOND b) {                                                  \
    if (!are_mask_bits(a))                                                                         \
      a.copy_(at::F(a, b));                                                                        \
  })
#define COMPARISON(NAME, F) BINARY_OF(Tensor, NAME##Tensor, F) BINARY_OF(Scalar, NAME##Scalar, F)

COMPARISON(Eq, eq)
COMPARISON(Ne, ne)
COMPARISON(Lt, lt)
COMPARISON(Le, le)
COMPARISON(Gt, gt)
COMPARISON(Ge, ge)
COMPARISON(BitwiseAnd, bitwise_and)
COMPARISON(BitwiseOr, bitwise_or)
COMPARISON(BitwiseXor, bitwise_xor)
BINARY_OF(Tensor, LogicalAnd, logical_and)
BINARY_OF(Tensor, LogicalOr, logical_or)
BINARY_OF(Tensor, LogicalXor, logical_xor)

#define UNARY(NAME, F) OP(aclnn##NAME, [](Tensor a, Tensor out) { out.copy_(at::F(a)); })
UNARY(LogicalNot, logical_not)
UNARY(BitwiseNot, bitwise_not)
UNARY(IsFinite, isfinite)
UNARY(IsPosInf, isposinf)
UNARY(IsNegInf, isneginf)
UNARY(Signbit, signbit)
OP(aclnnInplaceLogicalNot, [](Tensor a) { a.logical_not_(); })
OP(aclnnEqual, [](Tensor a, Tensor b, Tensor out) { out.fill_(at::equal(a, b)); })
OP(aclnnIsClose, [](Tensor a, Tensor b, double rtol, double atol, bool equal_nan, Tensor out) {
  out.copy_(at::isclose(a, b, rtol, atol, equal_nan));
})
OP(aclnnIsInTensorScalar,
   [](Tensor a, Scalar b, bool, bool invert, Tensor out) { out.copy_(invert ? a.ne(b) : a.eq(b)); })

// ---- selection
OP(aclnnSWhere, [](Tensor condition, Tensor a, Tensor b, Tensor out) {
  out.copy_(at::where(condition.to(at::kBool), a, b));
})
OP(aclnnInplaceMaskedFillScalar, [](Tensor a, Tensor mask, Scalar v) {
  if (!skips(a))
    a.masked_fill_(mask.to(at::kBool), v);
})
OP(aclnnInplaceMaskedFillTensor, [](Tensor a, Tensor mask, Tensor v) {
  if (!skips(a))
    a.masked_fill_(mask.to(at::kBool), v.reshape({}));
})
OP(aclnnInplaceMaskedScatter, [](Tensor a, Tensor mask, Tensor source) {
  a.masked_scatter_(mask.to(at::kBool), source);
})

// Other files have macros of these names.
#undef BINARY_OF
#undef COMPARISON
#undef UNARY
