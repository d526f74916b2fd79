// Conversions between the storage formats ND and FRACTAL_NZ.
#include "ops/storage_formats.h"

using namespace emu;

FractalNz emu::fractal_nz(const Tensor &t) { return {t.sizes().vec(), t.element_size()}; }

bool emu::has_fractal_nz(const Tensor &t) {
  return t.defined() && t.dim() >= 2 && (t.scalar_type() == at::kChar || is_half(t));
}

NzMatrices::NzMatrices(const aclTensor &tensor) {
  const Tensor &t = tensor.t;
  refuse_unless(has_fractal_nz(t), "a tensor of ", tensor.dtype, " in FRACTAL_NZ is not emulated");
  require_contiguous("a tensor in FRACTAL_NZ", t);
  FractalNz layout = fractal_nz(t);
  refuse_unless(layout.storage_sizes(t.sizes().vec()) == tensor.storage_shape,
                "the storage has other sizes than FRACTAL_NZ of ", t.sizes());
  rows_ = layout.rows;
  columns_ = layout.columns;
  blocks_ = at::from_blob(
      t.data_ptr(), {layout.matrices, layout.bands(), layout.padded_rows(), layout.width()},
      at::TensorOptions().dtype(t.scalar_type()));
}

Tensor NzMatrices::matrix(int64_t index) const {
  Tensor rows = blocks_[index].narrow(1, 0, rows_).transpose(0, 1).reshape({rows_, -1});
  return rows.narrow(1, 0, columns_);
}

// Whether this format stands for ND. torch_npu gives a tensor in ND a format that depends on its
// rank.
static bool is_plain(int format) {
  return format == ACL_FORMAT_ND || format == ACL_FORMAT_NCL || format == ACL_FORMAT_NCHW ||
         format == ACL_FORMAT_NCDHW;
}

// Rules: document aclnnNpuFormatCast. The emulator supports int8, float16 and bfloat16, and only
// blocks whose width in elements is that of the tensor's own type.
static void check_cast(const aclTensor &from, int to) {
  refuse_unless(has_fractal_nz(from.t), "only int8, float16 and bfloat16 of two or more dimensions "
                                        "are emulated");
  bool writes_nz = is_plain(from.format) && to == ACL_FORMAT_FRACTAL_NZ;
  bool reads_nz = from.format == ACL_FORMAT_FRACTAL_NZ && is_plain(to);
  refuse_unless(writes_nz || reads_nz, "a cast from format ", from.format, " to ", to,
                " is not emulated");
  demand(from.t.dim() <= 6, "srcTensor may have 6 dimensions, got ", from.t.dim());
}

EMU_API int aclnnNpuFormatCastCalculateSizeAndFormat(const aclTensor *from, int format, int dtype,
                                                     int64_t **sizes, uint64_t *rank, int *actual) {
  try {
    refuse_unless(from && sizes && rank && actual, "null argument");
    check_cast(*from, format);
    refuse_unless(dtype == from->dtype, "additionalDtype ", dtype, " is not emulated for srcTensor "
                  "of ", from->dtype);
    std::vector<int64_t> found = from->t.sizes().vec();
    if (format == ACL_FORMAT_FRACTAL_NZ)
      found = fractal_nz(from->t).storage_sizes(found);
    *rank = found.size();
    *sizes = new int64_t[found.size()];  // the caller frees it
    std::copy(found.begin(), found.end(), *sizes);
    *actual = format;
    return 0;
  } catch (const std::exception &e) {
    return refused("aclnnNpuFormatCastCalculateSizeAndFormat", e);
  }
}

OP(aclnnNpuFormatCast, [](aclTensor *from, aclTensor *to) -> Task {
  refuse_unless(from && to, "null aclTensor");
  check_cast(*from, to->format);
  refuse_unless(to->t.sizes() == from->t.sizes() && to->t.scalar_type() == from->t.scalar_type(),
                "dstTensor ", to->t.sizes(), " differs from srcTensor ", from->t.sizes());
  require_contiguous("srcTensor", from->t);
  FractalNz layout = fractal_nz(from->t);
  char *source = static_cast<char *>(from->t.data_ptr());
  char *target = static_cast<char *>(to->t.data_ptr());
  bool to_nz = to->format == ACL_FORMAT_FRACTAL_NZ;
  return [=] {
    if (skipping())  // nobody reads the values
      return;
    if (to_nz)
      layout.write(target, source);
    else
      layout.read(source, target);
  };
})
