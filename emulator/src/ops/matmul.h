// A matrix product in the form of the kernel.
#pragma once

#include "ops/bind.h"

namespace emu {

// Refuses shapes and types that cannot be multiplied. Empty if the strides are not the kernel's.
std::optional<kernels::MatMul> bind_product(const Tensor &a, const Tensor &b, const Tensor &out);

// For any strides.
Task multiply_task(const Tensor &a, const Tensor &b, const Tensor &out);

}  // namespace emu
