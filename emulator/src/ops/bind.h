// Converts at::Tensor to the pointers that kernels need, and contains checks that many operators
// share.
#pragma once

#include "kernels/kernels.h"
#include "ops/op_abi.h"

namespace emu {

inline bool is_half(const Tensor &t) {
  return t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
}
// Whether the kernels support the type.
inline bool is_kernel_type(const Tensor &t) { return is_half(t) || t.scalar_type() == at::kFloat; }
inline bool is_index(const Tensor &t) {
  return t.scalar_type() == at::kInt || t.scalar_type() == at::kLong;
}

inline kernels::Data data_of(const Tensor &t) {
  auto type = t.scalar_type() == at::kFloat  ? kernels::Type::F32
              : t.scalar_type() == at::kHalf ? kernels::Type::F16
                                             : kernels::Type::BF16;
  return {t.data_ptr(), type};
}
inline kernels::Data data_of(const OptTensor &t) { return t ? data_of(*t) : kernels::Data{}; }

inline void require_kernel_type(const char *what, const Tensor &t) {
  refuse_unless(is_kernel_type(t), what, " must be float32, float16 or bfloat16, got ",
                t.scalar_type());
}
inline void require_same_type(const char *what, const Tensor &t, const Tensor &other) {
  refuse_unless(t.scalar_type() == other.scalar_type(), what, " must be ", other.scalar_type(),
                ", got ", t.scalar_type());
}
inline void require_contiguous(const char *what, const Tensor &t) {
  refuse_unless(t.is_contiguous(), what, " must be contiguous, got strides ", t.strides());
}

// Copies a tensor to another tensor of the same size. If the types are equal, this is one strided
// copy. Otherwise ATen converts the elements.
Task copy_task(const Tensor &to, const Tensor &from);

}  // namespace emu
