#include "shardfield/graph/vtk/mesh_files.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <system_error>

#include <vtkAppendFilter.h>
#include <vtkCallbackCommand.h>
#include <vtkCompositeDataIterator.h>
#include <vtkDataSet.h>
#include <vtkDataSetReader.h>
#include <vtkErrorCode.h>
#include <vtkExodusIIReader.h>
#include <vtkExodusIIWriter.h>
#include <vtkInformation.h>
#include <vtkInformationVector.h>
#include <vtkMultiBlockDataSet.h>
#include <vtkOBJReader.h>
#include <vtkOBJWriter.h>
#include <vtkObjectFactory.h>
#include <vtkOutputWindow.h>
#include <vtkPLYReader.h>
#include <vtkPLYWriter.h>
#include <vtkSTLReader.h>
#include <vtkSTLWriter.h>
#include <vtkStreamingDemandDrivenPipeline.h>
#include <vtkUnstructuredGridAlgorithm.h>
#include <vtkUnstructuredGridWriter.h>
#include <vtkXMLPUnstructuredGridReader.h>
#include <vtkXMLPUnstructuredGridWriter.h>
#include <vtkXMLPolyDataReader.h>
#include <vtkXMLUnstructuredGridReader.h>
#include <vtkXMLUnstructuredGridWriter.h>

#include "shardfield/graph/vtk/convert.h"
#include "shardfield/graph/vtk/file_length.h"

