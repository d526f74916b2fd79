// MoeDistributeDispatch sends rows to the ranks of their experts, and MoeDistributeCombine sends
// the results back. On the device, both operators communicate inside their kernel. In the emulator,
// each rank gathers the data of all ranks. The operators use no stream ids of the domain.
#include "hccl/domain.h"
#include "ops/bind.h"
#include "target.h"

#include <cstring>
#include <set>

using namespace emu;
using hccl::Domain;

namespace {

// Three sizes in bytes: how much of the domain's buffer dispatch and combine need, the size of the
// buffer that the tiling assumes, and the real size of the buffer.
struct Window {
  int64_t needed, assumed, real;
};

struct Parallel {
  Domain domain;
  int64_t experts, local, ranks, rank, most_rows;  // most_rows: of one rank's batch
  Window window;
};

constexpr int64_t MIB = 1 << 20;

bool is_a3() { return chip() == Chip::A3; }

int64_t aligned(int64_t size, int64_t to) { return (size + to - 1) / to * to; }

// The formulas are from op-plugin's document of npu_moe_distribute_dispatch_v2, for types of two
// bytes and without shared experts.
int64_t needed_bytes(const std::string &algorithm, int64_t experts, int64_t ranks, int64_t rows,
                     int64_t k, int64_t hidden) {
  int64_t local = experts / ranks, row = 2 * hidden;
  int64_t with_choices = row + 4 * aligned(k, 8) * 4;
  if (algorithm == "hierarchy")
    return is_a3() ? experts * rows * with_choices + 404 * MIB
                   : (experts + ranks / 4) * aligned(rows * with_choices, 512) + 8 * MIB;
  if (!is_a3())
    return 2 * (rows * ranks * std::min(local, k) * row + 2 * MIB);
  int64_t sent = aligned(row, 32) + 64;
  sent = algorithm == "fullmesh_v2" ? aligned(sent, 480) / 480 * 512 : aligned(sent, 512);
  return 2 * (local * rows * ranks * sent + k * rows * aligned(row, 512));
}

// Since 29 November 2025, the tiling for A3 uses the size of the communicator's buffer, except for
// the algorithm "hierarchy" (GetEpWinSize, GetMaxWindowSize in mc2_tiling_utils).
Window window_of(const Domain &domain, const std::string &algorithm, int64_t needed) {
  int64_t real = domain.buffer_mb * MIB, variable = hccl::hccl_buffsize_mb() * MIB;
  return {needed, cann_before(8, 5, 1) || algorithm == "hierarchy" ? variable : real, real};
}

// The tiling for A2 does not check the buffer's size.
void check_tiling(const Window &w) {
  refuse_unless(!is_a3() || w.needed <= w.assumed, "HCCL_BUFFSIZE is too SMALL, "
                "NEEDED_HCCL_BUFFSIZE = ", w.needed / MIB + 1, "MB, HCCL_BUFFSIZE=",
                w.assumed / MIB, "MB");
}

// The kernel of A3 compares the real size of the buffer with the size that the tiling assumed
// (check_winsize.h). The kernel of A2 makes no such comparison, and would read and write beyond the
// buffer.
void check_kernel(const Window &w) {
  TORCH_CHECK(!is_a3() || w.real >= w.assumed, "AICORE exception: the communicator's buffer has ",
              w.real / MIB, " MB, and HCCL_BUFFSIZE says ", w.assumed / MIB);
  TORCH_CHECK(w.needed <= w.real, "MTE out of range: the batch needs ", w.needed / MIB + 1,
              " MB of the communicator's buffer, which has ", w.real / MIB);
}

// Rules: op-plugin documents npu_moe_distribute_dispatch_v2 and _combine_v2. Not emulated:
// quantisation, ranks of shared experts, tensor-parallel groups.
Parallel bind_parallel(const std::string &group, int64_t ranks, int64_t rank, int64_t experts,
                       int64_t tp_ranks, int64_t shard_type, int64_t shared_ranks,
                       const std::string &algorithm, int64_t global_rows, int64_t rows, int64_t k,
                       int64_t hidden) {
  refuse_unless(!group.empty() && group.size() < 128, "group_ep has ", group.size(),
                " characters, 1 to 127 are allowed");
  auto domain = hccl::find_domain(group, static_cast<uint32_t>(rank));
  refuse_unless(domain, "group_ep ", group, " has no rank ", rank, " in this process");
  refuse_unless(!domain->has_collectives, "group_ep ", group, " has run collectives; dispatch and ",
                "combine need a communicator of their own");
  refuse_unless(domain->ranks == ranks, "ep_world_size ", ranks, ", but group_ep has ",
                domain->ranks, " ranks");
  refuse_unless(shared_ranks == 0 && shard_type == 0, "ranks of shared experts are not emulated");
  refuse_unless(tp_ranks <= 1, "tp_world_size ", tp_ranks, ", only 0 or 1");
  static const std::set<int64_t> a2_sizes = {2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 192, 256, 384};
  demand(is_a3() ? ranks >= 2 && ranks <= 768 : a2_sizes.count(ranks) > 0, "ep_world_size ", ranks,
         " is not among those of this product");
  if (!is_a3() && cann_before(9)) {  // moe_distribute_combine_v2_tiling.cpp of November 2025
    demand(ranks % 8 == 0 && ranks <= 256, "ep_world_size ", ranks, " is no multiple of 8 to 256, ",
           "which this product needs on CANN 8.5");
    demand(experts <= 512, "moe_expert_num ", experts, ", at most 512 on CANN 8.5");
    demand(rows <= 256, "BS ", rows, ", at most 256 on CANN 8.5");
  }
  bool known = algorithm.empty() || algorithm == "hierarchy" ||
               (is_a3() ? algorithm == "fullmesh_v1" || algorithm == "fullmesh_v2"
                        : algorithm == "fullmesh");
  refuse_unless(known, "comm_alg ", algorithm, " is not one of this product");
  if (algorithm == "hierarchy")
    demand(is_a3() ? ranks % 16 == 0 && ranks <= 256 : ranks == 16 || ranks == 32 || ranks == 64,
           "comm_alg hierarchy needs ", is_a3() ? "multiples of 16 to 256" : "16, 32 or 64",
           " ranks, got ", ranks);
  demand(experts >= 1 && experts <= 1024, "moe_expert_num ", experts, " is not 1 to 1024");
  refuse_unless(experts % ranks == 0, "moe_expert_num ", experts, " is not a multiple of ", ranks,
                " ranks");
  bool is_v2 = algorithm == "fullmesh_v2";
  int64_t most_k = is_v2 ? 12 : 16;
  demand(k > 0 && k <= most_k && k <= experts, "K ", k, " is not 1 to ", most_k);
  int64_t most = is_a3() ? (is_v2 || algorithm == "hierarchy" ? 256 : 512)
                         : (algorithm == "hierarchy" ? 512 : 256);
  demand(rows > 0 && rows <= most, "BS ", rows, " is not 1 to ", most);
  if (is_a3())
    demand(hidden >= 1024 && hidden <= 8192, "H ", hidden, " is not 1024 to 8192");
  else
    demand(hidden % 32 == 0 && hidden <= (algorithm == "hierarchy" ? 10240 : 7168), "H ", hidden,
           " must be a multiple of 32, at most ", algorithm == "hierarchy" ? 10240 : 7168);
  refuse_unless(global_rows % ranks == 0 && rows <= global_rows / ranks, "global_bs ", global_rows,
                " does not hold ", rows, " rows for each of ", ranks, " ranks");
  Window window = window_of(
      *domain, algorithm,
      needed_bytes(algorithm, experts, ranks, global_rows / ranks, k, hidden));
  check_tiling(window);
  if (!cann_before(9, 1))  // vllm-ascend, get_hccl_options: such memory would be misaligned
    demand(domain->buffer_mb == hccl::hccl_buffsize_mb(), "group_ep ", group, " has a buffer of ",
           domain->buffer_mb, " MB, which must be HCCL_BUFFSIZE, ", hccl::hccl_buffsize_mb(),
           " MB, on CANN 9.1");
  return {*domain, experts, experts / ranks, ranks, rank, global_rows / ranks, window};
}

void require_activations(const char *what, const Tensor &t) {
  require_kernel_type(what, t);
  demand(is_half(t), what, " must be float16 or bfloat16, got ", t.scalar_type());
}

void check_mask(const OptTensor &mask, const Tensor &ids, const std::string &algorithm) {
  refuse_unless(!mask || is_a3() || algorithm != "hierarchy", "x_active_mask with comm_alg ",
                "hierarchy");
  if (mask)
    refuse_unless(mask->scalar_type() == at::kBool &&
                      (mask->sizes() == ids.sizes() ||
                       (mask->dim() == 1 && mask->size(0) == ids.size(0))),
                  "x_active_mask must be bool [BS] or [BS, K], got ", mask->sizes());
}

bool is_active(const OptTensor &mask, int64_t row, int64_t choice) {
  if (!mask)
    return true;
  auto *p = static_cast<const char *>(mask->data_ptr()) + row * mask->stride(0);
  return mask->dim() == 1 ? *p : p[choice * mask->stride(1)];
}

// Ids must be in range, and the ids of a row must differ. Both rules also apply to masked rows.
// Masked rows must come last. According to the documents of both operators, the caller is
// responsible for these conditions.
void require_ids(const int32_t *ids, int64_t rows, int64_t k, int64_t experts,
                 const OptTensor &mask) {
  for (int64_t row = 0; row < rows; row++) {
    std::set<int32_t> seen;
    for (int64_t i = 0; i < k; i++) {
      int32_t id = ids[row * k + i];
      TORCH_CHECK(id >= 0 && id < experts, "expert_ids has ", id, " of ", experts, " experts");
      TORCH_CHECK(seen.insert(id).second, "expert_ids has ", id, " twice in row ", row);
    }
    TORCH_CHECK(!mask || mask->dim() == 2 || !row || is_active(mask, row - 1, 0) ||
                    !is_active(mask, row, 0),
                "x_active_mask has true after false, at row ", row);
  }
}

std::string describe(const char *what, const Parallel &p, int64_t hidden, int64_t k) {
  return text(what, " moe_expert_num=", p.experts, " H=", hidden, " K=", k, " global_bs=",
              p.most_rows * p.ranks);
}

// Returns the data of all ranks, one after the other. All ranks must pass the same number of bytes.
std::vector<char> gather(const Domain &domain, const std::string &what,
                         const std::vector<char> &offer) {
  std::vector<char> all(offer.size() * domain.ranks);
  domain.exchange(what, offer.data(), offer.size(),
                  [&](size_t begin, size_t size, const char *const *parts) {
                    for (uint32_t r = 0; r < domain.ranks; r++)
                      memcpy(all.data() + r * offer.size() + begin, parts[r], size);
                  });
  return all;
}

// With modelled time, the ranks exchange only their clocks.
void meet_only(const Domain &domain, const std::string &what) {
  domain.exchange(what, nullptr, 0, [](size_t, size_t, const char *const *) {});
}

// The origin of a received row: the rank that sent it, the row's number on that rank, and the
// choice of an expert. The operator's output has room for 128 numbers per row.
struct Origin {
  int32_t rank, row, choice;
};

struct Dispatch {
  Parallel parallel;
  Tensor x, ids;
  OptTensor mask, scales;
  Tensor rows, origins, tokens, counts, row_scales;
  bool cumulative;
};

// The data that a rank offers: the number of rows, whether a mask is given, the expert of each
// choice (-1 for none), the scales, and the rows.
void run(const Dispatch &d) {
  AtenScope scope;
  const Parallel &p = d.parallel;
  check_kernel(p.window);
  if (settings().timed) {
    meet_only(p.domain, describe("MoeDistributeDispatch", p, d.x.size(1), d.ids.size(1)));
    d.tokens.zero_();
    d.counts.zero_();
    return;
  }
  Tensor x = d.x.contiguous(), ids = d.ids.contiguous();
  Tensor scales = d.scales ? d.scales->contiguous() : Tensor();
  int64_t k = ids.size(1), mine = ids.size(0), bytes = x.size(1) * x.element_size();
  int64_t choices = p.most_rows * k;
  int64_t scales_at = 8 + choices * 4, rows_at = scales_at + choices * 4;
  int64_t offer_bytes = rows_at + p.most_rows * bytes;
  std::vector<char> offer(offer_bytes, 0);
  auto *head = reinterpret_cast<int32_t *>(offer.data());
  head[0] = static_cast<int32_t>(mine);
  head[1] = d.mask.has_value();
  if (settings().strict && !skipping())
    require_ids(ids.data_ptr<int32_t>(), mine, k, p.experts, d.mask);
  for (int64_t i = 0; i < choices; i++)
    head[2 + i] = i < mine * k && is_active(d.mask, i / k, i % k) && !skipping()
                      ? ids.data_ptr<int32_t>()[i]
                      : -1;
  if (d.scales)
    memcpy(offer.data() + scales_at, scales.data_ptr(), mine * k * 4);
  memcpy(offer.data() + rows_at, x.data_ptr(), mine * bytes);
  auto all = gather(p.domain, describe("MoeDistributeDispatch", p, x.size(1), k), offer);

  auto of = [&](int64_t r) { return reinterpret_cast<const int32_t *>(&all[r * offer_bytes]); };
  if (settings().strict)
    for (int64_t r = 0; r < p.ranks; r++)
      TORCH_CHECK(!head[1] || of(r)[0] == mine,
                  "x_active_mask is for ranks of equal BS: rank ", r, " has ", of(r)[0],
                  " rows, this one ", mine);
  int64_t place = 0, room = d.rows.size(0);
  auto *tokens = d.tokens.data_ptr<int64_t>();
  auto *counts = d.counts.data_ptr<int32_t>();
  auto *origins = d.origins.data_ptr<int32_t>();
  for (int64_t e = 0; e < p.local; e++) {
    int64_t before = place;
    for (int64_t r = 0; r < p.ranks; r++) {
      for (int64_t i = 0; i < choices; i++) {
        if (of(r)[2 + i] != p.rank * p.local + e)
          continue;
        TORCH_CHECK(place < room, "more rows than expand_x holds, ", room);
        memcpy(static_cast<char *>(d.rows.data_ptr()) + place * bytes,
               &all[r * offer_bytes + rows_at + i / k * bytes], bytes);
        Origin origin{static_cast<int32_t>(r), static_cast<int32_t>(i / k),
                      static_cast<int32_t>(i % k)};
        memcpy(origins + place * 3, &origin, sizeof origin);
        if (d.scales)
          memcpy(d.row_scales.data_ptr<float>() + place,
                 &all[r * offer_bytes + scales_at + i * 4], 4);
        place++;
      }
      counts[e * p.ranks + r] = static_cast<int32_t>(place);
    }
    tokens[e] = d.cumulative ? place : place - before;
  }
}

struct Return {
  Parallel parallel;
  Tensor rows, ids, origins, counts, scales;
  OptTensor mask;
  Tensor out;
};

// First, the ranks exchange how many rows each rank returns. Then they exchange the rows with their
// origins.
void run(const Return &c) {
  AtenScope scope;
  const Parallel &p = c.parallel;
  check_kernel(p.window);
  Tensor rows = c.rows.contiguous(), scales = c.scales.contiguous(), ids = c.ids.contiguous();
  int64_t k = ids.size(1), tokens = ids.size(0), hidden = rows.size(1);
  if (settings().strict && !skipping())
    require_ids(ids.data_ptr<int32_t>(), tokens, k, p.experts, c.mask);
  std::string what = describe("MoeDistributeCombine", p, hidden, k);
  if (settings().timed)
    return meet_only(p.domain, what);
  int32_t returned = skipping() ? 0 : c.counts.data_ptr<int32_t>()[p.local * p.ranks - 1];
  std::vector<char> own(4);
  memcpy(own.data(), &returned, 4);
  auto numbers = gather(p.domain, what, own);
  int32_t most = 0;
  for (int64_t r = 0; r < p.ranks; r++)
    most = std::max(most, reinterpret_cast<const int32_t *>(numbers.data())[r]);
  int64_t bytes = hidden * rows.element_size(), rows_at = most * int64_t(sizeof(Origin));
  std::vector<char> offer(rows_at + most * bytes, 0);
  memcpy(offer.data(), c.origins.data_ptr(), returned * sizeof(Origin));
  memcpy(offer.data() + rows_at, rows.data_ptr(), returned * bytes);
  auto all = gather(p.domain, what, offer);
  if (skipping())
    return;
  Tensor parts = at::zeros({tokens, k, hidden}, rows.options());
  for (int64_t r = 0; r < p.ranks; r++) {
    const char *from = all.data() + r * offer.size();
    for (int32_t i = 0; i < reinterpret_cast<const int32_t *>(numbers.data())[r]; i++) {
      Origin o;
      memcpy(&o, from + i * sizeof o, sizeof o);
      if (o.rank != p.rank)
        continue;
      TORCH_CHECK(o.row >= 0 && o.row < tokens && o.choice >= 0 && o.choice < k,
                  "assist_info_for_combine is not what dispatch gave");
      memcpy(static_cast<char *>(parts.data_ptr()) + (o.row * k + o.choice) * bytes,
             from + rows_at + i * bytes, bytes);
    }
  }
  Tensor sums = at::bmm(scales.to(at::kFloat).unsqueeze(1), parts.to(at::kFloat)).squeeze(1);
  for (int64_t t = 0; t < tokens; t++)  // masked tokens are not written
    for (int64_t i = 0; i < k; i++)
      if (is_active(c.mask, t, i)) {
        c.out[t].copy_(sums[t]);
        break;
      }
}

}  // namespace

