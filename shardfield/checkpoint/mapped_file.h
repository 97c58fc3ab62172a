#pragma once

#include <cstddef>
#include <string>

namespace shardfield::checkpoint {

/// A file mapped into memory, read only. Local.
class MappedFile {
 public:
  /// @throws c10::Error when the file cannot be read.
  explicit MappedFile(std::string path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  const char* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::string path_;
  const char* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace shardfield::checkpoint
