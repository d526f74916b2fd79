#include "hccl/reduce.h"

#include "kernels/vector_math.h"

#include <stdexcept>
#include <string>

namespace emu::hccl {

size_t element_bytes(HcclDataType type) {
  switch (type) {
  case HCCL_DATA_TYPE_INT16:
  case HCCL_DATA_TYPE_UINT16:
  case HCCL_DATA_TYPE_FP16:
  case HCCL_DATA_TYPE_BFP16:
    return 2;
  case HCCL_DATA_TYPE_INT32:
  case HCCL_DATA_TYPE_UINT32:
  case HCCL_DATA_TYPE_FP32:
    return 4;
  case HCCL_DATA_TYPE_INT64:
  case HCCL_DATA_TYPE_UINT64:
  case HCCL_DATA_TYPE_FP64:
    return 8;
  case HCCL_DATA_TYPE_INT128:
    return 16;
  default:
    return 1;
  }
}

namespace {

template <class T> T combine(T a, T b, HcclReduceOp op) {
  switch (op) {
  case HCCL_REDUCE_SUM:
    return a + b;
  case HCCL_REDUCE_PROD:
    return a * b;
  case HCCL_REDUCE_MAX:
    return a < b ? b : a;
  default:
    return b < a ? b : a;
  }
}

template <class T>
void reduce_plain(T *out, const char *const *parts, size_t part_count, size_t count,
                  HcclReduceOp op) {
  for (size_t i = 0; i < count; i++) {
    T total = reinterpret_cast<const T *>(parts[0])[i];
    for (size_t r = 1; r < part_count; r++)
      total = combine(total, reinterpret_cast<const T *>(parts[r])[i], op);
    out[i] = total;
  }
}

void reduce_half(kernels::Data out, const char *const *parts, size_t part_count, size_t count,
                 HcclReduceOp op) {
  for (size_t i = 0; i < count; i++) {
    float total = 0;
    for (size_t r = 0; r < part_count; r++) {
      float x = kernels::element({const_cast<char *>(parts[r]), out.type}, i);
      total = r ? combine(total, x, op) : x;
    }
    auto *to = static_cast<uint16_t *>(out.p) + i;
    if (out.type == kernels::Type::BF16)
      *to = kernels::float_to_bf16(total);
    else
      *to = std::bit_cast<uint16_t>(static_cast<kernels::Float16>(total));
  }
}

}  // namespace

void reduce(void *out, const char *const *parts, size_t part_count, size_t count, HcclDataType type,
            HcclReduceOp op) {
  auto plain = [&]<class T>(T *to) { reduce_plain(to, parts, part_count, count, op); };
  switch (type) {
  case HCCL_DATA_TYPE_FP32:
    return plain(static_cast<float *>(out));
  case HCCL_DATA_TYPE_FP16:
    return reduce_half({out, kernels::Type::F16}, parts, part_count, count, op);
  case HCCL_DATA_TYPE_BFP16:
    return reduce_half({out, kernels::Type::BF16}, parts, part_count, count, op);
  case HCCL_DATA_TYPE_FP64:
    return plain(static_cast<double *>(out));
  case HCCL_DATA_TYPE_INT8:
    return plain(static_cast<int8_t *>(out));
  case HCCL_DATA_TYPE_UINT8:
    return plain(static_cast<uint8_t *>(out));
  case HCCL_DATA_TYPE_INT16:
    return plain(static_cast<int16_t *>(out));
  case HCCL_DATA_TYPE_INT32:
    return plain(static_cast<int32_t *>(out));
  case HCCL_DATA_TYPE_INT64:
    return plain(static_cast<int64_t *>(out));
  default:
    throw std::runtime_error("HCCL: reduction of HcclDataType " + std::to_string(type) +
                             " is not emulated");
  }
}

}  // namespace emu::hccl
