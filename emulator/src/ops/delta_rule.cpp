// The gated delta rule of linear attention, token by token and for prompts.
#include "kernels/delta_rule.h"
#include "ops/bind.h"

#include <cstring>
#include <map>

using namespace emu;

namespace {

// The arguments that both operators of this file have.
struct DeltaTensors {
  Tensor query, key, value, beta, state, lengths;
  OptTensor g, gk;
  Tensor out;

  int64_t tokens() const { return query.size(0); }
  int64_t requests() const { return lengths.size(0); }
  std::vector<std::pair<const char *, Tensor>> rows() const {
    return {{"query", query}, {"key", key}, {"value", value}, {"beta", beta}, {"out", out}};
  }
};

void check_types(const DeltaTensors &d, const char *state) {
  for (auto &[what, t] : d.rows()) {
    require_kernel_type(what, t);
    demand(t.scalar_type() == at::kBFloat16, what, " must be bfloat16, got ", t.scalar_type(),
           " (other floats only with strict=false)");
  }
  require_kernel_type(state, d.state);
  demand(d.state.scalar_type() == at::kBFloat16, state, " must be bfloat16, got ",
         d.state.scalar_type(), " (other floats only with strict=false)");
  refuse_unless(d.lengths.scalar_type() == at::kInt && d.lengths.dim() == 1,
                "actual_seq_lengths must be int32 with one dimension, got ",
                d.lengths.scalar_type(), " ", d.lengths.sizes());
  refuse_unless(!d.g || d.g->scalar_type() == at::kFloat, "g must be float32");
  refuse_unless(!d.gk || d.gk->scalar_type() == at::kFloat, "gk must be float32");
}

void check_shapes(const DeltaTensors &d, const char *state) {
  refuse_unless(d.query.dim() == 3 && d.value.dim() == 3 && d.state.dim() == 4,
                "query and value must have 3 dimensions, ", state, " 4; got ", d.query.sizes(),
                ", ", d.value.sizes(), ", ", d.state.sizes());
  int64_t tokens = d.tokens(), heads = d.value.size(1);
  refuse_unless(tokens > 0 && d.requests() > 0 && d.query.numel() > 0 && d.value.numel() > 0,
                "empty tensors");
  refuse_unless(d.key.sizes() == d.query.sizes(), "key of shape ", d.key.sizes(), " for query ",
                d.query.sizes());
  refuse_unless(d.value.size(0) == tokens, "value of shape ", d.value.sizes(), " for ", tokens,
                " tokens");
  refuse_unless(heads % d.query.size(1) == 0, "Nv ", heads, " is not a multiple of Nk ",
                d.query.size(1));
  std::vector<int64_t> gates = {tokens, heads}, sizes = {heads, d.value.size(2), d.query.size(2)};
  refuse_unless(d.beta.sizes() == gates, "beta must be [", tokens, ", ", heads, "], got ",
                d.beta.sizes());
  refuse_unless(!d.g || d.g->sizes() == gates, "g must be [", tokens, ", ", heads, "]");
  std::vector<int64_t> channels = {tokens, heads, d.query.size(2)};
  refuse_unless(!d.gk || d.gk->sizes() == channels, "gk must be [", tokens, ", ", heads, ", ",
                channels[2], "]");
  refuse_unless(d.state.sizes().slice(1) == sizes, state, " must be [slots, Nv, Dv, Dk] = [.., ",
                sizes[0], ", ", sizes[1], ", ", sizes[2], "], got ", d.state.sizes());
  require_contiguous(state, d.state);
  require_contiguous("out", d.out);
}

// If inputs are strided, this object owns contiguous copies of them.
struct BoundRule {
  std::vector<Tensor> dense;
  kernels::DeltaRule rule{};

  BoundRule(const DeltaTensors &d, float scale, const Tensor &written) {
    for (const Tensor &t : {d.query, d.key, d.value, d.beta})
      dense.push_back(t.contiguous());
    rule.g = decays("g", d.g);
    rule.gk = decays("gk", d.gk);
    rule.q = data_of(dense[0]);
    rule.k = data_of(dense[1]);
    rule.v = data_of(dense[2]);
    rule.beta = data_of(dense[3]);
    rule.out = data_of(d.out);
    rule.read = data_of(d.state);
    rule.written = data_of(written);
    rule.key_heads = d.query.size(1);
    rule.value_heads = d.value.size(1);
    rule.key_dim = d.query.size(2);
    rule.value_dim = d.value.size(2);
    rule.scale = scale;
  }

