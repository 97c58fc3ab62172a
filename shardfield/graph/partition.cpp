#include "shardfield/graph/partition.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>

#include "shardfield/graph/balance.h"
#include "shardfield/graph/bisection.h"
#include "shardfield/graph/curve.h"
#include "shardfield/graph/levels.h"
#include "shardfield/graph/library.h"
#include "shardfield/graph/swaps.h"

namespace shardfield::graph {

namespace {

constexpr int kSwapRounds = 12;
constexpr size_t kSwapped = 3;  // how many of the best candidates are improved further
constexpr int64_t kMostCellsForLibraries = 1'000'000;  // above, "auto" would take minutes

[[noreturn]] void fail(const std::string& text) {
  throw std::invalid_argument("partition: " + text);
}

std::optional<Library> library_of(const std::string& method) {
  for (const Library library : {Library::metis, Library::kahip, Library::scotch}) {
    if (method == name_of(library)) return library;
  }
  return std::nullopt;
}

bool is_geometric(const std::string& method) {
  return method == "hilbert" || method == "morton" || method == "rcb";
}

void check_options(int64_t num_rows, int64_t num_parts, const PartitionOptions& options) {
  if (num_parts < 1) fail("expected at least 1 part, got " + std::to_string(num_parts));
  if (num_parts > std::numeric_limits<int32_t>::max()) {
    fail("expected fewer than 2^31 parts, got " + std::to_string(num_parts));
  }
  if (!(options.tolerance >= 0) || !std::isfinite(options.tolerance)) {
    fail("expected a tolerance of 0 or more, got " + std::to_string(options.tolerance));
  }
  const std::string& method = options.method;
  if (method != "auto" && method != "levels" && !is_geometric(method) && !library_of(method)) {
    std::string known;
    for (const std::string& name : methods_here()) known += ", " + name;
    fail("unknown method \"" + method + "\"; here there are auto" + known);
  }
  if (options.weights.empty()) return;
  if (static_cast<int64_t>(options.weights.size()) != num_rows) {
    fail("expected one weight for each of " + std::to_string(num_rows) + " cells, got " +
         std::to_string(options.weights.size()));
  }
  double total = 0;
  for (size_t i = 0; i < options.weights.size(); ++i) {
    if (!(options.weights[i] >= 0) || !std::isfinite(options.weights[i])) {
      fail("weight " + std::to_string(i) + " is " + std::to_string(options.weights[i]) +
           "; expected finite weights of 0 or more");
    }
    total += options.weights[i];
  }
  if (!(total > 0) || !std::isfinite(total)) {
    fail("the weights sum to " + std::to_string(total) + "; expected a positive, finite sum");
  }
}

/// The weights times a power of two that brings the largest to 1 .. 2: exact, and tolerances for
/// rounding mean the same in any unit.
std::vector<double> without_unit(std::span<const double> weights) {
  std::vector<double> scaled(weights.begin(), weights.end());
  if (scaled.empty()) return scaled;
  const int exponent = std::ilogb(*std::max_element(scaled.begin(), scaled.end()));
  for (double& weight : scaled) weight = std::scalbn(weight, -exponent);
  return scaled;
}

/// One partitioning job: what is cut, and the pieces of knowledge that several methods share.
class Job {
 public:
  Job(int64_t num_rows, int64_t num_parts, const PartitionOptions& options)
      : num_rows_(num_rows),
        num_parts_(num_parts),
        given_weights_(options.weights),
        weights_(without_unit(options.weights)),
        options_(options) {
    options_.weights = weights_;
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  virtual ~Job() = default;

  Labels run() {
    if (num_parts_ == 1) {
      return {std::vector<int32_t>(static_cast<size_t>(num_rows_)), options_.method, {}};
    }
    return options_.method == "auto" ? best_of_all() : single(options_.method);
  }

 protected:
  [[nodiscard]] virtual const Lists& dual() = 0;                ///< What libraries partition.
  [[nodiscard]] virtual const Lists& contacts() = 0;            ///< What the halo is counted with.
  [[nodiscard]] virtual std::span<const double> centers() = 0;  ///< Empty: no coordinates.
  [[nodiscard]] virtual std::vector<int64_t> halos(const std::vector<int32_t>& labels) = 0;

  void tell(const std::string& what) const {
    if (options_.progress) options_.progress(what);
  }
  [[nodiscard]] const PartitionOptions& options() const { return options_; }
  [[nodiscard]] std::span<const double> given_weights() const { return given_weights_; }
  [[nodiscard]] int64_t num_parts() const { return num_parts_; }

 private:
  std::vector<int32_t> by_curve(Curve curve, CurveBox box) {
    return cut_order(curve_keys(centers(), curve, box, options_.num_threads), options_.weights,
                     num_parts_, options_.num_threads);
  }

  std::vector<int32_t> by_library(Library library, bool volume) {
    LibraryOptions wanted;
    wanted.volume = volume;
    wanted.tolerance = options_.tolerance;
    wanted.seed = options_.seed;
    if (!has_library(library))
      return partition_with(library, {}, {}, num_parts_, wanted);  // throws
    if (num_rows_ <= num_parts_) return spread();
    std::vector<int32_t> labels =
        partition_with(library, dual(), options_.weights, num_parts_, wanted);
    check_labels(labels, num_rows_, num_parts_, "cell");
    repair_balance(dual(), options_.weights, balance(), num_parts_, labels);
    return labels;
  }

  /// At most as many rows as parts: one each, as a curve would.
  [[nodiscard]] std::vector<int32_t> spread() const {
    std::vector<int32_t> labels;
    labels.reserve(static_cast<size_t>(num_rows_));
    for (int64_t row = 0; row < num_rows_; ++row) {
      labels.push_back(static_cast<int32_t>(row * num_parts_ / num_rows_));
    }
    return labels;
  }

  std::vector<int32_t> compute(const std::string& method) {
    if (is_geometric(method) && centers().empty()) {
      fail("method \"" + method + "\" needs coordinates, and this graph came without");
    }
    if (method == "hilbert") return by_curve(Curve::hilbert, CurveBox::stretched);
    if (method == "hilbert (cubic box)") return by_curve(Curve::hilbert, CurveBox::cubic);
    if (method == "morton") return by_curve(Curve::morton, CurveBox::stretched);
    if (method == "rcb") {
      return bisect(centers(), options_.weights, num_parts_, options_.num_threads);
    }
    if (method == "levels") return halve_by_levels(dual(), options_.weights, num_parts_);
    if (method == "metis (volume)") return by_library(Library::metis, true);
    return by_library(*library_of(method), false);
  }

  [[nodiscard]] Balance balance() const {
    return balance_of(options_.weights, num_rows_, num_parts_, options_.tolerance);
  }

  Trial judge(const std::string& method, const std::vector<int32_t>& labels) {
    Trial trial;
    trial.method = method;
    for (const int64_t halo : halos(labels)) {
      trial.largest_halo = std::max(trial.largest_halo, halo);
      trial.total_halo += halo;
    }
    std::vector<double> loads(static_cast<size_t>(num_parts_));
    double total = 0;
    for (size_t i = 0; i < labels.size(); ++i) {
      const double w = options_.weights.empty() ? 1 : options_.weights[i];
      loads[static_cast<size_t>(labels[i])] += w;
      total += w;
    }
    trial.imbalance =
        *std::max_element(loads.begin(), loads.end()) * static_cast<double>(num_parts_) / total;
    return trial;
  }

  Labels single(const std::string& method) {
    tell(method);
    return {compute(method), method, {}};
  }

  [[nodiscard]] std::vector<std::string> portfolio() {
    std::vector<std::string> methods;
    if (!centers().empty()) methods = {"hilbert", "hilbert (cubic box)", "morton", "rcb"};
    if (methods.empty()) methods.emplace_back("levels");
    if (num_rows_ > kMostCellsForLibraries) return methods;
    if (has_library(Library::metis)) {
      methods.emplace_back("metis");
      methods.emplace_back("metis (volume)");
    }
    if (has_library(Library::kahip)) methods.emplace_back("kahip");
    if (has_library(Library::scotch)) methods.emplace_back("scotch");
    return methods;
  }

  static bool better(const Trial& a, const Trial& b) {
    return a.largest_halo != b.largest_halo ? a.largest_halo < b.largest_halo
                                            : a.total_halo < b.total_halo;
  }

  /// All methods, the best few with swaps after; the best of these.
  Labels best_of_all() {
    using Clock = std::chrono::steady_clock;
    Labels result;
    std::vector<std::pair<Trial, std::vector<int32_t>>> tried;
    const auto add = [&](const std::string& name, auto&& make) {
      tell(name);
      const auto start = Clock::now();
      std::vector<int32_t> labels = make();
      Trial trial = judge(name, labels);
      trial.seconds = std::chrono::duration<double>(Clock::now() - start).count();
      result.trials.push_back(trial);
      tried.emplace_back(trial, std::move(labels));
    };
    for (const std::string& method : portfolio()) add(method, [&] { return compute(method); });
    const auto rank = [&] {
      std::stable_sort(tried.begin(), tried.end(),
                       [](const auto& a, const auto& b) { return better(a.first, b.first); });
    };
    rank();
    tried.resize(std::min<size_t>(tried.size(), kSwapped));
    if (num_rows_ <= kMostCellsForLibraries) {
      for (size_t i = 0; i < std::min<size_t>(tried.size(), kSwapped); ++i) {
        const std::vector<int32_t> start = tried[i].second;
        add(tried[i].first.method + " + swaps", [&] {
          std::vector<int32_t> labels = start;
          lower_halos(contacts(), options_.weights, balance(), num_parts_, kSwapRounds, labels);
          return labels;
        });
      }
      rank();
    }
    result.parts = std::move(tried.front().second);
    result.method = tried.front().first.method;
    return result;
  }

  int64_t num_rows_;
  int64_t num_parts_;
  std::span<const double> given_weights_;
  std::vector<double> weights_;
  PartitionOptions options_;  ///< With `weights_` for weights.
};

/// The rule by which a model's halo is counted; labels without ghosts are judged by one layer.
GhostRule judged_rule(GhostRule rule) {
  rule.layers = std::max<int64_t>(rule.layers, 1);
  return rule;
}

class MeshJob final : public Job {
 public:
  MeshJob(const Mesh& mesh, int64_t num_parts, const PartitionOptions& options)
      : Job(mesh.num_cells(), num_parts, options),
        mesh_(mesh),
        rule_(judged_rule(options.ghosts)) {}

