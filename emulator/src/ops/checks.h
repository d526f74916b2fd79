// Argument checks. A refusal names the operator (op_abi adds it) and the rule.
#pragma once

#include "settings.h"

#include <sstream>
#include <stdexcept>
#include <string>

namespace emu {

// Thrown in the first phase. The code is what the operator returns to the caller.
struct Refusal : std::invalid_argument {
  int code;
  explicit Refusal(const std::string &rule, int code_ = 161002)
      : std::invalid_argument(rule), code(code_) {}
};

template <class... Parts> std::string text(const Parts &...parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

// Refuses a call that no setting allows.
template <class Condition, class... Parts>
void refuse_unless(const Condition &condition, const Parts &...parts) {
  if (!condition)
    throw Refusal(text(parts...));
}

// Refuses a call that the operator's document excludes; the document is named beside the check. Not
// with strict=false.
template <class Condition, class... Parts>
void demand(const Condition &condition, const Parts &...parts) {
  if (settings().strict && !condition)
    throw Refusal(text(parts...));
}

}  // namespace emu
