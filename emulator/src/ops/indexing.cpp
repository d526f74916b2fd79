// Reading and writing by index.
#include "ops/bind.h"

#include <algorithm>

using namespace emu;

// The device accepts int32 indices, but some ATen functions do not.
static Tensor as_long(const Tensor &index) { return index.to(at::kLong); }

static void check_inside(const Tensor &index, int64_t limit) {
  if (index.numel() == 0)
    return;
  int64_t least = index.min().item<int64_t>(), most = index.max().item<int64_t>();
  TORCH_CHECK(least >= -limit && most < limit, "index ", least < -limit ? least : most,
              " lies outside a dimension of ", limit);
}

static Task select_rows(const Tensor &table, const Tensor &index, const Tensor &out) {
  refuse_unless(is_index(index), "the index must be int32 or int64, got ", index.scalar_type());
  refuse_unless(table.scalar_type() == out.scalar_type(), "types of table and output differ");
  if (idles(out))
    return [] {};
  int64_t row = table.dim() > 1 ? table.numel() / std::max<int64_t>(table.size(0), 1) : 1;
  bool direct = table.is_contiguous() && out.is_contiguous() && index.is_contiguous();
  if (!direct)
    return [=] {
      AtenScope scope;
      Tensor flat = as_long(index).reshape({-1});
      out.copy_(at::index_select(table, 0, flat).view(out.sizes()));
    };
  int64_t bytes = row * table.element_size();
  kernels::IndexedRows rows{static_cast<char *>(out.data_ptr()),
                            static_cast<const char *>(table.data_ptr()),
                            index.data_ptr(),
                            index.scalar_type() == at::kInt,
                            1,
                            index.numel(),
                            table.size(0),
                            bytes,
                            bytes,
                            bytes};
  return [rows] { kernels::gather_rows(rows); };
}

OP(aclnnEmbedding, [](Tensor weight, Tensor index, Tensor out) -> Task {
  refuse_unless(weight.dim() == 2, "weight must be a matrix, got ", weight.sizes());
  return select_rows(weight, index, out);
})
OP(aclnnIndexSelect, [](Tensor a, int64_t dim, Tensor index, Tensor out) -> Task {
  if (a.dim() > 0 && (dim == 0 || dim == -a.dim()) && is_index(index))
    return select_rows(a, index, out);
  return [=] {
    AtenScope scope;
    out.copy_(at::index_select(a, dim, as_long(index)));
  };
})
OP(aclnnGather, [](Tensor a, int64_t dim, Tensor index, Tensor out) {
  if (!idles(out))
    out.copy_(at::gather(a, dim, as_long(index)));
})
OP(aclnnTake, [](Tensor a, Tensor index, Tensor out) { out.copy_(at::take(a, as_long(index))); })

// An undefined entry of the list means that all of a dimension is selected. torch_npu also passes a
// placeholder with the same meaning. The placeholder is an empty vector, without data, of the type
// of `a`. Only its type distinguishes the placeholder from an empty index. A boolean entry means
// the positions of its true elements.
static c10::List<OptTensor> index_list(const Tensor &a, const Tensors &indices) {
  c10::List<OptTensor> list;
  int64_t dim = 0;
  for (const Tensor &index : indices) {
    bool whole = !index.defined() || (index.numel() == 0 && index.dim() == 1 && a.numel() > 0 &&
                                      index.data_ptr() == nullptr &&
                                      index.scalar_type() == a.scalar_type());
    if (whole) {
      list.push_back(std::nullopt);
      dim++;
    } else if (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte) {
      list.push_back(index);
      dim += index.dim();
    } else {
      check_inside(index, a.size(dim++));
      list.push_back(as_long(index));
    }
  }
  return list;
}
// Index and IndexPut return at once if no element is read or written (aclnn_index.cpp and
// aclnn_index_put_impl.cpp in ops-nn).
OP(aclnnIndex, [](Tensor a, Tensors indices, Tensor out) {
  if (out.numel() == 0 || idles(out))
    return;
  out.copy_(at::index(a, index_list(a, indices)));
})
OP(aclnnIndexPutImpl, [](Tensor a, Tensors indices, Tensor values, bool accumulate, bool) {
  if (values.numel() == 0 || a.numel() == 0 || idles(a))
    return;
  auto list = index_list(a, indices);
  // No caller selects all of each dimension. So if all entries have the form of placeholders, the
  // entries are empty indices of the tensor's type.
  if (std::none_of(list.begin(), list.end(), [](const OptTensor &i) { return i.has_value(); }))
    return;
  a.index_put_(list, values.to(a.scalar_type()), accumulate);
})
OP(aclnnIndexAdd,
   [](Tensor a, int64_t dim, Tensor index, Tensor source, Scalar alpha, Tensor out) {
     if (!skips(out))
       out.copy_(at::index_add(a, dim, as_long(index), source, alpha));
   })
