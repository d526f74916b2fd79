// The element types of HCCL, and reductions of elements.
#pragma once

#include <third_party/hccl/inc/hccl/hccl.h>

#include <cstddef>

namespace emu::hccl {

size_t element_bytes(HcclDataType type);

// out[i] = parts[0][i] op parts[1][i] op ..., computed in the order of ranks. float16 and bfloat16
// are computed in float32 and rounded once at the end. The result is deterministic, but its
// rounding differs from that of a device. Throws if the type is not supported.
void reduce(void *out, const char *const *parts, size_t part_count, size_t count, HcclDataType type,
            HcclReduceOp op);

}  // namespace emu::hccl
