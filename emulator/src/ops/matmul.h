// A matrix product in the form that the kernel takes.
#pragma once

#include "ops/bind.h"

namespace emu {

// Refuses shapes and types that cannot be multiplied. Returns nothing if the kernel does not
// support the strides.
std::optional<kernels::MatMul> bind_product(const Tensor &a, const Tensor &b, const Tensor &out);

// Computes the product for any strides.
Task multiply_task(const Tensor &a, const Tensor &b, const Tensor &out);

}  // namespace emu