OP(aclnnIndexCopy, [](Tensor a, int64_t dim, Tensor index, Tensor source, Tensor out) {
  out.copy_(at::index_copy(a, dim, as_long(index), source));
})
OP(aclnnInplaceIndexCopy, [](Tensor a, int64_t dim, Tensor index, Tensor source) {
  a.index_copy_(dim, as_long(index), source);
})
// aclnn_index_fill.cpp in ops-nn, CheckDtypeValid: the operator supports neither bytes nor int16.
OP(aclnnInplaceIndexFill, [](Tensor a, int64_t dim, Tensor index, Scalar value) -> Task {
  auto type = a.scalar_type();
  refuse_unless(is_kernel_type(a) || is_index(a) || type == at::kBool, "self must be float32, ",
                "float16, bfloat16, int32, int64 or bool, got ", type);
  return [=] {
    AtenScope scope;
    Tensor(a).index_fill_(dim, as_long(index), value);
  };
})
// Document npu_scatter_nd_update_: all indices must be inside the tensor, so they must not be
// negative. The rows and the tensor have the same type.
OP(aclnnScatterNdUpdate, [](Tensor a, Tensor indices, Tensor updates) -> Task {
  refuse_unless(is_index(indices), "indices must be int32 or int64, got ", indices.scalar_type());
  require_same_type("updates", updates, a);
  refuse_unless(indices.dim() >= 2 && indices.size(-1) <= a.dim(), "indices of shape ",
                indices.sizes(), " for a tensor of rank ", a.dim());
  return [=] {
    AtenScope scope;
    c10::List<OptTensor> index;
    for (const Tensor &column : as_long(indices).unbind(-1)) {
      int64_t limit = a.size(index.size());
      check_inside(column, limit);
      TORCH_CHECK(column.numel() == 0 || column.min().item<int64_t>() >= 0,
                  "index ", column.min().item<int64_t>(), " lies outside a dimension of ", limit);
      index.push_back(column);
    }
    if (!idles(a))
      a.index_put_(index, updates);
  };
})

// The reduction of a scatter: 0 means none, 1 means add, and 2 means multiply.
template <class Source>
static Tensor scattered(const Tensor &a, int64_t dim, const Tensor &index, const Source &source,
                        int64_t reduction) {
  if (reduction == 0)
    return at::scatter(a, dim, as_long(index), source);
  return at::scatter(a, dim, as_long(index), source, reduction == 1 ? "add" : "multiply");
}
OP(aclnnScatter, [](Tensor a, int64_t dim, Tensor index, Tensor source, int64_t reduction,
                    Tensor out) { out.copy_(scattered(a, dim, index, source, reduction)); })
OP(aclnnInplaceScatter, [](Tensor a, int64_t dim, Tensor index, Tensor source, int64_t reduction) {
  a.copy_(scattered(a, dim, index, source, reduction));
})
OP(aclnnScatterValue, [](Tensor a, int64_t dim, Tensor index, Scalar value, int64_t reduction,
                         Tensor out) { out.copy_(scattered(a, dim, index, value, reduction)); })
OP(aclnnInplaceScatterValue,
   [](Tensor a, int64_t dim, Tensor index, Scalar value, int64_t reduction) {
     a.copy_(scattered(a, dim, index, value, reduction));
   })
OP(aclnnScatterAdd, [](Tensor a, int64_t dim, Tensor index, Tensor source, Tensor out) {
  out.copy_(at::scatter_add(a, dim, as_long(index), source));
})
OP(aclnnOneHot,
   [](Tensor a, int64_t depth, Tensor on, Tensor off, int64_t axis, Tensor out) {
     Tensor positions = at::arange(depth).to(a.scalar_type());
     Tensor hot = a.unsqueeze(-1).eq(positions);
     if (axis >= 0 && axis < hot.dim() - 1)
       hot = hot.movedim(-1, axis);
     out.copy_(at::where(hot, on.reshape({}), off.reshape({})));
   })
OP(aclnnSearchSorted,
   [](Tensor sorted, Tensor a, bool int32, bool right, OptTensor sorter, Tensor out) {
     out.copy_(at::searchsorted(sorted, a, int32, right, std::nullopt, sorter));
   })

// The shape of the result depends on the data. This function writes the shape to the aclTensor. The
// caller reads the shape by aclGetViewShape.
static void write_with_shape(aclTensor *out, const Tensor &result) {
  out->t = at::from_blob(out->t.data_ptr(), result.sizes(), out->t.options());
  out->t.copy_(result);
}
OP(aclnnMaskedSelect,
   [](Tensor a, Tensor mask, aclTensor *out) { write_with_shape(out, at::masked_select(a, mask)); })
OP(aclnnNonzero, [](Tensor a, aclTensor *out) { write_with_shape(out, at::nonzero(a)); })
OP(aclnnNonzeroV2, [](Tensor a, aclTensor *out) { write_with_shape(out, at::nonzero(a).t()); })
