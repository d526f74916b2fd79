// The ATen headers of all operator files, precompiled once.
#ifndef EMU_ATEN_H
#define EMU_ATEN_H

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#endif
