// Sums, means, extrema, softmax.
#include "ops/bind.h"
#include "runtime/errors.h"
#include "runtime/services.h"

#include <algorithm>
#include <mutex>
#include <random>

using namespace emu;

OP(aclnnReduceSum, [](Tensor a, Ints dims, bool keep, aclDataType dtype, Tensor out) {
  if (!skips(out))
    out.copy_(at::sum(a, dims, keep, scalar_type(dtype)));
})
OP(aclnnMean, [](Tensor a, Ints dims, bool keep, aclDataType dtype, Tensor out) {
  if (!skips(out))
    out.copy_(at::mean(a, dims, keep, scalar_type(dtype)));
})
OP(aclnnStd, [](Tensor a, Ints dims, int64_t correction, bool keep, Tensor out) {
  if (!skips(out))
    out.copy_(at::std(a, dims, Scalar(correction), keep));
})
OP(aclnnProd, [](Tensor a, aclDataType dtype, Tensor out) {
  if (!skips(out))
    out.copy_(at::prod(a, scalar_type(dtype)));
})
OP(aclnnProdDim, [](Tensor a, int64_t dim, bool keep, aclDataType dtype, Tensor out) {
  if (!skips(out))
    out.copy_(at::prod(a, dim, keep, scalar_type(dtype)));
})
OP(aclnnAll, [](Tensor a, Ints dims, bool keep, Tensor out) {
  Tensor b = a.to(at::kBool);
  out.copy_(dims.empty() ? b.all() : at::all(b, dims, keep));
})
OP(aclnnAny, [](Tensor a, Ints dims, bool keep, Tensor out) {
  Tensor b = a.to(at::kBool);
  out.copy_(dims.empty() ? b.any() : at::any(b, dims, keep));
})
OP(aclnnMax, [](Tensor a, Tensor out) {
  if (!skips(out))
    out.copy_(a.max());
})
OP(aclnnMin, [](Tensor a, Tensor out) {
  if (!skips(out))
    out.copy_(a.min());
})
OP(aclnnAmax, [](Tensor a, Ints dims, bool keep, Tensor out) {
  if (!skips(out))
    out.copy_(at::amax(a, dims, keep));
})
OP(aclnnAmin, [](Tensor a, Ints dims, bool keep, Tensor out) {
  if (!skips(out))
    out.copy_(at::amin(a, dims, keep));
})

// Used if nothing is computed: writes random indexes below `choices`, so that some drafts are
// rejected. A choice depends on the number of calls since the device's last abort. So all ranks
// make the same choices if each rank uses only one stream.
static void choose_by_chance(const Tensor &out, int64_t choices) {
  struct Calls {
    std::mutex mutex;
    uint32_t aborts = 0;
    uint64_t number = 0;
  };
  static Calls of_device[kMaxDevices];
  Calls &calls = of_device[current_device()];
  std::unique_lock lock(calls.mutex);
  if (uint32_t aborts = num_aborts(); calls.aborts != aborts) {
    calls.aborts = aborts;
    calls.number = 0;
  }
  std::mt19937_64 chance(++calls.number);
  lock.unlock();
  Tensor chosen = at::empty(out.sizes(), at::kLong);
  for (int64_t i = 0; i < chosen.numel(); i++)
    chosen.data_ptr<int64_t>()[i] = static_cast<int64_t>(chance() % choices);
  out.copy_(chosen);
}

// If nothing is computed, the result is a random index below the setting `choices`, or index 0 if
// `choices` is not above 1.
static Task choose(const Tensor &a, int64_t dim, const Tensor &out) {
  int64_t choices = std::min<int64_t>(settings().choices, a.dim() ? a.size(dim) : 1);
  return [out, choices] {
    AtenScope scope;
    if (choices > 1)
      choose_by_chance(out, choices);
    else
      out.zero_();
  };
}

// Returns a task that finds the position of the greatest value in each row with the emulator's
// kernel. Returns no task if ATen must compute the result.
static Task argmax_kernel(const Tensor &a, int64_t dim, const Tensor &out) {
  bool last = a.dim() > 0 && (dim == -1 || dim == a.dim() - 1);
  if (!last || !is_kernel_type(a) || !a.is_contiguous() || !out.is_contiguous() ||
      !is_index(out) || a.size(-1) == 0)
    return nullptr;
  auto x = data_of(a);
  int64_t columns = a.size(-1), rows = a.numel() / columns;
  void *to = out.data_ptr();
  bool narrow = out.scalar_type() == at::kInt;
  return [=] { kernels::argmax_rows(x, rows, columns, columns, to, narrow); };
}

OP(aclnnArgMax, [](Tensor a, int64_t dim, bool keep, Tensor out) -> Task {
  if (skips(a))
    return choose(a, dim, out);
  if (Task kernel = argmax_kernel(a, dim, out))
    return kernel;
  return [=] {
    AtenScope scope;
    out.copy_(at::argmax(a, dim, keep));
  };
})
OP(aclnnMaxDim, [](Tensor a, int64_t dim, bool keep, Tensor values, Tensor indices) -> Task {
  if (skips(a)) {
    Task chooses = choose(a, dim, indices);
    return [=] {
      chooses();
      AtenScope scope;
      values.zero_();
    };
  }
  if (Task kernel = argmax_kernel(a, dim, indices))
    return [=] {
      kernel();
      AtenScope scope;
      Tensor at = indices.to(at::kLong).reshape({-1, 1});
      values.copy_(a.reshape({-1, a.size(-1)}).gather(1, at).reshape(values.sizes()));
    };
  return [=] {
    AtenScope scope;
    auto [v, i] = at::max(a, dim, keep);
    values.copy_(v);
    indices.copy_(i);
  };
})
OP(aclnnMinDim, [](Tensor a, int64_t dim, bool keep, Tensor values, Tensor indices) {
  if (skips(values)) {
    values.zero_();
    indices.zero_();
    return;
  }
  auto [v, i] = at::min(a, dim, keep);
  values.copy_(v);
  indices.copy_(i);
})
OP(aclnnArgMin, [](Tensor a, int64_t dim, bool keep, Tensor out) {
  if (skips(a))
    out.zero_();
  else
    out.copy_(at::argmin(a, dim, keep));
})
OP(aclnnCumsum, [](Tensor a, int64_t dim, aclDataType dtype, Tensor out) {
  if (!skips(out))
    out.copy_(at::cumsum(a, dim, scalar_type(dtype)));
})
OP(aclnnLogSumExp, [](Tensor a, Ints dims, bool keep, Tensor out) {
  if (!skips(out))
    out.copy_(at::logsumexp(a, dims, keep));
})
OP(aclnnNorm, [](Tensor a, Scalar p, Ints dims, bool keep, Tensor out) {
  if (!skips(out))
    out.copy_(at::norm(a, p, dims, keep));
})
OP(aclnnLinalgVectorNorm,
   [](Tensor a, Scalar p, Ints dims, bool keep, aclDataType dtype, Tensor out) {
     if (!skips(out))
       out.copy_(at::linalg_vector_norm(a, p, dims, keep, scalar_type(dtype)));
   })

// Softmax is computed in float32, because the output may have a wider type than the input (softmax
// with a dtype).
OP(aclnnSoftmax, [](Tensor a, int64_t dim, Tensor out) {
  if (!skips(out))
    out.copy_(at::softmax(is_half(a) ? a.to(at::kFloat) : a, dim));
})
OP(aclnnLogSoftmax, [](Tensor a, int64_t dim, Tensor out) {
  if (!skips(out))
    out.copy_(at::log_softmax(is_half(a) ? a.to(at::kFloat) : a, dim));
})
