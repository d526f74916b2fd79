// Copies and fills, at once or as tasks of a stream.
#include "runtime/counters.h"
#include "runtime/objects.h"

#include <acl/acl.h>
#include <acl/error_codes/rt_error_codes.h>

#include <cstring>

using namespace emu;

static aclError check_room(size_t room, size_t bytes) {
  if (bytes > room)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "copy of %zu bytes into %zu", bytes, room);
  return 0;
}

EMU_API aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes,
                             aclrtMemcpyKind) {
  if (aclError e = refuse_during_capture("aclrtMemcpy"))
    return e;
  if (aclError e = check_room(room, bytes))
    return e;
  count(Counters::of(current_device()).host_syncs);
  memmove(accessible(to), accessible(from), bytes);
  return 0;
}
EMU_API aclError aclrtMemset(void *to, size_t room, int32_t value, size_t bytes) {
  if (aclError e = refuse_during_capture("aclrtMemset"))
    return e;
  if (aclError e = check_room(room, bytes))
    return e;
  count(Counters::of(current_device()).host_syncs);
  memset(accessible(to), value, bytes);
  return 0;
}
EMU_API aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t bytes,
                                  aclrtMemcpyKind, aclrtStream stream) {
  if (aclError e = check_room(room, bytes))
    return e;
  return launch(stream, TaskKind::Copy, "aclrtMemcpyAsync",
                [=] { memmove(accessible(to), accessible(from), bytes); });
}
EMU_API aclError aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t bytes,
                                  aclrtStream stream) {
  if (aclError e = check_room(room, bytes))
    return e;
  return launch(stream, TaskKind::Copy, "aclrtMemsetAsync",
                [=] { memset(accessible(to), value, bytes); });
}
