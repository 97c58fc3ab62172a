#include "shardfield/graph/hdf5/piece_file.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <mutex>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include <hdf5.h>

namespace shardfield::graph {

namespace {

/// An HDF5 object, closed when it goes.
class Handle {
 public:
  Handle(hid_t id, herr_t (*close)(hid_t), const std::string& what) : id_(id), close_(close) {
    if (id < 0) throw std::runtime_error("HDF5 could not " + what);
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  Handle(Handle&& other) noexcept : id_(std::exchange(other.id_, -1)), close_(other.close_) {}
  Handle& operator=(Handle&&) = delete;
  ~Handle() {
    if (id_ >= 0) close_(id_);
  }
  operator hid_t() const { return id_; }  // NOLINT: HDF5's calls take numbers

 private:
  hid_t id_;
  herr_t (*close_)(hid_t);
};

void require(herr_t status, const std::string& what) {
  if (status < 0) throw std::runtime_error("HDF5 could not " + what);
}

/// One call into HDF5 at a time, as it may be built without threads' protection, and without its
/// printing of errors: ours say what was wanted.
class Session {
 public:
  Session() : lock_(mutex()) {
    H5Eget_auto2(H5E_DEFAULT, &function_, &data_);
    H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session() { H5Eset_auto2(H5E_DEFAULT, function_, data_); }

 private:
  static std::mutex& mutex() {
    static std::mutex only;
    return only;
  }

  std::lock_guard<std::mutex> lock_;
  H5E_auto2_t function_ = nullptr;
  void* data_ = nullptr;
};

/// Works on a file; errors begin with the call and the file's name.
template <class Work>
auto in_session(const char* op, const std::string& path, const Work& work) {
  const Session session;
  const std::string where = std::string(op) + ": \"" + path + "\": ";
  try {
    return work();
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(where + error.what());
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(where + error.what());
  }
}

/// The type of a tensor's numbers in memory and in files; check_fields let no others through.
hid_t native(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return H5T_NATIVE_DOUBLE;
    case at::kFloat:
      return H5T_NATIVE_FLOAT;
    case at::kLong:
      return H5T_NATIVE_INT64;
    case at::kInt:
      return H5T_NATIVE_INT32;
    case at::kShort:
      return H5T_NATIVE_INT16;
    case at::kChar:
      return H5T_NATIVE_INT8;
    default:
      return H5T_NATIVE_UINT8;
  }
}

/// The torch type that holds a data set's numbers, if it holds numbers; unsigned ones wider than a
/// byte become the next wider signed type.
std::optional<at::ScalarType> torch_type(hid_t set) {
  const Handle type(H5Dget_type(set), H5Tclose, "read a type");
  const size_t size = H5Tget_size(type);
  const H5T_class_t kind = H5Tget_class(type);
  if (kind == H5T_FLOAT) return size <= 4 ? at::kFloat : at::kDouble;
  if (kind != H5T_INTEGER) return std::nullopt;
  if (H5Tget_sign(type) == H5T_SGN_NONE) {
    return size == 1 ? at::kByte : size == 2 ? at::kInt : at::kLong;
  }
  return size == 1 ? at::kChar : size == 2 ? at::kShort : size == 4 ? at::kInt : at::kLong;
}

std::vector<hsize_t> extents(const at::Tensor& rows) {
  std::vector<hsize_t> out;
  for (const int64_t n : rows.sizes()) out.push_back(static_cast<hsize_t>(n));
  return out;
}

/// A data set that is filled piece by piece, in order.
class Column {
 public:
  Column(hid_t group, std::string name, const at::Tensor& like, int64_t total_rows)
      : name_(std::move(name)),
        type_(native(like.scalar_type())),
        set_(make(group, like, total_rows)) {}

  void append(const at::Tensor& rows) {
    const at::Tensor flat = rows.detach().cpu().contiguous();
    if (flat.numel() > 0) {
      std::vector<hsize_t> count = extents(flat);
      std::vector<hsize_t> start(count.size(), 0);
      start[0] = next_;
      const Handle there(H5Dget_space(set_), H5Sclose, "select rows");
      const Handle here(H5Screate_simple(static_cast<int>(count.size()), count.data(), nullptr),
                        H5Sclose, "select rows");
      require(
          H5Sselect_hyperslab(there, H5S_SELECT_SET, start.data(), nullptr, count.data(), nullptr),
          "select rows of " + name_);
      require(H5Dwrite(set_, type_, here, there, H5P_DEFAULT, flat.data_ptr()), "write " + name_);
    }
    next_ += static_cast<hsize_t>(flat.size(0));
  }

