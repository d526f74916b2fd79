// Initialisation, devices, contexts, versions, system options.
#include "runtime/objects.h"

#include <acl/acl.h>
#include <acl/error_codes/rt_error_codes.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <vector>

#include <unistd.h>

using namespace emu;

static const char *cann_version() { return settings().cann.c_str(); }

// Returns the devices that ASCEND_RT_VISIBLE_DEVICES selects. The variable contains ids between
// commas; ids after the first invalid id are ignored (CANN's document of the variable). If an id is
// not larger than the id before it, no device is selected. A test of torch_npu compares torch_npu's
// own count of devices with CANN's count. The process numbers its devices from zero.
static std::vector<int> parse_visible_devices() {
  std::vector<int> ids;
  const char *p = getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (!p) {
    ids.resize(settings().devices);
    std::iota(ids.begin(), ids.end(), 0);
    return ids;
  }
  const char *end = p + strlen(p);
  for (int id = 0; p < end; p++) {
    auto [after, error] = std::from_chars(p, end, id);
    if (error == std::errc() && !ids.empty() && id <= ids.back())
      return {};
    if (error != std::errc() || id < 0 || id >= settings().devices)
      break;
    ids.push_back(id);
    p = after;
    if (p == end || *p != ',')
      break;
  }
  return ids;
}

// CANN reads the variable once in each process.
static const std::vector<int> &visible_devices() {
  static const std::vector<int> ids = parse_visible_devices();
  return ids;
}

constexpr int kCubeCores = 24, kVectorCores = 48;
constexpr int64_t kL2Bytes = 192 << 20;

EMU_API aclError aclInit(const char *) {
  static std::atomic<bool> done{false};
  return done.exchange(true) ? ACL_ERROR_REPEAT_INITIALIZE : 0;
}
EMU_API aclError aclFinalize() { return 0; }

EMU_API const char *aclrtGetSocName() {
  return settings().soc.c_str();
}

EMU_API aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion *version) {
  memset(version, 0, sizeof *version);
  strncpy(version->version, cann_version(), sizeof version->version - 1);
  return 0;
}
EMU_API aclError aclsysGetVersionStr(char *, char *version) {
  strcpy(version, cann_version());
  return 0;
}

EMU_API aclError aclrtGetDeviceCount(uint32_t *count) {
  *count = static_cast<uint32_t>(visible_devices().size());
  return 0;
}
// A function of the driver. It ignores ASCEND_RT_VISIBLE_DEVICES. Until torch_npu opens a device,
// it calls this function, and reads the variable itself.
EMU_API int drvGetDevNum(uint32_t *count) {
  *count = static_cast<uint32_t>(settings().devices);
  return 0;
}
EMU_API aclError aclrtSetDevice(int32_t device) {
  const int count = static_cast<int>(visible_devices().size());
  if (device < 0 || device >= count)
    return fail(ACL_ERROR_RT_INVALID_DEVICEID, "invalid device %d of %d", device, count);
  t_device = device;
  return 0;
}
EMU_API aclError aclrtResetDevice(int32_t) { return 0; }
EMU_API aclError aclrtGetDevice(int32_t *device) {
  if (t_device < 0)
    return ACL_ERROR_RT_CONTEXT_NULL;
  *device = t_device;
  return 0;
}
EMU_API aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t *const logical) {
  const std::vector<int> &visible = visible_devices();
  if (user < 0 || user >= static_cast<int>(visible.size()))
    return fail(ACL_ERROR_RT_INVALID_DEVICEID, "invalid device %d of %zu", user, visible.size());
  *logical = visible[user];
  return 0;
}

// The physical id of a device is its id in ASCEND_RT_VISIBLE_DEVICES.
EMU_API aclError aclrtGetPhyDevIdByLogicDevId(const int32_t logical, int32_t *const physical) {
  return aclrtGetLogicDevIdByUserDevId(logical, physical);
}

// A context is represented by the device's number plus one.
EMU_API aclError aclrtGetCurrentContext(aclrtContext *context) {
  if (t_device < 0)
    return ACL_ERROR_RT_CONTEXT_NULL;
  *context = reinterpret_cast<void *>(static_cast<uintptr_t>(t_device + 1));
  return 0;
}
EMU_API aclError aclrtSetCurrentContext(aclrtContext context) {
  t_device = static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1;
  return 0;
}
EMU_API aclError aclrtGetPrimaryCtxState(int32_t, uint32_t *flags, int32_t *active) {
  if (flags)
    *flags = 0;
  *active = 1;
  return 0;
}

EMU_API aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return 0; }
EMU_API aclError aclrtSetOpExecuteTimeOut(uint32_t) { return 0; }
EMU_API aclError aclrtSetOpExecuteTimeOutV2(uint64_t, uint64_t *actual) {
  if (actual)
    *actual = 0;
  return 0;
}
EMU_API aclError aclrtSetOpWaitTimeout(uint32_t) { return 0; }

static std::mutex g_options_mutex;
static std::map<int, int64_t> g_system_options;
EMU_API aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  Lock lock(g_options_mutex);
  g_system_options[option] = value;
  return 0;
}
EMU_API aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
  Lock lock(g_options_mutex);
  *value = g_system_options[option];
  return 0;
}
EMU_API aclError aclrtCtxSetSysParamOpt(aclSysParamOpt, int64_t) { return 0; }

EMU_API aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr attribute, int64_t *value) {
  switch (attribute) {
  case ACL_DEV_ATTR_AICORE_CORE_NUM:
  case ACL_DEV_ATTR_CUBE_CORE_NUM:
    *value = kCubeCores;
    break;
  case ACL_DEV_ATTR_VECTOR_CORE_NUM:
    *value = kVectorCores;
    break;
  case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE:
    *value = settings().hbm_bytes;
    break;
  case ACL_DEV_ATTR_L2_CACHE_SIZE:
    *value = kL2Bytes;
    break;
  default:
    *value = 0;
  }
  return 0;
}
EMU_API aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo info, int64_t *value) {
  *value = info == ACL_DEVICE_INFO_VECTOR_CORE_NUM ? kVectorCores
           : info == ACL_DEVICE_INFO_L2_SIZE       ? kL2Bytes
                                                   : kCubeCores;
  return 0;
}
EMU_API aclError aclGetCannAttributeList(const aclCannAttr **list, size_t *count) {
  *list = nullptr;
  *count = 0;
  return 0;
}
EMU_API aclError aclrtGetDeviceResLimit(int32_t, aclrtDevResLimitType type, uint32_t *value) {
  *value = type == ACL_RT_DEV_RES_CUBE_CORE ? kCubeCores : kVectorCores;
  return 0;
}
EMU_API aclError aclrtGetStreamResLimit(aclrtStream, aclrtDevResLimitType type, uint32_t *value) {
  return aclrtGetDeviceResLimit(0, type, value);
}

EMU_API aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t, int32_t) {
  *can = 1;
  return 0;
}
EMU_API aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return 0; }
EMU_API aclError aclrtDeviceGetBareTgid(int32_t *pid) {
  *pid = getpid();
  return 0;
}
EMU_API aclError aclrtDeviceGetUuid(int32_t device, aclrtUuid *uuid) {
  memset(uuid, 0, sizeof *uuid);
  reinterpret_cast<char *>(uuid)[0] = static_cast<char>(device);
  return 0;
}
