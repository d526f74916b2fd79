// Arithmetic, unary functions, clamps.
#include "ops/op_abi.h"

#include <algorithm>

using namespace emu;

// The types that aclnn_x.cpp (ops-math, ops-nn, August 2026) lists for A2 and A3.
struct Types {
  std::initializer_list<at::ScalarType> input;
  bool floats;  // whether the result is a float
};
constexpr auto kF = at::kFloat, kH = at::kHalf, kB = at::kBFloat16, kD = at::kDouble;
constexpr auto kI8 = at::kChar, kU8 = at::kByte, kI16 = at::kShort, kI32 = at::kInt,
               kI64 = at::kLong, kBool = at::kBool;
constexpr Types kHalves{{kF, kH, kB}, true}, kFloats{{kF, kH, kB, kD}, true};
constexpr Types kToFloats{{kF, kH, kB, kD, kI8, kU8, kI16, kI32, kI64, kBool}, true};
constexpr Types kLongToFloats{{kF, kH, kB, kD, kI64, kBool}, true};
constexpr Types kAll{{kF, kH, kB, kD, kI8, kU8, kI16, kI32, kI64, kBool}, false};
constexpr Types kWholeNumbers{{kF, kH, kB, kD, kI8, kU8, kI16, kI32, kI64}, false};
constexpr Types kRounded{{kF, kH, kB, kD, kI32, kI64}, false};
constexpr Types kSigned{{kF, kH, kB, kD, kI8, kI32, kI64}, false};
constexpr Types kSigns{{kF, kH, kB, kD, kI32, kI64, kBool}, false};
constexpr Types kRectified{{kF, kH, kB, kI8, kU8, kI32, kI64}, false};

template <const Types &types> static void require_types(const Tensor &a, const Tensor &out) {
  refuse_unless(!types.floats || out.is_floating_point(), "the result must be a float, got ",
                out.scalar_type());
  const auto *end = types.input.end();
  demand(std::find(types.input.begin(), end, a.scalar_type()) != end, a.scalar_type(),
         " is not among the types of the operator");
}

// UNARY defines aclnnX(a, out) and aclnnInplaceX(a); BINARY defines aclnnX(a, b, out) and
// aclnnInplaceX(a, b). With kernels=skip, only results that are integers or booleans are computed,
// because they may be used as positions.
#define UNARY(NAME, F, TYPES)                                                                      \
  OP(aclnn##NAME, [](Tensor a, Tensor out) -> Task {                                               \
    require_types<TYPES>(a, out);                                                                  \
    return [=] {                                                                                   \
      AtenScope scope;                                                                             \
      if (!skips(out))                                                                             \
        out.copy_(at::F(a));                                                                       \
    };                                                                                             \
  })                                                                                               \
  OP(aclnnInplace##NAME, [](Tensor a) -> Task {                                                    \
    require_types<TYPES>(a, a);                                                                    \
    return [=] {                                                                                   \
      AtenScope scope;                                                                             \
      if (!skips(a))                                                                               \
        a.copy_(at::F(a));                                                                         \
    };                                                                                             \
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
// aclnnX(a, b, alpha, out): a + alpha * b and similar.
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

// The two most frequent operators write into `out` directly if the types allow it.
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

// The rounding of a quotient is 0 (none), 1 (towards zero) or 2 (down).
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

UNARY(Abs, abs, kAll)
UNARY(Ceil, ceil, kFloats)
UNARY(Cos, cos, kToFloats)
UNARY(Erf, erf, kLongToFloats)
UNARY(Exp, exp, kLongToFloats)
UNARY(Exp2, exp2, kToFloats)
UNARY(Expm1, expm1, kLongToFloats)
UNARY(Floor, floor, kWholeNumbers)
UNARY(Log, log, kToFloats)
UNARY(Log10, log10, kToFloats)
UNARY(Log1p, log1p, kToFloats)
UNARY(Log2, log2, kToFloats)
UNARY(Neg, neg, kSigned)
UNARY(Reciprocal, reciprocal, kToFloats)
UNARY(Relu, relu, kRectified)
UNARY(Round, round, kRounded)
UNARY(Rsqrt, rsqrt, kToFloats)
UNARY(Sigmoid, sigmoid, kToFloats)
UNARY(Sign, sign, kSigns)
UNARY(Silu, silu, kHalves)
UNARY(Sin, sin, kToFloats)
UNARY(Sqrt, sqrt, kToFloats)
UNARY(Tanh, tanh, kToFloats)
UNARY(Trunc, trunc, kHalves)

// Document aclnnGelu: always computed with tanh, also if torch requests the other form.
OP(aclnnGelu, [](Tensor a, Tensor out) -> Task {
  require_types<kHalves>(a, out);
  return arithmetic([=] {
    AtenScope scope;
    out.copy_(at::gelu(a, "tanh"));
  });
})
// Document aclnnSoftplus: float32, float16, bfloat16.
OP(aclnnSoftplus, [](Tensor a, Scalar beta, Scalar threshold, Tensor out) -> Task {
  require_types<kHalves>(a, out);
  return arithmetic([=] {
    AtenScope scope;
    out.copy_(at::softplus(a, beta, threshold));
  });
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
