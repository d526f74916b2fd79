// Declarations for the files of GroupedMatmul.
#pragma once

#include "ops/bind.h"

namespace emu {

// Calls f(group, first row, row after the last) for each group that has rows. `list` is in device
// memory. It contains the end of each group if `kind` is 0, and otherwise the number of rows of
// each group.
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

// Checks the rules for group_list that apply if x is a single tensor.
void check_list(const OptTensor &list, int64_t kind, int64_t groups, bool single);

// The rows of x may be parts of wider rows: ParamsDataContiguous in aclnn_grouped_matmul.cpp copies
// them. According to the document, x must not be transposed.
void require_rows(const Tensor &x);

inline bool is_given(const Tensors &list) { return !list.empty() && list[0].numel() > 0; }

// Refuses the call unless all of these lists are null.
void refuse_all(std::initializer_list<std::pair<const char *, const Tensors *>> lists);

// Returns the modelled time. The sizes of the groups are in device memory, so this function does
// not know them. It assumes that the rows are spread over as many groups as possible, and that the
// weights of all these groups are read.
int64_t grouped_ns(const Tensors &x, const Tensors &weight);

// The tensor lists of a call, with the names that aclnn uses.
struct GroupedCall {
  const Tensors &x, &weight, &bias, &scale, &antiquant_scale, &antiquant_offset, &row_scale;
  const OptTensor &list;
  int64_t split_item, group_type, list_type, activation;
  const Tensors &y;
};

// Returns the task for products whose weights have four bits. The rows are floats or int8.
Task bind_grouped_int4(const GroupedCall &call);

}  // namespace emu