OP(aclnnMoeDistributeDispatchV2,
   [](Tensor x, Tensor ids, OptTensor quant_scales, OptTensor mask, OptTensor scales,
      std::string group, int64_t ranks, int64_t rank, int64_t experts, std::string,
      int64_t tp_ranks, int64_t, int64_t shard_type, int64_t, int64_t shared_ranks,
      int64_t quant_mode, int64_t global_rows, int64_t tokens_kind, std::string algorithm,
      Tensor rows, Tensor, Tensor origins, Tensor tokens, Tensor counts, Tensor,
      Tensor row_scales) -> TimedTask {
     refuse_unless(quant_mode == 0 && !quant_scales, "quant_mode ", quant_mode,
                   " with scales is not emulated");
     require_activations("x", x);
     refuse_unless(x.dim() == 2 && ids.dim() == 2 && ids.size(0) == x.size(0) &&
                       ids.scalar_type() == at::kInt,
                   "expert_ids must be int32 [BS, K], got ", ids.sizes(), " for x ", x.sizes());
     Parallel p = bind_parallel(group, ranks, rank, experts, tp_ranks, shard_type, shared_ranks,
                                algorithm, global_rows, x.size(0), ids.size(1), x.size(1));
     check_mask(mask, ids, algorithm);
     refuse_unless(scales || algorithm != "hierarchy", "comm_alg hierarchy without expert_scales");
     demand(!scales || !is_a3() || algorithm == "hierarchy",
            "expert_scales is for comm_alg hierarchy on this product");
     refuse_unless(!scales || (scales->sizes() == ids.sizes() && scales->scalar_type() == at::kFloat),
                   "expert_scales must be float32 [BS, K]");
     refuse_unless(tokens.numel() == p.local && counts.numel() >= p.local * ranks &&
                       rows.size(1) == x.size(1),
                   "the results do not fit ", p.local, " experts on ", ranks, " ranks");
     int64_t least = global_rows * std::min(p.local, ids.size(1));
     refuse_unless(rows.size(0) >= least && origins.numel() >= 3 * least, "expand_x has ",
                   rows.size(0), " rows, ", least, " may come");
     for (auto &[what, t] : {std::pair{"expand_x", &rows}, {"ep_recv_counts", &counts}})
       require_contiguous(what, *t);
     Dispatch d{p, x, ids, mask, scales, rows, origins, tokens, counts, row_scales,
                tokens_kind == 0};
     return {[d] { run(d); }, dispatch_ns(x.size(0), x.size(1), ids.size(1), ranks)};
   })

