// emulator_configure, which checks settings that are given as text, and stores them.
#include "settings.h"

#include "emulator.h"
#include "rates.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>

namespace emu {
namespace {

Settings g_settings;

long number(const std::string &value, long least, long most) {
  long n = 0;
  auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), n);
  if (error != std::errc() || end != value.data() + value.size() || n < least || n > most)
    throw std::invalid_argument("want a whole number from " + std::to_string(least) + " to " +
                                std::to_string(most));
  return n;
}

double seconds(const std::string &value) {
  double s = 0;
  auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), s);
  if (error != std::errc() || end != value.data() + value.size() || !(s >= 0))
    throw std::invalid_argument("want seconds");
  return s;
}

bool boolean(const std::string &value) {
  if (value == "1" || value == "true" || value == "True")
    return true;
  if (value == "0" || value == "false" || value == "False")
    return false;
  throw std::invalid_argument("want true or false");
}

// Returns the index of `value` among the choices. Throws if it is not among them.
int choice(const std::string &value, std::initializer_list<const char *> choices) {
  std::string all;
  int i = 0;
  for (const char *c : choices) {
    if (value == c)
      return i;
    all += (i++ ? " or " : "") + std::string(c);
  }
  throw std::invalid_argument("want " + all);
}

// Returns `value` if it is a CANN release line whose rules are known. target.h distinguishes the
// releases of a line.
std::string known_cann(const std::string &value) {
  if (value.rfind("8.5.", 0) != 0 && value.rfind("9.", 0) != 0)
    throw std::invalid_argument("want a version of CANN 8.5 or 9, such as 8.5.1 or 9.1.0");
  return value;
}

// Decodes a part that is encoded like a part of a URL's query: + stands for a space, and %2B for a
// plus.
std::string decoded(const std::string &part) {
  std::string text;
  for (size_t i = 0; i < part.size(); i++) {
    unsigned char c = part[i] == '+' ? ' ' : part[i];
    if (c == '%') {
      const char *end = part.data() + std::min(part.size(), i + 3);
      if (std::from_chars(part.data() + i + 1, end, c, 16).ptr != part.data() + i + 3)
        throw std::invalid_argument("want two hexadecimal digits after %");
      i += 2;
    }
    text += char(c);
  }
  return text;
}

// Splits a list at its semicolons, and returns the parts.
std::vector<std::string> parts(const std::string &value) {
  std::vector<std::string> all;
  std::istringstream stream(value);
  for (std::string part; std::getline(stream, part, ';');) {
    part = decoded(part);
    if (part.empty())
      throw std::invalid_argument("want parts between semicolons");
    all.push_back(part);
  }
  return all;
}

// Checks a value that will be a part of a file's name.
std::string short_name(const std::string &value) {
  if (value.size() > 32 || value.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-") !=
                               std::string::npos)
    throw std::invalid_argument("want at most 32 small letters, digits and hyphens");
  return value;
}

double rate(const std::string &name, const std::string &value) {
  if (!is_rate(name))
    throw std::invalid_argument("there is no such rate");
  double number = 0;
  auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size() || !(number >= 0) ||
      !std::isfinite(number))
    throw std::invalid_argument("want a number of 0 or more");
  return number;
}

const std::string kRate = "rate.";

using FaultSetter = std::function<void(Fault &, const std::string &)>;

const std::map<std::string, FaultSetter> &fault_setters() {
  using Text = const std::string;
  constexpr long many = 1L << 30;
  static const std::map<std::string, FaultSetter> table{
      {"op", [](Fault &f, Text &v) { f.op = v; }},
      {"call", [](Fault &f, Text &v) { f.call = number(v, 1, many); }},
      {"kind",
       [](Fault &f, Text &v) {
         f.kind = FaultKind(
             choice(v, {"fail", "stall", "die", "link", "remote", "retry", "memory", "ecc", "uce"}));
       }},
      {"when", [](Fault &f, Text &v) { f.in_capture = choice(v, {"execute", "capture"}); }},
      {"rank", [](Fault &f, Text &v) { f.rank = v.empty() ? -1 : number(v, 0, many); }},
      {"stall_s", [](Fault &f, Text &v) { f.stall_s = seconds(v); }},
      {"operand", [](Fault &f, Text &v) { f.operand = number(v, 0, 1024); }},
      {"offset", [](Fault &f, Text &v) { f.offset = number(v, 0, 1L << 40); }},
  };
  return table;
}

