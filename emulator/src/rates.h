// The speed of the modelled chip (kernels=timed). rates.cpp and docs/develop/device-time.md list
// every number with its source. A setting rate.NAME replaces a number, for example by a measured
// number.
#pragma once

#include "emulator.h"

#include <string>

namespace emu {

struct Rates {
  // The chip.
  double bf16_tflops, int8_tflops, hbm_tb_s;
  // The fraction of the chip's peak speed that products of n x n matrices reach, and the fractions
  // that other work reaches.
  double matmul_1024, matmul_2048, matmul_4096, int8_matmul, attention, latent_attention;
  // The fraction of the memory's bandwidth that each kind of work reaches.
  double weights_memory, cache_memory, vector_memory, softmax_memory, argmax_memory, sort_memory;
  // The minimum time of each kind of kernel, and the gap between two kernels, in microseconds.
  double matmul_us, vector_us, decode_attention_us, prefill_attention_us, gap_us;
  double ai_cpu_us, ai_cpu_gb_s;
  // Times in microseconds: of the launch of a graph, and of tasks that are no kernels.
  double graph_launch_us, update_attention_us, update_us, event_us;
  // The speed of copies between host and device.
  double host_copy_us, host_gb_s;
  // The speed of collectives.
  double collective_aiv_us, collective_ffts_us, collective_aicpu_us;
  double link_us, pair_gb_s, port_gb_s, link_efficiency, node_ranks;
  double network_us, network_gb_s;
  // Times of MoeDistributeDispatch and Combine, for 7168 elements per token and 8 experts.
  double dispatch_us, dispatch_token_us, combine_us, combine_token_us, doubling_us;
};

// Returns the rates of the chip that the settings select. Rates that the settings replace have
// their new values.
EMU_SHARED const Rates &rates();

bool is_rate(const std::string &name);

inline int64_t microseconds(double us) { return static_cast<int64_t>(us * 1e3 + 0.5); }

}  // namespace emu
