// The operators before multi-head latent attention: they rotate queries, and write to the cache.
#include "kernels/mla.h"
#include "ops/bind.h"

using namespace emu;

static void require_half(const char *what, const Tensor &t) {
  require_kernel_type(what, t);
  demand(is_half(t), what, " must be float16 or bfloat16, got ", t.scalar_type(),
         " (float32 only with strict=false)");
}

// Rules: op-plugin document npu_interleave_rope. x is [B, N, S, D], and D is 64. cos and sin have
// one head, and one position or S positions. All tensors have the same type, and are contiguous.
OP(aclnnInterleaveRope, [](Tensor x, Tensor cos, Tensor sin, Tensor out) -> Task {
  require_half("x", x);
  refuse_unless(x.dim() == 4 && cos.dim() == 4 && cos.sizes() == sin.sizes(),
                "x, cos and sin must have 4 dimensions, cos and sin one shape; got ", x.sizes(),
                ", ", cos.sizes(), ", ", sin.sizes());
  int64_t dim = x.size(3), positions = x.size(2);
  demand(dim == 64, "D must be 64, got ", dim);
  refuse_unless(dim % 2 == 0 && cos.size(3) == dim, "cos of shape ", cos.sizes(), " for x ",
                x.sizes());
  refuse_unless(cos.size(1) == 1, "cos must have one head, got ", cos.size(1));
  refuse_unless(cos.size(0) == x.size(0) && (cos.size(2) == 1 || cos.size(2) == positions),
                "cos of shape ", cos.sizes(), " for x ", x.sizes());
  for (auto &[what, t] : {std::pair{"x", &x}, {"cos", &cos}, {"sin", &sin}, {"out", &out}}) {
    require_same_type(what, *t, x);
    require_contiguous(what, *t);
  }
  int64_t rows = dim ? x.numel() / dim : 0, heads = x.size(1), angles = cos.size(2);
  kernels::PairRotary r{data_of(x), data_of(cos), data_of(sin), data_of(out), dim};
  return arithmetic([=] {
    for (int64_t row = 0; row < rows; row++) {
      int64_t batch = row / (heads * positions), position = angles == 1 ? 0 : row % positions;
      kernels::rotate_pairs(r, row * dim, (batch * angles + position) * dim, row * dim);
    }
  });
})

// Rules: op-plugin document npu_kv_rmsnorm_rope_cache. kv [B, 1, S, 512 + 64]; caches [B, 1,
// length, D] with index [B, S] (Norm), or [blocks, block size, 1, D] with index [B * S] of flat
// slots (PA, PA_BNSD) and at least B * ceil(S / block size) blocks; no quantisation. If
// is_output_kv is set, the copies are written, but only in PA modes. A row with index -1 is not
// written: the document does not say this, but other projects use it for padded batches.
OP(aclnnKvRmsNormRopeCache,
   [](Tensor kv, Tensor gamma, Tensor cos, Tensor sin, Tensor index, Tensor rope_cache,
      Tensor latent_cache, OptTensor rope_scale, OptTensor latent_scale, OptTensor rope_offset,
      OptTensor latent_offset, double epsilon, std::string mode, bool copies, Tensor rope_out,
      Tensor latent_out) -> Task {
     refuse_unless(!rope_scale && !latent_scale && !rope_offset && !latent_offset,
                   "quantisation is not emulated");
     bool paged = mode == "PA" || mode == "PA_BNSD";
     refuse_unless(paged || mode == "Norm", "cache_mode ", mode,
                   " is not emulated, only Norm, PA and PA_BNSD");
     require_half("kv", kv);
     refuse_unless(kv.dim() == 4 && kv.size(1) == 1, "kv must be [B, 1, S, D], got ", kv.sizes());
     int64_t batch = kv.size(0), length = kv.size(2), rows = batch * length;
     int64_t rms = gamma.numel(), rope = kv.size(3) - rms;
     demand(rms == 512 && rope == 64, "kv must be 512 + 64 wide, got ", rms, " + ", rope);
     refuse_unless(rope > 0 && rope % 2 == 0, "gamma of ", rms, " elements for kv ", kv.sizes());
     for (auto &[what, t] : {std::pair{"cos", &cos}, {"sin", &sin}})
       refuse_unless(t->dim() == 4 && t->size(0) == batch && t->size(1) == 1 &&
                         t->size(2) == length && t->size(3) == rope,
                     what, " must be [", batch, ", 1, ", length, ", ", rope, "], got ",
                     t->sizes());
     for (auto &[what, t] : {std::pair{"gamma", &gamma}, {"cos", &cos}, {"sin", &sin},
                             {"k_cache", &rope_cache}, {"ckv_cache", &latent_cache}}) {
       require_same_type(what, *t, kv);
       require_contiguous(what, *t);
     }
     refuse_unless(index.scalar_type() == at::kLong && index.is_contiguous() &&
                       index.numel() == rows && index.dim() == (paged ? 1 : 2),
                   "index must be int64 ", paged ? "[B * S]" : "[B, S]", ", got ",
                   index.scalar_type(), " ", index.sizes());
     refuse_unless(rope_cache.dim() == 4 && latent_cache.dim() == 4 &&
                       rope_cache.sizes().slice(0, 3) == latent_cache.sizes().slice(0, 3) &&
                       rope_cache.size(3) == rope && latent_cache.size(3) == rms &&
                       rope_cache.size(paged ? 2 : 1) == 1,
                   "caches ", rope_cache.sizes(), " and ", latent_cache.sizes(),
                   " do not fit cache_mode ", mode);
     int64_t slots = paged ? 0 : rope_cache.size(2);
     if (paged) {
       int64_t block = std::max<int64_t>(rope_cache.size(1), 1);
       int64_t least = (length + block - 1) / block * batch;
       demand(rope_cache.size(0) >= least, "the cache has ", rope_cache.size(0),
              " blocks, B * ceil(S / block_size) is ", least);
     } else {
       refuse_unless(rope_cache.size(0) == batch, "k_cache of shape ", rope_cache.sizes(), " for ",
                     batch, " sequences");
       demand(slots >= length, "cache length ", slots, " is less than S ", length);
     }
     kernels::LatentRows l{};
     l.gamma = data_of(gamma);
     l.cos = data_of(cos);
     l.sin = data_of(sin);
     l.rope = data_of(rope_cache);
     l.latent = data_of(latent_cache);
     if (copies && paged) {
       l.rope_copy = data_of(rope_out);
       l.latent_copy = data_of(latent_out);
     }
     l.slots = index.data_ptr<int64_t>();
     l.rows = rows;
     l.rows_per_batch = std::max<int64_t>(length, 1);
     l.batch_slots = slots;
     l.capacity = rope_cache.size(0) * rope_cache.size(1) * rope_cache.size(2);
     l.rms_dim = rms;
     l.rope_dim = rope;
     l.epsilon = static_cast<float>(epsilon);
     return arithmetic([=]() mutable {
       AtenScope scope;
       Tensor dense = kv.contiguous();
       l.kv = data_of(dense);
       kernels::norm_rope_cache(l);
     });
   })

