// Copies, fills, elementwise and comparison operators.
#include "aten.h"

#include "ops/op_abi.h"

using namespace emu;

// ---- copies and fills
OP(aclnnInplaceCopy, [](Tensor to, Tensor from) { to.copy_(from); })
OP(aclnnCast, [](Tensor a, aclDataType, Tensor out) { out.copy_(a); })
OP(aclnnInplaceZero, [](Tensor a) { a.zero_(); })
OP(aclnnInplaceOne, [](Tensor a) { a.fill_(1); })
OP(aclnnInplaceFillScalar, [](Tensor a, Scalar v) { a.fill_(v); })
OP(aclnnInplaceFillTensor, [](Tensor a, Tensor v) { a.copy_(v.expand(a.sizes())); })
OP(aclnnArange,
   [](Scalar start, Scalar end, Scalar step, Tensor out) { at::arange_out(out, start, end, step); })
OP(aclnnEye, [](int64_t n, int64_t m, Tensor out) { out.copy_(at::eye(n, m)); })
OP(aclnnCat, [](Tensors list, int64_t dim, Tensor out) { out.copy_(at::cat(list, dim)); })

// ---- arithmetic
OP(aclnnAdd, [](Tensor a, Tensor b, Scalar k, Tensor out) { at::add_out(out, a, b, k); })
OP(aclnnAdds, [](Tensor a, Scalar b, Scalar k, Tensor out) { out.copy_(at::add(a, b, k)); })
OP(aclnnInplaceAdd, [](Tensor a, Tensor b, Scalar k) { a.add_(b, k); })
OP(aclnnInplaceAdds, [](Tensor a, Scalar b, Scalar k) { a.add_(b, k); })
OP(aclnnSub, [](Tensor a, Tensor b, Scalar k, Tensor out) { at::sub_out(out, a, b, k); })
OP(aclnnSubs, [](Tensor a, Scalar b, Scalar k, Tensor out) { out.copy_(at::sub(a, b, k)); })
OP(aclnnInplaceSub, [](Tensor a, Tensor b, Scalar k) { a.sub_(b, k); })
OP(aclnnMul, [](Tensor a, Tensor b, Tensor out) { at::mul_out(out, a, b); })
OP(aclnnMuls, [](Tensor a, Scalar b, Tensor out) { out.copy_(at::mul(a, b)); })
OP(aclnnInplaceMul, [](Tensor a, Tensor b) { a.mul_(b); })
OP(aclnnInplaceMuls, [](Tensor a, Scalar b) { a.mul_(b); })
OP(aclnnDiv, [](Tensor a, Tensor b, Tensor out) { at::div_out(out, a, b); })
OP(aclnnDivs, [](Tensor a, Scalar b, Tensor out) { out.copy_(at::div(a, b)); })
OP(aclnnInplaceDivs, [](Tensor a, Scalar b) { a.div_(b); })

static Tensor rounded(const Tensor &quotient, int mode) {
  return mode == 2 ? at::floor(quotient) : mode == 1 ? at::trunc(quotient) : quotient;
}
OP(aclnnDivMod,
   [](Tensor a, Tensor b, int mode, Tensor out) { out.copy_(rounded(at::div(a, b), mode)); })
OP(aclnnDivMods,
   [](Tensor a, Scalar b, int mode, Tensor out) { out.copy_(rounded(at::div(a, b), mode)); })

// ---- families: aclnnX(a, out), aclnnX(a, b, out), aclnnX(a, scalar, out)
#define UNARY(NAME, F) OP(aclnn##NAME, [](Tensor a, Tensor out) { out.copy_(at::F(a)); })
#define BINARY(NAME, F)                                                                            \
  OP(aclnn##NAME, [](Tensor a, Tensor b, Tensor out) { out.copy_(at::F(a, b)); })
#define WITH_SCALAR(NAME, F)                                                                       \
  OP(aclnn##NAME, [](Tensor a, Scalar b, Tensor out) { out.copy_(at::F(a, b)); })

UNARY(Abs, abs)
UNARY(Ceil, ceil)
UNARY(Cos, cos)
UNARY(Exp, exp)
UNARY(Floor, floor)
UNARY(IsFinite, isfinite)
UNARY(Log, log)
UNARY(LogicalNot, logical_not)
UNARY(BitwiseNot, bitwise_not)
UNARY(Neg, neg)
UNARY(Reciprocal, reciprocal)
UNARY(Rsqrt, rsqrt)
UNARY(Sigmoid, sigmoid)
UNARY(Silu, silu)
UNARY(Sin, sin)
UNARY(Sqrt, sqrt)
UNARY(Tanh, tanh)

BINARY(BitwiseAndTensor, bitwise_and)
BINARY(BitwiseOrTensor, bitwise_or)
BINARY(EqTensor, eq)
BINARY(GeTensor, ge)
BINARY(GtTensor, gt)
BINARY(LeTensor, le)
BINARY(LogicalAnd, logical_and)
BINARY(LogicalOr, logical_or)
BINARY(LtTensor, lt)
BINARY(Maximum, maximum)
BINARY(Minimum, minimum)
BINARY(NeTensor, ne)

WITH_SCALAR(EqScalar, eq)
WITH_SCALAR(GeScalar, ge)
WITH_SCALAR(GtScalar, gt)
WITH_SCALAR(LeScalar, le)
WITH_SCALAR(LtScalar, lt)
WITH_SCALAR(NeScalar, ne)
WITH_SCALAR(PowTensorScalar, pow)
WITH_SCALAR(RemainderTensorScalar, remainder)

// ---- selection
OP(aclnnSWhere,
   [](Tensor condition, Tensor a, Tensor b, Tensor out) { out.copy_(at::where(condition, a, b)); })
OP(aclnnMaskedFillScalar,
   [](Tensor a, Tensor mask, Scalar v, Tensor out) { out.copy_(a.masked_fill(mask, v)); })
OP(aclnnInplaceMaskedFillScalar, [](Tensor a, Tensor mask, Scalar v) { a.masked_fill_(mask, v); })