  const Lists& dual() override {
    if (!dual_) {
      tell("cells across facets");
      dual_ = cells_across_facets(mesh_, options().num_threads);
    }
    return *dual_;
  }

  /// Pieces and quality for these labels.
  Partition complete(Labels labels) {
    Partition result;
    result.labels = std::move(labels);
    const std::vector<int32_t>& parts = result.labels.parts;
    tell("ghosts and exchange plans");
    result.pieces =
        cut_into_pieces(mesh_, parts, num_parts(), options().ghosts, options().num_threads);
    tell("quality");
    result.quality = measure(dual(), halos(parts), parts, num_parts(), given_weights());
    return result;
  }

 private:
  const Neighbours& neighbours() {
    if (!neighbours_) neighbours_.emplace(mesh_, rule_, options().num_threads);
    return *neighbours_;
  }
  const Lists& contacts() override {
    if (!contacts_) contacts_ = neighbours().lists(options().num_threads);
    return *contacts_;
  }
  std::span<const double> centers() override {
    if (centers_.empty()) centers_ = mesh_.centroids(options().num_threads);
    return centers_;
  }
  std::vector<int64_t> halos(const std::vector<int32_t>& labels) override {
    return halo_sizes(neighbours(), labels, num_parts(), rule_.layers, options().num_threads);
  }

