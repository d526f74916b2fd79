// Values of four bits: eight in an int32, the first value in the lowest bits (op-plugin document
// npu_convert_weight_to_int4pack). torch has no such type, so the last dimension is divided by 8.
#pragma once

#include "ops/bind.h"

namespace emu {

// [.., n / 8] int32 to [.., n] int8.
Tensor unpack_int4(const Tensor &packed);

// Factors that aclnn calls UINT64: the lower half of each element holds the bits of a float32.
Tensor float_scales(const Tensor &scales);

// (weight + offset) * scale, rounded to the type of the scales, as the vector unit gives it to the
// cube unit. values is [k, n], scale and offset are [n] or [groups, n].
Tensor dequantised(const Tensor &values, const Tensor &scale, const OptTensor &offset);

// The product of int8 rows with weights of four bits, aclnnQuantMatmulV5.
TimedTask bind_int4_weight(const Tensor &a, const Tensor &b, const OptTensor &row_scale,
                           const OptTensor &scale, const OptTensor &sums, const OptTensor &bias,
                           int64_t group, const Tensor &out);

}  // namespace emu
