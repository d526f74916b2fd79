// Values of four bits. An int32 contains eight values; the first value is in the lowest bits
// (op-plugin document npu_convert_weight_to_int4pack). torch has no type of four bits, so the last
// dimension of such a tensor is 8 times smaller.
#pragma once

#include "ops/bind.h"

namespace emu {

// Converts int32 [.., n / 8] to int8 [.., n].
Tensor unpack_int4(const Tensor &packed);

// Returns factors as float32. aclnn gives them the type UINT64; the lower half of each element
// contains the bits of a float32.
Tensor float_scales(const Tensor &scales);

// Returns (values + offset) * scale, rounded to the type of the scales, as the vector unit passes
// it to the cube unit. values is [k, n]; scale and offset are [n] or [groups, n].
Tensor dequantised(const Tensor &values, const Tensor &scale, const OptTensor &offset);

// aclnnQuantMatmulV5: the product of int8 rows with weights of four bits.
TimedTask bind_int4_weight(const Tensor &a, const Tensor &b, const OptTensor &row_scale,
                           const OptTensor &scale, const OptTensor &sums, const OptTensor &bias,
                           int64_t group, const Tensor &out);

}  // namespace emu
