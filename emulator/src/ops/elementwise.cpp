// Arithmetic, unary functions, clamps.
#include "ops/op_abi.h"

using namespace emu;

// aclnnX(a, out), aclnnInplaceX(a); aclnnX(a, b, out), aclnnInplaceX(a, b). Floats are left alone
// with kernels=skip; integers and booleans are always computed, because they decide about positions.
#define UNARY(NAME, F)                                                                             \
  OP(aclnn##NAME, [](Tensor a, Tensor out) {                                                       \
    if (!skips(out))                                                                               \
      out.copy_(at::F(a));                                                                         \
  })                                                                                               \
  OP(aclnnInplace##NAME, [](Tensor a) {                                                            \
    if (!skips(a))                                                                                 \
      a.copy_(at::F(a));                                                                           \
  })
#define BINARY_OF(SECOND, NAME, F)                                                                 \
  OP(aclnn##NAME, [](Tensor a, SECOND b, Tensor out) {                                             \
    if (!skips(out))                                                                               \
      out.copy_(at::F(a, b));                                                                      \
  })                                                                                               \
  OP(aclnnInplace##NAME, [](Tensor a, SECOND b) {                                                  \
    if (!skips(a))                                                                                 \
      a.copy_(at::F(a, b));                                                                        \
  })
#define BINARY(NAME, F) BINARY_OF(Tensor, NAME, F)
#define WITH_SCALAR(NAME, F) BINARY_OF(Scalar, NAME, F)
// aclnnX(a, b, alpha, out): a + alpha * b and the like.
#define SCALED_OF(SECOND, NAME, F)                                                                 \
  OP(aclnn##NAME, [](Tensor a, SECOND b, Scalar k, Tensor out) {                                   \
    if (!skips(out))                                                                               \
      out.copy_(at::F(a, b, k));                                                                   \
  })                                                                                               \
  OP(aclnnInplace##NAME, [](Tensor a, SECOND b, Scalar k) {                                        \
    if (!skips(a))                                                                                 \
      a.copy_(at::F(a, b, k));                                                                     \
  })

SCALED_OF(Scalar, Adds, add)
SCALED_OF(Tensor, Sub, sub)
SCALED_OF(Scalar, Subs, sub)
SCALED_OF(Tensor, Rsub, rsub)
SCALED_OF(Scalar, Rsubs, rsub)

// The two most used ones write in place where the types allow it.
static bool same_types(const Tensor &a, const Tensor &b, const Tensor &out) {
  return a.scalar_type() == out.scalar_type() && b.scalar_type() == out.scalar_type();
}
static void add(const Tensor &a, const Tensor &b, const Scalar &k, const Tensor &out) {
  Tensor result = out;
  if (skips(out))
    return;
  if (same_types(a, b, out))
    at::add_out(result, a, b, k);
  else
    result.copy_(at::add(a, b, k));
}
static void multiply(const Tensor &a, const Tensor &b, const Tensor &out) {
  Tensor result = out;
  if (skips(out))
    return;
  if (same_types(a, b, out))
    at::mul_out(result, a, b);
  else
    result.copy_(at::mul(a, b));
}
OP(aclnnAdd, [](Tensor a, Tensor b, Scalar k, Tensor out) { add(a, b, k, out); })
OP(aclnnInplaceAdd, [](Tensor a, Tensor b, Scalar k) { add(a, b, k, a); })
OP(aclnnMul, [](Tensor a, Tensor b, Tensor out) { multiply(a, b, out); })
OP(aclnnInplaceMul, [](Tensor a, Tensor b) { multiply(a, b, a); })

WITH_SCALAR(Muls, mul)
BINARY(Div, div)
WITH_SCALAR(Divs, div)
BINARY(FloorDivide, floor_divide)
WITH_SCALAR(FloorDivides, floor_divide)
BINARY(RemainderTensorTensor, remainder)
WITH_SCALAR(RemainderTensorScalar, remainder)
BINARY(FmodTensor, fmod)
WITH_SCALAR(FmodScalar, fmod)
BINARY(PowTensorTensor, pow)
WITH_SCALAR(PowTensorScalar, pow)
BINARY(Maximum, maximum)
BINARY(Minimum, minimum)

OP(aclnnPowScalarTensor, [](Scalar a, Tensor b, Tensor out) {
  if (!skips(out))
    out.copy_(at::pow(a, b));
})
OP(aclnnRemainderScalarTensor, [](Scalar a, Tensor b, Tensor out) {
  if (!skips(out))
    out.copy_(at::remainder(a, b));
})

// Rounding of a quotient: 0 none, 1 towards zero, 2 down.
template <class Second>
static void divide(const Tensor &a, const Second &b, int mode, const Tensor &out) {
  if (skips(out))
    return;
  if (mode == 0)
    out.copy_(at::div(a, b));
  else
    out.copy_(at::div(a, b, mode == 1 ? "trunc" : "floor"));
}
OP(aclnnDivMod, [](Tensor a, Tensor b, int mode, Tensor out) { divide(a, b, mode, out); })
OP(aclnnDivMods, [](Tensor a, Scalar b, int mode, Tensor out) { divide(a, b, mode, out); })
OP(aclnnInplaceDivMod, [](Tensor a, Tensor b, int mode) { divide(a, b, mode, a); })
OP(aclnnInplaceDivMods, [](Tensor a, Scalar b, int mode) { divide(a, b, mode, a); })

UNARY(Abs, abs)
UNARY(Ceil, ceil)
UNARY(Cos, cos)
UNARY(Erf, erf)
UNARY(Exp, exp)
UNARY(Exp2, exp2)
UNARY(Expm1, expm1)
UNARY(Floor, floor)
UNARY(Log, log)
UNARY(Log10, log10)
UNARY(Log1p, log1p)
UNARY(Log2, log2)
UNARY(Neg, neg)
UNARY(Reciprocal, reciprocal)
UNARY(Relu, relu)
UNARY(Round, round)
UNARY(Rsqrt, rsqrt)
UNARY(Sigmoid, sigmoid)
UNARY(Sign, sign)
UNARY(Silu, silu)
UNARY(Sin, sin)
UNARY(Sqrt, sqrt)
UNARY(Tanh, tanh)
UNARY(Trunc, trunc)

OP(aclnnGelu, [](Tensor a, Tensor out) {
  if (!skipping())
    out.copy_(at::gelu(a));
})
OP(aclnnAddcmul, [](Tensor a, Tensor b, Tensor c, Scalar k, Tensor out) {
  if (!skips(out))
    out.copy_(at::addcmul(a, b, c, k));
})

// ---- clamps
OP(aclnnClamp, [](Tensor a, OptScalar least, OptScalar most, Tensor out) {
  if (!skips(out))
    out.copy_(at::clamp(a, least, most));
})
OP(aclnnClampTensor, [](Tensor a, OptTensor least, OptTensor most, Tensor out) {
  if (!skips(out))
    out.copy_(at::clamp(a, least, most));
})
WITH_SCALAR(ClampMin, clamp_min)
WITH_SCALAR(ClampMax, clamp_max)
BINARY(ClampMinTensor, clamp_min)
BINARY(ClampMaxTensor, clamp_max)
OP(aclnnNanToNum, [](Tensor a, float nan, float greatest, float least, Tensor out) {
  if (!skips(out))
    out.copy_(at::nan_to_num(a, nan, greatest, least));
})

// Other files have macros of these names.
#undef UNARY
#undef BINARY_OF
#undef BINARY
#undef WITH_SCALAR
#undef SCALED_OF
