// A folder for a test's files, gone at its end.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "base/check.h"

namespace shoal {

class TestFolder {
 public:
  TestFolder() : path_(std::filesystem::temp_directory_path() / "shoal-test-XXXXXX") {
    CHECK(::mkdtemp(path_.data()) != nullptr);
  }
  ~TestFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline const std::string& folder() {
  static const TestFolder made;
  return made.path();
}

}  // namespace shoal
