// The user's settings, made by emulator_configure(key, value) before the first use of the device.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace emu {

enum class FaultKind { Fail, Stall, Die, Link, Remote, Retry, Memory, Ecc, Uce };

// The call-th execution of op, or its call-th recording into a graph. "alloc" is an allocation of
// device memory during a capture; some calls of the host count, too.
struct Fault {
  std::string op;
  long call = 1;
  bool in_capture = false;
  FaultKind kind = FaultKind::Fail;
  int rank = -1;  // HCCL world rank, or the device id of a process without HCCL; -1 any
  double stall_s = 5;
  int operand = 0;  // Uce: index of the operator's tensor whose memory turns bad, and
  long offset = 0;  // the offset from its begin, in bytes
};
constexpr int kFaults = 2;

enum class HcclExpansion { Aiv, Ffts, Aicpu };

struct Settings {
  int devices = 8;
  size_t hbm_bytes = 65536ull << 20;  // per device, counted and reported, not reserved
  std::string soc = "Ascend910B1";
  std::string cann = "8.5.0";
  bool strict = true;         // operators refuse what their documents exclude
  // a real device's rules where they differ: parts of refusals that it does not make, and operators
  // that it refuses
  std::vector<std::string> admitted, refused;
  bool compute = true;        // false: launches, graphs and collectives run, arithmetic does not
  bool timed = false;         // in addition, streams have clocks with a chip's time
  int choices = 1;            // without arithmetic, ArgMax takes one of the first so many indices
  std::map<std::string, double> rates;  // instead of those of rates.cpp, by name
  int streams = 2048;         // stream ids of one device
  bool software_sq = false;   // graphs take queues when executed instead of ids when captured
  HcclExpansion hccl_expansion = HcclExpansion::Ffts;
  int hccl_streams_per_domain = -1;  // -1: what hccl_expansion costs
  int threads = 1;            // ATen threads of each worker
  int wait_s = 60;            // limit of a wait on the device
  int hccl_s = 120;           // limit of a wait for another rank
  std::string host;           // HCCL takes ranks with another name for ranks of another host
  bool trace = false;         // print every launch and every error

  Fault faults[kFaults];      // each happens once, and counts for itself
  // a file that arms a fault while it exists; its words are settings like these
  std::string fault_file;
  size_t memory_limit_bytes = 0;  // allocations beyond it fail although hbm_bytes is reported
};

__attribute__((visibility("default"))) const Settings &settings();

// Sets one setting; throws std::invalid_argument if it does not exist, or the value is invalid.
void set_setting(Settings &s, const std::string &name, const std::string &value);

// Sets all settings of a text: key=value, separated by spaces. Reports those that cannot be set.
void read_settings(Settings &s, const std::string &text, const char *where);

}  // namespace emu
