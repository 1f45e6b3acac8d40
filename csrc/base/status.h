// What a native call says when it cannot do its work. The core throws nothing; bind/ turns a Status into an exception.
#pragma once

#include <string>
#include <utility>

namespace shoal {

enum class Code { ok, input, capacity, memory };

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

}  // namespace shoal
