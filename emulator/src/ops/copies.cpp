// Copies, casts, fills, concatenation.
#include "ops/bind.h"

#include <cstring>

#include <sys/mman.h>

using namespace emu;

namespace emu {

static kernels::StridedCopy bind_copy(const Tensor &to, const Tensor &from) {
  kernels::StridedCopy c{};
  c.to = static_cast<char *>(to.data_ptr());
  c.from = static_cast<const char *>(from.data_ptr());
  c.element_bytes = to.element_size();
  c.rank = static_cast<int>(to.dim());
  for (int d = 0; d < c.rank; d++) {
    c.size[d] = to.size(d);
    c.to_stride[d] = to.stride(d);
    c.from_stride[d] = from.stride(d);
  }
  c.merge_dimensions();
  return c;
}

Task copy_task(const Tensor &to, const Tensor &from) {
  if (idles(to))
    return [] {};
  bool direct = to.scalar_type() == from.scalar_type() && from.dim() <= to.dim() &&
                to.dim() <= kernels::StridedCopy::kMaxRank &&
                (to.element_size() <= 4 || to.element_size() == 8);
  if (direct) {
    auto copy = bind_copy(to, from.sizes() == to.sizes() ? from : from.expand(to.sizes()));
    return [copy] { copy.run(); };
  }
  return [to, from] {
    AtenScope scope;
    to.copy_(from);
  };
}

}  // namespace emu

OP(aclnnInplaceCopy, [](Tensor to, Tensor from) -> Task { return copy_task(to, from); })
OP(aclnnCast, [](Tensor a, aclDataType, Tensor out) -> Task { return copy_task(out, a); })

// If a page is returned to the system, the program reads zeros from it, and the page uses no memory
// until it is written. So a cache that is filled with zeros costs no more than a cache without
// initial values.
static void clear(char *p, size_t bytes) {
  constexpr uintptr_t page = 2u << 20;
  auto begin = reinterpret_cast<uintptr_t>(p), end = begin + bytes;
  uintptr_t first = (begin + page - 1) / page * page, last = end / page * page;
  auto gives_back = [&](int advice) {
    return madvise(reinterpret_cast<void *>(first), last - first, advice) == 0;
  };
  // MADV_REMOVE fails for memory that belongs to no file, so MADV_DONTNEED is tried, too.
  // MADV_DONTNEED does not clear memory that belongs to a file.
  if (bytes < 8 * page || !(gives_back(MADV_REMOVE) || gives_back(MADV_DONTNEED))) {
    memset(p, 0, bytes);
    return;
  }
  memset(p, 0, first - begin);
  memset(reinterpret_cast<void *>(last), 0, end - last);
}
// Zeros need no arithmetic, so this operator accepts even types that no arithmetic operator
// supports.
OP(aclnnInplaceZero, [](Tensor a) -> Task {
  return [=] {
    AtenScope scope;
    if (idles(a))
      return;
    if (a.is_contiguous())
      clear(static_cast<char *>(a.data_ptr()), a.nbytes());
    else
      a.zero_();
  };
})
static void fill_with(const Tensor &a, const Scalar &value) {
  if (!idles(a))
    a.fill_(value);
}
OP(aclnnInplaceOne, [](Tensor a) { fill_with(a, 1); })
OP(aclnnInplaceFillScalar, [](Tensor a, Scalar v) { fill_with(a, v); })
OP(aclnnInplaceFillTensor, [](Tensor a, Tensor v) {
  if (!idles(a))
    a.copy_(v.expand(a.sizes()));
})
OP(aclnnArange,
   [](Scalar start, Scalar end, Scalar step, Tensor out) { at::arange_out(out, start, end, step); })
OP(aclnnRange,
   [](Scalar start, Scalar end, Scalar step, Tensor out) { at::range_out(out, start, end, step); })
OP(aclnnLinspace, [](Scalar start, Scalar end, int64_t steps, Tensor out) {
  // Integers are rounded in each step, as in torch. float16 and bfloat16 are rounded once, at the
  // end.
  auto type = out.is_floating_point() ? at::kFloat : out.scalar_type();
  out.copy_(at::linspace(start, end, steps, type));
})
OP(aclnnEye, [](int64_t n, int64_t m, Tensor out) { out.copy_(at::eye(n, m)); })

