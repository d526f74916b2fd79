// Matrix products. The emulator's loops or sgemm compute products of float32. Products of float16
// and bfloat16 are also computed in float32.
#include "ops/matmul.h"

using namespace emu;
using kernels::MatMul;

// Whether the rows of a matrix are contiguous. The kernel can read matrices with contiguous rows,
// or, as transposed matrices, with contiguous columns.
static bool has_rows(const Tensor &t) { return t.stride(1) == 1 || t.size(1) == 1; }
static bool has_columns(const Tensor &t) { return t.stride(0) == 1 || t.size(0) == 1; }
static int64_t row_stride(const Tensor &t) {
  return t.size(0) == 1 ? std::max<int64_t>(t.size(1), 1) : t.stride(0);
}
static int64_t column_stride(const Tensor &t) {
  return t.size(1) == 1 ? std::max<int64_t>(t.size(0), 1) : t.stride(1);
}

// Documents aclnnMm and torch.mm: two matrices of the same type, [m, k] and [k, n].
static void check(const Tensor &a, const Tensor &b, const Tensor &out) {
  refuse_unless(a.dim() == 2 && b.dim() == 2 && out.dim() == 2, "want matrices, got ", a.sizes(),
                " and ", b.sizes());
  refuse_unless(a.size(1) == b.size(0), "shapes ", a.sizes(), " and ", b.sizes(),
                " do not multiply");
  require_same_type("mat2", b, a);
  // With these operators, the cube unit multiplies float32, float16 or bfloat16. The quantised
  // operators multiply int8.
  demand(is_kernel_type(a), "matrix product of ", a.scalar_type(),
         ": float32, float16 or bfloat16 is needed");
}

std::optional<MatMul> emu::bind_product(const Tensor &a, const Tensor &b, const Tensor &out) {
  check(a, b, out);
  bool transposed = !has_rows(b);
  bool direct = is_kernel_type(a) && is_kernel_type(out) && has_rows(a) && has_rows(out) &&
                (has_rows(b) || has_columns(b));
  if (!direct)
    return {};
  return MatMul{data_of(a),     data_of(b),
                data_of(out),   a.size(0),
                b.size(1),      a.size(1),
                row_stride(a),  transposed ? column_stride(b) : row_stride(b),
                row_stride(out), transposed};
}

Task emu::multiply_task(const Tensor &a, const Tensor &b, const Tensor &out) {
  auto mm = bind_product(a, b, out);
  if (!mm)
    return arithmetic([=] {
      AtenScope scope;
      if (is_kernel_type(a))
        out.copy_(at::mm(a.to(at::kFloat), b.to(at::kFloat)));
      else
        out.copy_(at::mm(a, b));
    });
  return arithmetic([mm = *mm] {
    AtenScope scope;  // sets the number of threads of the MKL
    kernels::matmul(mm);
  });
}

// If no copy is necessary, the leading dimensions of `a` are combined to one dimension of rows.
static Task general_product(const Tensor &a, const Tensor &b, const Tensor &out) {
  if (a.dim() == 2 && b.dim() == 2)
    return multiply_task(a, b, out);
  if (a.dim() > 2 && b.dim() == 2 && a.is_contiguous() && out.is_contiguous()) {
    int64_t rows = c10::multiply_integers(a.sizes().slice(0, a.dim() - 1));
    return multiply_task(a.view({rows, a.size(-1)}), b, out.view({rows, b.size(-1)}));
  }
  if (a.dim() == 3 && b.dim() == 3 && a.size(0) == b.size(0)) {
    std::vector<Task> products;
    for (int64_t i = 0; i < a.size(0); i++)
      products.push_back(multiply_task(a[i], b[i], out[i]));
    return [products] {
      for (const Task &product : products)
        product();
    };
  }
  return arithmetic([=] {
    AtenScope scope;
    out.copy_(is_half(a) ? at::matmul(a.to(at::kFloat), b.to(at::kFloat)) : at::matmul(a, b));
  });
}

// After the product, multiplies by the scale and adds the bias, in float32.
static Task scaled_product(const Tensor &c, const Tensor &a, const Tensor &b, const Scalar &beta,
                           const Scalar &alpha, const Tensor &out) {
  check(a, b, out);
  return arithmetic([=] {
    AtenScope scope;
    Tensor product = at::empty(out.sizes(), at::kFloat);
    multiply_task(a, b, product)();
    if (alpha.toDouble() != 1)
      product.mul_(alpha);
    if (beta.toDouble() != 0)
      product.add_(c, beta);
    out.copy_(product);
  });
}

OP(aclnnMm,
   [](Tensor a, Tensor b, Tensor out, int8_t) -> TimedTask {
     return {multiply_task(a, b, out), product_ns(a, b)};
   })
OP(aclnnMatmul,
   [](Tensor a, Tensor b, Tensor out, int8_t) -> TimedTask {
     return {general_product(a, b, out), product_ns(a, b)};
   })
OP(aclnnBatchMatMul, [](Tensor a, Tensor b, Tensor out, int8_t) -> TimedTask {
  refuse_unless(a.dim() == 3 && b.dim() == 3, "want batches of matrices, got ", a.sizes(), " and ",
                b.sizes());
  return {general_product(a, b, out), product_ns(a, b)};
})
OP(aclnnAddmm,
   [](Tensor c, Tensor a, Tensor b, Scalar beta, Scalar alpha, Tensor out, int8_t) -> TimedTask {
     return {scaled_product(c, a, b, beta, alpha, out), product_ns(a, b)};
   })
OP(aclnnInplaceAddmm,
   [](Tensor out, Tensor a, Tensor b, Scalar beta, Scalar alpha, int8_t) -> TimedTask {
     return {scaled_product(out, a, b, beta, alpha, out), product_ns(a, b)};
   })
OP(aclnnBaddbmm,
   [](Tensor c, Tensor a, Tensor b, Scalar beta, Scalar alpha, Tensor out, int8_t) -> TimedTask {
     require_same_type("batch2", b, a);
     refuse_unless(is_kernel_type(a), "batched product of ", a.scalar_type(),
                   ": float32, float16 or bfloat16 is needed");
     Task task = arithmetic([=] {
       AtenScope scope;
       out.copy_(at::baddbmm(c.to(at::kFloat), a.to(at::kFloat), b.to(at::kFloat), beta, alpha));
     });
     return {task, product_ns(a, b)};
   })
OP(aclnnMv, [](Tensor a, Tensor v, Tensor out, int8_t) -> TimedTask {
  return {multiply_task(a, v.unsqueeze(1), out.unsqueeze(1)), product_ns(v.unsqueeze(0), a.t())};
})
OP(aclnnDot, [](Tensor a, Tensor b, Tensor out) {
  if (!skipping())
    out.copy_(at::dot(a, b));
})