  const Mesh& mesh_;
  GhostRule rule_;
  std::optional<Lists> dual_;
  std::optional<Lists> contacts_;
  std::optional<Neighbours> neighbours_;
  std::vector<double> centers_;
};

class NodeJob final : public Job {
 public:
  NodeJob(const Lists& graph, std::span<const double> coordinates, int64_t num_parts,
          const PartitionOptions& options)
      : Job(graph.num_rows(), num_parts, options),
        graph_(symmetric(graph)),
        coordinates_(coordinates) {}

 private:
  const Lists& dual() override { return graph_; }
  const Lists& contacts() override { return graph_; }
  std::span<const double> centers() override { return coordinates_; }
  std::vector<int64_t> halos(const std::vector<int32_t>& labels) override {
    std::vector<int64_t> sizes(static_cast<size_t>(num_parts()));
    std::vector<int32_t> touched;
    for (int64_t node = 0; node < graph_.num_rows(); ++node) {
      touched.clear();
      for (const int64_t other : graph_[node]) {
        const int32_t part = labels[static_cast<size_t>(other)];
        if (part == labels[static_cast<size_t>(node)] ||
            std::find(touched.begin(), touched.end(), part) != touched.end()) {
          continue;
        }
        touched.push_back(part);
        ++sizes[static_cast<size_t>(part)];
      }
    }
    return sizes;
  }

