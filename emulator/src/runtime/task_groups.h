// Task groups: nodes of a graph whose bodies may be replaced after the capture.
#pragma once

#include "runtime/graph.h"

namespace emu {

// Handles a launch in an update section of `stream`. The caller must hold g_capture_mutex.
aclError update_task(Stream *stream, TaskKind kind, const char *name, Task body);

}  // namespace emu
