// Rules that say which launches A2 and A3 run on their AI CPU, because no AI core kernel supports
// the type or the size. The AI CPU is much slower than an AI core. The emulator counts such
// launches, but does not refuse them.
#pragma once

#include "aten.h"

namespace emu {

// The properties of a call that a rule may check.
struct Operands {
  std::vector<at::Tensor> tensors;  // in the order of the call, results last
  std::vector<int64_t> numbers;
};

struct AiCpuRule {
  const char *op;
  const char *source;
  bool (*applies)(const Operands &);
};

// Returns null if an AI core kernel always exists for the operator, or if nothing is known about
// it.
const AiCpuRule *find_ai_cpu_rule(const char *op);

}  // namespace emu
