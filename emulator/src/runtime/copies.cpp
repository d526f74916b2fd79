// Copies and fills, synchronous or as tasks of a stream.
#include "rates.h"
#include "runtime/bad_memory.h"
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

// With modelled time, a copy uses either the link to the host, or only the device's memory. A fill
// has a destination, but no source.
static LaunchTraits traits_of(const void *to, const void *from, size_t bytes) {
  const Rates &r = rates();
  LaunchTraits traits;
  traits.between_host_and_device = from && (!is_device_address(to) || !is_device_address(from));
  traits.ns = traits.between_host_and_device
                  ? microseconds(r.host_copy_us) + static_cast<int64_t>(bytes / r.host_gb_s)
                  : microseconds(r.vector_us + r.gap_us) +
                        static_cast<int64_t>((from ? 2. : 1.) * bytes / r.hbm_tb_s /
                                             r.vector_memory / 1e3);
  return traits;
}
// With modelled time, the host sleeps for as long as a synchronous copy takes. The copy does not
// affect streams.
static void sleep_for(const LaunchTraits &traits) {
  if (settings().timed)
    sleep_until_ns(now_ns() + traits.ns);
}

EMU_API aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes,
                             aclrtMemcpyKind) {
  if (aclError e = refuse_during_capture("aclrtMemcpy"))
    return e;
  if (aclError e = check_room(room, bytes))
    return e;
  count(Counters::of(current_device()).host_syncs);
  pay_host_time(current_device());
  memmove(accessible(to), accessible(from), bytes);
  sleep_for(traits_of(to, from, bytes));
  return check_memory_of_call("aclrtMemcpy");
}
EMU_API aclError aclrtMemset(void *to, size_t room, int32_t value, size_t bytes) {
  if (aclError e = refuse_during_capture("aclrtMemset"))
    return e;
  if (aclError e = check_room(room, bytes))
    return e;
  count(Counters::of(current_device()).host_syncs);
  pay_host_time(current_device());
  memset(accessible(to), value, bytes);
  sleep_for(traits_of(to, nullptr, bytes));
  return check_memory_of_call("aclrtMemset");
}
EMU_API aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t bytes,
                                  aclrtMemcpyKind, aclrtStream stream) {
  if (aclError e = check_room(room, bytes))
    return e;
  return launch(stream, TaskKind::Copy, "aclrtMemcpyAsync",
                [=] { memmove(accessible(to), accessible(from), bytes); },
                traits_of(to, from, bytes));
}
EMU_API aclError aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t bytes,
                                  aclrtStream stream) {
  if (aclError e = check_room(room, bytes))
    return e;
  return launch(stream, TaskKind::Copy, "aclrtMemsetAsync",
                [=] { memset(accessible(to), value, bytes); }, traits_of(to, nullptr, bytes));
}

// According to the document of this call, each copy is between host and device, and attributes say
// where its source and its destination are.
static aclError check_batch(void **to, size_t *room, void **from, size_t *bytes, size_t count,
                            aclrtMemcpyBatchAttr *attributes, size_t *first, size_t num_attributes,
                            size_t *failed) {
  if (!to || !room || !from || !bytes || !count || !attributes || !first || !num_attributes ||
      num_attributes > count || first[0])
    return fail(ACL_ERROR_RT_PARAM_INVALID, "batch of %zu copies with %zu attributes", count,
                num_attributes);
  for (size_t i = 0, a = 0; i < count; i++) {
    if (a + 1 < num_attributes && first[a + 1] == i)
      a++;
    *failed = i;
    auto is_host = [](const aclrtMemLocation &at) { return at.type == ACL_MEM_LOCATION_TYPE_HOST; };
    const aclrtMemLocation &source = attributes[a].srcLoc, &target = attributes[a].dstLoc;
    if (is_host(source) == is_host(target))
      return fail(ACL_ERROR_RT_PARAM_INVALID,
                  "copy %zu of a batch is not between host and device", i);
    if (is_device_address(from[i]) == is_host(source) || is_device_address(to[i]) == is_host(target))
      return fail(ACL_ERROR_RT_PARAM_INVALID, "copy %zu of a batch: the locations are wrong", i);
    if (aclError e = check_room(room[i], bytes[i]))
      return e;
  }
  *failed = SIZE_MAX;
  return 0;
}

EMU_API aclError aclrtMemcpyBatch(void **to, size_t *room, void **from, size_t *bytes, size_t count,
                                  aclrtMemcpyBatchAttr *attributes, size_t *first,
                                  size_t num_attributes, size_t *failed) {
  *failed = SIZE_MAX;
  if (aclError e = refuse_during_capture("aclrtMemcpyBatch"))
    return e;
  if (aclError e =
          check_batch(to, room, from, bytes, count, attributes, first, num_attributes, failed))
    return e;
  for (size_t i = 0; i < count; i++)
    if (aclError e = aclrtMemcpy(to[i], room[i], from[i], bytes[i], ACL_MEMCPY_DEFAULT)) {
      *failed = i;
      return e;
    }
  return 0;
}
