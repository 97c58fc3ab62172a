#include "shardfield/checkpoint/mapped_file.h"

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shardfield/base/error.h"

namespace shardfield::checkpoint {

MappedFile::MappedFile(std::string path) : path_(std::move(path)) {
  // Opening a pipe without O_NONBLOCK would wait for somebody who writes.
  const int file = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  SHARDFIELD_CHECK(file >= 0, "checkpoint", path_, " cannot be read: ", std::strerror(errno));
  struct stat status{};
  const bool known = ::fstat(file, &status) == 0 && S_ISREG(status.st_mode);
  if (known) size_ = static_cast<size_t>(status.st_size);
  void* memory = size_ > 0 ? ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0) : nullptr;
  const int error = errno;
  ::close(file);
  SHARDFIELD_CHECK(known, "checkpoint", path_, " cannot be read: it is no file");
  SHARDFIELD_CHECK(memory != MAP_FAILED, "checkpoint", path_,
                   " cannot be read: ", std::strerror(error));
  data_ = static_cast<const char*>(memory);
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<char*>(data_), size_);
}

}  // namespace shardfield::checkpoint
