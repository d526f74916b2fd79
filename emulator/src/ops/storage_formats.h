// Tensors in FRACTAL_NZ.
#pragma once

#include "fractal_nz.h"
#include "ops/bind.h"

namespace emu {

// Whether the emulator can store tensors of this type and rank in FRACTAL_NZ.
bool has_fractal_nz(const Tensor &t);

FractalNz fractal_nz(const Tensor &t);

}  // namespace emu
