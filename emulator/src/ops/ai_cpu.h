// The launches that A2 and A3 run on their AI CPU instead of an AI core. The AI CPU is much slower.
// The reason for such a launch is that no kernel supports its type or size. These launches are
// counted, not refused.
#pragma once

#include "aten.h"

namespace emu {

// The properties of a call that a rule may use.
struct Operands {
  std::vector<at::Tensor> tensors;  // in the order of the call, results last
  std::vector<int64_t> numbers;
};

struct AiCpuRule {
  const char *op;
  const char *source;
  bool (*applies)(const Operands &);
};

// Null if the operator always has a kernel, or if nothing is known.
const AiCpuRule *find_ai_cpu_rule(const char *op);

}  // namespace emu
