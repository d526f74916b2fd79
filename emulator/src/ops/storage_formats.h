// Tensors in FRACTAL_NZ.
#pragma once

#include "fractal_nz.h"
#include "ops/bind.h"

namespace emu {

// Whether the emulator can store tensors of this type and rank in FRACTAL_NZ.
bool has_fractal_nz(const Tensor &t);

FractalNz fractal_nz(const Tensor &t);

// The matrices of a tensor in FRACTAL_NZ, [.., rows, columns]. The tensor's memory must contain
// whole blocks.
class NzMatrices {
public:
  explicit NzMatrices(const aclTensor &tensor);

  // Returns a copy in ND of the matrix with this index. If there are several leading dimensions,
  // all matrices are numbered in one sequence.
  Tensor matrix(int64_t index) const;

private:
  Tensor blocks_;  // [matrices, bands, padded rows, width]
  int64_t rows_, columns_;
};

}  // namespace emu
