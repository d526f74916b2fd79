// Comparisons, logical and bitwise operators, selection by masks.
#include "kernels/kernels.h"
#include "ops/op_abi.h"

using namespace emu;

#define BINARY_OF(SECOND, NAME, F)                                                                 \
  OP(aclnn##NAME, [](Tensor a, SECOND b, Tensor out) {                                             \
    if (!are_mask_bits(a))                                                                         \
      at::F##_out(out, a, b);                                                                      \
  })                                                                                               \
  OP(aclnnInplace##NAME, [](Tensor a, SECOND b) {                                                  \
    if (!are_mask_bits(a))                                                                         \
      a.copy_(at::F(a, b));                                                                        \
  })
#define BITWISE(NAME, F) BINARY_OF(Tensor, NAME##Tensor, F) BINARY_OF(Scalar, NAME##Scalar, F)

// ATen compares element by element. The kernel for floats and a number uses vectors.
template <class Else>
static void compare(const Tensor &a, const Scalar &b, const Tensor &out, kernels::Order order,
                    Else other) {
  if (are_mask_bits(a))
    return;
  if (a.scalar_type() == at::kFloat && out.scalar_type() == at::kBool && a.is_contiguous() &&
      out.is_contiguous() && a.sizes() == out.sizes())
    kernels::compare(a.const_data_ptr<float>(), b.to<float>(), order,
                     static_cast<uint8_t *>(out.data_ptr()), a.numel());
  else
    other();
}
#define COMPARISON(NAME, F)                                                                        \
  BINARY_OF(Tensor, NAME##Tensor, F)                                                               \
  OP(aclnn##NAME##Scalar, [](Tensor a, Scalar b, Tensor out) {                                     \
    compare(a, b, out, kernels::Order::NAME, [&] { at::F##_out(out, a, b); });                     \
  })                                                                                               \
  OP(aclnnInplace##NAME##Scalar, [](Tensor a, Scalar b) {                                          \
    if (!are_mask_bits(a))                                                                         \
      a.copy_(at::F(a, b));                                                                        \
  })

COMPARISON(Eq, eq)
COMPARISON(Ne, ne)
COMPARISON(Lt, lt)
COMPARISON(Le, le)
COMPARISON(Gt, gt)
COMPARISON(Ge, ge)
BITWISE(BitwiseAnd, bitwise_and)
BITWISE(BitwiseOr, bitwise_or)
BITWISE(BitwiseXor, bitwise_xor)
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

// ---- selection ATen branches on each element of a mask, which is slow if the mask is random. The
// kernels have no branches. The kernels need contiguous tensors of equal sizes, whose elements have
// four bytes.
static bool are_words(const Tensor &mask, std::initializer_list<Tensor> tensors) {
  bool result = mask.scalar_type() == at::kBool && mask.is_contiguous();
  for (const Tensor &each : tensors)
    result &= each.element_size() == 4 && each.is_contiguous() && each.sizes() == mask.sizes() &&
              each.scalar_type() == tensors.begin()->scalar_type();
  return result;
}
static const uint8_t *flags_of(const Tensor &t) { return static_cast<uint8_t *>(t.data_ptr()); }
static uint32_t *words_of(const Tensor &t) { return static_cast<uint32_t *>(t.data_ptr()); }

OP(aclnnSWhere, [](Tensor condition, Tensor a, Tensor b, Tensor out) {
  if (are_words(condition, {a, b, out}))
    kernels::choose_words(flags_of(condition), words_of(a), words_of(b), words_of(out),
                          out.numel());
  else
    out.copy_(at::where(condition.to(at::kBool), a, b));
})
OP(aclnnInplaceMaskedFillScalar, [](Tensor a, Tensor mask, Scalar v) {
  if (skips(a))
    return;
  if (are_words(mask, {a}))
    kernels::fill_words(flags_of(mask), *words_of(at::scalar_tensor(v, a.scalar_type())),
                        words_of(a), a.numel());
  else
    a.masked_fill_(mask.to(at::kBool), v);
})
OP(aclnnInplaceMaskedFillTensor, [](Tensor a, Tensor mask, Tensor v) {
  if (!skips(a))
    a.masked_fill_(mask.to(at::kBool), v.reshape({}));
})
OP(aclnnInplaceMaskedScatter, [](Tensor a, Tensor mask, Tensor source) {
  a.masked_scatter_(mask.to(at::kBool), source);
})

// Other files define macros with these names, too.
#undef BINARY_OF
#undef BITWISE
#undef COMPARISON
#undef UNARY
