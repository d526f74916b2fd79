// libopapi.so: the objects of the aclnn ABI.
#include "ops/op_abi.h"

namespace emu {

at::ScalarType scalar_type(aclDataType dtype) {
  switch (dtype) {
  case ACL_FLOAT:
    return at::kFloat;
  case ACL_FLOAT16:
    return at::kHalf;
  case ACL_BF16:
    return at::kBFloat16;
  case ACL_DOUBLE:
    return at::kDouble;
  case ACL_INT8:
    return at::kChar;
  case ACL_UINT8:
    return at::kByte;
  case ACL_INT16:
    return at::kShort;
  case ACL_INT32:
    return at::kInt;
  case ACL_INT64:
    return at::kLong;
  case ACL_BOOL:
    return at::kBool;
  case ACL_UINT16:
    return at::kUInt16;
  case ACL_UINT32:
    return at::kUInt32;
  case ACL_UINT64:
    return at::kUInt64;
  case ACL_FLOAT8_E4M3FN:
    return at::kFloat8_e4m3fn;
  case ACL_FLOAT8_E5M2:
    return at::kFloat8_e5m2;
  default:
    throw Refusal(type_name(dtype) + " is not emulated");
  }
}

std::string type_name(aclDataType dtype) {
  switch (dtype) {
  case ACL_COMPLEX32:
    return "complex32";
  case ACL_COMPLEX64:
    return "complex64";
  case ACL_COMPLEX128:
    return "complex128";
  default:
    return "aclDataType " + std::to_string(dtype);
  }
}

static Scalar read_scalar(const void *p, aclDataType dtype) {
  switch (scalar_type(dtype)) {
  case at::kDouble:
    return *static_cast<const double *>(p);
  case at::kFloat:
    return static_cast<double>(*static_cast<const float *>(p));
  case at::kHalf:
    return static_cast<double>(static_cast<float>(*static_cast<const at::Half *>(p)));
  case at::kBFloat16:
    return static_cast<double>(static_cast<float>(*static_cast<const at::BFloat16 *>(p)));
  case at::kLong:
    return *static_cast<const int64_t *>(p);
  case at::kInt:
    return static_cast<int64_t>(*static_cast<const int32_t *>(p));
  case at::kShort:
    return static_cast<int64_t>(*static_cast<const int16_t *>(p));
  case at::kChar:
    return static_cast<int64_t>(*static_cast<const int8_t *>(p));
  case at::kByte:
    return static_cast<int64_t>(*static_cast<const uint8_t *>(p));
  case at::kBool:
    return *static_cast<const bool *>(p);
  default:
    TORCH_CHECK(false, "scalar of ", type_name(dtype), " is not emulated");
  }
}

AtenScope::AtenScope() {
  // In ATen, each thread has its own setting for the number of intra-op threads. If a worker did
  // not set this number, OpenMP's threads would spin.
  static thread_local const bool once = [] {
    at::set_num_threads(settings().threads);
    return true;
  }();
  (void)once;
}

int refused(const char *op, const std::exception &error) {
  auto *refusal = dynamic_cast<const Refusal *>(&error);
  return fail(refusal ? refusal->code : kInvalidArgument, "%s: %s", op, error.what());
}

void refuse_by_settings(const char *op) {
  for (const std::string &name : settings().refused)
    refuse_unless(name != op, "the device refuses this operator");
}

int launch_phase(const char *name, aclOpExecutor *executor, aclrtStream stream) {
  if (!executor)
    return fail(kNullPointer, "%s: no executor", name);
  Task task = std::move(executor->task);
  LaunchTraits traits = executor->traits;
  delete executor;
  return launch(stream, TaskKind::Kernel, name, std::move(task), traits);
}

}  // namespace emu

using namespace emu;

EMU_API aclTensor *aclCreateTensor(const int64_t *shape, uint64_t rank, aclDataType dtype,
                                   const int64_t *strides, int64_t offset, aclFormat format,
                                   const int64_t *storage_shape, uint64_t storage_rank,
                                   void *data) {
  try {
    at::ScalarType type = scalar_type(dtype);
    auto options = at::TensorOptions().dtype(type).device(at::kCPU);
    char *p = nullptr;
    if (data)
      p = static_cast<char *>(accessible(data)) +
          offset * static_cast<int64_t>(c10::elementSize(type));
    at::IntArrayRef sizes(shape, rank);
    Tensor t = strides ? at::from_blob(p, sizes, at::IntArrayRef(strides, rank), options)
                       : at::from_blob(p, sizes, options);
    return new aclTensor{t, {storage_shape, storage_shape + storage_rank}, format, dtype};
  } catch (const Refusal &) {  // the operator that gets the tensor reports this with its own name
    return new aclTensor{Tensor(), {storage_shape, storage_shape + storage_rank}, format, dtype};
  } catch (const std::exception &e) {
    fail(kInvalidArgument, "aclCreateTensor: %s", e.what());
    return nullptr;
  }
}
EMU_API aclScalar *aclCreateScalar(void *value, aclDataType dtype) {
  try {
    return new aclScalar{read_scalar(value, dtype)};
  } catch (const std::exception &e) {
    fail(kInvalidArgument, "aclCreateScalar: %s", e.what());
    return nullptr;
  }
}
EMU_API aclIntArray *aclCreateIntArray(const int64_t *v, uint64_t n) {
  return new aclIntArray{{v, v + n}};
}
EMU_API aclFloatArray *aclCreateFloatArray(const float *v, uint64_t n) {
  return new aclFloatArray{{v, v + n}};
}
EMU_API aclBoolArray *aclCreateBoolArray(const bool *v, uint64_t n) {
  return new aclBoolArray{{v, v + n}};
}
// The list becomes the owner of its tensors.
EMU_API aclTensorList *aclCreateTensorList(aclTensor *const *v, uint64_t n) {
  auto *list = new aclTensorList;
  for (uint64_t i = 0; i < n; i++) {
    list->tensors.push_back(v[i] ? std::optional(*v[i]) : std::nullopt);
    delete v[i];
  }
  return list;
}
EMU_API aclScalarList *aclCreateScalarList(aclScalar *const *v, uint64_t n) {
  auto *list = new aclScalarList;
  for (uint64_t i = 0; i < n; i++) {
    list->values.push_back(v[i]->value);
    delete v[i];
  }
  return list;
}

template <class T> static int destroy(T *p) {
  delete p;
  return 0;
}
EMU_API int aclDestroyTensor(aclTensor *p) { return destroy(p); }
EMU_API int aclDestroyScalar(aclScalar *p) { return destroy(p); }
EMU_API int aclDestroyIntArray(aclIntArray *p) { return destroy(p); }
EMU_API int aclDestroyFloatArray(aclFloatArray *p) { return destroy(p); }
EMU_API int aclDestroyBoolArray(aclBoolArray *p) { return destroy(p); }
EMU_API int aclDestroyTensorList(aclTensorList *p) { return destroy(p); }
EMU_API int aclDestroyScalarList(aclScalarList *p) { return destroy(p); }
EMU_API int aclDestroyAclOpExecutor(aclOpExecutor *p) { return destroy(p); }

// If the shape of a result depends on data, op-plugin synchronizes and then calls this function.
EMU_API int aclGetViewShape(const aclTensor *tensor, int64_t **shape, uint64_t *rank) {
  auto sizes = tensor->t.sizes();
  *rank = sizes.size();
  *shape = new int64_t[sizes.size()];  // the caller frees it
  std::copy(sizes.begin(), sizes.end(), *shape);
  return 0;
}
