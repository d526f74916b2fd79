// Maps a C++ lambda over at::Tensor and friends to the two-phase aclnn C ABI.
//
//   OP(aclnnMm, [](Tensor a, Tensor b, Tensor out, int8_t) { at::mm_out(out, a, b); })
//
// exports aclnnMmGetWorkspaceSize(aclTensor*, aclTensor*, aclTensor*, int8_t, uint64_t*,
// aclOpExecutor**), whose signature is derived from the lambda, and aclnnMm(workspace, size,
// executor, stream). The first call converts the arguments and keeps them in the executor; the
// second launches the lambda on the stream.
#pragma once

#include "aten.h"

#include "emulator.h"


// CANN declares these types without defining them. The tensor is a view made by from_blob.
struct aclTensor {
  at::Tensor t;
  std::vector<int64_t> storage_shape;
  int format;
  aclDataType dtype;
};
struct aclScalar {
  at::Scalar value;
};
struct aclIntArray {
  std::vector<int64_t> values;
};
struct aclFloatArray {
  std::vector<double> values;
};
struct aclBoolArray {
  std::vector<char> values;
};
struct aclTensorList {
  std::vector<at::Tensor> tensors;
};
struct aclScalarList {
  std::vector<at::Scalar> values;
};
struct aclOpExecutor {
  std::function<void()> body;
};

namespace emu {

using at::Scalar;
using at::Tensor;
using OptTensor = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;
using Ints = std::vector<int64_t>;
using OptInts = std::optional<Ints>;

constexpr int kNullPointer = 161001, kInvalidArgument = 161002, kNotEmulated = 161003;

at::ScalarType scalar_type(aclDataType dtype);

// The C type of an argument, and how it becomes the lambda's parameter.
template <class T> struct Argument {
  using C = T;
  static T convert(T v) { return v; }
};
template <> struct Argument<Tensor> {
  using C = aclTensor *;
  static Tensor convert(C p) {
    TORCH_CHECK(p, "null aclTensor");
    return p->t;
  }
};
template <> struct Argument<OptTensor> {
  using C = aclTensor *;
  static OptTensor convert(C p) { return p ? OptTensor(p->t) : OptTensor(); }
};
template <> struct Argument<Scalar> {
  using C = aclScalar *;
  static Scalar convert(C p) {
    TORCH_CHECK(p, "null aclScalar");
    return p->value;
  }
};
template <> struct Argument<Ints> {
  using C = aclIntArray *;
  static Ints convert(C p) { return p ? p->values : Ints(); }
};
template <> struct Argument<OptInts> {
  using C = aclIntArray *;
  static OptInts convert(C p) { return p ? OptInts(p->values) : OptInts(); }
};
template <> struct Argument<Tensors> {
  using C = aclTensorList *;
  static Tensors convert(C p) { return p ? p->tensors : Tensors(); }
};
template <> struct Argument<std::string> {
  using C = char *;
  static std::string convert(C p) { return p ? p : ""; }
};

// Intra-op threads are per thread in ATen: each worker sets its own (EMU_NPU_THREADS, default 1).
inline void limit_worker_threads() {
  static thread_local const bool once = [] {
    at::set_num_threads(settings().threads);
    return true;
  }();
  (void)once;
}

template <class Function> struct WorkspacePhase;
template <class... A> struct WorkspacePhase<void (*)(A...)> {
  template <void (*F)(A...)>
  static int call(typename Argument<A>::C... a, uint64_t *bytes, aclOpExecutor **executor) {
    try {
      *bytes = 0;
      // Owned copies: torch_npu destroys the aclTensors right after the launch.
      std::tuple<A...> arguments(Argument<A>::convert(a)...);
      *executor = new aclOpExecutor{[arguments = std::move(arguments)] {
        limit_worker_threads();
        at::NoGradGuard no_grad;
        at::AutoDispatchBelowADInplaceOrView below_autograd;
        std::apply(F, arguments);
      }};
      return 0;
    } catch (const std::exception &e) {
      return fail(kInvalidArgument, "%s", e.what());
    }
  }
};

inline int launch_phase(const char *name, aclOpExecutor *executor, aclrtStream stream) {
  if (!executor)
    return fail(kNullPointer, "%s: no executor", name);
  auto body = std::move(executor->body);
  delete executor;
  return launch(stream, TaskKind::Kernel, name, std::move(body));
}

}  // namespace emu

// The exported first phase is a bare jump through a pointer, so that one macro serves every
// signature without repeating it. `jmp *p(%rip)` is x86-64; other machines need their own form.
#define EMU_EXPORT_WORKSPACE_PHASE(SYMBOL, NAME)                                                   \
  extern "C" EMU_SHARED __attribute__((naked)) void SYMBOL() {                                     \
    asm("jmp *emu_phase1_" #NAME "(%rip)");                                                        \
  }

#define OP(NAME, ...)                                                                              \
  static constexpr auto emu_body_##NAME = +__VA_ARGS__;                                            \
  extern "C" {                                                                                     \
  __attribute__((visibility("hidden"), used)) int (*emu_phase1_##NAME)(...) =                      \
      reinterpret_cast<int (*)(...)>(                                                              \
          &emu::WorkspacePhase<std::remove_const_t<decltype(emu_body_##NAME)>>::call<              \
              emu_body_##NAME>);                                                                   \
  }                                                                                                \
  EMU_EXPORT_WORKSPACE_PHASE(NAME##GetWorkspaceSize, NAME)                                         \
  EMU_API int NAME(void *, uint64_t, aclOpExecutor *executor, aclrtStream stream) {                \
    return emu::launch_phase(#NAME, executor, stream);                                             \
  }
