// Norms, SwiGLU, rotary embedding and cache writes. The fused kernels compute most of them.
#include "ops/bind.h"

using namespace emu;
using kernels::Rotary;

// Rules: op-plugin documents npu_rms_norm and npu_add_rms_norm. x is float32, float16 or bfloat16.
// The shape of gamma is the shape of the last dimensions of x. Inputs may be strided. Only
// npu_rms_norm accepts empty tensors.
static kernels::RmsNorm bind_norm(const Tensor &x, const Tensor &gamma, double epsilon,
                                  const Tensor &out, const Tensor &rstd) {
  require_kernel_type("x", x);
  require_kernel_type("gamma", gamma);
  demand(gamma.dim() <= x.dim() &&
             gamma.sizes() == x.sizes().slice(x.dim() - gamma.dim(), gamma.dim()),
         "gamma of shape ", gamma.sizes(), " is not the trailing shape of x ", x.sizes());
  require_contiguous("out", out);
  require_same_type("out", out, x);
  kernels::RmsNorm norm{};
  norm.out = data_of(out);
  norm.columns = gamma.numel();
  norm.rows = x.numel() / std::max<int64_t>(norm.columns, 1);
  norm.epsilon = static_cast<float>(epsilon);
  bool wants_rstd = rstd.numel() == norm.rows && rstd.scalar_type() == at::kFloat;
  norm.rstd = wants_rstd ? rstd.data_ptr<float>() : nullptr;
  return norm;
}

// Contiguous inputs are read in place. Other inputs are copied when the task runs, to make them
// contiguous.
static Task run_norm(kernels::RmsNorm norm, Tensor x, OptTensor residual, Tensor gamma) {
  bool direct = x.is_contiguous() && (!residual || residual->is_contiguous()) &&
                gamma.is_contiguous();
  if (direct) {
    norm.x = data_of(x);
    norm.gamma = data_of(gamma);
    norm.residual = data_of(residual);
    return arithmetic([norm] { kernels::rms_norm(norm); });
  }
  return arithmetic([norm, x, residual, gamma]() mutable {
    AtenScope scope;
    Tensor dense = x.contiguous(), other = residual ? residual->contiguous() : Tensor();
    Tensor weight = gamma.contiguous();
    norm.x = data_of(dense);
    norm.gamma = data_of(weight);
    norm.residual = residual ? data_of(other) : kernels::Data{};
    kernels::rms_norm(norm);
  });
}

OP(aclnnRmsNorm, [](Tensor x, Tensor gamma, double epsilon, Tensor out, Tensor rstd) -> Task {
  return run_norm(bind_norm(x, gamma, epsilon, out, rstd), x, {}, gamma);
})
// Document npu_gemma_rms_norm: the norm is multiplied by 1 + gamma. gamma has the type of x, and x
// is contiguous.
OP(aclnnGemmaRmsNorm, [](Tensor x, Tensor gamma, double epsilon, Tensor out, Tensor rstd) -> Task {
  demand(gamma.scalar_type() == x.scalar_type(), "gamma must be ", x.scalar_type(), ", got ",
         gamma.scalar_type());
  demand(x.numel() > 0, "x must not be empty");
  demand(x.is_contiguous(), "x must be contiguous, got strides ", x.strides());
  auto norm = bind_norm(x, gamma, epsilon, out, rstd);
  norm.shift = 1;
  return run_norm(norm, x, {}, gamma);
})
OP(aclnnAddRmsNorm,
   [](Tensor x, Tensor residual, Tensor gamma, double epsilon, Tensor out, Tensor rstd,
      Tensor sum) -> Task {
     require_same_type("x2", residual, x);
     demand(x.numel() > 0, "x must not be empty");
     demand(residual.sizes() == x.sizes(), "x2 of shape ", residual.sizes(), " differs from x1 ",
            x.sizes());
     // Document npu_add_rms_norm: the type of gamma is the type of x1.
     demand(gamma.scalar_type() == x.scalar_type(), "gamma must be ", x.scalar_type(), ", got ",
            gamma.scalar_type());
     require_contiguous("sum", sum);
     auto norm = bind_norm(x, gamma, epsilon, out, rstd);
     norm.sum = data_of(sum);
     return run_norm(norm, x, residual, gamma);
   })

