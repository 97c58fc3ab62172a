#include "shardfield/graph/vtk/file_length.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <vector>

namespace shardfield::graph {

namespace {

/// A file read from its begin, with an error where it ends too early.
class Input {
 public:
  Input(const std::string& path, bool big_endian)
      : big_endian_(big_endian),
        size_(static_cast<int64_t>(std::filesystem::file_size(path))),
        file_(path, std::ios::binary) {}

  [[nodiscard]] int64_t size() const { return size_; }
  void set_big_endian(bool big) { big_endian_ = big; }

  [[noreturn]] void fail(const std::string& why) const {
    throw std::runtime_error("the file is torn, or not of its kind: " + why + " (it has " +
                             std::to_string(size_) + " bytes)");
  }

  void skip(int64_t bytes) {
    if (bytes < 0 || bytes > size_ - at_) fail("it ends within its data");
    at_ += bytes;
    if (bytes < kNear) {
      file_.ignore(bytes);
    } else {
      file_.seekg(at_);
    }
  }

  [[nodiscard]] int64_t number(int bytes) {
    std::array<char, 8> raw{};
    if (bytes > size_ - at_ || !file_.read(raw.data(), bytes)) fail("it ends within its data");
    at_ += bytes;
    if (big_endian_) std::reverse(raw.begin(), raw.begin() + bytes);
    uint64_t value = 0;
    for (int i = bytes - 1; i >= 0; --i) {
      value = value << 8U | static_cast<unsigned char>(raw[static_cast<size_t>(i)]);
    }
    return static_cast<int64_t>(value);
  }

  [[nodiscard]] std::string line() {
    std::string text;
    if (!std::getline(file_, text)) fail("it ends before its last line");
    at_ += static_cast<int64_t>(text.size()) + 1;
    if (!text.empty() && text.back() == '\r') text.pop_back();
    return text;
  }

 private:
  static constexpr int64_t kNear = 4096;  // read over, as a jump throws the stream's buffer away

