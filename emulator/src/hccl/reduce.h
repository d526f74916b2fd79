// Element types of HCCL and reductions over them.
#pragma once

#include <third_party/hccl/inc/hccl/hccl.h>

#include <cstddef>

namespace emu::hccl {

size_t element_bytes(HcclDataType type);

// out[i] = parts[0][i] op parts[1][i] op ...: computed in rank order; half-width floats are
// computed in float32 and rounded once at the end. The result is deterministic, but its rounding
// differs from that of the device. Throws for other types.
void reduce(void *out, const char *const *parts, size_t part_count, size_t count, HcclDataType type,
            HcclReduceOp op);

}  // namespace emu::hccl
