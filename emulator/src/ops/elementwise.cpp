// Arithmetic, unary functions, clamps.
#include "kernels/kernels.h"
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

// Returns the range of memory from the first to the last element.
static std::pair<const char *, const char *> span_of(const Tensor &t) {
  auto *begin = static_cast<const char *>(t.const_data_ptr());
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); i++)
    last += (t.size(i) - 1) * t.stride(i);
  return {begin, begin + (last + 1) * t.element_size()};
}

// Whether a function can compute directly into `out`: all types are equal, the result has the shape
// of `out`, and each input shares either all or none of its memory with `out`.
static bool receives(const Tensor &out, std::initializer_list<Tensor> inputs) {
  std::vector<int64_t> shape;
  auto [begin, end] = span_of(out);
  for (const Tensor &in : inputs) {
    auto [first, last] = span_of(in);
    bool is_same = first == begin && in.sizes() == out.sizes() && in.strides() == out.strides();
    if (in.scalar_type() != out.scalar_type() || !(is_same || last <= begin || end <= first))
      return false;
    shape = at::infer_size(shape, in.sizes());
  }
  return out.numel() > 0 && out.sizes() == shape;
}

// WRITE computes at::F(...) into `out`. It allocates a tensor for the result only if `receives` is
// false.
#define WRITE(F, OUT, TENSORS, ...)                                                                \
  do {                                                                                             \
    Tensor result = OUT;                                                                           \
    if (receives(result, TENSORS))                                                                 \
      at::F##_out(result, __VA_ARGS__);                                                            \
    else                                                                                           \
      result.copy_(at::F(__VA_ARGS__));                                                            \
  } while (0)
#define TENSORS(...) (std::initializer_list<Tensor>{__VA_ARGS__})

// UNARY defines aclnnX(a, out) and aclnnInplaceX(a). BINARY defines aclnnX(a, b, out) and
// aclnnInplaceX(a, b). With kernels=skip, only results that are integers or booleans are computed,
// because they may be used as positions.
#define UNARY_BY(NAME, COMPUTE, TYPES)                                                             \
  OP(aclnn##NAME, [](Tensor a, Tensor out) -> Task {                                               \
    require_types<TYPES>(a, out);                                                                  \
    return [=] {                                                                                   \
      AtenScope scope;                                                                             \
      if (!skips(out))                                                                             \
        COMPUTE(a, out);                                                                           \
    };                                                                                             \
  })                                                                                               \
  OP(aclnnInplace##NAME, [](Tensor a) -> Task {                                                    \
    require_types<TYPES>(a, a);                                                                    \
    return [=] {                                                                                   \
      AtenScope scope;                                                                             \
      if (!skips(a))                                                                               \
        COMPUTE(a, a);                                                                             \
    };                                                                                             \
  })
#define UNARY(NAME, F, TYPES)                                                                      \
  static void compute_##F(const Tensor &a, const Tensor &out) { WRITE(F, out, TENSORS(a), a); }     \
  UNARY_BY(NAME, compute_##F, TYPES)
// A unary function for which the emulator has a kernel for float32.
#define UNARY_WITH_KERNEL(NAME, F, TYPES)                                                          \
  static void compute_##F(const Tensor &a, const Tensor &out) {                                    \
    if (a.scalar_type() == kF && a.is_contiguous() && out.is_contiguous() && receives(out, {a}))   \
      kernels::F(a.const_data_ptr<float>(), out.data_ptr<float>(), a.numel());                     \
    else                                                                                           \
      out.copy_(at::F(a));                                                                         \
  }                                                                                                \
  UNARY_BY(NAME, compute_##F, TYPES)
#define BINARY(NAME, F)                                                                            \
  OP(aclnn##NAME, [](Tensor a, Tensor b, Tensor out) {                                             \
    if (!skips(out))                                                                               \
      WRITE(F, out, TENSORS(a, b), a, b);                                                          \
  })                                                                                               \
  OP(aclnnInplace##NAME, [](Tensor a, Tensor b) {                                                  \
    if (!skips(a))                                                                                 \
      WRITE(F, a, TENSORS(a, b), a, b);                                                            \
  })