namespace shardfield::graph {

namespace {

std::string ending_of(const std::string& path) {
  std::string ending = std::filesystem::path(path).extension().string();
  std::transform(ending.begin(), ending.end(), ending.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return ending;
}

/// What VTK reports while an object works: its own errors, and by VTK's window those of the readers
/// and writers that it uses. The window is VTK's one, so works are one at a time.
class ErrorWatch {
 public:
  explicit ErrorWatch(vtkAlgorithm* watched) : lock_(mutex()), watched_(watched) {
    listen(watched_, vtkCommand::ErrorEvent, errors_);
    listen(vtkOutputWindow::GetInstance(), vtkCommand::ErrorEvent, errors_);
    listen(vtkOutputWindow::GetInstance(), vtkCommand::WarningEvent, warnings_);
  }
  ErrorWatch(const ErrorWatch&) = delete;
  ErrorWatch& operator=(const ErrorWatch&) = delete;
  ~ErrorWatch() {
    for (const Listener& listener : listeners_) listener.to->RemoveObserver(listener.tag);
  }

  /// Throws if anything went wrong, or if `done` is false.
  void check(const char* op, const std::string& path, bool done = true) const {
    const unsigned long code = watched_->GetErrorCode();
    // The legacy reader only warns of data that it cannot read, and leaves them out.
    const bool left_out = watched_->IsA("vtkDataReader") && !warnings_.empty();
    if (done && errors_.empty() && code == vtkErrorCode::NoError && !left_out) return;
    std::string words = errors_.empty() ? warnings_ : errors_;
    if (words.empty()) words = vtkErrorCode::GetStringFromErrorCode(code);
    // The first message tells what went wrong; others tell what that led to.
    throw std::runtime_error(std::string(op) + ": VTK could not work on \"" + path +
                             "\": " + words.substr(0, words.find("\n\n")));
  }

 private:
  struct Listener {
    vtkSmartPointer<vtkObject> to;
    unsigned long tag = 0;
  };

  static std::mutex& mutex() {
    static std::mutex only;
    return only;
  }

  void listen(vtkObject* to, unsigned long event, std::string& words) {
    const auto callback = vtkSmartPointer<vtkCallbackCommand>::New();
    callback->SetClientData(&words);
    callback->SetCallback([](vtkObject*, unsigned long, void* out, void* message) {
      if (message != nullptr) static_cast<std::string*>(out)->append(static_cast<char*>(message));
    });
    listeners_.push_back({to, to->AddObserver(event, callback)});
  }

  std::lock_guard<std::mutex> lock_;
  vtkSmartPointer<vtkAlgorithm> watched_;
  std::vector<Listener> listeners_;
  std::string errors_, warnings_;
};

/// A grid or surface as it is, or the cells of any other data set in a grid.
vtkSmartPointer<vtkPointSet> as_point_set(vtkDataObject* data) {
  if (data->IsA("vtkUnstructuredGrid") || data->IsA("vtkPolyData")) {
    return static_cast<vtkPointSet*>(data);
  }
  auto append = vtkSmartPointer<vtkAppendFilter>::New();
  append->AddInputDataObject(data);
  append->Update();
  return append->GetOutput();
}

template <class Reader>
PointSets read_one(const std::string& path) {
  auto reader = vtkSmartPointer<Reader>::New();
  const ErrorWatch errors(reader);
  reader->SetFileName(path.c_str());
  reader->Update();
  errors.check("read_mesh", path);
  return {as_point_set(reader->GetOutputDataObject(0))};
}

/// The blocks of elements at the last time step, all over the same points.
PointSets read_exodus(const std::string& path) {
  auto reader = vtkSmartPointer<vtkExodusIIReader>::New();
  const ErrorWatch errors(reader);
  reader->SetFileName(path.c_str());
  reader->UpdateInformation();
  reader->SetSqueezePoints(false);
  reader->SetAllArrayStatus(vtkExodusIIReader::NODAL, 1);
  reader->SetAllArrayStatus(vtkExodusIIReader::ELEM_BLOCK, 1);
  if (reader->GetNumberOfTimeSteps() > 0) reader->SetTimeStep(reader->GetNumberOfTimeSteps() - 1);
  reader->Update();
  errors.check("read_mesh", path);
  PointSets sets;
  const auto each =
      vtkSmartPointer<vtkCompositeDataIterator>::Take(reader->GetOutput()->NewIterator());
  for (each->InitTraversal(); !each->IsDoneWithTraversal(); each->GoToNextItem()) {
    if (auto* grid = vtkUnstructuredGrid::SafeDownCast(each->GetCurrentDataObject())) {
      sets.emplace_back(grid);
    }
  }
  return sets;
}

PointSets read_sets(const std::string& path) {
  const std::string ending = ending_of(path);
  if (ending == ".vtu") return read_one<vtkXMLUnstructuredGridReader>(path);
  if (ending == ".pvtu") return read_one<vtkXMLPUnstructuredGridReader>(path);
  if (ending == ".vtp") return read_one<vtkXMLPolyDataReader>(path);
  if (ending == ".vtk") return read_one<vtkDataSetReader>(path);
  if (ending == ".stl") return read_one<vtkSTLReader>(path);
  if (ending == ".ply") return read_one<vtkPLYReader>(path);
  if (ending == ".obj") return read_one<vtkOBJReader>(path);
  if (ending == ".e" || ending == ".ex2" || ending == ".exo") return read_exodus(path);
  throw std::invalid_argument(
      "read_mesh: expected .vtu, .pvtu, .vtp, .vtk, .e, .ex2, .exo, .stl, "
      ".ply or .obj, got \"" +
      path + "\"");
}

template <class Writer, class Data>
void write_one(const std::string& path, const Lent<Data>& lent) {
  auto writer = vtkSmartPointer<Writer>::New();
  const ErrorWatch errors(writer);
  writer->SetFileName(path.c_str());
  writer->SetInputData(lent.data);
  if constexpr (requires { writer->SetFileTypeToBinary(); }) writer->SetFileTypeToBinary();
  // Arrays of 4 GB and more.
  if constexpr (requires { writer->SetHeaderTypeToUInt64(); }) writer->SetHeaderTypeToUInt64();
  const auto done = static_cast<bool>(writer->Write());
  errors.check("write_mesh", path, done);
}

/// A source whose piece i is the i-th grid, made when it is asked for.
class PieceSource : public vtkUnstructuredGridAlgorithm {
 public:
  static PieceSource* New();
  vtkTypeMacro(PieceSource, vtkUnstructuredGridAlgorithm);  // NOLINT: every VTK class does so

  std::function<Lent<vtkUnstructuredGrid>(int)> make;

 protected:
  PieceSource() { SetNumberOfInputPorts(0); }

  int RequestInformation(vtkInformation*, vtkInformationVector**,
                         vtkInformationVector* outputs) override {
    outputs->GetInformationObject(0)->Set(CAN_HANDLE_PIECE_REQUEST(), 1);
    return 1;
  }

  int RequestData(vtkInformation*, vtkInformationVector**, vtkInformationVector* outputs) override {
    const int piece = outputs->GetInformationObject(0)->Get(
        vtkStreamingDemandDrivenPipeline::UPDATE_PIECE_NUMBER());
    current_ = make(piece);
    vtkUnstructuredGrid::GetData(outputs)->ShallowCopy(current_.data);
    return 1;
  }

 private:
  Lent<vtkUnstructuredGrid> current_;
};

vtkStandardNewMacro(PieceSource);

/// Where VTK puts the i-th piece of an index.
std::filesystem::path file_of_piece(const std::string& index, size_t i) {
  const std::filesystem::path path(index);
  return path.parent_path() / (path.stem().string() + "_" + std::to_string(i) + ".vtu");
}

}  // namespace

bool has_vtk() {
  return true;
}

MeshFile read_mesh(const std::string& path) {
  if (!std::filesystem::exists(path)) {
    throw std::runtime_error("read_mesh: no file \"" + path + "\"");
  }
  try {
    check_length(path, ending_of(path));
  } catch (const std::runtime_error& error) {
    throw std::runtime_error("read_mesh: \"" + path + "\": " + error.what());
  }
  const PointSets sets = read_sets(path);
  try {
    return from_point_sets(sets);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument("read_mesh: \"" + path + "\": " + error.what());
  }
}

void write_mesh(const std::string& path, const Mesh& mesh, const Fields& point_data,
                const Fields& cell_data) {
  check_fields("write_mesh", mesh, point_data, cell_data);
  const std::string ending = ending_of(path);
  const bool surface = ending == ".stl" || ending == ".ply" || ending == ".obj";
  if (surface && point_data.size() + cell_data.size() != 0) {
    throw std::invalid_argument("write_mesh: " + ending + " files hold no fields, got " +
                                std::to_string(point_data.size() + cell_data.size()) +
                                "; write a .vtu file, or the mesh alone");
  }
  if (ending == ".stl") return write_one<vtkSTLWriter>(path, to_surface(mesh, false, ending));
  if (ending == ".ply") return write_one<vtkPLYWriter>(path, to_surface(mesh, true, ending));
  if (ending == ".obj") return write_one<vtkOBJWriter>(path, to_surface(mesh, true, ending));
  const Lent<vtkUnstructuredGrid> grid = to_grid(mesh, point_data, cell_data);
  if (ending == ".vtu") return write_one<vtkXMLUnstructuredGridWriter>(path, grid);
  if (ending == ".vtk") return write_one<vtkUnstructuredGridWriter>(path, grid);
  if (ending == ".e" || ending == ".ex2" || ending == ".exo") {
    return write_one<vtkExodusIIWriter>(path, grid);
  }
  throw std::invalid_argument(
      "write_mesh: expected .vtu, .vtk, .e, .ex2, .exo, .stl, .ply or .obj, got \"" + path +
      "\"; pieces go to .pvtu files by write_pieces");
}

std::vector<std::string> write_pieces(const std::string& path, const Mesh& mesh,
                                      std::span<const Piece> pieces, const Fields& point_data,
                                      const Fields& cell_data) {
  if (ending_of(path) != ".pvtu") {
    throw std::invalid_argument("write_pieces: expected a path that ends in .pvtu, got \"" + path +
                                "\"");
  }
  if (pieces.empty()) throw std::invalid_argument("write_pieces: expected at least one piece");
  check_fields("write_pieces", mesh, point_data, cell_data);
  int32_t layers = 0;
  for (const Piece& piece : pieces) {
    for (const int32_t layer : piece.cell_layers) layers = std::max(layers, layer);
  }
  // Else the file of an earlier piece would stay where this one has no cells.
  std::error_code refused;  // then VTK cannot write there, and says so
  for (size_t i = 0; i < pieces.size(); ++i) {
    std::filesystem::remove(file_of_piece(path, i), refused);
  }
  auto source = vtkSmartPointer<PieceSource>::New();
  source->make = [&](int i) {
    return to_grid(mesh, pieces[static_cast<size_t>(i)], point_data, cell_data);
  };
  auto writer = vtkSmartPointer<vtkXMLPUnstructuredGridWriter>::New();
  const ErrorWatch errors(writer);
  writer->SetInputConnection(source->GetOutputPort());
  writer->SetFileName(path.c_str());
  writer->SetNumberOfPieces(static_cast<int>(pieces.size()));
  writer->SetStartPiece(0);
  writer->SetEndPiece(static_cast<int>(pieces.size()) - 1);
  writer->SetGhostLevel(layers);
  writer->SetHeaderTypeToUInt64();
  errors.check("write_pieces", path, writer->Write() != 0);
  std::vector<std::string> files{path};
  for (size_t i = 0; i < pieces.size(); ++i) {
    const std::filesystem::path file = file_of_piece(path, i);
    if (std::filesystem::exists(file)) files.push_back(file.string());
  }
  return files;
}

}  // namespace shardfield::graph
