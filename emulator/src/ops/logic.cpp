// Comparisons, logical and bitwise operators, selection by masks.
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
// ATen branches on each element of a mask, which is slow if the mask is random. This loop has no
// branches. It needs contiguous tensors of equal sizes, whose elements have four bytes.
static bool are_words(const Tensor &mask, std::initializer_list<Tensor> tensors) {
  bool result = mask.scalar_type() == at::kBool && mask.is_contiguous();
  for (const Tensor &each : tensors)
    result &= each.element_size() == 4 && each.is_contiguous() && each.sizes() == mask.sizes() &&
              each.scalar_type() == tensors.begin()->scalar_type();
  return result;
}
template <typename First, typename Second>
static void choose_words(const Tensor &mask, First first, Second second, uint32_t *chosen) {
  const auto *is_first = static_cast<const uint8_t *>(mask.data_ptr());
  for (int64_t i = 0, n = mask.numel(); i < n; i++) {
    const uint32_t a = first(i), b = second(i), is_a = is_first[i];
    chosen[i] = b ^ ((a ^ b) & -is_a);
  }
}
static uint32_t *words_of(const Tensor &t) { return static_cast<uint32_t *>(t.data_ptr()); }

OP(aclnnSWhere, [](Tensor condition, Tensor a, Tensor b, Tensor out) {
  if (!are_words(condition, {a, b, out})) {
    out.copy_(at::where(condition.to(at::kBool), a, b));
    return;
  }
  const uint32_t *first = words_of(a), *second = words_of(b);
  choose_words(
      condition, [=](int64_t i) { return first[i]; }, [=](int64_t i) { return second[i]; },
      words_of(out));
})
OP(aclnnInplaceMaskedFillScalar, [](Tensor a, Tensor mask, Scalar v) {
  if (skips(a))
    return;
  if (!are_words(mask, {a})) {
    a.masked_fill_(mask.to(at::kBool), v);
    return;
  }
  Tensor filling = at::scalar_tensor(v, a.scalar_type());
  const uint32_t word = *words_of(filling), *kept = words_of(a);
  choose_words(
      mask, [=](int64_t) { return word; }, [=](int64_t i) { return kept[i]; }, words_of(a));
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
