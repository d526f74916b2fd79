// libmetadef.so: the string type that the interfaces of CANN's libraries use.
#include <functional>
#include <string>

#pragma GCC visibility push(default)
#include <graph/ascend_string.h>
#pragma GCC visibility pop

namespace ge {

static const std::string &text_of(const std::shared_ptr<std::string> &name) {
  static const std::string empty;
  return name ? *name : empty;
}

AscendString::AscendString(const char *const name)
    : name_(name ? std::make_shared<std::string>(name) : nullptr) {}
AscendString::AscendString(const char *const name, size_t length)
    : name_(name ? std::make_shared<std::string>(name, length) : nullptr) {}

const char *AscendString::GetString() const { return text_of(name_).c_str(); }
size_t AscendString::GetLength() const { return text_of(name_).size(); }
size_t AscendString::Find(const AscendString &part) const {
  return name_ && part.name_ ? name_->find(*part.name_) : std::string::npos;
}
size_t AscendString::Hash() const { return std::hash<std::string>()(text_of(name_)); }

// A string without a value is less than every string with a value.
static int compare(const std::shared_ptr<std::string> &a, const std::shared_ptr<std::string> &b) {
  return a && b ? a->compare(*b) : int(bool(a)) - int(bool(b));
}
bool AscendString::operator<(const AscendString &d) const { return compare(name_, d.name_) < 0; }
bool AscendString::operator>(const AscendString &d) const { return compare(name_, d.name_) > 0; }
bool AscendString::operator<=(const AscendString &d) const { return compare(name_, d.name_) <= 0; }
bool AscendString::operator>=(const AscendString &d) const { return compare(name_, d.name_) >= 0; }
bool AscendString::operator==(const AscendString &d) const { return compare(name_, d.name_) == 0; }
bool AscendString::operator!=(const AscendString &d) const { return compare(name_, d.name_) != 0; }
bool AscendString::operator==(const char *const d) const { return *this == AscendString(d); }
bool AscendString::operator!=(const char *const d) const { return *this != AscendString(d); }

}  // namespace ge