OP(aclnnMoeDistributeCombineV2,
   [](Tensor rows, Tensor ids, Tensor origins, Tensor counts, Tensor scales, OptTensor,
      OptTensor mask, OptTensor, OptTensor, OptTensor, OptTensor row_scales, OptTensor shared,
      std::string group, int64_t ranks, int64_t rank, int64_t experts, std::string,
      int64_t tp_ranks, int64_t, int64_t shard_type, int64_t, int64_t shared_ranks,
      int64_t global_rows, int64_t, int64_t quant_mode, int64_t, std::string algorithm,
      Tensor out) -> TimedTask {
     refuse_unless(quant_mode == 0, "comm_quant_mode ", quant_mode, " is not emulated");
     refuse_unless(!shared, "shared_expert_x is for ranks of shared experts, not emulated");
     require_activations("expand_x", rows);
     refuse_unless(ids.dim() == 2 && ids.scalar_type() == at::kInt && rows.dim() == 2,
                   "expert_ids must be int32 [BS, K], got ", ids.sizes());
     refuse_unless(scales.sizes() == ids.sizes() && scales.scalar_type() == at::kFloat,
                   "expert_scales must be float32 ", ids.sizes(), ", got ", scales.scalar_type(),
                   " ", scales.sizes());
     Parallel p = bind_parallel(group, ranks, rank, experts, tp_ranks, shard_type, shared_ranks,
                                algorithm, global_rows, ids.size(0), ids.size(1), rows.size(1));
     check_mask(mask, ids, algorithm);
     demand(is_a3() || row_scales, "expand_scales must be given on this product");
     demand(!is_a3() || !row_scales || algorithm == "hierarchy",
            "expand_scales is for comm_alg hierarchy on this product");
     refuse_unless(!row_scales || (row_scales->dim() == 1 &&
                                   row_scales->scalar_type() == at::kFloat &&
                                   row_scales->size(0) >= rows.size(0)),
                   "expand_scales must be what dispatch gave");
     refuse_unless(counts.scalar_type() == at::kInt && counts.numel() >= p.local * ranks &&
                       origins.scalar_type() == at::kInt && origins.numel() >= 3 * rows.size(0),
                   "assist_info_for_combine or ep_send_counts are not what dispatch gave");
     require_same_type("the result", out, rows);
     require_contiguous("the result", out);
     Return c{p, rows, ids, origins, counts, scales, mask, out};
     return {[c] { run(c); }, combine_ns(ids.size(0), rows.size(1), ids.size(1), ranks)};
   })
