// Transposes squares of elements in vector registers. A line is the contents of one register, and a
// row of the square.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace emu::kernels {

constexpr int64_t kLineBytes = 64;
typedef uint64_t Line __attribute__((vector_size(kLineBytes)));

// Two lines are divided into pieces of kBytes bytes, and each line into pairs of pieces. The second
// piece of each pair in `a` and the first piece of this pair in `b` change places. Words have their
// lowest byte first, as on all supported processors.
template <int kBytes> inline void exchange(Line &a, Line &b) {
  const Line old_a = a, old_b = b;
  if constexpr (kBytes < 8) {
    constexpr int bits = 8 * kBytes;
    constexpr uint64_t first = ~uint64_t{0} / ((uint64_t{1} << bits) + 1);
    a = (old_a & first) | ((old_b & first) << bits);
    b = ((old_a >> bits) & first) | (old_b & ~first);
  } else if constexpr (kBytes == 8) {
    a = __builtin_shufflevector(old_a, old_b, 0, 8, 2, 10, 4, 12, 6, 14);
    b = __builtin_shufflevector(old_a, old_b, 1, 9, 3, 11, 5, 13, 7, 15);
  } else if constexpr (kBytes == 16) {
    a = __builtin_shufflevector(old_a, old_b, 0, 1, 8, 9, 4, 5, 12, 13);
    b = __builtin_shufflevector(old_a, old_b, 2, 3, 10, 11, 6, 7, 14, 15);
  } else {
    a = __builtin_shufflevector(old_a, old_b, 0, 1, 2, 3, 8, 9, 10, 11);
    b = __builtin_shufflevector(old_a, old_b, 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// Element j of line i becomes element i of line j. First, squares of 1 x 1 elements change places,
// then squares of 2 x 2 elements, and so on, up to half a line.
template <int kElementBytes, int kBytes = kElementBytes> inline void transpose(Line *lines) {
  constexpr int count = kLineBytes / kElementBytes, apart = kBytes / kElementBytes;
  for (int i = 0; i < count; i += 2 * apart)
    for (int k = i; k < i + apart; k++)
      exchange<kBytes>(lines[k], lines[k + apart]);
  if constexpr (2 * kBytes < kLineBytes)
    transpose<kElementBytes, 2 * kBytes>(lines);
}

// Writes a line to memory and bypasses the caches. So memory is not read before the write, and the
// caches keep their contents. The address must be a multiple of the line's length. After the last
// line, call finish_stores().
inline void store_past_caches(void *to, Line line) {
#ifdef __AVX512F__
  _mm512_stream_si512(static_cast<__m512i *>(to), reinterpret_cast<__m512i>(line));
#else
  memcpy(to, &line, kLineBytes);
#endif
}
inline void finish_stores() {
#ifdef __AVX512F__
  _mm_sfence();
#endif
}

}  // namespace emu::kernels