// Rules: document aclnnLayerNorm. The normalised shape is the shape of the last dimensions of x.
// Weight and bias have this shape. Everything is computed in float32.
OP(aclnnLayerNorm,
   [](Tensor x, Ints shape, OptTensor weight, OptTensor bias, double epsilon, Tensor out,
      OptTensor mean, OptTensor rstd) -> Task {
     require_kernel_type("x", x);
     int64_t rank = shape.size();
     refuse_unless(rank > 0 && rank <= x.dim() && x.sizes().slice(x.dim() - rank) == shape,
                   "normalized_shape ", shape, " is not the trailing shape of x ", x.sizes());
     for (auto &[what, t] : {std::pair{"weight", &weight}, {"bias", &bias}})
       refuse_unless(!*t || (*t)->sizes() == shape, what, " of shape ",
                     *t ? (*t)->sizes() : at::IntArrayRef(), " for normalized_shape ", shape);
     return arithmetic([=] {
       AtenScope scope;
       Ints axes;
       for (int64_t axis = x.dim() - rank; axis < x.dim(); axis++)
         axes.push_back(axis);
       Tensor f = x.to(at::kFloat), middle = at::mean(f, axes, true);
       Tensor centred = f - middle;
       Tensor scale = at::rsqrt(at::mean(centred * centred, axes, true) + epsilon);
       Tensor y = centred * scale;
       if (weight)
         y = y * weight->to(at::kFloat);
       if (bias)
         y = y + bias->to(at::kFloat);
       out.copy_(y);
       for (auto &[to, from] : {std::pair{&mean, &middle}, {&rstd, &scale}})
         if (*to && (*to)->numel() == from->numel())
           (*to)->copy_(from->view((*to)->sizes()));
     });
   })

// Document npu_swiglu: the size of the split dimension is even. The type is float32, float16 or
// bfloat16.
OP(aclnnSwiGlu, [](Tensor x, int64_t dim, Tensor out) -> Task {
  require_kernel_type("x", x);
  int64_t axis = dim < 0 ? dim + x.dim() : dim;
  refuse_unless(axis >= 0 && axis < x.dim(), "dim ", dim, " of a tensor of rank ", x.dim());
  refuse_unless(x.size(axis) % 2 == 0, "dimension ", dim, " has odd size ", x.size(axis));
  bool direct = axis == x.dim() - 1 && x.is_contiguous() && out.is_contiguous();
  if (!direct)
    return arithmetic([=] {
      AtenScope scope;
      auto halves = x.to(at::kFloat).chunk(2, axis);
      out.copy_(at::silu(halves[0]) * halves[1]);
    });
  int64_t columns = x.size(-1) / 2;
  kernels::SwiGlu call{data_of(x), data_of(out), columns ? out.numel() / columns : 0, columns};
  return arithmetic([call] { kernels::swiglu(call); });
})

// Document npu_clipped_swiglu: the size of the split dimension is even. x is contiguous, and its
// type is float32, float16 or bfloat16. The emulator does not support the argument group_index,
// with which callers leave out rows.
OP(aclnnClippedSwiglu,
   [](Tensor x, OptTensor group_index, int64_t dim, double alpha, double limit, double bias,
      bool interleaved, Tensor out) -> Task {
     require_kernel_type("x", x);
     require_contiguous("x", x);
     refuse_unless(!group_index, "group_index is not emulated");
     int64_t axis = dim < 0 ? dim + x.dim() : dim;
     refuse_unless(x.dim() > 1 && axis == x.dim() - 1, "dim ", dim, " of a tensor of rank ", x.dim(),
                   " is not emulated, only the last dimension of two or more");
     refuse_unless(x.size(axis) % 2 == 0, "dimension ", dim, " has odd size ", x.size(axis));
     return arithmetic([=] {
       AtenScope scope;
       Tensor whole = x.to(at::kFloat);
       auto parts = interleaved ? whole.unflatten(-1, {-1, 2}).unbind(-1) : whole.chunk(2, -1);
       Tensor gate = parts[0].clamp_max(limit), up = parts[1].clamp(-limit, limit);
       out.copy_(gate * at::sigmoid(gate * alpha) * (up + bias));
     });
   })