#define WITH_SCALAR(NAME, F)                                                                       \
  OP(aclnn##NAME, [](Tensor a, Scalar b, Tensor out) {                                             \
    if (!skips(out))                                                                               \
      out.copy_(at::F(a, b));                                                                      \
  })                                                                                               \
  OP(aclnnInplace##NAME, [](Tensor a, Scalar b) {                                                  \
    if (!skips(a))                                                                                 \
      a.copy_(at::F(a, b));                                                                        \
  })
// Defines aclnnX(a, b, alpha, out), which computes a + alpha * b or a similar expression.
#define SCALED(NAME, F)                                                                            \
  OP(aclnn##NAME, [](Tensor a, Tensor b, Scalar k, Tensor out) {                                   \
    if (!skips(out))                                                                               \
      WRITE(F, out, TENSORS(a, b), a, b, k);                                                       \
  })                                                                                               \
  OP(aclnnInplace##NAME, [](Tensor a, Tensor b, Scalar k) {                                        \
    if (!skips(a))                                                                                 \
      WRITE(F, a, TENSORS(a, b), a, b, k);                                                         \
  })
#define SCALED_BY_SCALAR(NAME, F)                                                                  \
  OP(aclnn##NAME, [](Tensor a, Scalar b, Scalar k, Tensor out) {                                   \
    if (!skips(out))                                                                               \
      out.copy_(at::F(a, b, k));                                                                   \
  })                                                                                               \
  OP(aclnnInplace##NAME, [](Tensor a, Scalar b, Scalar k) {                                        \
    if (!skips(a))                                                                                 \
      a.copy_(at::F(a, b, k));                                                                     \
  })

// The quotient of two integers is a float. CANN casts the quotient to the type of `out`, but
// at::div_out refuses this cast.
static void write_quotient(const Tensor &a, const Tensor &b, const Tensor &out) {
  if (out.is_floating_point())
    WRITE(div, out, TENSORS(a, b), a, b);
  else
    out.copy_(at::div(a, b));
}
static void write_quotient(const Tensor &a, const Scalar &b, const Tensor &out) {
  out.copy_(at::div(a, b));
}

SCALED(Add, add)
SCALED(Sub, sub)
SCALED(Rsub, rsub)
SCALED_BY_SCALAR(Adds, add)
SCALED_BY_SCALAR(Subs, sub)
SCALED_BY_SCALAR(Rsubs, rsub)

BINARY(Mul, mul)
WITH_SCALAR(Muls, mul)
OP(aclnnDiv, [](Tensor a, Tensor b, Tensor out) {
  if (!skips(out))
    write_quotient(a, b, out);
})
OP(aclnnInplaceDiv, [](Tensor a, Tensor b) {
  if (!skips(a))
    write_quotient(a, b, a);
})
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

// The mode says how a quotient is rounded: 0 means not at all, 1 towards zero, and 2 down.
template <class Second>
static void divide(const Tensor &a, const Second &b, int mode, const Tensor &out) {
  if (skips(out))
    return;
  if (mode == 0)
    write_quotient(a, b, out);
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
UNARY_WITH_KERNEL(Log, log, kToFloats)
UNARY(Log10, log10, kToFloats)
UNARY_WITH_KERNEL(Log1p, log1p, kToFloats)
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

// Document aclnnGelu: the result is always computed with tanh, even if torch requests the form
// without tanh.
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
    WRITE(addcmul, out, TENSORS(a, b, c), a, b, c, k);
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

// Other files define macros with these names, too.
#undef UNARY
#undef BINARY_OF
#undef BINARY
#undef WITH_SCALAR
#undef SCALED_OF
