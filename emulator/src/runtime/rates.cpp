// The table of rates. docs/develop/device-time.md repeats each number, says where it comes from,
// and how certain it is.
#include "rates.h"

#include "target.h"

namespace emu {
namespace {

// The peak speeds and the memory speed of each chip. If the name of a chip is not in this table, it
// has the rates of the first chip of its generation.
struct ChipRow {
  const char *soc;
  double bf16_tflops, int8_tflops, hbm_tb_s;
};
constexpr ChipRow kA2[] = {{"Ascend910B1", 364, 727, 1.6},
                           {"Ascend910B2", 354, 708, 1.6},
                           {"Ascend910B3", 295, 590, 1.6},
                           {"Ascend910B4", 246, 492, 0.8}};
constexpr ChipRow kA3[] = {{"Ascend910_939", 364, 727, 1.6}, {"Ascend910_936", 246, 492, 1.6}};

struct Row {
  const char *name;
  double Rates::*rate;
  double a2, a3;
};
constexpr Row kRows[] = {
    {"matmul_1024", &Rates::matmul_1024, 0.28, 0.28},
    {"matmul_2048", &Rates::matmul_2048, 0.70, 0.70},
    {"matmul_4096", &Rates::matmul_4096, 0.85, 0.85},
    {"int8_matmul", &Rates::int8_matmul, 0.78, 0.78},
    {"attention", &Rates::attention, 0.50, 0.50},
    {"latent_attention", &Rates::latent_attention, 0.65, 0.65},
    {"weights_memory", &Rates::weights_memory, 0.80, 0.80},
    {"cache_memory", &Rates::cache_memory, 0.70, 0.70},
    {"vector_memory", &Rates::vector_memory, 0.60, 0.60},
    {"softmax_memory", &Rates::softmax_memory, 0.23, 0.23},
    {"argmax_memory", &Rates::argmax_memory, 0.07, 0.07},
    {"sort_memory", &Rates::sort_memory, 0.05, 0.05},
    {"matmul_us", &Rates::matmul_us, 5, 5},
    {"vector_us", &Rates::vector_us, 3, 3},
    {"decode_attention_us", &Rates::decode_attention_us, 15, 15},
    {"prefill_attention_us", &Rates::prefill_attention_us, 45, 45},
    {"gap_us", &Rates::gap_us, 2, 2},
    {"ai_cpu_us", &Rates::ai_cpu_us, 35, 35},
    {"ai_cpu_gb_s", &Rates::ai_cpu_gb_s, 1, 1},
    {"graph_launch_us", &Rates::graph_launch_us, 100, 100},
    {"update_attention_us", &Rates::update_attention_us, 184, 184},
    {"update_us", &Rates::update_us, 60, 60},
    {"event_us", &Rates::event_us, 1, 1},
    {"host_copy_us", &Rates::host_copy_us, 10, 10},
    {"host_gb_s", &Rates::host_gb_s, 20, 20},
    {"collective_aiv_us", &Rates::collective_aiv_us, 10, 10},
    {"collective_ffts_us", &Rates::collective_ffts_us, 10, 10},
    {"collective_aicpu_us", &Rates::collective_aicpu_us, 175, 175},
    {"link_us", &Rates::link_us, 0.5, 0.5},
    {"pair_gb_s", &Rates::pair_gb_s, 28, 196},
    {"port_gb_s", &Rates::port_gb_s, 196, 196},
    {"link_efficiency", &Rates::link_efficiency, 0.7, 0.7},
    {"node_ranks", &Rates::node_ranks, 8, 384},
    {"network_us", &Rates::network_us, 1.5, 1.5},
    {"network_gb_s", &Rates::network_gb_s, 25, 24.5},
    {"dispatch_us", &Rates::dispatch_us, 35, 35},
    {"dispatch_token_us", &Rates::dispatch_token_us, 0.8, 0.8},
    {"combine_us", &Rates::combine_us, 30, 30},
    {"combine_token_us", &Rates::combine_token_us, 0.75, 0.75},
    {"doubling_us", &Rates::doubling_us, 5, 5},
};
constexpr Row kPeaks[] = {
    {"bf16_tflops", &Rates::bf16_tflops, 0, 0},
    {"int8_tflops", &Rates::int8_tflops, 0, 0},
    {"hbm_tb_s", &Rates::hbm_tb_s, 0, 0},
};

template <size_t n> const ChipRow &find_chip(const ChipRow (&rows)[n]) {
  for (const ChipRow &row : rows)
    if (settings().soc.rfind(row.soc, 0) == 0)
      return row;
  return rows[0];
}

void replace(Rates &rates, const Row &row) {
  auto found = settings().rates.find(row.name);
  if (found != settings().rates.end())
    rates.*row.rate = found->second;
}

Rates rates_of_settings() {
  Rates rates{};
  const bool is_a3 = chip() == Chip::A3;
  const ChipRow &chip = is_a3 ? find_chip(kA3) : find_chip(kA2);
  rates.bf16_tflops = chip.bf16_tflops;
  rates.int8_tflops = chip.int8_tflops;
  rates.hbm_tb_s = chip.hbm_tb_s;
  for (const Row &row : kPeaks)
    replace(rates, row);
  for (const Row &row : kRows) {
    rates.*row.rate = is_a3 ? row.a3 : row.a2;
    replace(rates, row);
  }
  return rates;
}

}  // namespace

const Rates &rates() {
  static const Rates rates = rates_of_settings();
  return rates;
}

bool is_rate(const std::string &name) {
  for (const Row &row : kPeaks)
    if (name == row.name)
      return true;
  for (const Row &row : kRows)
    if (name == row.name)
      return true;
  return false;
}

}  // namespace emu

// Returns the rates in use as a JSON object. The text is valid until the next call in this thread.
EMU_API const char *emulator_rates() {
  using namespace emu;
  static thread_local std::string text;
  text = "{";
  auto add = [](const Row &row) {
    char entry[96];
    snprintf(entry, sizeof entry, "%s\"%s\": %.17g", text.size() > 1 ? ", " : "", row.name,
             rates().*row.rate);
    text += entry;
  };
  for (const Row &row : kPeaks)
    add(row);
  for (const Row &row : kRows)
    add(row);
  text += "}";
  return text.c_str();
}