// Rules: op-plugin document npu_transpose_batchmatmul. x1 is [B, M, K], or [M, B, K] with perm_x1
// (1, 0, 2). x2 is [B, K, N]. The result is [M, B, N]. If batch_split_factor is more than one, the
// columns of the result are split into this number of parts. K and N are multiples of 16. B, N and
// K are below 65536; for a transposed x1, K * B is also below 65536.
OP(aclnnTransposeBatchMatMul,
   [](Tensor x1, Tensor x2, OptTensor bias, OptTensor scale, Ints perm1, Ints perm2, Ints perm_out,
      int8_t, int32_t split, Tensor out) -> TimedTask {
     refuse_unless(!bias && !scale, "bias and scale are not emulated");
     require_kernel_type("input", x1);
     require_same_type("weight", x2, x1);
     refuse_unless(x1.dim() == 3 && x2.dim() == 3, "input and weight must have 3 dimensions");
     bool turned = perm1 == Ints{1, 0, 2};
     refuse_unless(turned || perm1 == Ints{0, 1, 2}, "perm_x1 ", perm1);
     refuse_unless(perm2 == (Ints{0, 1, 2}), "perm_x2 ", perm2, ", only 0 1 2");
     refuse_unless(perm_out == (Ints{1, 0, 2}), "perm_y ", perm_out, ", only 1 0 2");
     Tensor a = turned ? x1.transpose(0, 1) : x1;
     int64_t batch = a.size(0), k = a.size(2), n = x2.size(2);
     refuse_unless(x2.size(0) == batch && x2.size(1) == k, "shapes ", x1.sizes(), " and ",
                   x2.sizes(), " do not multiply");
     demand(k % 16 == 0 && n % 16 == 0, "K ", k, " and N ", n, " must be multiples of 16");
     demand(batch < 65536 && n < 65536 && (turned ? k * batch : k) < 65536, "B ", batch, ", K ", k,
            " and N ", n, " must be below 65536, and K * B of a turned input");
     refuse_unless(split >= 1 && batch * n % split == 0 && out.numel() == a.size(1) * batch * n,
                   "batch_split_factor ", split, " does not fit ", batch, " * ", n);
     require_contiguous("the result", out);
     Task task = arithmetic([=] {
       AtenScope scope;
       Tensor product = at::bmm(a.to(at::kFloat), x2.to(at::kFloat)).transpose(0, 1);
       if (split > 1)  // [parts, M, B * N / parts]
         product = product.reshape({a.size(1), split, batch * n / split}).transpose(0, 1);
       out.copy_(product.reshape(out.sizes()));
     });
     return {task, product_ns(a, x2)};
   })
