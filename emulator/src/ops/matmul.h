// A product of matrices as the kernel takes it.
#pragma once

#include "ops/bind.h"

namespace emu {

// Refuses shapes and types that do not multiply. Nothing, if the strides are not the kernel's.
std::optional<kernels::MatMul> bind_product(const Tensor &a, const Tensor &b, const Tensor &out);

// In any strides.
Task multiply_task(const Tensor &a, const Tensor &b, const Tensor &out);

}  // namespace emu
