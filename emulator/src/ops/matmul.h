// Matrix products in the form that the kernel needs.
#pragma once

#include "ops/bind.h"

namespace emu {

// Throws a Refusal if the shapes or the types cannot be multiplied. Returns no value if the kernel
// does not support the strides.
std::optional<kernels::MatMul> bind_product(const Tensor &a, const Tensor &b, const Tensor &out);

// Returns a task that computes the product, for any strides.
Task multiply_task(const Tensor &a, const Tensor &b, const Tensor &out);

}  // namespace emu
