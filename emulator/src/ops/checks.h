// Checks of arguments. The text of a refusal names the operator (op_abi adds the name) and the
// rule.
#pragma once

#include "settings.h"

#include <sstream>
#include <stdexcept>
#include <string>

namespace emu {

constexpr int kRefused = 161002;

// Thrown in the operator's first phase. `code` is the error code that the operator returns to its
// caller.
struct Refusal : std::invalid_argument {
  int code;
  explicit Refusal(const std::string &rule, int code_ = kRefused)
      : std::invalid_argument(rule), code(code_) {}
};

template <class... Parts> std::string text(const Parts &...parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

// Refuses a call if the condition is false. No setting can allow such a call.
template <class Condition, class... Parts>
void refuse_unless(const Condition &condition, const Parts &...parts) {
  if (!condition)
    throw Refusal(text(parts...));
}

// Refuses a call that breaks a rule, unless the settings say that the device does not have this
// rule.
inline void refuse_unless_admitted(const std::string &rule, int code = kRefused) {
  for (const std::string &admitted : settings().admitted)
    if (rule.find(admitted) != std::string::npos)
      return;
  throw Refusal(rule, code);
}

// Refuses a call if the condition, which the operator's document requires, is false. A comment at
// the check names the document. With strict=false, nothing is refused.
template <class Condition, class... Parts>
void demand(const Condition &condition, const Parts &...parts) {
  if (settings().strict && !condition)
    refuse_unless_admitted(text(parts...));
}

}  // namespace emu