 private:
  Handle make(hid_t group, const at::Tensor& like, int64_t total_rows) const {
    std::vector<hsize_t> whole = extents(like);
    whole[0] = static_cast<hsize_t>(total_rows);
    const Handle space(H5Screate_simple(static_cast<int>(whole.size()), whole.data(), nullptr),
                       H5Sclose, "describe " + name_);
    return Handle(
        H5Dcreate2(group, name_.c_str(), type_, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT),
        H5Dclose, "make the data set " + name_);
  }

  std::string name_;
  hid_t type_;
  Handle set_;
  hsize_t next_ = 0;
};

void write_text(hid_t object, const char* name, const std::string& text) {
  const Handle type(H5Tcopy(H5T_C_S1), H5Tclose, "describe a text");
  require(H5Tset_size(type, text.size()), "describe a text");
  const Handle space(H5Screate(H5S_SCALAR), H5Sclose, "describe a text");
  const Handle attribute(H5Acreate2(object, name, type, space, H5P_DEFAULT, H5P_DEFAULT), H5Aclose,
                         std::string("make the attribute ") + name);
  require(H5Awrite(attribute, type, text.data()), std::string("write ") + name);
}

void write_version(hid_t object) {
  const std::array<int64_t, 2> version{1, 0};
  const std::array<hsize_t, 1> size{2};
  const Handle space(H5Screate_simple(1, size.data(), nullptr), H5Sclose, "describe a version");
  const Handle attribute(
      H5Acreate2(object, "Version", H5T_NATIVE_INT64, space, H5P_DEFAULT, H5P_DEFAULT), H5Aclose,
      "make the attribute Version");
  require(H5Awrite(attribute, H5T_NATIVE_INT64, version.data()), "write Version");
}

/// What one piece puts into the file.
struct Rows {
  at::Tensor points, nodes, offsets, kinds;
  Fields point_data, cell_data;
};

template <class T>
at::Tensor shown(std::span<const T> values, at::ScalarType type) {
  // Read only: nothing below writes into a piece's arrays.
  return at::from_blob(const_cast<T*>(values.data()), {static_cast<int64_t>(values.size())},
                       at::TensorOptions(type));
}

at::Tensor in_three_dims(const Mesh& mesh) {
  const at::Tensor points =
      shown(mesh.points().values, at::kDouble).reshape({mesh.num_points(), mesh.dim()});
  return mesh.dim() == 3 ? points : at::constant_pad_nd(points, {0, 3 - mesh.dim()});
}

Rows rows_of(const Mesh& mesh, const Fields& point_data, const Fields& cell_data) {
  const CellLists cells = cell_lists_of(mesh);
  return {in_three_dims(mesh),
          at::tensor(cells.nodes, at::kLong),
          at::tensor(cells.offsets, at::kLong),
          at::tensor(cells.kinds, at::kByte),
          point_data,
          cell_data};
}

Rows rows_of(const Mesh& mesh, const Piece& piece, const Fields& point_data,
             const Fields& cell_data) {
  const std::span<const int64_t> numbers(piece.points);
  return {in_three_dims(mesh).index_select(0, shown(numbers, at::kLong)),
          shown(std::span<const int64_t>(piece.nodes), at::kLong),
          shown(std::span<const int64_t>(piece.offsets), at::kLong),
          shown(std::span<const uint8_t>(piece.kinds), at::kByte),
          point_fields_of(piece, point_data),
          cell_fields_of(piece, cell_data)};
}

/// One column of every piece, in order.
void write_column(hid_t group, const std::string& name, const std::vector<Rows>& pieces,
                  const std::function<at::Tensor(const Rows&)>& column) {
  int64_t total = 0;
  for (const Rows& rows : pieces) total += column(rows).size(0);
  Column out(group, name, column(pieces.front()), total);
  for (const Rows& rows : pieces) out.append(column(rows));
}

void write_fields(hid_t root, const char* group_name, const std::vector<Rows>& pieces,
                  Fields Rows::* fields) {
  const Handle group(H5Gcreate2(root, group_name, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT), H5Gclose,
                     std::string("make the group ") + group_name);
  const Fields& first = pieces.front().*fields;
  for (const auto& [name, field] : first) {
    write_column(group, name, pieces,
                 [&, key = name](const Rows& rows) { return (rows.*fields).at(key); });
  }
  if (first.contains("global_id")) write_text(group, "GlobalIds", "global_id");
}

void write_rows(const std::string& path, const std::vector<Rows>& pieces) {
  const Handle file(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT), H5Fclose,
                    "make the file");
  const Handle root(H5Gcreate2(file, "VTKHDF", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT), H5Gclose,
                    "make the group VTKHDF");
  write_version(root);
  write_text(root, "Type", "UnstructuredGrid");
  const auto count = [&](const char* name, at::Tensor Rows::* column) {
    write_column(root, name, pieces, [&](const Rows& rows) {
      return at::tensor(std::vector<int64_t>{(rows.*column).size(0)}, at::kLong);
    });
  };
  count("NumberOfPoints", &Rows::points);
  count("NumberOfCells", &Rows::kinds);
  count("NumberOfConnectivityIds", &Rows::nodes);
  write_column(root, "Points", pieces, [](const Rows& rows) { return rows.points; });
  write_column(root, "Connectivity", pieces, [](const Rows& rows) { return rows.nodes; });
  write_column(root, "Offsets", pieces, [](const Rows& rows) { return rows.offsets; });
  write_column(root, "Types", pieces, [](const Rows& rows) { return rows.kinds; });
  write_fields(root, "PointData", pieces, &Rows::point_data);
  write_fields(root, "CellData", pieces, &Rows::cell_data);
}

/// Rows begin .. begin + count - 1 of a data set, or nothing where it holds no numbers.
std::optional<at::Tensor> find_rows(hid_t group, const std::string& name, int64_t begin,
                                    int64_t count) {
  const Handle set(H5Dopen2(group, name.c_str(), H5P_DEFAULT), H5Dclose,
                   "open the data set " + name);
  const auto type = torch_type(set);
  const Handle there(H5Dget_space(set), H5Sclose, "read the size of " + name);
  const int dims = H5Sget_simple_extent_ndims(there);
  if (!type || dims < 1) return std::nullopt;
  std::vector<hsize_t> extent(static_cast<size_t>(dims));
  H5Sget_simple_extent_dims(there, extent.data(), nullptr);
  const auto rows = static_cast<int64_t>(extent[0]);
  if (begin < 0 || count < 0 || begin > rows || count > rows - begin) {
    throw std::runtime_error("the data set " + name + " has " + std::to_string(rows) +
                             " rows; expected " + std::to_string(count) + " from row " +
                             std::to_string(begin));
  }
  extent[0] = static_cast<hsize_t>(count);
  const std::vector<int64_t> shape(extent.begin(), extent.end());
  at::Tensor out = at::empty(shape, *type);
  if (out.numel() == 0) return out;
  std::vector<hsize_t> start(extent.size(), 0);
  start[0] = static_cast<hsize_t>(begin);
  require(H5Sselect_hyperslab(there, H5S_SELECT_SET, start.data(), nullptr, extent.data(), nullptr),
          "select rows of " + name);
  const Handle here(H5Screate_simple(dims, extent.data(), nullptr), H5Sclose, "select rows");
  require(H5Dread(set, native(*type), here, there, H5P_DEFAULT, out.data_ptr()), "read " + name);
  return out;
}

at::Tensor read_rows(hid_t group, const std::string& name, int64_t begin, int64_t count) {
  auto rows = find_rows(group, name, begin, count);
  if (!rows) throw std::runtime_error("the data set " + name + " holds no rows of numbers");
  return *rows;
}

int64_t num_rows(hid_t group, const char* name) {
  const Handle set(H5Dopen2(group, name, H5P_DEFAULT), H5Dclose,
                   std::string("open the data set ") + name);
  const Handle space(H5Dget_space(set), H5Sclose, "read a size");
  return H5Sget_simple_extent_npoints(space);
}

struct Opened {
  Handle file, root;
};

Opened open(const std::string& path) {
  if (!std::filesystem::exists(path)) throw std::runtime_error("there is no such file");
  Handle file(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), H5Fclose,
              "open it; it is no HDF5 file, or a torn one");
  Handle root(H5Gopen2(file, "VTKHDF", H5P_DEFAULT), H5Gclose, "find the group VTKHDF in it");
  return {std::move(file), std::move(root)};
}

/// Where a piece's rows begin, and how many there are.
struct Range {
  int64_t begin = 0, count = 0;
};

Range range_of(hid_t root, const char* counts, int64_t piece) {
  const at::Tensor all = read_rows(root, counts, 0, piece + 1).to(at::kLong);
  const auto* first = all.const_data_ptr<int64_t>();
  return {std::accumulate(first, first + piece, int64_t{0}), first[piece]};
}

Fields read_fields(hid_t root, const char* name, const Range& range) {
  Fields fields;
  if (H5Lexists(root, name, H5P_DEFAULT) <= 0) return fields;
  const Handle group(H5Gopen2(root, name, H5P_DEFAULT), H5Gclose,
                     std::string("open the group ") + name);
  std::vector<std::string> names;
  const auto visit = [](hid_t, const char* link, const H5L_info_t*, void* out) -> herr_t {
    static_cast<std::vector<std::string>*>(out)->emplace_back(link);
    return 0;
  };
  require(H5Literate(group, H5_INDEX_NAME, H5_ITER_INC, nullptr, visit, &names),
          std::string("list ") + name);
  for (const std::string& field : names) {
    if (auto rows = find_rows(group, field, range.begin, range.count)) {
      fields.emplace(field, std::move(*rows));
    }
  }
  return fields;
}

template <class T>
Array<T> as_array(const at::Tensor& tensor, at::ScalarType type) {
  auto kept = std::make_shared<at::Tensor>(tensor.to(type).contiguous());
  const std::span<const T> view(static_cast<const T*>(kept->const_data_ptr()),
                                static_cast<size_t>(kept->numel()));
  return Array<T>(view, std::move(kept));
}

MeshFile read_piece(const std::string& path, int64_t piece) {
  const Opened opened = open(path);
  const hid_t root = opened.root;
  const int64_t pieces = num_rows(root, "NumberOfPoints");
  if (piece < 0 || piece >= pieces) {
    throw std::invalid_argument("expected a piece from 0 to " + std::to_string(pieces - 1) +
                                ", got " + std::to_string(piece));
  }
  const Range points = range_of(root, "NumberOfPoints", piece);
  const Range cells = range_of(root, "NumberOfCells", piece);
  const Range nodes = range_of(root, "NumberOfConnectivityIds", piece);
  std::vector<CellBlock> blocks;
  if (cells.count > 0) {
    // Offsets have one number more than cells in every piece.
    const at::Tensor offsets = read_rows(root, "Offsets", cells.begin + piece, cells.count + 1);
    blocks.push_back(CellBlock::mixed(
        as_array<uint8_t>(read_rows(root, "Types", cells.begin, cells.count), at::kByte),
        as_array<int64_t>(read_rows(root, "Connectivity", nodes.begin, nodes.count), at::kLong),
        as_array<int64_t>(offsets, at::kLong)));
  }
  const at::Tensor coordinates = read_rows(root, "Points", points.begin, points.count);
  if (coordinates.dim() != 2 || coordinates.size(1) != 3) {
    throw std::runtime_error("the data set Points has no 3 coordinates per row");
  }
  try {
    return {Mesh(as_array<double>(coordinates, at::kDouble), 3, std::move(blocks)),
            read_fields(root, "PointData", points), read_fields(root, "CellData", cells)};
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument("piece " + std::to_string(piece) + ": " + error.what());
  }
}

}  // namespace

