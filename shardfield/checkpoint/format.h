#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

/// What reader and writer share: names, boxes, the index's frame.
namespace shardfield::checkpoint {

inline constexpr const char* kOp = "checkpoint";
inline constexpr const char* kIndex = "shardfield.index.json";
inline constexpr const char* kFormat = "shardfield-sharded";
inline constexpr int kVersion = 1;
/// Metadata of files: names of 128-bit complex tensors, which safetensors holds as pairs.
inline constexpr const char* kPairs = "shardfield.pairs";
/// Bytes that one hash covers.
inline constexpr int64_t kBlockBytes = int64_t{4} << 20;

/// A block of a tensor. Offset (2, 0) and shape (3, 4): rows 2 to 4, columns 0 to 3.
struct Box {
  std::vector<int64_t> offset;
  std::vector<int64_t> shape;

  bool operator==(const Box&) const = default;
};

/// The dtype of a name in files ("F32") and back. @throws c10::Error when there is none.
at::ScalarType dtype_of(const std::string& name);
std::string dtype_name(at::ScalarType dtype);

/// Number of elements, or -1 when it is negative or does not fit.
int64_t elements(const std::vector<int64_t>& shape);

/// The common part of two boxes.
std::optional<Box> overlap(const Box& a, const Box& b);

/// True when a box lies inside a tensor of this shape. Safe for any numbers.
bool lies_inside(const Box& box, const std::vector<int64_t>& shape);

/// @throws c10::Error unless the boxes hold every element of the tensor exactly once.
void check_cover(const std::string& name, const std::vector<int64_t>& shape,
                 const std::vector<Box>& boxes);

/// 16 hex digits, "-r", digits, ".safetensors": a name of a piece's file, never a path.
bool is_piece_file(const std::string& name);

}  // namespace shardfield::checkpoint
