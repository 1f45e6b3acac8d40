// What a native call says when it cannot do its work. bind/ turns it into an
// exception. The core itself throws nothing but std::bad_alloc.
#pragma once

#include <string>
#include <utility>

namespace shoal {

enum class Code { ok, input, capacity, memory, device, storage };

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::ok; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::ok;
  std::string message_;
};

// Where there may be no memory for a message either: this one is short enough to need none.
inline Status out_of_memory() { return {Code::memory, "out of memory"}; }

}  // namespace shoal