// ---- rotary embedding

// Binds up to three leading dimensions; if there are fewer, they are aligned on the right. If a
// dimension of the angles has size 1, it is broadcast.
static void bind_leading(Rotary &r, const Tensor &x, const Tensor &out, const Tensor &angles) {
  int64_t leading = x.dim() - 1;
  for (int64_t d = 0; d < 3; d++) {
    int64_t at = d - (3 - leading);
    bool exists = at >= 0;
    r.size[d] = exists ? x.size(at) : 1;
    r.x_stride[d] = exists ? x.stride(at) : 0;
    r.out_stride[d] = exists ? out.stride(at) : 0;
    bool broadcast = !exists || angles.size(at) == 1;
    refuse_unless(broadcast || angles.size(at) == x.size(at), "cos of shape ", angles.sizes(),
                  " does not broadcast to x ", x.sizes());
    r.angle_stride[d] = broadcast ? 0 : angles.stride(at);
  }
}

static Rotary bind_rotary(const Tensor &x, const Tensor &cos, const Tensor &sin, int64_t mode,
                          const Tensor &out) {
  for (auto &[what, t] : {std::pair{"x", x}, {"cos", cos}, {"sin", sin}}) {
    require_kernel_type(what, t);
    refuse_unless(t.dim() == x.dim() && t.stride(-1) == 1, what,
                  " must have the rank of x and a contiguous last dimension");
  }
  refuse_unless(cos.sizes() == sin.sizes(), "cos ", cos.sizes(), " and sin ", sin.sizes());
  refuse_unless(sin.strides() == cos.strides() || sin.is_contiguous(), "sin must be contiguous");
  demand(cos.scalar_type() == x.scalar_type() && sin.scalar_type() == x.scalar_type(),
         "x, cos and sin must have one type");
  refuse_unless(cos.size(-1) <= x.size(-1) && cos.size(-1) % 2 == 0, "last dimension of cos is ",
                cos.size(-1), ", of x ", x.size(-1));
  Rotary r{};
  r.x = data_of(x);
  r.cos = data_of(cos);
  r.sin = data_of(sin);
  r.out = data_of(out);
  r.dim = x.size(-1);
  r.rotated = cos.size(-1);
  refuse_unless(mode == 0 || mode == 1, "rotary mode ", mode, " is not emulated (half, interleave)");
  r.interleaved = mode == 1;
  bind_leading(r, x, out, cos);
  return r;
}

// Document npu_rotary_mul: there are 3 or 4 dimensions (B, S, N and D, in any order). Document
// aclnnRotaryPositionEmbedding: D is even and at most 896, and the D of cos is the D of x.
OP(aclnnRotaryPositionEmbedding,
   [](Tensor x, Tensor cos, Tensor sin, int64_t mode, Tensor out) -> Task {
     refuse_unless(x.dim() == 3 || x.dim() == 4, "x must have 3 or 4 dimensions, got ", x.dim());
     demand(x.size(-1) % 2 == 0 && x.size(-1) <= 896, "D must be even and at most 896, got ",
            x.size(-1));
     demand(cos.size(-1) == x.size(-1), "cos must be as wide as x: ", cos.size(-1), ", ",
            x.size(-1));
     Rotary r = bind_rotary(x, cos, sin, mode, out);
     return arithmetic([r] { kernels::rotary(r); });
   })

