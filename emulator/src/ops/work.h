// The time of operators on the chip with modelled time (kernels=timed), in nanoseconds. It is the
// larger of operations / peak and bytes / bandwidth, but at least the kernel's minimum time, plus
// the gap to the next kernel. docs/develop/device-time.md lists the rate of each operator.
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
// The product is a further phase of a kernel, so without its own launch.
int64_t product_phase_ns(const Product &product);
// a [.., m, k] times b [k, n] or [.., k, n].
int64_t product_ns(const at::Tensor &a, const at::Tensor &b);

int64_t attention_ns(const kernels::Attention &attention);

// The gated delta rule: the bytes of the states that it reads and writes, and the operations of the
// cube unit.
int64_t delta_rule_ns(double state_bytes, double operations);

// Each of `rows` rows of `hidden` elements is sent to `choices` experts, which are on `ranks`
// ranks.
int64_t dispatch_ns(double rows, double hidden, double choices, double ranks);
int64_t combine_ns(double rows, double hidden, double choices, double ranks);

// The time in which vector cores move these bytes in a kernel's second phase, without a launch.
int64_t vector_phase_ns(double bytes);

// The time of all other operators, computed from the bytes of their tensors; the tensors are in the
// order of the call.
int64_t memory_ns(const char *op, bool on_ai_cpu, const std::vector<at::Tensor> &tensors);

}  // namespace emu
