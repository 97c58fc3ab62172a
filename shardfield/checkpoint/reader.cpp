#include "shardfield/checkpoint/reader.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <nlohmann/json.hpp>

#include "shardfield/base/error.h"
#include "shardfield/checkpoint/format.h"
#include "shardfield/checkpoint/sha256.h"

namespace shardfield::checkpoint {

namespace {

using Json = nlohmann::json;
using Sizes = std::vector<int64_t>;

constexpr size_t kMaxHeaderBytes = 100000000;  // what the safetensors library accepts
constexpr int kMaxNesting = 1000;              // what Python's JSON reads
constexpr size_t kMaxDims = 64;                // what ATen's loops take

/// What a file says that no checkpoint says; parse() adds the path.
struct Malformed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// JSON text as a value. Deep nesting is refused: reading it again would run out of stack.
Json parsed(const char* begin, const char* end) {
  return Json::parse(begin, end, [](int depth, Json::parse_event_t, const Json&) {
    if (depth > kMaxNesting) throw Malformed("nested too deep");
    return true;
  });
}

/// A whole number. The library's own conversion takes fractions and wraps what is too large.
int64_t integer_of(const Json& value) {
  constexpr auto kMost = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<uint64_t>() > kMost))
    throw Malformed("expected a whole number, got " +
                    (value.is_number() ? value.dump() : std::string(value.type_name())));
  return value.get<int64_t>();
}

Sizes sizes_of(const Json& list) {
  if (!list.is_array() || list.size() > kMaxDims)
    throw Malformed("expected a list of at most " + std::to_string(kMaxDims) + " sizes");
  Sizes sizes;
  for (const Json& size : list) sizes.push_back(integer_of(size));
  return sizes;
}

void check_object(const Json& value) {
  if (!value.is_object())
    throw Malformed("expected names with values, got " + std::string(value.type_name()));
}

/// Bytes of a box of this dtype that lie inside a file; throws when they do not.
int64_t checked_bytes(const std::string& name, at::ScalarType dtype, const Sizes& shape,
                      int64_t begin, const MappedFile& file) {
  const int64_t count = elements(shape);
  int64_t bytes = 0, end = 0;
  const bool fits =
      count >= 0 && begin >= 0 &&
      !__builtin_mul_overflow(count, static_cast<int64_t>(c10::elementSize(dtype)), &bytes) &&
      !__builtin_add_overflow(begin, bytes, &end) && end <= static_cast<int64_t>(file.size());
  SHARDFIELD_CHECK(fits, kOp, file.path(), ": cut off inside '", name,
                   "', or offsets that do not fit it: ", "expected ", bytes, " bytes from ", begin,
                   ", got a file of ", file.size());
  return bytes;
}

/// The part of a tensor that holds `box` where `part` lies.
at::Tensor slice(at::Tensor t, const Box& box, const Box& part) {
  for (size_t d = 0; d < part.offset.size(); ++d)
    t = t.narrow(static_cast<int64_t>(d), part.offset[d] - box.offset[d], part.shape[d]);
  return t;
}

StoredTensor tensor_from(const std::string& name, const Json& entry) {
  StoredTensor t;
  t.dtype = dtype_of(entry.at("dtype").get<std::string>());
  t.shape = sizes_of(entry.at("shape"));
  for (const Json& p : entry.at("pieces")) {
    t.pieces.push_back({p.at("file").get<std::string>(),
                        integer_of(p.at("begin")),
                        {sizes_of(p.at("offset")), sizes_of(p.at("shape"))},
                        p.at("sha256").get<std::vector<std::string>>()});
    SHARDFIELD_CHECK(is_piece_file(t.pieces.back().file), kOp, "'", name, "' names the file '",
                     t.pieces.back().file, "', which is none of a checkpoint");
  }
  std::vector<Box> boxes;
  for (const StoredPiece& p : t.pieces) boxes.push_back(p.box);
  check_cover(name, t.shape, boxes);
  return t;
}

/// The text of "index" in {"sha256": "...", "index": ...}, once its hash fits.
std::string checked_index(const MappedFile& file) {
  const std::string text(file.data() ? file.data() : "", file.size());
  const std::string before = R"({"sha256": ")", between = R"(", "index": )";
  const size_t start = before.size() + 64 + between.size();
  const bool shaped = text.size() > start + 1 && text.starts_with(before) &&
                      text.compare(before.size() + 64, between.size(), between) == 0;
  std::string body = shaped ? text.substr(start, text.size() - start - 1) : "";
  SHARDFIELD_CHECK(shaped && text.compare(before.size(), 64, sha256(body.data(), body.size())) == 0,
                   kOp, file.path(), " is damaged: its hash differs");
  return body;
}

