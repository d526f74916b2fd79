// Maps a C++ lambda to the two-phase aclnn C ABI. Three forms:
//
//   OP(aclnnMul, [](Tensor a, Tensor b, Tensor out) { at::mul_out(out, a, b); })
//   OP(aclnnCast, [](Tensor a, aclDataType, Tensor out) -> Task { check...; return [=] {...}; })
//   OP(aclnnMm, [](Tensor a, Tensor b, Tensor out, int8_t) -> TimedTask { return {task, ns}; })
//
// All three export two functions: aclnnXGetWorkspaceSize(arguments..., uint64_t *, aclOpExecutor
// **), whose signature is derived from the lambda, and aclnnX(workspace, size, executor, stream).
// The first function is the first phase: it converts the arguments. If the lambda returns a Task,
// the lambda runs in this phase. The lambda then checks its arguments, as the real operator does in
// its first phase, and binds pointers. The second function, the second phase, launches the task.
// With modelled time, the task takes the time that the TimedTask contains, or a time estimated from
// the tensors (work.h).
#pragma once

#include "aten.h"

#include "emulator.h"
#include "ops/ai_cpu.h"
#include "ops/checks.h"
#include "ops/export.h"
#include "ops/work.h"

// CANN declares these types, but does not define them. `t` is a view made by from_blob; it is
// undefined if its type is not emulated.
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
  std::vector<std::optional<aclTensor>> tensors;
};
struct aclScalarList {
  std::vector<at::Scalar> values;
};
struct aclOpExecutor {
  emu::Task task;
  emu::LaunchTraits traits;
};