  bool big_endian_;
  int64_t size_;
  int64_t at_ = 0;
  std::ifstream file_;
};

/// VTK gives way where a field that stands before the geometry is torn.
void check_legacy(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  for (std::string text; std::getline(file, text);) {
    std::string word = text.substr(0, text.find_first_of(" \t\r"));
    std::transform(word.begin(), word.end(), word.begin(),
                   [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
    if (word == "POINTS" || word == "DIMENSIONS") return;
  }
  Input(path, false).fail("it has no points");
}

/// 80 bytes of text, the number of triangles, 50 bytes of each.
void check_stl(const std::string& path) {
  constexpr int64_t kText = 80;
  constexpr int64_t kTriangle = 50;
  Input in(path, false);
  std::string head(static_cast<size_t>(std::min(in.size(), kText)), '\0');
  std::ifstream(path, std::ios::binary)
      .read(head.data(), static_cast<std::streamsize>(head.size()));
  const bool text = head.starts_with("solid") && head.find('\0') == std::string::npos;
  if (text || in.size() < kText) return;  // VTK reads letters with care
  in.skip(kText);
  const int64_t triangles = in.number(4);
  if (in.size() < kText + 4 + kTriangle * triangles) {
    in.fail("it ends before the last of its " + std::to_string(triangles) + " triangles");
  }
}

/// One property of PLY's rows: a number, or a list behind its length.
struct Property {
  int count_bytes = 0;  ///< 0 for a single number.
  int value_bytes = 0;
};

struct Element {
  std::string name;
  int64_t rows = 0;
  std::vector<Property> properties;
};

struct PlyHeader {
  std::string format;
  std::vector<Element> elements;
};

int bytes_of_type(const Input& in, const std::string& type) {
  static const std::map<std::string, int> kBytes{
      {"char", 1},  {"uchar", 1},   {"int8", 1},   {"uint8", 1},  {"short", 2}, {"ushort", 2},
      {"int16", 2}, {"uint16", 2},  {"int", 4},    {"uint", 4},   {"int32", 4}, {"uint32", 4},
      {"float", 4}, {"float32", 4}, {"double", 8}, {"float64", 8}};
  const auto found = kBytes.find(type);
  if (found == kBytes.end()) in.fail("\"" + type + "\" is no type of PLY");
  return found->second;
}

PlyHeader read_header(Input& in) {
  PlyHeader header;
  if (in.line() != "ply") in.fail("its first line is not \"ply\"");
  for (std::string text = in.line(); text != "end_header"; text = in.line()) {
    std::istringstream words(text);
    std::string word;
    words >> word;
    if (word == "format") {
      words >> header.format;
    } else if (word == "element") {
      Element& element = header.elements.emplace_back();
      words >> element.name >> element.rows;
    } else if (word == "property") {
      if (header.elements.empty()) in.fail("a property stands before the first element");
      Property property;
      words >> word;
      if (word == "list") {
        words >> word;
        property.count_bytes = bytes_of_type(in, word);
        words >> word;
      }
      property.value_bytes = bytes_of_type(in, word);
      header.elements.back().properties.push_back(property);
    }
  }
  return header;
}

void skip_text_row(Input& in, const Element& element, int64_t row) {
  std::istringstream words(in.line());
  std::string word;
  for (const Property& property : element.properties) {
    int64_t values = 1;
    if (property.count_bytes != 0) words >> values;
    if (values < 0) in.fail("row " + std::to_string(row) + " lists less than nothing");
    for (int64_t i = 0; i < values && words; ++i) words >> word;
    if (!words) in.fail("row " + std::to_string(row) + " of \"" + element.name + "\" is short");
  }
}

void skip_binary_rows(Input& in, const Element& element) {
  int64_t fixed = 0;
  bool lists = false;
  for (const Property& property : element.properties) {
    fixed += property.value_bytes;
    lists = lists || property.count_bytes != 0;
  }
  if (!lists) {
    if (fixed != 0 && element.rows > in.size() / fixed) in.fail("it ends within its data");
    in.skip(element.rows * fixed);
    return;
  }
  for (int64_t row = 0; row < element.rows; ++row) {
    for (const Property& property : element.properties) {
      const int64_t values = property.count_bytes == 0 ? 1 : in.number(property.count_bytes);
      in.skip(values * property.value_bytes);
    }
  }
}

void check_ply(const std::string& path) {
  Input in(path, false);
  const PlyHeader header = read_header(in);
  in.set_big_endian(header.format == "binary_big_endian");
  for (const Element& element : header.elements) {
    if (header.format != "ascii") {
      skip_binary_rows(in, element);
      continue;
    }
    for (int64_t row = 0; row < element.rows; ++row) skip_text_row(in, element, row);
  }
}

/// The header of netCDF's classic forms, of which Exodus files are made. Numbers of elements take
/// four bytes, eight in the fifth form; places of data four in the first form, else eight.
class NetcdfHeader {
 public:
  NetcdfHeader(Input& in, int64_t form)
      : in_(in), count_bytes_(form == 5 ? 8 : 4), place_bytes_(form == 1 ? 4 : 8) {}

  /// Where the last variable ends.
  [[nodiscard]] int64_t end() {
    int64_t records = in_.number(count_bytes_);
    if (records < 0 || records == kStreaming) records = 0;  // as many as there are
    const std::vector<int64_t> dims = read_dims();
    skip_attributes();
    int64_t end = 0;
    int64_t record_bytes = 0;
    int64_t last_record = 0;
    for (int64_t left = read_list(); left > 0; --left) {
      skip_name();
      const int64_t rank = in_.number(count_bytes_);
      bool in_records = false;
      for (int64_t i = 0; i < rank; ++i) {
        const int64_t dim = in_.number(count_bytes_);
        if (dim < 0 || dim >= static_cast<int64_t>(dims.size())) in_.fail("it names no dim");
        if (i == 0) in_records = dims[static_cast<size_t>(dim)] == 0;
      }
      skip_attributes();
      in_.skip(4);  // the type
      const int64_t bytes = in_.number(count_bytes_);
      const int64_t begin = in_.number(place_bytes_);
      if (in_records) record_bytes += bytes;
      (in_records ? last_record : end) = std::max(in_records ? last_record : end, begin + bytes);
    }
    return records > 0 ? std::max(end, last_record + (records - 1) * record_bytes) : end;
  }

 private:
  static constexpr int64_t kStreaming = 0xFFFFFFFF;

  /// A tag and the number of entries behind it.
  int64_t read_list() {
    in_.skip(4);
    return in_.number(count_bytes_);
  }

  void skip_padded(int64_t bytes) { in_.skip((bytes + 3) / 4 * 4); }
  void skip_name() { skip_padded(in_.number(count_bytes_)); }

  std::vector<int64_t> read_dims() {
    std::vector<int64_t> dims;
    for (int64_t left = read_list(); left > 0; --left) {
      skip_name();
      dims.push_back(in_.number(count_bytes_));
    }
    return dims;
  }

  void skip_attributes() {
    constexpr std::array<int, 12> kBytes{0, 1, 1, 2, 4, 4, 8, 1, 2, 4, 8, 8};
    for (int64_t left = read_list(); left > 0; --left) {
      skip_name();
      const int64_t type = in_.number(4);
      if (type < 1 || type >= static_cast<int64_t>(kBytes.size())) in_.fail("it has no such type");
      skip_padded(in_.number(count_bytes_) * kBytes[static_cast<size_t>(type)]);
    }
  }

  Input& in_;
  int count_bytes_;
  int place_bytes_;
};

void check_netcdf(const std::string& path) {
  constexpr int64_t kClassic = 'C' << 16U | 'D' << 8U | 'F';
  Input in(path, true);
  if (in.size() < 4 || in.number(3) != kClassic) return;  // HDF5, which checks itself, or no netCDF
  const int64_t form = in.number(1);
  const int64_t end = NetcdfHeader(in, form).end();
  // The last variable need not be padded to whole words.
  if (in.size() + 3 < end) in.fail("its variables end at byte " + std::to_string(end));
}

}  // namespace

void check_length(const std::string& path, const std::string& ending) {
  if (ending == ".vtk") check_legacy(path);
  if (ending == ".stl") check_stl(path);
  if (ending == ".ply") check_ply(path);
  if (ending == ".e" || ending == ".ex2" || ending == ".exo") check_netcdf(path);
}

}  // namespace shardfield::graph
