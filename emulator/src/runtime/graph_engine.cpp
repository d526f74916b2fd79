// If torch_npu finds no aclnn kernel for an operator, it sends the operator to the graph engine. Of
// these operators, only Identity is emulated: if CANN is older than 9.1, torch_npu uses Identity to
// change the storage format of a tensor.
#include "fractal_nz.h"
#include "rates.h"
#include "runtime/objects.h"

#include <acl/acl.h>
#include <acl/acl_op_compiler.h>
#include <acl/error_codes/rt_error_codes.h>

#include <algorithm>
#include <cstring>
#include <vector>

using namespace emu;

// CANN declares these types, but does not define them.
struct aclTensorDesc {
  aclDataType dtype;
  std::vector<int64_t> sizes;
  aclFormat format;  // of the storage
};
struct aclDataBuffer {
  void *data;
  size_t bytes;
};

EMU_API aclTensorDesc *aclCreateTensorDesc(aclDataType dtype, int rank, const int64_t *sizes,
                                           aclFormat format) {
  return new aclTensorDesc{dtype, {sizes, sizes + rank}, format};
}
EMU_API void aclDestroyTensorDesc(const aclTensorDesc *desc) { delete desc; }
EMU_API aclError aclSetTensorFormat(aclTensorDesc *desc, aclFormat format) {
  desc->format = format;
  return 0;
}
EMU_API aclDataBuffer *aclCreateDataBuffer(void *data, size_t bytes) {
  return new aclDataBuffer{data, bytes};
}
EMU_API aclError aclDestroyDataBuffer(const aclDataBuffer *buffer) {
  delete buffer;
  return 0;
}

static aclError not_emulated(const char *op) {
  return fail(ACL_ERROR_FEATURE_UNSUPPORTED,
              "GE operator %s (no aclnn kernel is emulated for this call)", op);
}

static int64_t bytes_of(aclDataType dtype) {
  switch (dtype) {
  case ACL_INT8:
    return 1;
  case ACL_FLOAT16:
  case ACL_BF16:
    return 2;
  default:
    return 0;
  }
}

static int64_t num_bytes(const aclTensorDesc &desc) {
  int64_t elements = 1;
  for (int64_t size : desc.sizes)
    elements *= size;
  return elements * bytes_of(desc.dtype);
}

// If both formats are equal, Identity only copies. torch_npu makes such calls if the program does
// not allow internal formats. In such a call, both tensors are in ND.
static aclError run_identity(const aclTensorDesc &from, const aclDataBuffer &input,
                             const aclTensorDesc &to, const aclDataBuffer &output,
                             aclrtStream stream) {
  const bool reads_nz = from.format == ACL_FORMAT_FRACTAL_NZ;
  const bool writes_nz = to.format == ACL_FORMAT_FRACTAL_NZ;
  const int64_t element = bytes_of(from.dtype), plain = num_bytes(from);
  if (!element || from.dtype != to.dtype || from.sizes != to.sizes)
    return not_emulated("Identity");
  if ((reads_nz || writes_nz) && from.sizes.size() < 2)
    return not_emulated("Identity");
  // A tensor with fewer than two dimensions has no matrix; the layout is not used for it.
  const FractalNz layout(from.sizes.size() < 2 ? std::vector<int64_t>{0, 0} : from.sizes, element);
  const int64_t read = reads_nz ? layout.bytes() : plain;
  const int64_t written = writes_nz ? layout.bytes() : plain;
  if (static_cast<int64_t>(input.bytes) < read || static_cast<int64_t>(output.bytes) < written)
    return fail(ACL_ERROR_INVALID_PARAM, "Identity: buffers of %zu and %zu bytes, needs %ld and %ld",
                input.bytes, output.bytes, read, written);
  const Rates &r = rates();
  LaunchTraits traits;
  traits.ns = microseconds(r.vector_us + r.gap_us) +
              static_cast<int64_t>((read + written) / r.hbm_tb_s / r.vector_memory / 1e3);
  char *source = static_cast<char *>(accessible(input.data));
  char *target = static_cast<char *>(accessible(output.data));
  return launch(stream, TaskKind::Kernel, "Identity",
                [=] {
                  if (!settings().compute)  // nobody reads the values
                    return;
                  if (reads_nz == writes_nz)
                    memmove(target, source, read);
                  else if (writes_nz)
                    layout.write(target, source);
                  else
                    layout.read(source, target);
                },
                traits);
}

static aclError run_operator(const char *op, int num_inputs, const aclTensorDesc *const input_desc[],
                             const aclDataBuffer *const inputs[], int num_outputs,
                             const aclTensorDesc *const output_desc[],
                             const aclDataBuffer *const outputs[], aclrtStream stream) {
  const std::vector<std::string> &refused = settings().refused;
  if (strcmp(op, "Identity") || num_inputs != 1 || num_outputs != 1 ||
      std::find(refused.begin(), refused.end(), op) != refused.end())
    return not_emulated(op);
  if (aclError e = refuse_during_capture("aclopCompileAndExecute"))
    return e;
  return run_identity(*input_desc[0], *inputs[0], *output_desc[0], *outputs[0], stream);
}

EMU_API aclError aclopCompileAndExecute(const char *op, int num_inputs,
                                        const aclTensorDesc *const input_desc[],
                                        const aclDataBuffer *const inputs[], int num_outputs,
                                        const aclTensorDesc *const output_desc[],
                                        aclDataBuffer *const outputs[], const aclopAttr *,
                                        aclopEngineType, aclopCompileType, const char *,
                                        aclrtStream stream) {
  return run_operator(op, num_inputs, input_desc, inputs, num_outputs, output_desc, outputs, stream);
}
EMU_API aclError aclopCompileAndExecuteV2(const char *op, int num_inputs,
                                          aclTensorDesc *input_desc[], aclDataBuffer *inputs[],
                                          int num_outputs, aclTensorDesc *output_desc[],
                                          aclDataBuffer *outputs[], aclopAttr *, aclopEngineType,
                                          aclopCompileType, const char *, aclrtStream stream) {
  return run_operator(op, num_inputs, input_desc, inputs, num_outputs, output_desc, outputs, stream);
}
