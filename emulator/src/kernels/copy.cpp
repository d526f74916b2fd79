// Strided copies, and rows chosen by an index.
#include "kernels/kernels.h"

#include <algorithm>
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

// Elements from one stride to another, in two dimensions. What lies side by side in the source is
// often written far apart: by tiles, and through a small one of our own, because lines that are a
// power of two apart push each other out of the cache.
template <class T>
static void copy_plane(const StridedCopy &c, int outer, char *to, const char *from) {
  constexpr int64_t kRows = 256, kColumns = 32;  // long where lines are read one after another
  const int inner = c.rank - 1;
  const int64_t rows = outer < inner ? c.size[outer] : 1, columns = c.size[inner];
  const int64_t to_row = c.to_stride[outer], to_column = c.to_stride[inner];
  const int64_t from_row = c.from_stride[outer], from_column = c.from_stride[inner];
  T tile[kColumns][kRows];
  for (int64_t i = 0; i < rows; i += kRows)
    for (int64_t j = 0; j < columns; j += kColumns) {
      const int64_t height = std::min(kRows, rows - i), width = std::min(kColumns, columns - j);
      auto *f = reinterpret_cast<const T *>(from) + i * from_row + j * from_column;
      for (int64_t column = 0; column < width; column++)
        for (int64_t row = 0; row < height; row++)
          tile[column][row] = f[row * from_row + column * from_column];
      auto *t = reinterpret_cast<T *>(to) + i * to_row + j * to_column;
      for (int64_t row = 0; row < height; row++)
        for (int64_t column = 0; column < width; column++)
          t[row * to_row + column * to_column] = tile[column][row];
    }
}

// Whether elements that follow each other do so on both sides.
static bool is_dense(const StridedCopy &c) {
  return c.to_stride[c.rank - 1] == 1 && c.from_stride[c.rank - 1] == 1;
}

static void copy_level(const StridedCopy &c, int d, char *to, const char *from) {
  int64_t bytes = c.element_bytes;
  if (c.rank == 0 || (d == c.rank - 1 && (c.size[d] == 1 || is_dense(c)))) {
    memmove(to, from, (c.rank ? c.size[d] : 1) * bytes);
    return;
  }
  if (d >= c.rank - 2 && !is_dense(c)) {
    if (bytes == 4)
      copy_plane<uint32_t>(c, d, to, from);
    else if (bytes == 2)
      copy_plane<uint16_t>(c, d, to, from);
    else if (bytes == 8)
      copy_plane<uint64_t>(c, d, to, from);
    else
      copy_plane<uint8_t>(c, d, to, from);
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
