#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include "fuzz/targets.h"
#include <unistd.h>

#include "shardfield/checkpoint/reader.h"
#include "shardfield/checkpoint/sha256.h"

namespace shardfield::fuzz {

namespace {

namespace fs = std::filesystem;

/// A folder of this process that goes when the process ends.
class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / ("shardfield-fuzz-" + std::to_string(::getpid()))) {
    fs::create_directories(path_);
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string write(const std::string& name, Bytes start, Bytes rest = {}, Bytes end = {}) const {
    const std::string path = path_ / name;
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    for (const Bytes part : {start, rest, end})
      file.write(reinterpret_cast<const char*>(part.data()),
                 static_cast<std::streamsize>(part.size()));
    return path;
  }
  std::string path() const { return path_; }

 private:
  fs::path path_;
};

const Folder& folder() {
  static const Folder one;
  return one;
}

Bytes bytes_of(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

void require(bool good) {
  if (!good) std::abort();
}

/// Reads every tensor whole and half, and what stands beside them.
void use(checkpoint::Reader& reader) {
  for (const auto& [name, stored] : reader.tensors()) {
    const at::Tensor whole = reader.read(name);
    require(whole.sizes() == stored.shape && whole.scalar_type() == stored.dtype);
    require(whole.is_contiguous());
    if (stored.shape.empty() || whole.numel() > 4096) continue;
    checkpoint::Box half = {std::vector<int64_t>(stored.shape.size(), 0), stored.shape};
    half.offset[0] = stored.shape[0] / 2;
    half.shape[0] -= half.offset[0];
    const at::Tensor part = reader.read(name, half);
    const at::Tensor same = whole.narrow(0, half.offset[0], half.shape[0]).contiguous();
    require(part.nbytes() == same.nbytes());
    require(part.numel() == 0 ||
            std::memcmp(part.const_data_ptr(), same.const_data_ptr(), part.nbytes()) == 0);
  }
}

/// 16 floats for the pieces of an index, at byte 64 of the file.
void write_piece() {
  std::string header = R"({"x":{"dtype":"F32","shape":[16],"data_offsets":[0,64]}})";
  header.resize(56, ' ');
  const uint64_t length = header.size();
  std::string content(reinterpret_cast<const char*>(&length), 8);
  content += header;
  for (uint8_t i = 0; i < 64; ++i) content += static_cast<char>(i % 2);
  folder().write("0123456789abcdef-r00000.safetensors", bytes_of(content));
}

}  // namespace

bool safetensors_file(Bytes bytes) {
  const std::string path = folder().write("any.safetensors", bytes);
  try {
    checkpoint::Reader reader(path);
    use(reader);
  } catch (const c10::Error&) {
    return false;
  }
  return true;
}

bool checkpoint_index(Bytes bytes) {
  static const bool once = (write_piece(), true);
  require(once);
  const std::string head =
      R"({"sha256": ")" + checkpoint::sha256(bytes.data(), bytes.size()) + R"(", "index": )";
  folder().write("shardfield.index.json", bytes_of(head), bytes, bytes_of("}"));
  try {
    checkpoint::Reader reader(folder().path(), /*verify=*/bytes.size() % 2 == 0);
    use(reader);
    (void)reader.integer("step");
  } catch (const c10::Error&) {
    return false;
  }
  return true;
}

}  // namespace shardfield::fuzz
