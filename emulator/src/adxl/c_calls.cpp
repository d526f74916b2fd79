// C functions for the Python package hixl (python/site-packages). Each function makes one call of
// AdxlEngine.
#include "adxl/adxl_engine.h"

using adxl::AdxlEngine;

static AdxlEngine *engine_at(void *engine) { return static_cast<AdxlEngine *>(engine); }

EMU_API void *emulator_hixl_new() { return new AdxlEngine; }
EMU_API void emulator_hixl_delete(void *engine) { delete engine_at(engine); }

// `options` contains the options one after the other: for each option, its name and then its value.
EMU_API uint32_t emulator_hixl_initialize(void *engine, const char *name, const char **options,
                                          size_t count) {
  std::map<adxl::AscendString, adxl::AscendString> found;
  for (size_t i = 0; i < count; i++)
    found[options[2 * i]] = options[2 * i + 1];
  return engine_at(engine)->Initialize(name, found);
}

EMU_API void emulator_hixl_finalize(void *engine) { engine_at(engine)->Finalize(); }

EMU_API uint32_t emulator_hixl_register(void *engine, uintptr_t address, size_t bytes, int type,
                                        uintptr_t *handle) {
  adxl::MemHandle found = nullptr;
  auto status = engine_at(engine)->RegisterMem({address, bytes}, adxl::MemType(type), found);
  *handle = reinterpret_cast<uintptr_t>(found);
  return status;
}

EMU_API uint32_t emulator_hixl_deregister(void *engine, uintptr_t handle) {
  return engine_at(engine)->DeregisterMem(reinterpret_cast<adxl::MemHandle>(handle));
}

EMU_API uint32_t emulator_hixl_connect(void *engine, const char *remote, int32_t timeout_ms) {
  return engine_at(engine)->Connect(remote, timeout_ms);
}

EMU_API uint32_t emulator_hixl_disconnect(void *engine, const char *remote, int32_t timeout_ms) {
  return engine_at(engine)->Disconnect(remote, timeout_ms);
}

EMU_API uint32_t emulator_hixl_transfer(void *engine, const char *remote, int operation,
                                        const adxl::TransferOpDesc *spans, size_t count,
                                        int32_t timeout_ms) {
  return engine_at(engine)->TransferSync(remote, adxl::TransferOp(operation),
                                         {spans, spans + count}, timeout_ms);
}

EMU_API uint32_t emulator_hixl_start(void *engine, const char *remote, int operation,
                                     const adxl::TransferOpDesc *spans, size_t count,
                                     uintptr_t *request) {
  adxl::TransferReq found = nullptr;
  auto status = engine_at(engine)->TransferAsync(remote, adxl::TransferOp(operation),
                                                 {spans, spans + count}, {}, found);
  *request = reinterpret_cast<uintptr_t>(found);
  return status;
}

EMU_API uint32_t emulator_hixl_status(void *engine, uintptr_t request, int *found) {
  auto status = adxl::TransferStatus::FAILED;
  auto result = engine_at(engine)->GetTransferStatus(reinterpret_cast<void *>(request), status);
  *found = int(status);
  return result;
}

EMU_API uint32_t emulator_hixl_capability(int32_t feature, int32_t *value) {
  return AdxlEngine::GetCapability(adxl::FeatureType(feature), *value);
}
