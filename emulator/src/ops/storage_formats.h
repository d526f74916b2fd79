// Tensors in FRACTAL_NZ.
#pragma once

#include "fractal_nz.h"
#include "ops/bind.h"

namespace emu {

// Whether the emulator can store tensors of this type and rank in FRACTAL_NZ.
bool has_fractal_nz(const Tensor &t);

FractalNz fractal_nz(const Tensor &t);

// The matrices of a tensor in FRACTAL_NZ, [.., rows, columns]. Its blocks must be full or padded.
class NzMatrices {
public:
  explicit NzMatrices(const aclTensor &tensor);

  // A copy in ND; matrices of several leading dimensions are numbered through.
  Tensor matrix(int64_t index) const;

private:
  Tensor blocks_;  // [matrices, bands, padded rows, width]
  int64_t rows_, columns_;
};

}  // namespace emu
