#include "shardfield/checkpoint/format.h"

#include <algorithm>
#include <map>
#include <set>

#include <c10/util/ArrayRef.h>

#include "shardfield/base/error.h"

namespace shardfield::checkpoint {

namespace {

const std::map<std::string, at::ScalarType>& dtypes() {
  static const std::map<std::string, at::ScalarType> table = {
      {"BOOL", at::kBool},
      {"U8", at::kByte},
      {"I8", at::kChar},
      {"I16", at::kShort},
      {"U16", at::kUInt16},
      {"I32", at::kInt},
      {"U32", at::kUInt32},
      {"I64", at::kLong},
      {"U64", at::kUInt64},
      {"F16", at::kHalf},
      {"BF16", at::kBFloat16},
      {"F32", at::kFloat},
      {"F64", at::kDouble},
      {"C64", at::kComplexFloat},
      {"C128", at::kComplexDouble},
      {"F8_E4M3", at::kFloat8_e4m3fn},
      {"F8_E5M2", at::kFloat8_e5m2},
  };
  return table;
}

}  // namespace

at::ScalarType dtype_of(const std::string& name) {
  const auto it = dtypes().find(name);
  SHARDFIELD_CHECK(it != dtypes().end(), kOp, "unknown dtype '", name, "' in the file");
  return it->second;
}

std::string dtype_name(at::ScalarType dtype) {
  for (const auto& [name, type] : dtypes())
    if (type == dtype) return name;
  SHARDFIELD_CHECK(false, kOp, dtype, " has no place in safetensors files; convert it first");
}

int64_t elements(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t n : shape)
    if (n < 0 || __builtin_mul_overflow(count, n, &count)) return -1;
  return count;
}

std::optional<Box> overlap(const Box& a, const Box& b) {
  Box common;
  for (size_t d = 0; d < a.offset.size(); ++d) {
    const int64_t start = std::max(a.offset[d], b.offset[d]);
    const int64_t stop = std::min(a.offset[d] + a.shape[d], b.offset[d] + b.shape[d]);
    if (stop <= start) return std::nullopt;
    common.offset.push_back(start);
    common.shape.push_back(stop - start);
  }
  return common;
}

namespace {

/// The dim along which the boxes start at most different places.
size_t most_cut_dim(const std::vector<Box>& boxes) {
  size_t best = 0, most = 0;
  for (size_t d = 0; d < boxes.front().offset.size(); ++d) {
    std::set<int64_t> starts;
    for (const Box& box : boxes) starts.insert(box.offset[d]);
    if (starts.size() > most) best = d;
    most = std::max(most, starts.size());
  }
  return best;
}

/// True when no two boxes share an element. Each box meets only those that reach it along one dim:
/// in a grid of pieces a row of them, not all.
bool are_apart(const std::vector<Box>& boxes) {
  if (boxes.empty() || boxes.front().offset.empty()) return boxes.size() < 2;
  const size_t d = most_cut_dim(boxes);
  std::vector<const Box*> sorted, reaching;
  for (const Box& box : boxes) sorted.push_back(&box);
  std::sort(sorted.begin(), sorted.end(),
            [&](const Box* a, const Box* b) { return a->offset[d] < b->offset[d]; });
  for (const Box* box : sorted) {
    std::erase_if(reaching,
                  [&](const Box* b) { return b->offset[d] + b->shape[d] <= box->offset[d]; });
    for (const Box* other : reaching)
      if (overlap(*box, *other)) return false;
    reaching.push_back(box);
  }
  return true;
}

}  // namespace

bool lies_inside(const Box& box, const std::vector<int64_t>& shape) {
  bool inside = box.offset.size() == shape.size() && box.shape.size() == shape.size();
  for (size_t d = 0; inside && d < shape.size(); ++d)
    inside = box.offset[d] >= 0 && box.shape[d] >= 0 && box.offset[d] <= shape[d] &&
             box.shape[d] <= shape[d] - box.offset[d];
  return inside;
}

void check_cover(const std::string& name, const std::vector<int64_t>& shape,
                 const std::vector<Box>& boxes) {
  int64_t total = 0;
  bool good = elements(shape) >= 0;
  for (size_t i = 0; good && i < boxes.size(); ++i) {
    good = lies_inside(boxes[i], shape) &&
           !__builtin_add_overflow(total, elements(boxes[i].shape), &total);
  }
  SHARDFIELD_CHECK(good && total == elements(shape) && are_apart(boxes), kOp, "the pieces of '",
                   name, "' (", c10::IntArrayRef(shape), ") do not hold each element once");
}

bool is_piece_file(const std::string& name) {
  const std::string tail = ".safetensors";
  if (name.size() < 16 + 2 + 5 + tail.size() || !name.ends_with(tail)) return false;
  const auto hex = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  const auto end = name.end() - static_cast<std::ptrdiff_t>(tail.size());
  return std::all_of(name.begin(), name.begin() + 16, hex) && name.substr(16, 2) == "-r" &&
         std::all_of(name.begin() + 18, end, digit);
}

}  // namespace shardfield::checkpoint
