// A program that makes calls of adxl::AdxlEngine. Each line of its standard input is one call. It
// answers each call with one line: the status, the values, a tab, and the text of the error.
#include "adxl/adxl_engine.h"

#include <acl/acl.h>

#include <iostream>
#include <sstream>
#include <string>

using namespace adxl;

static std::string runs(const std::vector<unsigned char> &bytes) {
  std::ostringstream text;
  for (size_t i = 0, j = 0; i < bytes.size(); i = j) {
    for (j = i; j < bytes.size() && bytes[j] == bytes[i];)
      j++;
    text << " " << int(bytes[i]) << "*" << j - i;
  }
  return text.str();
}

static std::vector<TransferOpDesc> spans(std::istream &words) {
  std::vector<TransferOpDesc> all;
  for (TransferOpDesc one; words >> one.local_addr >> one.remote_addr >> one.len;)
    all.push_back(one);
  return all;
}

int main() {
  AdxlEngine engine;
  for (std::string line, call; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::ostringstream values;
    words >> call;
    std::string name;
    uint64_t address = 0, bytes = 0;
    int value = 0;
    Status status = 0;
    if (call == "device") {
      words >> value;
      status = aclrtSetDevice(value);
    } else if (call == "init") {
      words >> name;
      std::map<AscendString, AscendString> options;
      for (std::string option; words >> option;) {
        size_t equals = option.find('=');
        options[option.substr(0, equals).c_str()] = option.substr(equals + 1).c_str();
      }
      status = engine.Initialize(name.c_str(), options);
    } else if (call == "malloc" || call == "malloc_host") {
      words >> bytes;
      void *p = nullptr;
      status = call == "malloc" ? aclrtMalloc(&p, bytes, ACL_MEM_MALLOC_HUGE_ONLY)
                                : aclrtMallocHost(&p, bytes);
      values << " " << reinterpret_cast<uintptr_t>(p);
    } else if (call == "free") {
      words >> address;
      status = aclrtFree(reinterpret_cast<void *>(address));
    } else if (call == "fill") {
      words >> address >> bytes >> value;
      status = aclrtMemset(reinterpret_cast<void *>(address), bytes, value, bytes);
    } else if (call == "show") {
      words >> address >> bytes;
      std::vector<unsigned char> found(bytes);
      status = aclrtMemcpy(found.data(), bytes, reinterpret_cast<void *>(address), bytes,
                           ACL_MEMCPY_DEFAULT);
      values << runs(found);
    } else if (call == "register") {
      words >> address >> bytes >> value;
      MemHandle handle = nullptr;
      status = engine.RegisterMem({address, bytes}, MemType(value), handle);
      values << " " << reinterpret_cast<uintptr_t>(handle);
    } else if (call == "deregister") {
      words >> address;
      status = engine.DeregisterMem(reinterpret_cast<MemHandle>(address));
    } else if (call == "connect") {
      status = words >> name >> value ? engine.Connect(name.c_str(), value)
                                      : engine.Connect(name.c_str());
    } else if (call == "disconnect") {
      status = words >> name >> value ? engine.Disconnect(name.c_str(), value)
                                      : engine.Disconnect(name.c_str());
    } else if (call == "transfer") {
      int timeout_ms = 0;
      words >> name >> value >> timeout_ms;
      status = engine.TransferSync(name.c_str(), TransferOp(value), spans(words), timeout_ms);
    } else if (call == "start") {
      words >> name >> value;
      TransferReq request = nullptr;
      status = engine.TransferAsync(name.c_str(), TransferOp(value), spans(words), {}, request);
      values << " " << reinterpret_cast<uintptr_t>(request);
    } else if (call == "status") {
      words >> address;
      TransferStatus found{};
      status = engine.GetTransferStatus(reinterpret_cast<TransferReq>(address), found);
      values << " " << int(found);
    } else if (call == "capability") {
      words >> value;
      int32_t supported = -1;
      status = AdxlEngine::GetCapability(FeatureType(value), supported);
      values << " " << supported;
    } else if (call == "notify") {
      words >> name;
      status = engine.SendNotify(name.c_str(), {});
    } else if (call == "streams") {
      uint32_t available = 0;
      status = aclrtGetStreamAvailableNum(&available);
      values << " " << available;
    } else if (call == "finalize") {
      engine.Finalize();
    } else {
      return 1;
    }
    const char *text = aclGetRecentErrMsg();
    std::cout << status << values.str() << "\t" << (status && text ? text : "") << std::endl;
  }
}
