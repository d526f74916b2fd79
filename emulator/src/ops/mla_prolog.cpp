// The operator that computes the queries of latent attention from hidden states, and writes the
// latents and the rotated keys to the cache.
#include "kernels/mla.h"
#include "ops/bind.h"
#include "ops/quant.h"
#include "ops/storage_formats.h"
#include "ops/work.h"
#include "target.h"

using namespace emu;

namespace {

constexpr int kNoQuantisation = 0, kInt8 = 2;  // weight_quant_mode

bool is_one_of(int64_t value, std::initializer_list<int64_t> values) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

// A matrix in FRACTAL_NZ, and the scales of its columns if the matrix is int8.
struct Weight {
  NzMatrices stored;
  Tensor scale;
  int64_t columns;

  // Returns the product of the rows with this matrix, in float32. If the rows are int8, the sums
  // are exact, and are then multiplied by the scales of the rows and the columns.
  Tensor times(const Tensor &rows, const Tensor &row_scale) const {
    if (!scale.defined())
      return at::matmul(rows.to(at::kFloat), stored.matrix(0).to(at::kFloat));
    Tensor sum = at::matmul(rows.to(at::kDouble), stored.matrix(0).to(at::kDouble));
    return sum.to(at::kFloat) * scale.view({1, -1}) * row_scale.view({-1, 1});
  }
};

Weight weight_of(const char *what, aclTensor *weight, const OptTensor &scale, int64_t rows,
                 int64_t columns, bool is_int8) {
  refuse_unless(weight && weight->t.defined(), what, " is a null pointer");
  refuse_unless(weight->format == ACL_FORMAT_FRACTAL_NZ, what, " must be in FRACTAL_NZ, got format ",
                weight->format);
  const Tensor &t = weight->t;
  refuse_unless(t.scalar_type() == (is_int8 ? at::kChar : at::kBFloat16), what,
                " has another type than weight_quant_mode says: ", t.scalar_type());
  refuse_unless(t.dim() == 2 && t.size(0) == rows && t.size(1) == columns, what, " must be [", rows,
                ", ", columns, "], got ", t.sizes());
  refuse_unless(bool(scale) == is_int8, "int8 weights need scales, and only int8 weights: ", what);
  if (scale)
    refuse_unless(scale->scalar_type() == at::kFloat && scale->dim() == 2 && scale->size(0) == 1 &&
                      scale->size(1) == columns,
                  "the scales of ", what, " must be float32 [1, ", columns, "], got ",
                  scale->scalar_type(), " ", scale->sizes());
  return {NzMatrices(*weight), scale ? *scale : Tensor(), columns};
}

void require_bfloat16(const char *what, const Tensor &t, at::IntArrayRef sizes) {
  refuse_unless(t.scalar_type() == at::kBFloat16 && t.sizes() == sizes && t.is_contiguous(), what,
                " must be contiguous bfloat16 ", sizes, ", got ", t.scalar_type(), " ", t.sizes());
}

Tensor normalised(const Tensor &rows, const Tensor &gamma, double epsilon) {
  Tensor mean = (rows * rows).mean(-1, true);
  return rows / at::sqrt(mean + epsilon) * gamma.to(at::kFloat);
}

// Moves the elements of each head with an even index before the other elements, and then rotates
// the first half with the second half. x is [tokens, heads, 64], and the angles are [tokens, 1,
// 64].
Tensor rotated(const Tensor &x, const Tensor &cos, const Tensor &sin) {
  Tensor pairs = x.reshape({x.size(0), x.size(1), -1, 2});
  Tensor even = pairs.select(-1, 0), odd = pairs.select(-1, 1);
  return at::cat({even, odd}, -1) * cos + at::cat({at::neg(odd), even}, -1) * sin;
}

}  // namespace

