#include "shardfield/checkpoint/writer.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <random>

#include <ATen/ATen.h>

#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "shardfield/base/error.h"
#include "shardfield/checkpoint/format.h"
#include "shardfield/checkpoint/load.h"
#include "shardfield/checkpoint/sha256.h"
#include "shardfield/comm/collectives.h"
#include "shardfield/comm/vector_collectives.h"
#include "shardfield/tensor/autograd.h"
#include "shardfield/tensor/shard_tensor_impl.h"

namespace shardfield::checkpoint {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using Sizes = std::vector<int64_t>;

/// A file being written; flushed to disk by close().
class OutputFile {
 public:
  explicit OutputFile(const fs::path& path) : path_(path) {
    file_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    check(file_ >= 0);
  }
  ~OutputFile() {
    if (file_ >= 0) ::close(file_);
  }
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(const void* data, size_t size) {
    const char* at = static_cast<const char*>(data);
    while (size > 0) {
      const ssize_t done = ::write(file_, at, size);
      if (done < 0 && errno == EINTR) continue;
      check(done > 0);
      at += done;
      size -= static_cast<size_t>(done);
    }
  }
  void close() {
    check(::fsync(file_) == 0);
    check(::close(std::exchange(file_, -1)) == 0);
  }

 private:
  void check(bool good) const {
    SHARDFIELD_CHECK(good, kOp, path_.string(), " cannot be written: ", std::strerror(errno));
  }
  fs::path path_;
  int file_ = -1;
};

/// Makes a rename inside a folder last.
void sync_folder(const fs::path& folder) {
  const int file = ::open(folder.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  ::fsync(file);
  ::close(file);
}

/// Every rank's JSON value. Collective over the mesh.
std::vector<Json> all_gather_json(const Json& mine, const spec::Mesh& mesh) {
  const std::string text = mine.dump();
  Sizes sizes;
  for (const auto& row : comm::all_gather_ints({static_cast<int64_t>(text.size())}, mesh, at::kCPU))
    sizes.push_back(row[0]);
  at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  const at::Tensor all = comm::all_gather_v(bytes, mesh, sizes);
  const auto* at = reinterpret_cast<const char*>(all.const_data_ptr<uint8_t>());
  std::vector<Json> out;
  for (const int64_t size : sizes) {
    out.push_back(Json::parse(at, at + size));
    at += size;
  }
  return out;
}

/// Runs local work on every rank and tells all what it returned; all raise when one fails.
std::vector<Json> together(const spec::Mesh& mesh, const std::function<Json()>& work) {
  Json mine = {{"failure", ""}};
  try {
    mine["result"] = work();
  } catch (const c10::Error& error) {
    mine["failure"] = error.what_without_backtrace();
  } catch (const std::exception& error) {
    mine["failure"] = error.what();
  }
  std::vector<Json> out;
  std::string failures;
  int rank = 0;
  for (const Json& answer : all_gather_json(mine, mesh)) {
    const auto failure = answer.at("failure").get<std::string>();
    if (!failure.empty()) failures += "\n  rank " + std::to_string(rank) + ": " + failure;
    out.push_back(answer.value("result", Json()));
    ++rank;
  }
  SHARDFIELD_CHECK(failures.empty(), "save_sharded", "ranks have failed:", failures);
  return out;
}

/// One rank's piece of one tensor.
struct Owned {
  int owner = 0;
  Box box;
};

/// Who writes which piece: of replicas the holder with the fewest bytes so far; equal on all ranks.
std::map<std::string, std::vector<Owned>> assign_owners(const std::vector<Json>& manifests) {
  std::map<std::string, std::vector<Owned>> owners;
  std::vector<int64_t> load(manifests.size(), 0);
  for (const auto& [name, entry] : manifests[0].at("tensors").items()) {
    std::vector<Box> boxes;
    std::vector<std::vector<int>> holders;
    for (size_t r = 0; r < manifests.size(); ++r) {
      const Json& there = manifests[r].at("tensors").at(name);
      const Box box = {there.at("offset").get<Sizes>(), there.at("piece").get<Sizes>()};
      if (elements(box.shape) == 0) continue;
      const auto found =
          static_cast<size_t>(std::find(boxes.begin(), boxes.end(), box) - boxes.begin());
      if (found == boxes.size()) {
        boxes.push_back(box);
        holders.emplace_back();
      }
      holders[found].push_back(static_cast<int>(r));
    }
    check_cover(name, entry.at("shape").get<Sizes>(), boxes);
    const auto itemsize = c10::elementSize(dtype_of(entry.at("dtype").get<std::string>()));
    for (size_t b = 0; b < boxes.size(); ++b) {
      const int owner = *std::min_element(holders[b].begin(), holders[b].end(),
                                          [&](int a, int c) { return load[a] < load[c]; });
      load[owner] += elements(boxes[b].shape) * static_cast<int64_t>(itemsize);
      owners[name].push_back({owner, boxes[b]});
    }
    owners[name];  // tensors without elements have an entry too
  }
  return owners;
}

void check_same(const std::vector<Json>& manifests) {
  for (size_t r = 1; r < manifests.size(); ++r) {
    for (const Json* pair : {&manifests[0], &manifests[r]}) {
      const Json& other = pair == &manifests[0] ? manifests[r] : manifests[0];
      for (const auto& [name, entry] : pair->at("tensors").items()) {
        const auto found = other.at("tensors").find(name);
        SHARDFIELD_CHECK(found != other.at("tensors").end(), "save_sharded", "'", name,
                         "' is missing on one of the ranks 0 and ", r,
                         "; all ranks must save the same names");
        SHARDFIELD_CHECK(
            found->at("shape") == entry.at("shape") && found->at("dtype") == entry.at("dtype"),
            "save_sharded", "'", name, "' differs between ranks 0 and ", r, ": ", entry.dump(),
            " and ", found->dump());
      }
    }
    SHARDFIELD_CHECK(manifests[r].at("integers") == manifests[0].at("integers"), "save_sharded",
                     "ranks 0 and ", r, " hold other values: ", manifests[0].at("integers").dump(),
                     " and ", manifests[r].at("integers").dump());
  }
}

/// Names become nested mappings: "a" cannot be a value beside "a/b".
void check_names(const Tensors& tensors, const std::map<std::string, int64_t>& integers) {
  const auto is_value = [&](const std::string& name) {
    return tensors.contains(name) || integers.contains(name);
  };
  for (const auto& [name, unused] : tensors) {
    SHARDFIELD_CHECK(!integers.contains(name), kOp, "'", name, "' is a tensor and an integer");
    for (size_t at = name.find('/'); at != std::string::npos; at = name.find('/', at + 1))
      SHARDFIELD_CHECK(!is_value(name.substr(0, at)), kOp, "'", name.substr(0, at),
                       "' is a value and holds '", name, "'; give one of them another name");
  }
}

/// {"model/a": ..} as nested {"dict": [["model", {"dict": [["a", {"tensor": "model/a"}]]}]]}.
Json nested(const Json& tensors, const Json& integers) {
  Json root = {{"dict", Json::array()}};
  const std::function<Json&(Json&, const std::string&)> child =
      [](Json& at, const std::string& key) -> Json& {
    for (Json& entry : at["dict"])
      if (entry[0].get<std::string>() == key) return entry[1];
    at["dict"].push_back(Json::array({key, {{"dict", Json::array()}}}));
    return at["dict"].back()[1];
  };
  for (const auto& [name, unused] : tensors.items()) {
    Json* at = &root;
    size_t start = 0;
    for (size_t slash = name.find('/'); slash != std::string::npos; slash = name.find('/', start)) {
      at = &child(*at, name.substr(start, slash - start));
      start = slash + 1;
    }
    (*at)["dict"].push_back(Json::array({name.substr(start), {{"tensor", name}}}));
  }
  for (const auto& [name, value] : integers.items())
    root["dict"].push_back(Json::array({name, {{"value", value}}}));
  return root;
}

/// One file's tensors: metadata, header and first bytes.
struct FilePlan {
  std::string header;                     ///< with its length in front
  std::map<std::string, int64_t> begins;  ///< first byte of each tensor in the file
  std::vector<std::string> order;
};

FilePlan plan_file(int rank, const std::map<std::string, std::vector<Owned>>& owners,
                   const Json& tensors) {
  std::vector<std::pair<int64_t, std::string>> sorted;
  std::map<std::string, Sizes> shapes;
  for (const auto& [name, pieces] : owners)
    for (const Owned& piece : pieces) {
      if (piece.owner != rank) continue;
      const auto dtype = dtype_of(tensors.at(name).at("dtype").get<std::string>());
      sorted.emplace_back(-static_cast<int64_t>(c10::elementSize(dtype)), name);
      shapes[name] = piece.box.shape;
    }
  std::sort(sorted.begin(), sorted.end());
  Json header = {{"__metadata__", {{"format", "pt"}}}};
  Json pairs = Json::array();
  FilePlan plan;
  int64_t at = 0;
  for (const auto& [size, name] : sorted) {
    std::string dtype = tensors.at(name).at("dtype").get<std::string>();
    Sizes shape = shapes[name];
    const int64_t bytes = elements(shape) * -size;
    if (dtype == "C128") {
      dtype = "F64";
      shape.push_back(2);
      pairs.push_back(name);
    }
    header[name] = {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {at, at + bytes}}};
    plan.begins[name] = at;
    plan.order.push_back(name);
    at += bytes;
  }
  if (!pairs.empty()) header["__metadata__"][kPairs] = pairs.dump();
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const auto length = static_cast<uint64_t>(text.size());
  plan.header.assign(reinterpret_cast<const char*>(&length), 8);
  plan.header += text;
  for (auto& [name, begin] : plan.begins) begin += static_cast<int64_t>(plan.header.size());
  return plan;
}

/// Writes this rank's file; the hashes of each tensor's blocks.
Json write_file(const fs::path& path, const FilePlan& plan, const Tensors& tensors) {
  Json hashes = Json::object();
  if (plan.order.empty()) return hashes;
  OutputFile file(path);
  file.write(plan.header.data(), plan.header.size());
  for (const std::string& name : plan.order) {
    const at::Tensor& t = tensors.at(name);
    const at::Tensor piece = (tensor::is_sharded(t) ? tensor::local(t.detach()) : t.detach())
                                 .resolve_conj()
                                 .resolve_neg()
                                 .cpu()
                                 .contiguous();
    const auto* data = static_cast<const char*>(piece.const_data_ptr());
    const auto size = static_cast<int64_t>(piece.nbytes());
    hashes[name] = Json::array();
    for (int64_t at = 0; at < size; at += kBlockBytes) {
      const auto bytes = static_cast<size_t>(std::min(kBlockBytes, size - at));
      hashes[name].push_back(sha256(data + at, bytes));
      file.write(data + at, bytes);
    }
  }
  file.close();
  return hashes;
}

std::string file_name(const std::string& save, int rank) {
  std::string digits = std::to_string(rank);
  digits.insert(0, 5 - std::min<size_t>(digits.size(), 5), '0');
  return save + "-r" + digits + ".safetensors";
}

/// The index in one rename; then the files of the save before go.
void commit(const fs::path& folder, const std::string& save, const Json& body) {
  const std::string text = body.dump();
  const fs::path temporary = folder / (std::string(kIndex) + ".tmp-" + std::to_string(::getpid()));
  OutputFile file(temporary);
  const std::string whole =
      R"({"sha256": ")" + sha256(text.data(), text.size()) + R"(", "index": )" + text + "}";
  file.write(whole.data(), whole.size());
  file.close();
  fs::rename(temporary, folder / kIndex);
  sync_folder(folder);
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    if (is_piece_file(name) && !name.starts_with(save)) fs::remove(entry.path());
  }
}