/// Runs a parser and turns the JSON library's errors into ours, with the path.
template <typename F>
void parse(const std::string& path, F&& work) {
  try {
    work();
  } catch (const Json::exception& error) {
    SHARDFIELD_CHECK(false, kOp, path, " is malformed: ", error.what());
  } catch (const Malformed& error) {
    SHARDFIELD_CHECK(false, kOp, path, " is malformed: ", error.what());
  }
}

/// @throws c10::Error unless a box lies inside a tensor of this shape.
void check_inside(const std::string& name, const Box& box, const Sizes& shape) {
  SHARDFIELD_CHECK(lies_inside(box, shape), kOp, "expected a box inside of '", name, "' (",
                   c10::IntArrayRef(shape), "), got offset ", c10::IntArrayRef(box.offset),
                   " and shape ", c10::IntArrayRef(box.shape));
}

}  // namespace

Reader::Reader(const std::string& path, bool verify) : folder_(path), verify_(verify) {
  if (path.ends_with(".safetensors")) {
    open_file(path);
  } else {
    open_folder(path);
  }
}

void Reader::open_folder(const std::string& folder) {
  const std::string path = folder + "/" + kIndex;
  const std::string text = checked_index(MappedFile(path));
  parse(path, [&] {
    const Json body = parsed(text.data(), text.data() + text.size());
    check_object(body);
    const auto format = body.value("format", "");
    const int64_t version = body.contains("version") ? integer_of(body.at("version")) : 0;
    SHARDFIELD_CHECK(format == kFormat && version == kVersion, kOp, path, " is '", format,
                     "' version ", version, "; this library reads shardfield-sharded ", kVersion);
    save_ = body.at("save").get<std::string>();
    structure_ = body.at("structure").dump();
    check_object(body.at("tensors"));
    for (const auto& [name, entry] : body.at("tensors").items())
      tensors_.emplace(name, tensor_from(name, entry));
  });
}

void Reader::open_file(const std::string& path) {
  const auto slash = path.rfind('/');
  const std::string name = slash == std::string::npos ? path : path.substr(slash + 1);
  folder_ = slash == std::string::npos ? "." : path.substr(0, slash);
  const MappedFile& mapped = file(name);
  uint64_t length = 0;
  if (mapped.size() >= 8) std::memcpy(&length, mapped.data(), 8);
  SHARDFIELD_CHECK(mapped.size() >= 8 && length <= kMaxHeaderBytes && length <= mapped.size() - 8,
                   kOp, path, " is no safetensors file, or cut off in its header");
  parse(path, [&] {
    const Json header = parsed(mapped.data() + 8, mapped.data() + 8 + length);
    check_object(header);
    for (const auto& [key, entry] : header.items()) {
      if (key == "__metadata__") {
        metadata_ = entry.get<std::map<std::string, std::string>>();
        continue;
      }
      StoredTensor t;
      t.dtype = dtype_of(entry.at("dtype").get<std::string>());
      t.shape = sizes_of(entry.at("shape"));
      const Sizes offsets = sizes_of(entry.at("data_offsets"));
      const auto first = static_cast<int64_t>(8 + length);
      const bool ordered = offsets.size() == 2 && offsets[0] >= 0 && offsets[0] <= offsets[1] &&
                           offsets[1] <= static_cast<int64_t>(mapped.size()) - first;
      const int64_t begin = first + (ordered ? offsets[0] : 0);
      const int64_t bytes = checked_bytes(key, t.dtype, t.shape, begin, mapped);
      SHARDFIELD_CHECK(ordered && offsets[1] - offsets[0] == bytes, kOp, path, ": '", key,
                       "' has offsets that do not fit its shape");
      t.pieces.push_back({name, begin, {Sizes(t.shape.size(), 0), t.shape}, {}});
      tensors_.emplace(key, std::move(t));
    }
    const auto pairs = metadata_.find(kPairs);
    if (pairs == metadata_.end()) return;
    const std::string& names = pairs->second;
    for (const Json& key : parsed(names.data(), names.data() + names.size())) {
      const auto found = tensors_.find(key.get<std::string>());
      SHARDFIELD_CHECK(found != tensors_.end(), kOp, path, ": no tensor ", key.dump());
      StoredTensor& t = found->second;
      SHARDFIELD_CHECK(t.dtype == at::kDouble && !t.shape.empty() && t.shape.back() == 2, kOp, path,
                       ": ", key.dump(), " is said to be complex and is not");
      t.dtype = at::kComplexDouble;
      t.shape.pop_back();
      t.pieces[0].box = {Sizes(t.shape.size(), 0), t.shape};
    }
  });
}