  Lists graph_;
  std::span<const double> coordinates_;
};

void check_mesh_method(const PartitionOptions& options) {
  if (options.method == "levels") {
    fail(
        "method \"levels\" is for graphs without coordinates; a mesh has better ones: auto, rcb, "
        "hilbert");
  }
}

}  // namespace

Labels partition_labels(const Mesh& mesh, int64_t num_parts, const PartitionOptions& options) {
  check_options(mesh.num_cells(), num_parts, options);
  check_mesh_method(options);
  check_ghost_rule(options.ghosts);
  if (options.ghosts.layers != 0) {
    throw std::invalid_argument(
        "partition_labels: expected ghost_layers of 0, got " +
        std::to_string(options.ghosts.layers) +
        "; one label per cell cannot say whose ghost it is, because a cell can be a ghost of "
        "several parts: use partition, whose pieces list their ghosts");
  }
  return MeshJob(mesh, num_parts, options).run();
}

Partition partition(const Mesh& mesh, int64_t num_parts, const PartitionOptions& options) {
  check_options(mesh.num_cells(), num_parts, options);
  check_mesh_method(options);
  check_ghost_rule(options.ghosts);
  MeshJob job(mesh, num_parts, options);
  return job.complete(job.run());
}

Partition partition_by_labels(const Mesh& mesh, std::vector<int32_t> labels, int64_t num_parts,
                              const PartitionOptions& options) {
  check_options(mesh.num_cells(), num_parts, options);
  check_ghost_rule(options.ghosts);
  check_labels(labels, mesh.num_cells(), num_parts, "cell");
  return MeshJob(mesh, num_parts, options).complete({std::move(labels), "given labels", {}});
}

Labels partition_nodes(const Lists& graph, std::span<const double> coordinates, int64_t num_parts,
                       const PartitionOptions& options) {
  check_options(graph.num_rows(), num_parts, options);
  if (graph.num_rows() == 0) fail("the graph is empty; expected at least one node");
  for (const int64_t target : graph.targets) {
    if (target < 0 || target >= graph.num_rows()) {
      fail("a link leads to node " + std::to_string(target) + "; expected 0 to " +
           std::to_string(graph.num_rows() - 1));
    }
  }
  if (!coordinates.empty() && static_cast<int64_t>(coordinates.size()) != graph.num_rows() * 3) {
    fail("expected 3 coordinates for each of " + std::to_string(graph.num_rows()) + " nodes, got " +
         std::to_string(coordinates.size()) + " in all");
  }
  return NodeJob(graph, coordinates, num_parts, options).run();
}

std::vector<std::string> methods_here() {
  std::vector<std::string> methods{"hilbert", "morton", "rcb"};
  for (const Library library : {Library::metis, Library::kahip, Library::scotch}) {
    if (has_library(library)) methods.push_back(name_of(library));
  }
  return methods;
}

}  // namespace shardfield::graph
