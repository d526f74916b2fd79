// The modelled time (kernels=timed) of operators on the chip, in nanoseconds. The time is
// operations / peak or bytes / bandwidth, whichever is larger, but at least the kernel's minimum
// time. The gap to the next kernel is added. docs/develop/device-time.md lists the rate of each
// operator.
#pragma once

#include "aten.h"

#include "kernels/kernels.h"

namespace emu {

struct Product {
  double batch, m, n, k;
  at::ScalarType type;  // of the factors
  double weight_bytes;  // of the right side
};
int64_t product_ns(const Product &product);
// The time of a product that is a further phase of a kernel. A phase has neither a minimum time nor
// a gap, because it is not launched separately.
int64_t product_phase_ns(const Product &product);
// The time of the product of a [.., m, k] and b, which is [k, n] or [.., k, n].
int64_t product_ns(const at::Tensor &a, const at::Tensor &b);

int64_t attention_ns(const kernels::Attention &attention);

// The time of the gated delta rule. The arguments are the number of bytes of states that are read
// and written, and the number of operations of the cube unit.
int64_t delta_rule_ns(double state_bytes, double operations);

// The time of sending rows to experts. `rows` is the number of rows, `hidden` the number of
// elements in each row, `choices` the number of experts that get each row, and `ranks` the number
// of ranks that have the experts.
int64_t dispatch_ns(double rows, double hidden, double choices, double ranks);
int64_t combine_ns(double rows, double hidden, double choices, double ranks);

// The time that vector cores need to move this number of bytes in the second phase of a kernel. A
// phase has neither a minimum time nor a gap.
int64_t vector_phase_ns(double bytes);

// The time of any other operator, computed from the bytes of its tensors. The tensors are in the
// order of the operator's arguments.
int64_t memory_ns(const char *op, bool on_ai_cpu, const std::vector<at::Tensor> &tensors);

}  // namespace emu