bool has_hdf5() {
  return true;
}

void write_hdf5(const std::string& path, const Mesh& mesh, const Fields& point_data,
                const Fields& cell_data) {
  check_fields("write_hdf5", mesh, point_data, cell_data);
  in_session("write_hdf5", path, [&] { write_rows(path, {rows_of(mesh, point_data, cell_data)}); });
}

void write_hdf5(const std::string& path, const Mesh& mesh, std::span<const Piece> pieces,
                const Fields& point_data, const Fields& cell_data) {
  check_fields("write_hdf5", mesh, point_data, cell_data);
  if (pieces.empty()) throw std::invalid_argument("write_hdf5: expected at least one piece, got 0");
  std::vector<Rows> rows;
  rows.reserve(pieces.size());
  for (const Piece& piece : pieces) rows.push_back(rows_of(mesh, piece, point_data, cell_data));
  in_session("write_hdf5", path, [&] { write_rows(path, rows); });
}

int64_t num_hdf5_pieces(const std::string& path) {
  return in_session("num_hdf5_pieces", path,
                    [&] { return num_rows(open(path).root, "NumberOfPoints"); });
}

MeshFile read_hdf5(const std::string& path, int64_t piece) {
  return in_session("read_hdf5", path, [&] { return read_piece(path, piece); });
}

}  // namespace shardfield::graph