  const float *decays(const char *what, const OptTensor &logs) {
    if (!logs)
      return nullptr;
    dense.push_back(logs->contiguous());
    if (settings().strict)
      TORCH_CHECK(!dense.back().gt(0).any().item<bool>(), what, " has an element above 0");
    return dense.back().data_ptr<float>();
  }
};

// New memory is filled with bytes 0xFF, and reading a state of such bytes is refused. When a caller
// gives a slot to a request, the caller can fill the slot with such bytes. The emulator then
// refuses a request that would read the state of an earlier request.
void require_written(const char *what, const Tensor &states, int64_t slot, int64_t request) {
  if (!settings().strict)
    return;
  Tensor state = states[slot];
  auto *bytes = static_cast<const unsigned char *>(state.const_data_ptr());
  TORCH_CHECK(bytes[0] != 0xFF || memcmp(bytes, bytes + 1, state.nbytes() - 1), "request ", request,
              " starts from slot ", slot, " of ", what, ", which nothing has written");
}

// Reads the lengths, which are data of the device, and returns the first token of each request.
std::vector<int64_t> starts_of(const Tensor &lengths, int64_t tokens, int64_t longest) {
  std::vector<int64_t> starts;
  int64_t total = 0;
  for (int64_t i = 0; i < lengths.size(0); i++) {
    int64_t length = lengths.data_ptr<int32_t>()[i];
    TORCH_CHECK(length >= 1 && length <= longest, "actual_seq_lengths[", i, "] is ", length,
                ", not 1 to ", longest);
    starts.push_back(total);
    total += length;
  }
  TORCH_CHECK(total == tokens, "actual_seq_lengths add up to ", total, ", but T is ", tokens);
  return starts;
}

// Slot 0 is for the padding rows of graphs, so several requests may use it. Each other slot may
// belong to only one request of the call, because the device computes the requests at the same
// time.
void check_slots(const int32_t *slots, int64_t request, int64_t start, int64_t count,
                 int64_t limit, std::map<int32_t, int64_t> &owners) {
  for (int64_t t = start; t < start + count; t++) {
    TORCH_CHECK(slots[t] >= 0 && slots[t] < limit, "ssm_state_indices[", t, "] is ", slots[t],
                ", and state has ", limit, " slots");
    auto owner = owners.emplace(slots[t], request).first->second;
    TORCH_CHECK(slots[t] == 0 || owner == request, "requests ", owner, " and ", request,
                " have the same slot ", slots[t], " in ssm_state_indices");
  }
}

}  // namespace

