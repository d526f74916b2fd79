// The interface of CANN's libllm_datadist.so for one-sided transfers between devices (HIXL, whose
// older name is adxl): names, values and layouts as in include/adxl of gitcode.com/cann/hixl. The
// wheel of torch_npu does not contain these headers.
#pragma once

#include "emulator.h"

#include <graph/ascend_string.h>

#include <map>
#include <memory>
#include <vector>

struct aclrtMemFabricHandle;

namespace adxl {

using Status = uint32_t;
using AscendString = ge::AscendString;
using MemHandle = void *;
using TransferReq = void *;

constexpr Status SUCCESS = 0;
constexpr Status PARAM_INVALID = 103900;
constexpr Status TIMEOUT = 103901;
constexpr Status NOT_CONNECTED = 103902;
constexpr Status ALREADY_CONNECTED = 103903;
constexpr Status NOTIFY_FAILED = 103904;
constexpr Status UNSUPPORTED = 103905;
constexpr Status FAILED = 503900;
constexpr Status RESOURCE_EXHAUSTED = 203900;

enum MemType { MEM_DEVICE, MEM_HOST };
enum TransferOp { READ, WRITE };
enum class TransferStatus { WAITING, COMPLETED, TIMEOUT, FAILED };
enum FeatureType : int32_t { AUTO_CONNECT, CLIENT_SERVER_COMM };

struct MemDesc {
  uintptr_t addr;
  size_t len;
  uint8_t reserved[128] = {};
};
struct TransferOpDesc {
  uintptr_t local_addr;
  uintptr_t remote_addr;
  size_t len;
};
struct TransferArgs {
  uint8_t reserved[128] = {};
};
struct NotifyDesc {
  AscendString name;
  AscendString notify_msg;
};

class EMU_SHARED AdxlEngine {
public:
  AdxlEngine();
  ~AdxlEngine();
  Status Initialize(const AscendString &local_engine,
                    const std::map<AscendString, AscendString> &options);
  void Finalize();
  Status RegisterMem(const MemDesc &memory, MemType type, MemHandle &handle);
  Status DeregisterMem(MemHandle handle);
  Status Connect(const AscendString &remote_engine, int32_t timeout_ms = 1000);
  Status Disconnect(const AscendString &remote_engine, int32_t timeout_ms = 1000);
  Status TransferSync(const AscendString &remote_engine, TransferOp operation,
                      const std::vector<TransferOpDesc> &spans, int32_t timeout_ms = 1000);
  Status TransferAsync(const AscendString &remote_engine, TransferOp operation,
                       const std::vector<TransferOpDesc> &spans, const TransferArgs &arguments,
                       TransferReq &request);
  Status GetTransferStatus(const TransferReq &request, TransferStatus &status);
  Status SendNotify(const AscendString &remote_engine, const NotifyDesc &notify,
                    int32_t timeout_ms = 1000);
  Status GetNotifies(std::vector<NotifyDesc> &notifies);
  static Status MallocMem(MemType type, size_t bytes, void **out);
  static Status ExportToShareableHandle(void *address, aclrtMemFabricHandle &handle);
  static Status FreeMem(void *address);
  static Status GetCapability(FeatureType feature, int32_t &value);

private:
  // Programs allocate this object themselves, so it must have the size of CANN's object: one
  // pointer.
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace adxl