// Rules: document aclnnMlaPrologV3WeightNz, and the sources of November 2025
// (mla_prolog_tiling_check.cpp and the kernel), which allow less than later documents: hidden
// states have 6144, 7168 or 7680 elements, and blocks have 16 or 128 tokens. The emulator supports
// rows and weights in bfloat16 or in int8, a cache in bfloat16, and cache_mode PA_BSND. The
// document requires indices inside the cache, but the operator's kernel skips negative indices.
// With int8, the kernel keeps the results of the first products in float32 until the norms are
// computed. The kernel quantises the norm of the queries without first rounding the norm to
// bfloat16.
OP(aclnnMlaPrologV3WeightNz,
   [](Tensor x, aclTensor *weight_dq, aclTensor *weight_uq_qr, Tensor uk, aclTensor *weight_dkv_kr,
      Tensor gamma_q, Tensor gamma_kv, Tensor sin, Tensor cos, Tensor latents, Tensor rope_keys,
      OptTensor index, OptTensor x_scale, OptTensor dq_scale, OptTensor uq_qr_scale,
      OptTensor dkv_kr_scale, OptTensor latent_scale, OptTensor rope_scale, OptTensor smooth,
      OptTensor lengths, OptTensor clip, double epsilon_q, double epsilon_kv, std::string mode,
      int64_t weight_mode, int64_t cache_mode, int64_t query_mode, int64_t joint, int64_t joint_scale,
      int64_t, double query_factor, double key_factor, Tensor query, Tensor query_rope, OptTensor,
      OptTensor query_norm, OptTensor) -> TimedTask {
     refuse_unless(weight_mode == kNoQuantisation || weight_mode == kInt8, "weight_quant_mode ",
                   weight_mode, " is not emulated, only 0 and 2");
     refuse_unless(!cache_mode && !query_mode && !joint && !joint_scale && !latent_scale &&
                       !rope_scale && !smooth && !lengths && !clip && !query_norm,
                   "caches and queries in int8, smooth scales, lengths, clipping and query_norm are "
                   "not emulated");
     refuse_unless(mode == "PA_BSND", "cache_mode ", mode, " is not emulated, only PA_BSND");
     refuse_unless(query_factor == 1 && key_factor == 1, "qc_qr_scale and kc_scale other than 1 are "
                   "not emulated");
     demand(chip() != Chip::Other, "only A2 and A3 have this operator");
     // In the sources of CANN 8.5, the operator's arguments have another order than in the call of
     // torch_npu.
     demand(!cann_before(9), "CANN 8.5 does not have this operator");
     bool is_int8 = weight_mode == kInt8;
     auto type = is_int8 ? at::kChar : at::kBFloat16;
     refuse_unless(x.dim() == 2 && x.scalar_type() == type && x.is_contiguous(),
                   "token_x must be contiguous ", type, " of two dimensions (three are not emulated"
                   "), got ", x.scalar_type(), " ", x.sizes());
     refuse_unless(uk.dim() == 3, "weight_uk must have 3 dimensions, got ", uk.sizes());
     int64_t tokens = x.size(0), hidden = x.size(1), rank = gamma_q.numel();
     int64_t heads = uk.size(0), plain = uk.size(1), width = uk.size(2), rope = cos.size(-1);
     demand(is_one_of(hidden, {6144, 7168, 7680}), "hidden states have ", hidden,
            " elements, allowed are 6144, 7168 and 7680");
     demand(rank == 1536, "the latent of queries has ", rank, " elements, allowed are 1536");
     demand(is_one_of(heads, {1, 2, 4, 8, 16, 32, 64, 128}), heads,
            " heads are no power of two up to 128");
     demand(width == 512 && plain == 128 && rope == 64, "a key has ", width, " + ", rope,
            " elements and a head ", plain, ", allowed are 512 + 64 and 128");
     demand(tokens <= 1048576, "token_x has ", tokens, " rows, at most 1048576");
     refuse_unless(rope > 0 && rope % 2 == 0, "rope_cos of ", rope, " columns");
     require_bfloat16("weight_uk", uk, {heads, plain, width});
     require_bfloat16("rmsnorm_gamma_cq", gamma_q, {rank});
     require_bfloat16("rmsnorm_gamma_ckv", gamma_kv, {width});
     require_bfloat16("rope_sin", sin, {tokens, rope});
     require_bfloat16("rope_cos", cos, {tokens, rope});
     refuse_unless(latents.dim() == 4 && rope_keys.dim() == 4, "caches must have 4 dimensions");
     int64_t blocks = latents.size(0), block = latents.size(1);
     require_bfloat16("kv_cache", latents, {blocks, block, 1, width});
     require_bfloat16("kr_cache", rope_keys, {blocks, block, 1, rope});
     demand(block == 16 || block == 128, "blocks have ", block, " slots, allowed are 16 and 128");
     refuse_unless(index && index->scalar_type() == at::kLong && index->dim() == 1 &&
                       index->size(0) == tokens && index->is_contiguous(),
                   "cache_index must be int64, one for each of ", tokens, " tokens");
     refuse_unless(bool(x_scale) == is_int8, "dequant_scale_x must be given for int8 rows only");
     if (x_scale)
       refuse_unless(x_scale->scalar_type() == at::kFloat && x_scale->dim() == 2 &&
                         x_scale->size(0) == tokens && x_scale->size(1) == 1,
                     "dequant_scale_x must be float32 [", tokens, ", 1], got ",
                     x_scale->scalar_type(), " ", x_scale->sizes());
     Weight down = weight_of("weight_dq", weight_dq, dq_scale, hidden, rank, is_int8);
     Weight down_kv =
         weight_of("weight_dkv_kr", weight_dkv_kr, dkv_kr_scale, hidden, width + rope, is_int8);
     Weight up = weight_of("weight_uq_qr", weight_uq_qr, uq_qr_scale, rank,
                           heads * (plain + rope), is_int8);
     require_bfloat16("query", query, {tokens, heads, width});
     require_bfloat16("query_rope", query_rope, {tokens, heads, rope});
     // The results of products in bfloat16 are rounded before the vector cores read them.
     auto rounded = [=](const Tensor &t) { return is_int8 ? t : t.to(at::kBFloat16).to(at::kFloat); };
     Task task = arithmetic([=] {
       AtenScope scope;
       const int64_t *slots = index->data_ptr<int64_t>(), capacity = blocks * block;
       for (int64_t token = 0; token < tokens; token++)
         if (slots[token] >= capacity)
           throw std::runtime_error("index " + std::to_string(slots[token]) +
                                    " lies outside the cache");
       Tensor scales = x_scale ? *x_scale : Tensor();
       Tensor angles[] = {cos.to(at::kFloat).unsqueeze(1), sin.to(at::kFloat).unsqueeze(1)};
       Tensor kv = rounded(down_kv.times(x, scales));
       Tensor normed = normalised(kv.narrow(1, 0, width), gamma_kv, epsilon_kv);
       Tensor turned = rotated(kv.narrow(1, width, rope).unsqueeze(1), angles[0], angles[1]);
       Tensor latent_rows = latents.view({capacity, width});
       Tensor key_rows = rope_keys.view({capacity, rope});
       for (int64_t token = 0; token < tokens; token++)
         if (slots[token] >= 0) {
           latent_rows[slots[token]].copy_(normed[token]);
           key_rows[slots[token]].copy_(turned[token][0]);
         }
       Tensor low = normalised(rounded(down.times(x, scales)), gamma_q, epsilon_q), low_scales;
       if (is_int8) {
         Tensor values = at::empty(low.sizes(), at::kChar);
         low_scales = at::empty({tokens}, at::kFloat);
         write_int8_and_steps(low, values, low_scales);
         low = values;
       } else {
         low = low.to(at::kBFloat16);
       }
       Tensor q = rounded(up.times(low, low_scales)).view({tokens, heads, plain + rope});
       query_rope.copy_(rotated(q.narrow(2, plain, rope), angles[0], angles[1]));
       Tensor plain_q = q.narrow(2, 0, plain).to(at::kBFloat16).to(at::kFloat).transpose(0, 1);
       query.copy_(at::bmm(plain_q, uk.to(at::kFloat)).transpose(0, 1));
     });
     double n = static_cast<double>(tokens), bytes = is_int8 ? 1 : 2;
     auto phase = [&](double columns, double inputs) {
       return product_phase_ns({1, n, columns, inputs, type, columns * inputs * bytes});
     };
     double first = static_cast<double>(rank + width + rope), heads_n = static_cast<double>(heads);
     int64_t products =
         product_ns({1, n, first, double(hidden), type, first * double(hidden) * bytes}) +
         phase(heads_n * double(plain + rope), double(rank)) +
         product_phase_ns({heads_n, n, double(width), double(plain), at::kBFloat16,
                           double(uk.numel()) * 2});
     // The vector cores read the sums of the first three products, and write norms and rotated
     // keys.
     double sums = n * (first + heads_n * double(plain + rope)) * (is_int8 ? 4 : 2);
     return {task, products + vector_phase_ns(sums * 2)};
   })