// Rules: document npu_recurrent_gated_delta_rule. Two more rules are from
// aclnnRecurrentGatedDeltaRule: num_accepted_tokens is required, and T is at most the number of
// slots. The emulator also checks the values of tensors, which CANN does not check. torch_npu's
// document of 2.13 says that gk is not supported yet, but the newest document of
// aclnnRecurrentGatedDeltaRule describes gk.
OP(aclnnRecurrentGatedDeltaRule,
   [](Tensor query, Tensor key, Tensor value, Tensor beta, Tensor state, Tensor lengths,
      Tensor slots, OptTensor g, OptTensor gk, OptTensor accepted, float scale,
      Tensor out) -> TimedTask {
     constexpr int64_t kLongest = 8, kMost = 256;
     DeltaTensors d{query, key, value, beta, state, lengths, g, gk, out};
     demand(!gk, "gk is not supported yet, pass None");
     check_types(d, "state");
     check_shapes(d, "state");
     int64_t tokens = d.tokens(), requests = d.requests(), limit = state.size(0);
     for (auto &[what, size] : {std::pair{"Nk", query.size(1)}, {"Nv", value.size(1)},
                                {"Dk", query.size(2)}, {"Dv", value.size(2)}})
       demand(size <= kMost, what, " is ", size, ", at most ", kMost);
     demand(tokens <= limit, "T is ", tokens, ", but state has only ", limit, " slots");
     refuse_unless(slots.scalar_type() == at::kInt && slots.dim() == 1 && slots.size(0) == tokens,
                   "ssm_state_indices must be int32 [", tokens, "], got ", slots.scalar_type(),
                   " ", slots.sizes());
     demand(accepted.has_value(), "num_accepted_tokens must be given");
     refuse_unless(!accepted || (accepted->scalar_type() == at::kInt && accepted->dim() == 1 &&
                                 accepted->size(0) == requests),
                   "num_accepted_tokens must be int32 [", requests, "]");
     Task task = arithmetic([=] {
       AtenScope scope;
       Tensor each = lengths.contiguous(), places = slots.contiguous();
       Tensor counts = accepted ? accepted->contiguous() : Tensor();
       std::vector<int64_t> starts = starts_of(each, tokens, kLongest);
       const int32_t *slot = places.data_ptr<int32_t>();
       std::map<int32_t, int64_t> owners;
       std::vector<kernels::DeltaRequest> found;
       for (int64_t i = 0; i < requests; i++) {
         int64_t start = starts[i], count = each.data_ptr<int32_t>()[i];
         int64_t kept = accepted ? counts.data_ptr<int32_t>()[i] : 1;
         TORCH_CHECK(kept >= 1 && kept <= count, "num_accepted_tokens[", i, "] is ", kept,
                     ", not 1 to ", count, ", the request's length");
         check_slots(slot, i, start, count, limit, owners);
         require_written("state", state, slot[start + kept - 1], i);
         found.push_back({start, count, slot[start + kept - 1], slot + start});
       }
       BoundRule bound(d, scale, state);
       for (const kernels::DeltaRequest &request : found)
         kernels::delta_rule(bound.rule, request);
     });
     double one = state[0].nbytes();
     return {task, delta_rule_ns(one * (requests + tokens), 0)};
   })

// Rules: document npu_chunk_gated_delta_rule. Its limit of 8 tokens per request contradicts its own
// example, so this limit is not checked. The document of aclnnChunkGatedDeltaRule also requires g
// >= -1. This limit of g is not checked, because other projects pass other values. The document
// also allows smaller heads, which the emulator refuses.
OP(aclnnChunkGatedDeltaRule,
   [](Tensor query, Tensor key, Tensor value, Tensor beta, Tensor initial, Tensor lengths,
      OptTensor g, float scale, Tensor out, Tensor final) -> TimedTask {
     constexpr int64_t kMostHeads = 64, kDim = 128;
     DeltaTensors d{query, key, value, beta, initial, lengths, g, OptTensor(), out};
     check_types(d, "initial_state");
     check_shapes(d, "initial_state");
     int64_t tokens = d.tokens(), requests = d.requests();
     for (auto &[what, heads] : {std::pair{"Nk", query.size(1)}, {"Nv", value.size(1)}})
       demand(heads <= kMostHeads, what, " is ", heads, ", at most ", kMostHeads);
     for (auto &[what, dim] : {std::pair{"Dk", query.size(2)}, {"Dv", value.size(2)}})
       demand(dim == kDim, what, " must be ", kDim, ", got ", dim);
     refuse_unless(initial.size(0) == requests, "initial_state of ", initial.size(0), " states for ",
                   requests, " requests");
     require_same_type("final_state", final, initial);
     require_contiguous("final_state", final);
     refuse_unless(final.sizes() == initial.sizes(), "final_state of shape ", final.sizes());
     Task task = arithmetic([=] {
       AtenScope scope;
       Tensor each = lengths.contiguous();
       std::vector<int64_t> starts = starts_of(each, tokens, tokens);
       BoundRule bound(d, scale, final);
       for (int64_t i = 0; i < requests; i++) {
         require_written("initial_state", initial, i, i);
         std::vector<int32_t> slots(each.data_ptr<int32_t>()[i], -1);
         slots.back() = static_cast<int32_t>(i);
         kernels::delta_rule(bound.rule, {starts[i], static_cast<int64_t>(slots.size()), i,
                                          slots.data()});
       }
     });
     // The modelled time counts two kinds of products for each token and head: products with the
     // state, and products with the tokens of a chunk.
     constexpr double kChunk = 64;
     double key_dim = query.size(2), value_dim = value.size(2), rows = tokens * value.size(1);
     double operations = 2 * rows * (3 * key_dim * value_dim + 2 * kChunk * (key_dim + value_dim));
     return {task, delta_rule_ns(initial.nbytes() + final.nbytes(), operations)};
   })