Json index_of(const std::string& save, const std::vector<Json>& manifests,
              const std::map<std::string, std::vector<Owned>>& owners,
              const std::vector<Json>& hashes) {
  const Json& tensors = manifests[0].at("tensors");
  std::vector<FilePlan> plans;
  for (size_t r = 0; r < manifests.size(); ++r)
    plans.push_back(plan_file(static_cast<int>(r), owners, tensors));
  Json entries = Json::object();
  for (const auto& [name, pieces] : owners) {
    Json list = Json::array();
    for (const Owned& piece : pieces)
      list.push_back({{"file", file_name(save, piece.owner)},
                      {"begin", plans[piece.owner].begins.at(name)},
                      {"offset", piece.box.offset},
                      {"shape", piece.box.shape},
                      {"sha256", hashes[piece.owner].at(name)}});
    entries[name] = {{"shape", tensors.at(name).at("shape")},
                     {"dtype", tensors.at(name).at("dtype")},
                     {"pieces", list}};
  }
  return {{"format", kFormat},
          {"version", kVersion},
          {"save", save},
          {"ranks", manifests.size()},
          {"block_bytes", kBlockBytes},
          {"structure", nested(tensors, manifests[0].at("integers"))},
          {"tensors", entries}};
}

}  // namespace

Tensors tensors_of(const torch::nn::Module& module, const std::string& prefix) {
  const std::string start = prefix.empty() ? "" : prefix + "/";
  Tensors found;
  for (const auto& entry : module.named_parameters()) found[start + entry.key()] = entry.value();
  for (const auto& entry : module.named_buffers()) found[start + entry.key()] = entry.value();
  return found;
}

