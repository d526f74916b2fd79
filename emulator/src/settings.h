// The user's settings. emulator_configure(key, value) sets them before the device is first used.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace emu {

enum class FaultKind { Fail, Stall, Die, Link, Remote, Retry, Memory, Ecc, Uce };

// A fault happens when the operator `op` is executed, or is recorded into a graph, for the
// `call`-th time. If `op` is "alloc", the fault happens at an allocation of device memory during a
// capture. `op` may also be the name of certain calls of the host.
struct Fault {
  std::string op;
  long call = 1;
  bool in_capture = false;
  FaultKind kind = FaultKind::Fail;
  int rank = -1;  // HCCL world rank, or the device id of a process without HCCL; -1 any
  double stall_s = 5;
  int operand = 0;  // Uce: index of the operator's tensor whose memory turns bad, and
  long offset = 0;  // the offset from the tensor's begin, in bytes
};
constexpr int kFaults = 2;

enum class HcclExpansion { Aiv, Ffts, Aicpu };

struct Settings {
  int devices = 8;
  size_t hbm_bytes = 65536ull << 20;  // per device, counted and reported, not reserved
  std::string soc = "Ascend910B1";
  std::string cann = "8.5.0";
  bool strict = true;         // operators refuse what their documents exclude
  // How a real device differs from the emulator. `admitted` contains parts of the texts of refusals
  // that the device does not make. `refused` contains operators that only the device refuses.
  std::vector<std::string> admitted, refused;
  bool compute = true;        // false: launches, graphs and collectives run, arithmetic does not
  bool timed = false;         // in addition, streams have clocks with modelled time
  int choices = 1;            // without arithmetic, ArgMax returns an index below this number
  std::map<std::string, double> rates;  // by name; they replace rates of rates.cpp
  int streams = 2048;         // stream ids of one device
  bool software_sq = false;   // graphs take queues when executed instead of ids when captured
  HcclExpansion hccl_expansion = HcclExpansion::Ffts;
  int hccl_streams_per_domain = -1;  // -1: hccl_expansion determines it
  int threads = 1;            // ATen threads of each worker
  int wait_s = 60;            // limit of a wait on the device
  int hccl_s = 120;           // limit of a wait for another rank
  std::string host;           // HCCL treats ranks with different names as on different hosts
  bool trace = false;         // print every launch and every error

  Fault faults[kFaults];      // each happens once, and counts its calls separately
  // a file that arms a fault while the file exists; it contains the fault's settings
  std::string fault_file;
  size_t memory_limit_bytes = 0;  // a larger total fails, although hbm_bytes is reported
};

__attribute__((visibility("default"))) const Settings &settings();

// Sets one setting. Throws std::invalid_argument if there is no such setting, or if the value is
// invalid.
void set_setting(Settings &s, const std::string &name, const std::string &value);

// Sets all settings in a text, which consists of key=value pairs with spaces between them. Reports
// settings that cannot be set.
void read_settings(Settings &s, const std::string &text, const char *where);

}  // namespace emu
