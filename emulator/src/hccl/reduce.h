// Element types of HCCL and reductions over them.
#pragma once

#include <third_party/hccl/inc/hccl/hccl.h>

#include <cstddef>

namespace emu::hccl {

size_t element_bytes(HcclDataType type);

// out[i] = parts[0][i] op parts[1][i] op ...: in rank order, half-width floats in float32 with one
// rounding at the end. Deterministic, but not the device's rounding. Throws for other types.
void reduce(void *out, const char *const *parts, size_t part_count, size_t count, HcclDataType type,
            HcclReduceOp op);

}  // namespace emu::hccl
