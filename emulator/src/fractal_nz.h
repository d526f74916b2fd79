// FRACTAL_NZ: a storage format for weights. It divides a matrix into blocks; each block has 16
// rows, and columns of 32 bytes in total. The blocks are stored column by column, from top to
// bottom. Within a block, the elements are stored row by row. So a matrix [rows, columns] is stored
// as [columns / width, rows / 16, 16, width], where `width` elements have 32 bytes. Zeros fill
// blocks that the matrix does not fill.
// Sources: torch_npu, FormatHelper.cpp (InferShapeNDToNZ); document aclnnNpuFormatCast.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace emu {

struct FractalNz {
  int64_t matrices, rows, columns;
  int64_t element_bytes;

  // `sizes` are the sizes of a tensor. Its last two dimensions are the rows and the columns of
  // matrices.
  FractalNz(const std::vector<int64_t> &sizes, int64_t element_bytes)
      : matrices(1), rows(sizes[sizes.size() - 2]), columns(sizes.back()),
        element_bytes(element_bytes) {
    for (size_t d = 0; d + 2 < sizes.size(); d++)
      matrices *= sizes[d];
  }

  int64_t width() const { return 32 / element_bytes; }
  int64_t padded_rows() const { return (rows + 15) / 16 * 16; }
  int64_t bands() const { return (columns + width() - 1) / width(); }
  int64_t bytes() const { return matrices * bands() * padded_rows() * 32; }

  std::vector<int64_t> storage_sizes(std::vector<int64_t> sizes) const {
    sizes.resize(sizes.size() - 2);
    for (int64_t size : {bands(), padded_rows() / 16, int64_t(16), width()})
      sizes.push_back(size);
    return sizes;
  }

  // Calls copy(offset in FRACTAL_NZ, offset in ND, number of bytes) for each row of each block.
  template <class Copy> void each_row(const Copy &copy) const {
    for (int64_t matrix = 0; matrix < matrices; matrix++)
      for (int64_t band = 0; band < bands(); band++) {
        int64_t first = band * width(), count = std::min(width(), columns - first);
        for (int64_t row = 0; row < rows; row++)
          copy(((matrix * bands() + band) * padded_rows() + row) * 32,
               ((matrix * rows + row) * columns + first) * element_bytes, count * element_bytes);
      }
  }

  void write(char *nz, const char *nd) const {
    memset(nz, 0, bytes());
    each_row([=](int64_t to, int64_t from, int64_t count) { memcpy(nz + to, nd + from, count); });
  }
  void read(const char *nz, char *nd) const {
    each_row([=](int64_t from, int64_t to, int64_t count) { memcpy(nd + to, nz + from, count); });
  }
};

}  // namespace emu
