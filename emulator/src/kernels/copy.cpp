// Copies between memory with any strides, and copies of rows that an index selects.
#include "kernels/kernels.h"
#include "kernels/transpose.h"

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

// Two dimensions of a copy. Strides are in elements.
template <class T> struct Plane {
  T *to;
  const T *from;
  int64_t rows, columns, to_row, to_column, from_row, from_column;

  // Returns the part of this plane that begins at row `i` and column `j`.
  Plane part(int64_t i, int64_t j, int64_t height, int64_t width) const {
    Plane p = *this;
    p.to += i * to_row + j * to_column;
    p.from += i * from_row + j * from_column;
    p.rows = height;
    p.columns = width;
    return p;
  }
  Plane turned() const {
    return {to, from, columns, rows, to_column, to_row, from_column, from_row};
  }
};

// Elements that are neighbours in the source are often far apart in the destination. So the copy
// works in tiles. Each tile is copied through a small local buffer. Without the buffer, memory
// lines at distances of a power of two would evict each other from the cache.
template <class T> static void copy_tiles(const Plane<T> &p) {
  constexpr int64_t kRows = 256, kColumns = 32;  // long, because lines are read one after another
  T tile[kColumns][kRows];
  for (int64_t i = 0; i < p.rows; i += kRows)
    for (int64_t j = 0; j < p.columns; j += kColumns) {
      const int64_t height = std::min(kRows, p.rows - i), width = std::min(kColumns, p.columns - j);
      const T *f = p.from + i * p.from_row + j * p.from_column;
      for (int64_t column = 0; column < width; column++)
        for (int64_t row = 0; row < height; row++)
          tile[column][row] = f[row * p.from_row + column * p.from_column];
      T *t = p.to + i * p.to_row + j * p.to_column;
      for (int64_t row = 0; row < height; row++)
        for (int64_t column = 0; column < width; column++)
          t[row * p.to_row + column * p.to_column] = tile[column][row];
    }
}

// Copies a plane in squares of elements. The rows of the plane are contiguous in the destination,
// and its columns are contiguous in the source.
template <class T, bool kPastCaches>
static void copy_squares(const Plane<T> &p, int64_t rows, int64_t columns) {
  constexpr int64_t side = kLineBytes / sizeof(T);
  Line lines[side];
  for (int64_t j = 0; j < columns; j += side)
    for (int64_t i = 0; i < rows; i += side) {
      const Plane<T> square = p.part(i, j, side, side);
      for (int64_t k = 0; k < side; k++)
        memcpy(&lines[k], square.from + k * p.from_column, kLineBytes);
      transpose<sizeof(T)>(lines);
      for (int64_t k = 0; k < side; k++)
        if constexpr (kPastCaches)
          store_past_caches(square.to + k * p.to_row, lines[k]);
        else
          memcpy(square.to + k * p.to_row, &lines[k], kLineBytes);
    }
  if constexpr (kPastCaches)
    finish_stores();
}

template <class T> static void copy_transposed(const Plane<T> &p) {
  constexpr int64_t side = kLineBytes / sizeof(T);
  constexpr int64_t large = 1 << 20;  // copies of this size are not expected to be in a cache
  const int64_t rows = p.rows / side * side, columns = p.columns / side * side;
  const bool begin_lines =
      reinterpret_cast<uintptr_t>(p.to) % kLineBytes == 0 && p.to_row % side == 0;
  if (begin_lines && rows * columns * int64_t{sizeof(T)} >= large)
    copy_squares<T, true>(p, rows, columns);
  else
    copy_squares<T, false>(p, rows, columns);
  copy_tiles(p.part(0, columns, rows, p.columns - columns));
  copy_tiles(p.part(rows, 0, p.rows - rows, p.columns));
}

template <class T>
static void copy_plane(const StridedCopy &c, int outer, char *to, const char *from) {
  const int inner = c.rank - 1;
  const Plane<T> p{reinterpret_cast<T *>(to),
                   reinterpret_cast<const T *>(from),
                   outer < inner ? c.size[outer] : 1,
                   c.size[inner],
                   c.to_stride[outer],
                   c.to_stride[inner],
                   c.from_stride[outer],
                   c.from_stride[inner]};
  if (p.from_row == 1 && p.to_column == 1)
    copy_transposed(p);
  else if (p.from_column == 1 && p.to_row == 1)
    copy_transposed(p.turned());
  else
    copy_tiles(p);
}

// Whether elements of the innermost dimension are contiguous in the source and in the destination.
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