static Task in_sequence(std::vector<Task> tasks) {
  if (tasks.size() == 1)
    return tasks[0];
  return [tasks] {
    for (const Task &task : tasks)
      task();
  };
}

OP(aclnnCat, [](Tensors list, int64_t dim, Tensor out) -> Task {
  std::vector<Task> copies;
  int64_t at = 0, axis = dim < 0 ? dim + out.dim() : dim;
  for (const Tensor &part : list) {
    if (part.numel() == 0)  // torch concatenates an empty vector with any tensor
      continue;
    refuse_unless(part.dim() == out.dim(), "cat of ranks ", part.dim(), " and ", out.dim());
    copies.push_back(copy_task(out.narrow(axis, at, part.size(axis)), part));
    at += part.size(axis);
  }
  return in_sequence(copies);
})
OP(aclnnStack, [](Tensors list, int64_t dim, Tensor out) -> Task {
  std::vector<Task> copies;
  int64_t axis = dim < 0 ? dim + out.dim() : dim;
  for (size_t i = 0; i < list.size(); i++)
    copies.push_back(copy_task(out.select(axis, i), list[i]));
  return in_sequence(copies);
})
OP(aclnnSplitWithSize, [](Tensor a, Ints sizes, int64_t dim, Tensors out) -> Task {
  std::vector<Task> copies;
  int64_t at = 0;
  for (size_t i = 0; i < out.size(); at += sizes[i++])
    copies.push_back(copy_task(out[i], a.narrow(dim, at, sizes[i])));
  return in_sequence(copies);
})
// Document aclnnForeachCopy: two lists of tensors with equal shapes.
OP(aclnnForeachCopy, [](Tensors from, Tensors to) -> Task {
  refuse_unless(from.size() == to.size(), "lists of ", from.size(), " and ", to.size(), " tensors");
  std::vector<Task> copies;
  for (size_t i = 0; i < to.size(); i++) {
    refuse_unless(from[i].sizes() == to[i].sizes(), "copy of ", from[i].sizes(), " to ",
                  to[i].sizes());
    copies.push_back(copy_task(to[i], from[i]));
  }
  return in_sequence(copies);
})
OP(aclnnRepeat, [](Tensor a, Ints repeats, Tensor out) { out.copy_(a.repeat(repeats)); })
OP(aclnnFlip, [](Tensor a, Ints dims, Tensor out) { out.copy_(at::flip(a, dims)); })
OP(aclnnRoll, [](Tensor a, Ints shifts, Ints dims, Tensor out) {
  out.copy_(at::roll(a, shifts, dims));
})
OP(aclnnTril, [](Tensor a, int64_t diagonal, Tensor out) { out.copy_(at::tril(a, diagonal)); })
OP(aclnnTriu, [](Tensor a, int64_t diagonal, Tensor out) { out.copy_(at::triu(a, diagonal)); })
OP(aclnnInplaceTril, [](Tensor a, int64_t diagonal) { a.tril_(diagonal); })
OP(aclnnInplaceTriu, [](Tensor a, int64_t diagonal) { a.triu_(diagonal); })
OP(aclnnConstantPadNd, [](Tensor a, Ints pad, Scalar value, Tensor out) {
  out.copy_(at::constant_pad_nd(a, pad, value));
})
OP(aclnnRepeatInterleaveInt, [](Tensor a, int64_t repeats, int64_t, Tensor out) {
  out.copy_(at::repeat_interleave(a, repeats));
})
OP(aclnnRepeatInterleaveIntWithDim,
   [](Tensor a, int64_t repeats, int64_t dim, int64_t, Tensor out) {
     out.copy_(at::repeat_interleave(a, repeats, dim));
   })
OP(aclnnRepeatInterleave, [](Tensor a, Tensor repeats, int64_t, Tensor out) {
  out.copy_(at::repeat_interleave(a, repeats.to(at::kLong)));
})
OP(aclnnRepeatInterleaveWithDim,
   [](Tensor a, Tensor repeats, int64_t dim, int64_t, Tensor out) {
     out.copy_(at::repeat_interleave(a, repeats.to(at::kLong), dim));
   })
