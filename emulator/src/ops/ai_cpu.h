// Which launches A2 and A3 run on their AI CPU instead of an AI core: slower by far, and the reason is
// a type or a size that no kernel has. Counted, not refused.
#pragma once

#include "aten.h"

namespace emu {

// What a rule may look at of a call.
struct Operands {
  std::vector<at::Tensor> tensors;  // in the order of the call, results last
  std::vector<int64_t> numbers;
};

struct AiCpuRule {
  const char *op;
  const char *source;
  bool (*applies)(const Operands &);
};

// Null where the operator always has a kernel, or nothing is known.
const AiCpuRule *find_ai_cpu_rule(const char *op);

}  // namespace emu