const MappedFile& Reader::file(const std::string& name) {
  auto& mapped = files_[name];
  if (!mapped) mapped = std::make_unique<MappedFile>(folder_ + "/" + name);
  return *mapped;
}

const StoredTensor& Reader::tensor(const std::string& name) const {
  const auto it = tensors_.find(name);
  SHARDFIELD_CHECK(it != tensors_.end(), kOp, "no tensor '", name, "' in ", folder_);
  return it->second;
}

int64_t Reader::integer(const std::string& name) const {
  int64_t found = 0;
  parse(folder_, [&] {
    const Json state = parsed(structure_.data(), structure_.data() + structure_.size());
    for (const Json& entry : state.at("dict")) {
      if (entry.at(0).get<std::string>() != name) continue;
      found = integer_of(entry.at(1).at("value"));
      return;
    }
    SHARDFIELD_CHECK(false, kOp, "no value '", name, "' in ", folder_);
  });
  return found;
}

void Reader::check_blocks(const MappedFile& file, const StoredPiece& piece, int64_t itemsize,
                          const Box& part) {
  if (!verify_ || piece.sha256.empty()) return;
  int64_t first = 0, last = 0, stride = itemsize;
  for (size_t d = part.shape.size(); d-- > 0;) {
    const int64_t start = part.offset[d] - piece.box.offset[d];
    first += start * stride;
    last += (start + part.shape[d] - 1) * stride;
    stride *= piece.box.shape[d];
  }
  for (int64_t block = first / kBlockBytes; block <= last / kBlockBytes; ++block) {
    const int64_t begin = piece.begin + block * kBlockBytes;
    if (good_blocks_.contains({piece.file, begin})) continue;
    const int64_t size = std::min(kBlockBytes, stride - block * kBlockBytes);
    const bool good = block < static_cast<int64_t>(piece.sha256.size()) &&
                      sha256(file.data() + begin, static_cast<size_t>(size)) == piece.sha256[block];
    SHARDFIELD_CHECK(good, kOp, file.path(), ": bytes ", begin, " to ", begin + size,
                     " are not what was written; the file is damaged");
    good_blocks_.emplace(piece.file, begin);
  }
}

void Reader::copy_part(const StoredPiece& piece, at::ScalarType dtype, const Box& wanted,
                       const Box& part, const at::Tensor& out) {
  const MappedFile& mapped = file(piece.file);
  const auto itemsize = static_cast<int64_t>(c10::elementSize(dtype));
  check_blocks(mapped, piece, itemsize, part);
  // The map is read only; nothing below writes through this tensor.
  char* data = const_cast<char*>(mapped.data()) + piece.begin;
  at::Tensor aligned;
  // Complex doubles are moved 16 bytes at a time: a file aligns to 8.
  if (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(itemsize)) {
    aligned = at::empty({elements(piece.box.shape) * itemsize}, at::kByte);
    std::memcpy(aligned.mutable_data_ptr(), data, aligned.nbytes());
    data = static_cast<char*>(aligned.mutable_data_ptr());
  }
  const at::Tensor whole = at::from_blob(data, piece.box.shape, at::dtype(dtype));
  slice(out, wanted, part).copy_(slice(whole, piece.box, part));
}

at::Tensor Reader::read(const std::string& name, const std::optional<Box>& box) {
  const c10::NoGradGuard no_grad;
  const StoredTensor& t = tensor(name);
  const Box wanted = box.value_or(Box{Sizes(t.shape.size(), 0), t.shape});
  check_inside(name, wanted, t.shape);
  // All sizes before anything is allocated: a file may speak of more than it holds.
  for (const StoredPiece& piece : t.pieces)
    if (overlap(wanted, piece.box))
      checked_bytes(name, t.dtype, piece.box.shape, piece.begin, file(piece.file));
  const bool is_bool = t.dtype == at::kBool;
  const at::ScalarType dtype = is_bool ? at::kByte : t.dtype;
  at::Tensor out = at::empty(wanted.shape, dtype);
  for (const StoredPiece& piece : t.pieces)
    if (const auto part = overlap(wanted, piece.box)) copy_part(piece, dtype, wanted, *part, out);
  bytes_read_ += static_cast<int64_t>(out.nbytes());
  if (!is_bool) return out;
  const auto* bytes = out.const_data_ptr<uint8_t>();
  SHARDFIELD_CHECK(std::all_of(bytes, bytes + out.numel(), [](uint8_t b) { return b <= 1; }), kOp,
                   "'", name, "' in ", folder_, " is said to be bool and holds other bytes");
  return out.view(at::kBool);
}

}  // namespace shardfield::checkpoint
