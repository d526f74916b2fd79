// Declarations for the files of GroupedMatmul.
#pragma once

#include "ops/bind.h"

namespace emu {

// Calls f(group, first row, row after the last) for each group that has rows. `list` is on the
// device: ends of the groups (kind 0), or numbers of rows.
template <class F>
void each_group(const Tensor &list, int64_t kind, int64_t rows, const F &f) {
  const int64_t *entries = list.data_ptr<int64_t>();
  int64_t start = 0;
  for (int64_t i = 0; i < list.numel(); i++) {
    int64_t end = kind == 0 ? entries[i] : start + entries[i];
    TORCH_CHECK(end >= start && end <= rows, "group_list gives group ", i, " the rows ", start,
                " to ", end, " of ", rows);
    if (end > start)
      f(i, start, end);
    start = end;
  }
}

// The rules of group_list if x is one tensor.
void check_list(const OptTensor &list, int64_t kind, int64_t groups, bool single);

// Rows may be parts of wider rows: ParamsDataContiguous in aclnn_grouped_matmul.cpp copies them. By
// the document, x must not be turned.
void require_rows(const Tensor &x);

inline bool is_given(const Tensors &list) { return !list.empty() && list[0].numel() > 0; }

// Refuses lists that must be null.
void refuse_all(std::initializer_list<std::pair<const char *, const Tensors *>> lists);

// The sizes of the groups are in device memory, so this function does not know them. It assumes
// that rows are spread over as many groups as possible, and that the weights of each such group are
// read.
int64_t grouped_ns(const Tensors &x, const Tensors &weight);

// The tensor lists of a call, as aclnn names them.
struct GroupedCall {
  const Tensors &x, &weight, &bias, &scale, &antiquant_scale, &antiquant_offset, &row_scale;
  const OptTensor &list;
  int64_t split_item, group_type, list_type, activation;
  const Tensors &y;
};

// Products whose weights have four bits, with rows in floats or in int8.
Task bind_grouped_int4(const GroupedCall &call);

}  // namespace emu