namespace emu {

using at::Scalar;
using at::Tensor;
using OptTensor = std::optional<Tensor>;
using OptScalar = std::optional<Scalar>;
using Tensors = std::vector<Tensor>;
using Ints = std::vector<int64_t>;
using OptInts = std::optional<Ints>;

// Error codes of the aclnn interface (aclnn_base.h), which the first phase returns.
constexpr int kNullPointer = 161001, kInvalidArgument = 161002;

at::ScalarType scalar_type(aclDataType dtype);
std::string type_name(aclDataType dtype);

inline Tensor emulated(const aclTensor &p) {
  refuse_unless(p.t.defined(), type_name(p.dtype), " is not emulated");
  // If the tensors of an operator may have this format, its lambda has parameters of the type
  // aclTensor * or aclTensorList *.
  refuse_unless(p.format != ACL_FORMAT_FRACTAL_NZ, "tensors in FRACTAL_NZ are not emulated here");
  return p.t;
}

// The C type of an argument, and how it is converted to the type of the lambda's parameter.
template <class T> struct Argument {
  using C = T;
  static T convert(T v) { return v; }
};
template <> struct Argument<Tensor> {
  using C = aclTensor *;
  static Tensor convert(C p) {
    refuse_unless(p, "null aclTensor");
    return emulated(*p);
  }
};
template <> struct Argument<OptTensor> {
  using C = aclTensor *;
  static OptTensor convert(C p) { return p ? OptTensor(emulated(*p)) : OptTensor(); }
};
template <> struct Argument<Scalar> {
  using C = aclScalar *;
  static Scalar convert(C p) {
    refuse_unless(p, "null aclScalar");
    return p->value;
  }
};
template <> struct Argument<OptScalar> {
  using C = aclScalar *;
  static OptScalar convert(C p) { return p ? OptScalar(p->value) : OptScalar(); }
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
  static Tensors convert(C p) {
    Tensors list(p ? p->tensors.size() : 0);
    for (size_t i = 0; i < list.size(); i++)
      if (p->tensors[i])
        list[i] = emulated(*p->tensors[i]);
    return list;
  }
};
template <> struct Argument<std::string> {
  using C = char *;
  static std::string convert(C p) { return p ? p : ""; }
};

// Settings for ATen inside a task: no autograd, and the number of threads that is set for this
// worker.
struct AtenScope {
  AtenScope();
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
};

// With kernels=skip, nothing is computed. Values that are used as positions are set to zero, which
// is always a valid index.
inline bool skipping() { return !settings().compute; }
inline bool skips(const Tensor &out) { return skipping() && out.is_floating_point(); }
inline Task arithmetic(Task task) { return skipping() ? Task([] {}) : task; }

// Whether an operator that only moves elements may skip the move. With modelled time, floats and
// int8 values (quantised floats) are not computed, so they need not be moved. Other integers are
// always moved.
inline bool idles(const Tensor &out) {
  return settings().timed && (out.is_floating_point() || out.scalar_type() == at::kChar);
}

// With modelled time, no floats are computed. int16 values are bits of masks, and masks only affect
// floats.
inline bool are_mask_bits(const Tensor &t) {
  return settings().timed && t.scalar_type() == at::kShort;
}

// A task, and its modelled time in nanoseconds.
struct TimedTask {
  Task task;
  int64_t ns;
};

int refused(const char *op, const std::exception &error);

// Refuses an operator if the device that the settings describe does not have it.
void refuse_by_settings(const char *op);

// ATen has tensors of uint16, uint32 and uint64, but almost no functions for them.
inline bool is_wide_unsigned(const Tensor &t) {
  if (!t.defined())
    return false;
  at::ScalarType type = t.scalar_type();
  return type == at::kUInt16 || type == at::kUInt32 || type == at::kUInt64;
}
template <class Other> bool is_wide_unsigned(const Other &) { return false; }
template <class... A> void refuse_wide_unsigned(const std::tuple<A...> &arguments) {
  bool found = std::apply([](const A &...a) { return (is_wide_unsigned(a) || ...); }, arguments);
  refuse_unless(!found, "uint16, uint32 and uint64 are emulated for copies only");
}

// ---- counts of a launch

// Kernels load whole blocks of 32 bytes. So a kernel needs more time for a tensor that begins in
// the middle of a block.
inline bool is_unaligned(const Tensor &t) {
  return t.defined() && t.numel() > 0 && reinterpret_cast<uintptr_t>(t.data_ptr()) % 32 != 0;
}
inline bool is_unaligned(const OptTensor &t) { return t && is_unaligned(*t); }
inline bool is_unaligned(const Tensors &list) {
  for (const Tensor &t : list)
    if (is_unaligned(t))
      return true;
  return false;
}
template <class Other> bool is_unaligned(const Other &) { return false; }

template <class Argument> void add_operand(Operands &operands, const Argument &argument) {
  if constexpr (std::is_same_v<Argument, Tensor>)
    operands.tensors.push_back(argument);
  else if constexpr (std::is_same_v<Argument, aclTensor *>)
    operands.tensors.push_back(argument->t);
  else if constexpr (std::is_same_v<Argument, int64_t> || std::is_same_v<Argument, int>)
    operands.numbers.push_back(argument);
}

template <class... A>
LaunchTraits traits_of(const char *name, const AiCpuRule *rule, const std::tuple<A...> &arguments) {
  return std::apply(
      [&](const A &...a) {
        LaunchTraits traits;
        traits.unaligned = (is_unaligned(a) || ...) ? name : nullptr;
        if (rule) {
          Operands operands;
          (add_operand(operands, a), ...);
          traits.ai_cpu = rule->applies(operands) ? name : nullptr;
        }
        return traits;
      },
      arguments);
}

template <class Argument> void add_tensor(std::vector<Tensor> &tensors, const Argument &argument) {
  if constexpr (std::is_same_v<Argument, Tensor>)
    tensors.push_back(argument);
  else if constexpr (std::is_same_v<Argument, aclTensor *>)
    tensors.push_back(argument->t);
  else if constexpr (std::is_same_v<Argument, aclTensorList *>) {
    for (const auto &tensor : argument->tensors)
      if (tensor)
        tensors.push_back(tensor->t);
  } else if constexpr (std::is_same_v<Argument, OptTensor>) {
    if (argument)
      tensors.push_back(*argument);
  } else if constexpr (std::is_same_v<Argument, Tensors>) {
    tensors.insert(tensors.end(), argument.begin(), argument.end());
  }
}

// Returns the addresses of tensors as the program sees them.
inline std::shared_ptr<const std::vector<uintptr_t>> places_of(const std::vector<Tensor> &tensors) {
  auto places = std::make_shared<std::vector<uintptr_t>>();
  for (const Tensor &t : tensors)
    if (t.defined() && t.data_ptr())
      places->push_back(reinterpret_cast<uintptr_t>(t.data_ptr()) - kDeviceWindowBytes);
  return places;
}

template <class... A>
int64_t ns_of(const char *name, const LaunchTraits &traits, const std::tuple<A...> &arguments) {
  std::vector<Tensor> tensors;
  std::apply([&](const A &...a) { (add_tensor(tensors, a), ...); }, arguments);
  return memory_ns(name, traits.ai_cpu != nullptr, tensors);
}

// The compiler generates this code once for each signature. Each operator adds only one call. This
// saves compile time.
template <class Function> struct WorkspacePhase;
template <class Result, class... A> struct WorkspacePhase<Result (*)(A...)> {
  using Body = Result (*)(A...);

  template <Body body, const char *name>
  static int call(typename Argument<A>::C... a, uint64_t *bytes, aclOpExecutor **executor) {
    static const AiCpuRule *rule = find_ai_cpu_rule(name);
    return prepare(body, name, rule, a..., bytes, executor);
  }

  __attribute__((noinline)) static int prepare(Body body, const char *name, const AiCpuRule *rule,
                                               typename Argument<A>::C... a, uint64_t *bytes,
                                               aclOpExecutor **executor) {
    try {
      *bytes = 0;
      refuse_by_settings(name);
      // The task needs its own copies of the arguments, because torch_npu destroys the aclTensors
      // directly after the launch.
      std::tuple<A...> arguments(Argument<A>::convert(a)...);
      LaunchTraits traits = traits_of(name, rule, arguments);
      if (wants_operands(name)) {
        std::vector<Tensor> tensors;
        std::apply([&](const A &...a) { (add_tensor(tensors, a), ...); }, arguments);
        traits.operands = places_of(tensors);
      }
      if constexpr (std::is_same_v<Result, TimedTask>) {
        TimedTask timed = std::apply(body, std::move(arguments));
        traits.ns = timed.ns;
        *executor = new aclOpExecutor{std::move(timed.task), traits};
        return 0;
      } else if (settings().timed) {
        traits.ns = ns_of(name, traits, arguments);
      }
      if constexpr (std::is_same_v<Result, Task>) {
        *executor = new aclOpExecutor{std::apply(body, std::move(arguments)), traits};
        return 0;
      } else if constexpr (!std::is_same_v<Result, TimedTask>) {
        refuse_wide_unsigned(arguments);
        *executor = new aclOpExecutor{[body, arguments = std::move(arguments)] {
                                        AtenScope scope;
                                        std::apply(body, arguments);
                                      },
                                      traits};
        return 0;
      }
    } catch (const std::exception &e) {
      return refused(name, e);
    }
  }
};

int launch_phase(const char *name, aclOpExecutor *executor, aclrtStream stream);

}  // namespace emu

#define OP(NAME, ...)                                                                              \
  static constexpr auto emu_body_##NAME = +__VA_ARGS__;                                            \
  static constexpr char emu_name_##NAME[] = #NAME;                                                 \
  static constexpr auto emu_phase1_##NAME =                                                        \
      &emu::WorkspacePhase<std::remove_const_t<decltype(emu_body_##NAME)>>::call<emu_body_##NAME,  \
                                                                                 emu_name_##NAME>; \
  EMU_EXPORT(NAME##GetWorkspaceSize, emu_phase1_##NAME)                                            \
  EMU_API int NAME(void *, uint64_t, aclOpExecutor *executor, aclrtStream stream) {                \
    return emu::launch_phase(#NAME, executor, stream);                                             \
  }