void save_sharded(const std::string& folder, const Tensors& tensors,
                  const std::map<std::string, int64_t>& integers, const spec::Mesh& mesh) {
  const at::NoGradGuard no_grad;
  const auto describe = [&]() -> Json {
    check_names(tensors, integers);
    Json entries = Json::object();
    for (const auto& [name, t] : tensors) {
      const Box box = box_of(name, t);
      entries[name] = {{"shape", t.sizes().vec()},
                       {"dtype", dtype_name(t.scalar_type())},
                       {"offset", box.offset},
                       {"piece", box.shape}};
    }
    fs::create_directories(folder);
    std::random_device random;
    std::string save;
    for (int i = 0; i < 16; ++i) save += "0123456789abcdef"[random() % 16];
    return {{"tensors", entries}, {"integers", integers}, {"save", save}};
  };
  const std::vector<Json> manifests = together(mesh, describe);
  check_same(manifests);
  const auto owners = assign_owners(manifests);
  const auto save = manifests[0].at("save").get<std::string>();
  const fs::path mine = fs::path(folder) / file_name(save, mesh.rank);
  try {
    const std::vector<Json> hashes = together(mesh, [&] {
      return write_file(mine, plan_file(mesh.rank, owners, manifests[0].at("tensors")), tensors);
    });
    together(mesh, [&]() -> Json {
      if (mesh.rank == 0) commit(folder, save, index_of(save, manifests, owners, hashes));
      return nullptr;
    });
  } catch (...) {
    std::error_code ignored;
    fs::remove(mine, ignored);
    throw;
  }
}

}  // namespace shardfield::checkpoint
