// Refused calls. A Refusal contains the status for the caller, and a text for aclGetRecentErrMsg.
#pragma once

#include "adxl/adxl_engine.h"

#include <sstream>
#include <stdexcept>
#include <string>

namespace emu::adxl {

using namespace ::adxl;

struct Refusal : std::runtime_error {
  Status status;
  Refusal(Status status_, const std::string &text) : std::runtime_error(text), status(status_) {}
};

// Refuses a call if the condition is false. No setting can change this.
template <class... Parts>
void refuse_unless(bool condition, Status status, const Parts &...parts) {
  if (condition)
    return;
  std::ostringstream text;
  (text << ... << parts);
  throw Refusal(status, text.str());
}

// The condition is a rule of CANN's documents. If the condition is false, the call is refused, with
// two exceptions: strict=false, and a refusal whose text contains an entry of the setting `admit`.
template <class... Parts>
void demand(bool condition, Status status, const Parts &...parts) {
  if (condition || !settings().strict)
    return;
  std::ostringstream text;
  (text << ... << parts);
  for (const std::string &admitted : settings().admitted)
    if (text.str().find(admitted) != std::string::npos)
      return;
  throw Refusal(status, text.str());
}

}  // namespace emu::adxl