// A name with the prefix "fault_", such as "fault_op", belongs to the first fault, and a name with
// the prefix "fault2_" to the second fault. "stall_s" has no prefix.
bool set_fault(Settings &settings, std::string name, const std::string &value) {
  if (name == "stall_s")
    name = "fault_stall_s";
  for (int i = 0; i < kFaults; i++) {
    std::string prefix = i ? "fault" + std::to_string(i + 1) + "_" : "fault_";
    if (name.rfind(prefix, 0) != 0)
      continue;
    auto found = fault_setters().find(name.substr(prefix.size()));
    if (found == fault_setters().end())
      return false;
    found->second(settings.faults[i], value);
    return true;
  }
  return false;
}

using Setter = std::function<void(Settings &, const std::string &)>;

const std::map<std::string, Setter> &setters() {
  using S = Settings;
  using Text = const std::string;
  constexpr long many = 1L << 30;
  static const std::map<std::string, Setter> table{
      {"devices", [](S &s, Text &v) { s.devices = number(v, 1, kMaxDevices); }},
      {"hbm_mb", [](S &s, Text &v) { s.hbm_bytes = size_t(number(v, 1, many)) << 20; }},
      {"soc", [](S &s, Text &v) { s.soc = v; }},
      {"cann", [](S &s, Text &v) { s.cann = known_cann(v); }},
      {"admit", [](S &s, Text &v) { s.admitted = parts(v); }},
      {"refuse", [](S &s, Text &v) { s.refused = parts(v); }},
      {"strict", [](S &s, Text &v) { s.strict = boolean(v); }},
      {"kernels",
       [](S &s, Text &v) {
         int kind = choice(v, {"compute", "skip", "timed"});
         s.compute = kind == 0;
         s.timed = kind == 2;
       }},
      {"choices", [](S &s, Text &v) { s.choices = number(v, 1, many); }},
      {"streams", [](S &s, Text &v) { s.streams = number(v, 1, many); }},
      {"accounting", [](S &s, Text &v) { s.software_sq = choice(v, {"pinned", "software_sq"}); }},
      {"hccl_expansion",
       [](S &s, Text &v) { s.hccl_expansion = HcclExpansion(choice(v, {"AIV", "FFTS", "AICPU"})); }},
      {"hccl_streams_per_domain",
       [](S &s, Text &v) { s.hccl_streams_per_domain = number(v, 0, many); }},
      {"threads", [](S &s, Text &v) { s.threads = number(v, 1, 1024); }},
      {"wait_s", [](S &s, Text &v) { s.wait_s = number(v, 1, many); }},
      {"hccl_s", [](S &s, Text &v) { s.hccl_s = number(v, 1, many); }},
      {"host", [](S &s, Text &v) { s.host = short_name(v); }},
      {"trace", [](S &s, Text &v) { s.trace = boolean(v); }},
      {"fault_file", [](S &s, Text &v) { s.fault_file = v; }},
      {"memory_limit_mb",
       [](S &s, Text &v) { s.memory_limit_bytes = size_t(number(v, 0, many)) << 20; }},
  };
  return table;
}

}  // namespace

const Settings &settings() { return g_settings; }

void set_setting(Settings &s, const std::string &name, const std::string &value) {
  if (name.rfind(kRate, 0) == 0) {
    std::string known = name.substr(kRate.size());
    try {
      s.rates[known] = rate(known, value);
    } catch (const std::exception &e) {
      throw std::invalid_argument(name + "=" + value + ": " + e.what());
    }
    return;
  }
  auto found = setters().find(name);
  try {
    if (set_fault(s, name, value))
      return;
    if (found != setters().end())
      return found->second(s, value);
  } catch (const std::exception &e) {
    throw std::invalid_argument(name + "=" + value + ": " + e.what());
  }
  throw std::invalid_argument("unknown setting " + name);
}

void read_settings(Settings &s, const std::string &text, const char *where) {
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    size_t equals = word.find('=');
    std::string value = equals == std::string::npos ? "" : word.substr(equals + 1);
    try {
      set_setting(s, word.substr(0, equals), value);
    } catch (const std::exception &e) {
      fprintf(stderr, "[emulator] %s: %s\n", where, e.what());
    }
  }
}

}  // namespace emu

// Sets one setting. Returns null, or the text of an error. To be called before the device is first
// used: later changes have only a partial effect.
EMU_API const char *emulator_configure(const char *key, const char *value) {
  static thread_local std::string problem;
  try {
    emu::set_setting(emu::g_settings, key, value);
    return nullptr;
  } catch (const std::exception &e) {
    problem = e.what();
    return problem.c_str();
  }
}

// Reads the settings that the command `npu-emulator run` passes to a process and its child
// processes. The command has already checked these settings.
static const bool is_configured_by_environment = [] {
  const char *text = getenv("EMULATED_NPU");
  emu::read_settings(emu::g_settings, text ? text : "", "EMULATED_NPU");
  return true;
}();