// Rotates in place. The numbers of the layouts: 1 is BSND, 2 is SBND, 3 is BNSD, and 4 is TND.
// Document npu_apply_rotary_pos_emb (A2, A3): D is 64 or 128; the layout is BSND or TND; cos and
// sin have one head; the mode is half; all tensors have the same type.
OP(aclnnApplyRotaryPosEmbV2,
   [](Tensor query, Tensor key, Tensor cos, Tensor sin, int64_t layout, std::string mode) -> Task {
     bool tnd = layout == 4;
     refuse_unless(query.dim() == (tnd ? 3 : 4) && key.dim() == query.dim(), "query of rank ",
                   query.dim(), " does not fit the layout");
     demand(layout == 1 || tnd, "layout must be BSND or TND on this product");
     demand(query.size(-1) == 64 || query.size(-1) == 128, "D must be 64 or 128, got ",
            query.size(-1));
     demand(cos.size(-2) == 1, "cos must have one head, got ", cos.size(-2));
     demand(cos.size(0) == query.size(0) && (tnd || cos.size(1) == query.size(1)),
            "cos of shape ", cos.sizes(), " must have the leading dimensions of query ",
            query.sizes());
     demand(mode == "half", "rotary_mode must be half on this product, got ", mode);
     refuse_unless(mode == "half" || mode == "interleave", "rotary_mode ", mode);
     int64_t kind = mode == "half" ? 0 : 1;
     Rotary q = bind_rotary(query, cos, sin, kind, query), k = bind_rotary(key, cos, sin, kind, key);
     return arithmetic([q, k] {
       kernels::rotary(q);
       kernels::rotary(k);
     });
   })

// ---- paged cache writes: cache mode Norm, [blocks, block size, heads, D]; slot -1 is skipped

// Document npu_scatter_pa_kv_cache: all tensors are contiguous. key, value and the caches have the
// same type. The caches have rank 4. slots is int32 or int64, and has one element for each token.
static kernels::IndexedRows bind_cache_write(const char *what, const Tensor &rows,
                                             const Tensor &cache, const Tensor &slots) {
  demand(cache.dim() == 4, what, " cache must have 4 dimensions, got ", cache.dim());
  require_contiguous(what, rows);
  require_contiguous("the cache", cache);
  require_same_type("the cache", cache, rows);
  int64_t tokens = rows.size(0), width = tokens ? rows.numel() / tokens : 0;
  int64_t capacity = cache.size(0) * cache.size(1);
  refuse_unless(slots.dim() == 1 && slots.size(0) == tokens, "slot_mapping of shape ",
                slots.sizes(), " for ", tokens, " tokens");
  refuse_unless(tokens == 0 || cache.numel() == capacity * width, what, " rows of ", width,
                " elements do not fit the cache ", cache.sizes(), " (cache_mode Norm)");
  int64_t bytes = width * rows.element_size();
  return {static_cast<char *>(cache.data_ptr()),
          static_cast<const char *>(rows.data_ptr()),
          slots.data_ptr(),
          slots.scalar_type() == at::kInt,
          slots.stride(0),
          tokens,
          capacity,
          bytes,
          bytes,
          bytes};
}

OP(aclnnScatterPaKvCache,
   [](Tensor key, Tensor key_cache, Tensor slots, Tensor value, Tensor value_cache,
      OptTensor compress_lens, OptTensor, OptTensor, std::string cache_mode, std::string, Ints,
      Ints) -> Task {
     refuse_unless(cache_mode.empty() || cache_mode.rfind("Norm", 0) == 0, "cache_mode ",
                   cache_mode, " is not emulated, only Norm");
     refuse_unless(key.dim() == 3 && value.dim() == 3 && !compress_lens,
                   "key and value must have 3 dimensions (the compressed form is not emulated)");
     demand(key.size(0) == value.size(0) && key.size(1) == value.size(1),
            "key and value must have the same tokens and heads");
     require_same_type("value", value, key);
     refuse_unless(is_index(slots), "slot_mapping must be int32 or int64, got ",
                   slots.scalar_type());
     auto keys = bind_cache_write("key", key, key_cache, slots);
     auto values = bind_cache_write("value", value, value_cache, slots);
     return arithmetic([keys, values] {
       kernels::scatter_rows(keys);
       kernels::scatter_rows(values);
     });
   })
