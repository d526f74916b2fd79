// Strided copies, and rows chosen by an index.
#include "kernels/kernels.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace emu::kernels {

void StridedCopy::merge_dimensions() {
  int kept = 0;
  for (int d = 0; d < rank; d++) {
    if (size[d] == 1)
      continue;
    bool joins = kept > 0 && to_stride[kept - 1] == size[d] * to_stride[d] &&
                 from_stride[kept - 1] == size[d] * from_stride[d];
    int at = joins ? kept - 1 : kept++;
    size[at] = joins ? size[at] * size[d] : size[d];
    to_stride[at] = to_stride[d];
    from_stride[at] = from_stride[d];
  }
  rank = kept;
}

template <class T>
static void copy_run(char *to, const char *from, int64_t count, int64_t to_step,
                     int64_t from_step) {
  auto *t = reinterpret_cast<T *>(to);
  auto *f = reinterpret_cast<const T *>(from);
  for (int64_t i = 0; i < count; i++)
    t[i * to_step] = f[i * from_step];
}

static void copy_level(const StridedCopy &c, int d, char *to, const char *from) {
  int64_t bytes = c.element_bytes;
  if (d == c.rank - 1 || c.rank == 0) {
    int64_t count = c.rank ? c.size[d] : 1;
    int64_t to_step = c.rank ? c.to_stride[d] : 1, from_step = c.rank ? c.from_stride[d] : 1;
    if (count == 1 || (to_step == 1 && from_step == 1))
      memmove(to, from, count * bytes);
    else if (bytes == 4)
      copy_run<uint32_t>(to, from, count, to_step, from_step);
    else if (bytes == 2)
      copy_run<uint16_t>(to, from, count, to_step, from_step);
    else if (bytes == 8)
      copy_run<uint64_t>(to, from, count, to_step, from_step);
    else
      copy_run<uint8_t>(to, from, count, to_step, from_step);
    return;
  }
  for (int64_t i = 0; i < c.size[d]; i++)
    copy_level(c, d + 1, to + i * c.to_stride[d] * bytes, from + i * c.from_stride[d] * bytes);
}

void StridedCopy::run() const {
  for (int d = 0; d < rank; d++)
    if (size[d] == 0)
      return;
  copy_level(*this, 0, to, from);
}

static int64_t index_at(const IndexedRows &rows, int64_t i) {
  i *= rows.index_stride;
  return rows.index_is_int32 ? static_cast<const int32_t *>(rows.index)[i]
                             : static_cast<const int64_t *>(rows.index)[i];
}

static void require_inside(const IndexedRows &rows, int64_t i, int64_t index) {
  if (index < 0 || index >= rows.limit)
    throw std::runtime_error("index " + std::to_string(index) + " at position " +
                             std::to_string(i) + " lies outside 0.." +
                             std::to_string(rows.limit - 1));
}

void gather_rows(const IndexedRows &g) {
  for (int64_t i = 0; i < g.count; i++) {
    int64_t index = index_at(g, i);
    require_inside(g, i, index);
    memcpy(g.to + i * g.to_stride_bytes, g.from + index * g.from_stride_bytes, g.row_bytes);
  }
}

void scatter_rows(const IndexedRows &s) {
  for (int64_t i = 0; i < s.count; i++) {
    int64_t index = index_at(s, i);
    if (index == -1)
      continue;
    require_inside(s, i, index);
    memcpy(s.to + index * s.to_stride_bytes, s.from + i * s.from_stride_bytes, s.row_bytes);
  }
}

}  // namespace emu::kernels
