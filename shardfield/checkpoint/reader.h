#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardfield/checkpoint/format.h"
#include "shardfield/checkpoint/mapped_file.h"

namespace shardfield::checkpoint {

/// One piece in a file: its place in the tensor and in the file.
struct StoredPiece {
  std::string file;  ///< name inside the checkpoint's folder
  int64_t begin = 0;
  Box box;
  std::vector<std::string> sha256;  ///< of each block of kBlockBytes; may be empty
};

struct StoredTensor {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;
  std::vector<StoredPiece> pieces;
};

/// Reads boxes of tensors from a folder of save_sharded or from one safetensors file, through
/// memory maps. Whatever the files hold is checked against their sizes before it is used, and the
/// blocks that are read against their hashes. Local.
class Reader {
 public:
  /// @param path    folder with shardfield.index.json, or a .safetensors file
  /// @param verify  compare hashes
  /// @throws c10::Error for a checkpoint that is missing, malformed, cut off or of a later version.
  explicit Reader(const std::string& path, bool verify = true);

  const std::map<std::string, StoredTensor>& tensors() const { return tensors_; }
  /// @throws c10::Error for an unknown name.
  const StoredTensor& tensor(const std::string& name) const;
  /// The elements of a box; the whole tensor without one. On the CPU.
  at::Tensor read(const std::string& name, const std::optional<Box>& box = std::nullopt);
  /// Which save wrote the folder; empty for a file.
  const std::string& save() const { return save_; }
  /// The nested values as JSON text: tensors by name, everything else by value.
  const std::string& structure() const { return structure_; }
  /// Metadata of a safetensors file.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  /// An integer that stands in the top level of the state: value("step").
  int64_t integer(const std::string& name) const;
  int64_t bytes_read() const { return bytes_read_; }

 private:
  void open_folder(const std::string& folder);
  void open_file(const std::string& path);
  const MappedFile& file(const std::string& name);
  void check_blocks(const MappedFile& file, const StoredPiece& piece, int64_t itemsize,
                    const Box& part);
  /// Copies the common part of a piece and a wanted box into `out`, the wanted box.
  void copy_part(const StoredPiece& piece, at::ScalarType dtype, const Box& wanted, const Box& part,
                 const at::Tensor& out);

  std::string folder_;
  bool verify_;
  std::map<std::string, StoredTensor> tensors_;
  std::map<std::string, std::unique_ptr<MappedFile>> files_;
  std::set<std::pair<std::string, int64_t>> good_blocks_;
  std::string save_, structure_;
  std::map<std::string, std::string> metadata_;
  int64_t bytes_read_ = 0;
};

}  // namespace shardfield::checkpoint
