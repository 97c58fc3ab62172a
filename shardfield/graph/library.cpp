#include "shardfield/graph/library.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <stdexcept>

#include <dlfcn.h>

namespace shardfield::graph {

namespace {

/// Libraries do better with some room; what exceeds the caller's tolerance is repaired after.
constexpr double kLibraryTolerance = 0.03;

struct Source {
  const char* name;
  const char* variable;
  std::array<const char*, 3> file_names;
  const char* how_to_get;
};

const Source& source_of(Library library) {
  static const std::array<Source, 3> kSources{
      {{"metis",
        "SHARDFIELD_METIS",
        {"libmetis.so.5", "libmetis.so", nullptr},
        "install the PyPI packages cmeel-metis and cmeel-gklib or Debian's libmetis5"},
       {"kahip",
        "SHARDFIELD_KAHIP",
        {"libkahip.so", nullptr, nullptr},
        "install the PyPI package kahip"},
       {"scotch",
        "SHARDFIELD_SCOTCH",
        {"libscotch.so", "libscotch-7.0.so", "libscotch.so.0"},
        "install Debian's libscotch-7.0"}}};
  return kSources[static_cast<size_t>(library)];
}

/// Loaded libraries stay loaded until the process ends.
struct Handles {
  std::mutex lock;
  std::array<std::vector<std::string>, 3> paths;
  std::array<void*, 3> handles{};
};

Handles& handles() {
  static Handles all;
  return all;
}

/// Scotch keeps its error routines, and the METIS wheel its support library, in files that the main
/// one does not find by itself: they are loaded first, from beside it or by the system.
void open_companions(Library library, const std::string& name) {
  const std::string folder = name.substr(0, name.rfind('/') + 1);
  if (library == Library::metis && !folder.empty()) {
    (void)dlopen((folder + "libGKlib.so").c_str(), RTLD_NOW | RTLD_GLOBAL);
  }
  if (library == Library::scotch) {
    for (const char* companion : {"libscotcherr.so", "libscotcherr-7.0.so"}) {
      if (dlopen((folder + companion).c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr) return;
    }
  }
}

void* open_first(Library library, const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    open_companions(library, name);
    // A library that misses symbols of its own fails here, not in the middle of a call.
    if (void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
  }
  return nullptr;
}

void* handle_of(Library library) {
  const auto index = static_cast<size_t>(library);
  const Source& source = source_of(library);
  Handles& all = handles();
  const std::lock_guard<std::mutex> guard(all.lock);
  if (all.handles[index] != nullptr) return all.handles[index];
  std::vector<std::string> names;
  if (const char* path = std::getenv(source.variable)) {
    names.emplace_back(path);  // an explicit wish stands alone: a typo is not silently replaced
  } else {
    names = all.paths[index];
    for (const char* name : source.file_names) {
      if (name != nullptr) names.emplace_back(name);
    }
  }
  return all.handles[index] = open_first(library, names);
}

void* require(Library library) {
  if (void* handle = handle_of(library)) return handle;
  const Source& source = source_of(library);
  throw std::runtime_error(std::string("partition: method \"") + source.name +
                           "\" needs a library that was not found; " + source.how_to_get +
                           ", or set " + source.variable + " to the path of its shared library");
}

template <class Function>
Function* symbol(Library library, const char* name) {
  void* found = dlsym(require(library), name);
  if (found == nullptr) {
    throw std::runtime_error(std::string("partition: the library found for method \"") +
                             source_of(library).name + "\" has no function " + name +
                             "; expected another version, see " + source_of(library).variable);
  }
  return reinterpret_cast<Function*>(found);
}

/// The graph in the integers of a library: rows, neighbours, node weights (empty: all alike).
template <class Int>
struct LibraryGraph {
  std::vector<Int> offsets;
  std::vector<Int> targets;
  std::vector<Int> weights;
};

template <class Int>
LibraryGraph<Int> convert(Library library, const Lists& graph, std::span<const double> weights) {
  constexpr auto kMost = static_cast<double>(std::numeric_limits<Int>::max());
  if (static_cast<double>(graph.targets.size()) > kMost) {
    throw std::runtime_error(std::string("partition: the graph has ") +
                             std::to_string(graph.targets.size()) + " links, more than method \"" +
                             source_of(library).name + "\" can number here; use hilbert or rcb");
  }
  LibraryGraph<Int> out;
  out.offsets.assign(graph.offsets.begin(), graph.offsets.end());
  out.targets.assign(graph.targets.begin(), graph.targets.end());
  if (weights.empty()) return out;
  const double heaviest = *std::max_element(weights.begin(), weights.end());
  const double most_sum = std::min(kMost, 9e15) / 4;
  const double scale = std::min(1000.0, most_sum / static_cast<double>(weights.size())) / heaviest;
  for (const double w : weights) {
    out.weights.push_back(std::max<Int>(1, static_cast<Int>(std::lround(w * scale))));
  }
  return out;
}

template <class Int>
Int* pointer_or_null(std::vector<Int>& values) {
  return values.empty() ? nullptr : values.data();
}

/// METIS says nowhere how wide its integers are; setting its options shows it: 40 entries of -1.
bool metis_is_64_bit() {
  std::array<int32_t, 96> options{};
  symbol<int(void*)>(Library::metis, "METIS_SetDefaultOptions")(options.data());
  return options[79] == -1;  // 80 halves of 40 wide entries
}

template <class Int>
std::vector<int32_t> run_metis(const Lists& graph, std::span<const double> weights,
                               int64_t num_parts, const LibraryOptions& options) {
  // The one place in METIS's list of options that releases 5.1 and 5.2 agree on; the imbalance is
  // an argument, and its random numbers start alike at every call.
  constexpr size_t kObjective = 1;
  using Partition =
      int(Int*, Int*, Int*, Int*, Int*, Int*, Int*, Int*, float*, float*, Int*, Int*, Int*);
  auto* const partition = symbol<Partition>(Library::metis, "METIS_PartGraphKway");
  LibraryGraph<Int> input = convert<Int>(Library::metis, graph, weights);
  std::array<Int, 40> settings{};
  symbol<int(Int*)>(Library::metis, "METIS_SetDefaultOptions")(settings.data());
  settings[kObjective] = options.volume ? 1 : 0;
  auto imbalance = static_cast<float>(1 + std::max(options.tolerance, kLibraryTolerance));
  auto count = static_cast<Int>(graph.num_rows());
  auto parts = static_cast<Int>(num_parts);
  Int constraints = 1;
  Int objective = 0;
  std::vector<Int> labels(static_cast<size_t>(count));
  const int status = partition(&count, &constraints, input.offsets.data(), input.targets.data(),
                               pointer_or_null(input.weights), nullptr, nullptr, &parts, nullptr,
                               &imbalance, settings.data(), &objective, labels.data());
  if (status != 1) {
    throw std::runtime_error("partition: METIS failed with status " + std::to_string(status) +
                             " (-2: bad input, -3: out of memory, -4: other)");
  }
  return {labels.begin(), labels.end()};
}

template <class Int>
std::vector<int32_t> run_kahip(const Lists& graph, std::span<const double> weights,
                               int64_t num_parts, const LibraryOptions& options) {
  using Partition = void(int*, int*, Int*, Int*, Int*, int*, double*, bool, int, int, Int*, int*);
  auto* const partition = symbol<Partition>(Library::kahip, "kaffpa");
  LibraryGraph<Int> input = convert<Int>(Library::kahip, graph, weights);
  if (graph.num_rows() > std::numeric_limits<int>::max()) {
    throw std::runtime_error("partition: KaHIP numbers nodes with 32 bits; use hilbert or rcb");
  }
  std::vector<int> node_weights(input.weights.begin(), input.weights.end());
  auto count = static_cast<int>(graph.num_rows());
  auto parts = static_cast<int>(num_parts);
  double imbalance = std::max(options.tolerance, kLibraryTolerance);
  const int mode = options.mode == "fast" ? 0 : options.mode == "eco" ? 1 : 2;
  Int cut = 0;
  std::vector<int> labels(static_cast<size_t>(count));
  partition(&count, pointer_or_null(node_weights), input.offsets.data(), nullptr,
            input.targets.data(), &parts, &imbalance, true, options.seed, mode, &cut,
            labels.data());
  return {labels.begin(), labels.end()};
}

/// Scotch's objects, freed whatever happens. The context has one thread: with more of them its
/// results would differ from call to call.
class ScotchObjects {
 public:
  ScotchObjects() {
    context_ = make("SCOTCH_contextAlloc", "SCOTCH_contextInit");
    graph_ = make("SCOTCH_graphAlloc", "SCOTCH_graphInit");
    bound_ = make("SCOTCH_graphAlloc", "SCOTCH_graphInit");
    strategy_ = make("SCOTCH_stratAlloc", "SCOTCH_stratInit");
    symbol<int(void*, int, const int*)>(Library::scotch, "SCOTCH_contextThreadSpawn")(context_, 1,
                                                                                      nullptr);
  }
  ScotchObjects(const ScotchObjects&) = delete;
  ScotchObjects& operator=(const ScotchObjects&) = delete;
  ~ScotchObjects() {
    drop("SCOTCH_stratExit", strategy_);
    drop("SCOTCH_graphExit", bound_);
    drop("SCOTCH_graphExit", graph_);
    drop("SCOTCH_contextExit", context_);
  }
  [[nodiscard]] void* context() const { return context_; }
  [[nodiscard]] void* graph() const { return graph_; }
  [[nodiscard]] void* bound() const { return bound_; }
  [[nodiscard]] void* strategy() const { return strategy_; }

 private:
  static void* make(const char* allocate, const char* initialize) {
    void* object = symbol<void*()>(Library::scotch, allocate)();
    symbol<int(void*)>(Library::scotch, initialize)(object);
    return object;
  }
  static void drop(const char* exit, void* object) {
    void* handle = handle_of(Library::scotch);
    if (auto* end = reinterpret_cast<void (*)(void*)>(dlsym(handle, exit))) end(object);
    if (auto* free = reinterpret_cast<void (*)(void*)>(dlsym(handle, "SCOTCH_memFree"))) {
      free(object);
    }
  }

  void* context_ = nullptr;
  void* graph_ = nullptr;
  void* bound_ = nullptr;  ///< The graph as seen through the context.
  void* strategy_ = nullptr;
};

template <class Int>
std::vector<int32_t> run_scotch(const Lists& graph, std::span<const double> weights,
                                int64_t num_parts, const LibraryOptions& options) {
  constexpr Int kBalanceFlag = 0x20000;  // SCOTCH_STRATBALANCE: balance before cut
  LibraryGraph<Int> input = convert<Int>(Library::scotch, graph, weights);
  ScotchObjects objects;
  symbol<void(void*, Int)>(Library::scotch, "SCOTCH_contextRandomSeed")(
      objects.context(), static_cast<Int>(options.seed));
  symbol<void(void*)>(Library::scotch, "SCOTCH_contextRandomReset")(objects.context());
  const auto check = [](int status, const char* step) {
    if (status != 0) {
      throw std::runtime_error(std::string("partition: Scotch failed in ") + step);
    }
  };
  using Build = int(void*, Int, Int, Int*, Int*, Int*, Int*, Int, Int*, Int*);
  check(symbol<Build>(Library::scotch, "SCOTCH_graphBuild")(
            objects.graph(), 0, static_cast<Int>(graph.num_rows()), input.offsets.data(), nullptr,
            pointer_or_null(input.weights), nullptr, static_cast<Int>(input.targets.size()),
            input.targets.data(), nullptr),
        "SCOTCH_graphBuild");
  check(symbol<int(void*, void*, void*)>(Library::scotch, "SCOTCH_contextBindGraph")(
            objects.context(), objects.graph(), objects.bound()),
        "SCOTCH_contextBindGraph");
  using Strategy = int(void*, Int, Int, double);
  check(symbol<Strategy>(Library::scotch, "SCOTCH_stratGraphMapBuild")(
            objects.strategy(), kBalanceFlag, static_cast<Int>(num_parts),
            std::max(options.tolerance, kLibraryTolerance)),
        "SCOTCH_stratGraphMapBuild");
  std::vector<Int> labels(static_cast<size_t>(graph.num_rows()));
  check(symbol<int(void*, Int, void*, Int*)>(Library::scotch, "SCOTCH_graphPart")(
            objects.bound(), static_cast<Int>(num_parts), objects.strategy(), labels.data()),
        "SCOTCH_graphPart");
  return {labels.begin(), labels.end()};
}

}  // namespace

std::string name_of(Library library) {
  return source_of(library).name;
}

void add_library_path(Library library, const std::string& path) {
  const std::lock_guard<std::mutex> guard(handles().lock);
  handles().paths[static_cast<size_t>(library)].push_back(path);
}

bool has_library(Library library) {
  return handle_of(library) != nullptr;
}

std::vector<int32_t> partition_with(Library library, const Lists& graph,
                                    std::span<const double> weights, int64_t num_parts,
                                    const LibraryOptions& options) {
  static std::mutex one_at_a_time;  // all three keep state in globals
  require(library);
  const std::lock_guard<std::mutex> guard(one_at_a_time);
  switch (library) {
    case Library::metis:
      return metis_is_64_bit() ? run_metis<int64_t>(graph, weights, num_parts, options)
                               : run_metis<int32_t>(graph, weights, num_parts, options);
    case Library::kahip:
      return symbol<int()>(Library::kahip, "kahip_sizeof_idx")() == 8
                 ? run_kahip<int64_t>(graph, weights, num_parts, options)
                 : run_kahip<int32_t>(graph, weights, num_parts, options);
    case Library::scotch:
      return symbol<int()>(Library::scotch, "SCOTCH_numSizeof")() == 8
                 ? run_scotch<int64_t>(graph, weights, num_parts, options)
                 : run_scotch<int32_t>(graph, weights, num_parts, options);
  }
  throw std::logic_error("partition: no such library");
}

}  // namespace shardfield::graph
