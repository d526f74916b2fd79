#include "hccl/interfaces.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>
#include <stdexcept>

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

namespace emu::hccl {

static std::string variable(const char *name) {
  const char *value = getenv(name);
  return value ? value : "";
}

[[noreturn]] static void refuse(const char *name, const std::string &why) {
  throw std::runtime_error(std::string(name) + "=" + variable(name) + ": " + why);
}

static std::vector<std::string> items_of(const std::string &list) {
  std::vector<std::string> items;
  std::istringstream text(list);
  for (std::string item; std::getline(text, item, ',');)
    items.push_back(item);
  return items;
}

// The network interfaces that are up: for each name, the first address of the family.
static std::map<std::string, std::string> interfaces(int family) {
  std::map<std::string, std::string> found;
  ifaddrs *all = nullptr;
  if (getifaddrs(&all))
    throw std::runtime_error(std::string("HCCL: network interfaces: ") + strerror(errno));
  for (ifaddrs *i = all; i; i = i->ifa_next) {
    if (!i->ifa_addr || i->ifa_addr->sa_family != family || !(i->ifa_flags & IFF_UP))
      continue;
    char text[INET6_ADDRSTRLEN];
    auto *six = reinterpret_cast<sockaddr_in6 *>(i->ifa_addr);
    if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&six->sin6_addr))
      continue;
    const void *ip = family == AF_INET6
                         ? static_cast<void *>(&six->sin6_addr)
                         : &reinterpret_cast<sockaddr_in *>(i->ifa_addr)->sin_addr;
    if (inet_ntop(family, ip, text, sizeof text))
      found.emplace(i->ifa_name, text);
  }
  freeifaddrs(all);
  return found;
}

// HCCL_SOCKET_IFNAME: "eth,enp" are prefixes, "=eth0" is exactly this name, and "^..." excludes
// interfaces.
static bool admits(std::string rule, const std::string &interface) {
  auto take = [&](char mark) {
    bool is_there = !rule.empty() && rule[0] == mark;
    rule.erase(0, is_there);
    return is_there;
  };
  bool excludes = take('^'), exact = take('=');
  auto items = items_of(rule);
  bool matches = std::any_of(items.begin(), items.end(), [&](const std::string &item) {
    return exact ? interface == item : interface.rfind(item, 0) == 0;
  });
  return matches != excludes;
}

static int last(const std::string &interface) {
  return interface == "lo" ? 2 : interface.rfind("docker", 0) == 0 ? 1 : 0;
}

std::string host_ip() {
  if (std::string ip = variable("HCCL_IF_IP"); !ip.empty()) {
    unsigned char bytes[16];
    if (inet_pton(AF_INET, ip.c_str(), bytes) != 1 && inet_pton(AF_INET6, ip.c_str(), bytes) != 1)
      refuse("HCCL_IF_IP", "want one IPv4 or IPv6 address of this host");
    if (ip == "0.0.0.0" || ip == "::")
      refuse("HCCL_IF_IP", "peers cannot reach a wildcard: want one address of this host");
    return ip;
  }
  auto known = interfaces(variable("HCCL_SOCKET_FAMILY") == "AF_INET6" ? AF_INET6 : AF_INET);
  std::vector<std::string> order;
  for (auto &[name, ip] : known)
    order.push_back(name);
  std::stable_sort(order.begin(), order.end(),
                   [](auto &a, auto &b) { return last(a) < last(b); });
  std::string rule = variable("HCCL_SOCKET_IFNAME"), all;
  for (const std::string &name : order) {
    if (rule.empty() || admits(rule, name))
      return known[name];
    all += (all.empty() ? "" : ", ") + name;
  }
  if (rule.empty())
    throw std::runtime_error("HCCL: no network interface has an address: set HCCL_IF_IP");
  refuse("HCCL_SOCKET_IFNAME", "admits none of this host's network interfaces: " + all);
}

static uint16_t port_of(const char *name, const std::string &text) {
  unsigned port = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  if (error != std::errc() || end != text.data() + text.size() || port < 1 || port > 65535)
    refuse(name, "want ports from 1 to 65535, such as 60000-60050 or 56000,56005, or auto");
  return static_cast<uint16_t>(port);
}

std::vector<uint16_t> host_ports() {
  std::vector<uint16_t> ports;
  auto add = [&](unsigned first, unsigned last) {
    for (unsigned port = first; port <= last; port++)
      ports.push_back(static_cast<uint16_t>(port));
  };
  constexpr char kRange[] = "HCCL_HOST_SOCKET_PORT_RANGE", kBase[] = "HCCL_IF_BASE_PORT";
  if (std::string range = variable(kRange); !range.empty() && range != "auto") {
    for (const std::string &item : items_of(range)) {
      size_t dash = item.find('-');
      uint16_t first = port_of(kRange, item.substr(0, dash));
      uint16_t last = dash == std::string::npos ? first : port_of(kRange, item.substr(dash + 1));
      if (last < first)
        refuse(kRange, "the range " + item + " is empty");
      add(first, last);
    }
  } else if (std::string base = variable(kBase); range.empty() && !base.empty()) {
    unsigned first = port_of(kBase, base);
    add(first, std::min(first + 15, 65535u));
  }
  if (ports.empty())
    ports.push_back(0);
  return ports;
}

}  // namespace emu::hccl
