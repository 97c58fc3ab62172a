#include <numeric>

#include <pybind11/functional.h>
#include <pybind11/numpy.h>

#include "bindings/module.h"

#include "shardfield/comm/collectives.h"
#include "shardfield/exchange/listed_rows.h"
#include "shardfield/graph/bistride.h"
#include "shardfield/graph/curve.h"
#include "shardfield/graph/halo_graph.h"
#include "shardfield/graph/library.h"
#include "shardfield/graph/partition.h"

namespace shardfield::bindings {

namespace py = pybind11;

namespace {

using Doubles = py::array_t<double, py::array::c_style>;
using Ints = py::array_t<int64_t, py::array::c_style>;
using Labels = py::array_t<int32_t, py::array::c_style>;

/// Shows a NumPy array's memory and keeps it alive.
template <class T>
graph::Array<T> borrow(const py::array_t<T, py::array::c_style>& array) {
  auto* object = new py::object(array);
  std::shared_ptr<const void> keeper(object, [](py::object* held) {
    const py::gil_scoped_acquire gil;
    delete held;
  });
  return graph::Array<T>(std::span<const T>(array.data(), static_cast<size_t>(array.size())),
                         std::move(keeper));
}

template <class T>
std::span<const T> view(const py::array_t<T, py::array::c_style>& array) {
  return {array.data(), static_cast<size_t>(array.size())};
}

/// A NumPy array over memory that `owner` keeps alive.
template <class T>
py::array_t<T> shown(const std::vector<T>& values, py::handle owner) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data(), owner);
}

/// A NumPy array that takes the vector over.
template <class T>
py::array_t<T> given(std::vector<T> values) {
  auto* kept = new std::vector<T>(std::move(values));
  const py::capsule owner(kept, [](void* memory) { delete static_cast<std::vector<T>*>(memory); });
  return shown(*kept, owner);
}

graph::CellBlock block_of(int kind, const Ints& nodes, const py::object& offsets,
                          const py::object& kinds) {
  if (!kinds.is_none()) {
    return graph::CellBlock::mixed(borrow(kinds.cast<py::array_t<uint8_t, py::array::c_style>>()),
                                   borrow(nodes), borrow(offsets.cast<Ints>()));
  }
  const auto cell_kind = static_cast<graph::CellKind>(kind);
  if (offsets.is_none()) return graph::CellBlock::uniform(cell_kind, borrow(nodes));
  return graph::CellBlock::ragged(cell_kind, borrow(nodes), borrow(offsets.cast<Ints>()));
}

std::shared_ptr<graph::Mesh> mesh_of(
    const Doubles& points,
    const std::vector<std::tuple<int, Ints, py::object, py::object>>& cells) {
  std::vector<graph::CellBlock> blocks;
  for (const auto& [kind, nodes, offsets, kinds] : cells) {
    blocks.push_back(block_of(kind, nodes, offsets, kinds));
  }
  const auto dim = static_cast<int>(points.shape(1));
  auto coordinates = borrow(points);
  const py::gil_scoped_release no_gil;
  return std::make_shared<graph::Mesh>(std::move(coordinates), dim, std::move(blocks));
}

graph::GhostRule rule_of(const std::string& contact, int64_t layers, double radius) {
  graph::GhostRule rule{graph::Contact::point, layers, radius};
  if (contact == "facet") rule.contact = graph::Contact::facet;
  if (contact == "radius") rule.contact = graph::Contact::radius;
  if (contact != "point" && contact != "facet" && contact != "radius") {
    throw std::invalid_argument("partition: unknown contact \"" + contact +
                                R"("; expected "point", "facet" or "radius")");
  }
  return rule;
}

graph::PartitionOptions options_of(const std::string& method, const Doubles& weights,
                                   double tolerance, const graph::GhostRule& rule, int num_threads,
                                   int seed, const py::object& progress) {
  graph::PartitionOptions options;
  options.method = method;
  options.weights = view(weights);
  options.tolerance = tolerance;
  options.ghosts = rule;
  options.num_threads = num_threads;
  options.seed = seed;
  if (!progress.is_none()) {
    options.progress = [progress](const std::string& what) {
      const py::gil_scoped_acquire gil;
      progress(what);
    };
  }
  return options;
}

py::tuple labels_with_story(graph::Labels labels) {
  py::list trials;
  for (const graph::Trial& t : labels.trials) {
    trials.append(py::make_tuple(t.method, t.largest_halo, t.total_halo, t.imbalance, t.seconds));
  }
  return py::make_tuple(given(std::move(labels.parts)), labels.method, trials);
}

py::tuple label_cells(const graph::Mesh& mesh, int64_t num_parts, const std::string& method,
                      const Doubles& weights, double tolerance, int64_t layers, int num_threads,
                      int seed, const py::object& progress) {
  const auto options = options_of(method, weights, tolerance, rule_of("point", layers, 0),
                                  num_threads, seed, progress);
  graph::Labels labels;
  {
    const py::gil_scoped_release no_gil;
    labels = graph::partition_labels(mesh, num_parts, options);
  }
  return labels_with_story(std::move(labels));
}

/// The ranks of a mesh, for algorithms that know no transport.
graph::Together together_on(const spec::Mesh& mesh, const c10::Device& device) {
  std::vector<int> axes(mesh.shape.size());
  std::iota(axes.begin(), axes.end(), 0);
  const auto reduce = [&mesh, device, axes](void* data, size_t count, at::ScalarType type,
                                            comm::Reduction how) {
    const at::Tensor here = at::from_blob(data, {static_cast<int64_t>(count)}, type);
    here.copy_(comm::all_reduce(here.to(device), mesh, axes, how));
  };
  const auto every = [&mesh, device](const std::vector<int64_t>& own) {
    return comm::all_gather_ints(own, mesh, device);
  };
  graph::Together together;
  together.max = [reduce](std::span<double> values) {
    reduce(values.data(), values.size(), at::kDouble, comm::Reduction::kMax);
  };
  together.sum = [reduce](std::span<int64_t> values) {
    reduce(values.data(), values.size(), at::kLong, comm::Reduction::kSum);
  };
  together.first = [every, rank = mesh.rank](int64_t value) {
    const auto all = every({value});
    int64_t before = 0;
    for (int r = 0; r < rank; ++r) before += all[static_cast<size_t>(r)][0];
    return before;
  };
  together.gather = [every](std::span<const int64_t> own) {
    const auto counts = every({static_cast<int64_t>(own.size())});
    int64_t most = 0;
    for (const auto& count : counts) most = std::max(most, count[0]);
    if (most == 0) return std::vector<int64_t>();
    std::vector<int64_t> padded(own.begin(), own.end());
    padded.resize(static_cast<size_t>(most));
    const auto all = every(padded);
    std::vector<int64_t> joined;
    for (size_t r = 0; r < all.size(); ++r) {
      joined.insert(joined.end(), all[r].begin(), all[r].begin() + counts[r][0]);
    }
    return joined;
  };
  return together;
}

Labels label_range(const Doubles& centers, const std::string& method, int64_t num_parts,
                   const spec::Mesh& mesh, const std::string& device, int num_threads) {
  const auto curve = method == "morton" ? graph::Curve::morton : graph::Curve::hilbert;
  std::vector<int32_t> labels;
  {
    const py::gil_scoped_release no_gil;
    labels = graph::cut_ranges(view(centers), curve, graph::CurveBox::stretched, num_parts,
                               together_on(mesh, c10::Device(device)), num_threads);
  }
  return given(std::move(labels));
}

using Pieces = std::vector<std::shared_ptr<graph::Piece>>;

Pieces shared(std::vector<graph::Piece> pieces) {
  Pieces out;
  for (graph::Piece& piece : pieces) {
    out.push_back(std::make_shared<graph::Piece>(std::move(piece)));
  }
  return out;
}

py::dict quality_as_dict(graph::Quality quality) {
  py::dict out;
  out["cut"] = quality.cut;
  out["cells"] = given(std::move(quality.cells));
  out["loads"] = given(std::move(quality.loads));
  out["halos"] = given(std::move(quality.halos));
  out["facet_halos"] = given(std::move(quality.facet_halos));
  out["fragments"] = given(std::move(quality.fragments));
  return out;
}

py::tuple cut_mesh(const graph::Mesh& mesh, int64_t num_parts, const std::string& method,
                   const Doubles& weights, double tolerance, const std::string& contact,
                   int64_t layers, double radius, int num_threads, int seed,
                   const py::object& progress) {
  const auto options = options_of(method, weights, tolerance, rule_of(contact, layers, radius),
                                  num_threads, seed, progress);
  graph::Partition cut;
  {
    const py::gil_scoped_release no_gil;
    cut = graph::partition(mesh, num_parts, options);
  }
  return py::make_tuple(labels_with_story(std::move(cut.labels)), shared(std::move(cut.pieces)),
                        quality_as_dict(std::move(cut.quality)));
}

py::tuple cut_by_labels(const graph::Mesh& mesh, const Labels& labels, int64_t num_parts,
                        const std::string& contact, int64_t layers, double radius,
                        int num_threads) {
  graph::PartitionOptions options;
  options.ghosts = rule_of(contact, layers, radius);
  options.num_threads = num_threads;
  std::vector<int32_t> parts(labels.data(), labels.data() + labels.size());
  graph::Partition cut;
  {
    const py::gil_scoped_release no_gil;
    cut = graph::partition_by_labels(mesh, std::move(parts), num_parts, options);
  }
  return py::make_tuple(shared(std::move(cut.pieces)), quality_as_dict(std::move(cut.quality)));
}

py::tuple label_nodes(const Ints& offsets, const Ints& targets, const Doubles& coordinates,
                      int64_t num_parts, const std::string& method, const Doubles& weights,
                      double tolerance, int num_threads, int seed) {
  graph::Lists lists;
  lists.offsets.assign(offsets.data(), offsets.data() + offsets.size());
  lists.targets.assign(targets.data(), targets.data() + targets.size());
  const auto options =
      options_of(method, weights, tolerance, rule_of("point", 0, 0), num_threads, seed, py::none());
  graph::Labels labels;
  {
    const py::gil_scoped_release no_gil;
    labels = graph::partition_nodes(lists, view(coordinates), num_parts, options);
  }
  return labels_with_story(std::move(labels));
}

/// Nodes, offsets and targets of each coarser level.
std::vector<std::tuple<py::array, py::array, py::array>> coarse_levels(const Ints& offsets,
                                                                       const Ints& targets,
                                                                       int64_t num_levels) {
  graph::Lists lists;
  lists.offsets.assign(offsets.data(), offsets.data() + offsets.size());
  lists.targets.assign(targets.data(), targets.data() + targets.size());
  std::vector<graph::CoarseLevel> levels;
  {
    const py::gil_scoped_release no_gil;
    levels = graph::bistride_levels(graph::symmetric(lists), num_levels);
  }
  std::vector<std::tuple<py::array, py::array, py::array>> out;
  for (graph::CoarseLevel& level : levels) {
    out.emplace_back(given(std::move(level.nodes)), given(std::move(level.links.offsets)),
                     given(std::move(level.links.targets)));
  }
  return out;
}

std::vector<std::shared_ptr<graph::ExchangePlan>> plan_rows(const std::vector<Ints>& rows,
                                                            const Labels& owners) {
  std::vector<std::span<const int64_t>> views;
  views.reserve(rows.size());
  for (const Ints& part : rows) views.push_back(view(part));
  std::vector<std::shared_ptr<graph::ExchangePlan>> out;
  for (graph::ExchangePlan& plan : graph::plan_exchanges(views, view(owners))) {
    out.push_back(std::make_shared<graph::ExchangePlan>(std::move(plan)));
  }
  return out;
}

/// A plan from what `num_owned`, `num_rows`, `sends` and `receives` show.
graph::ExchangePlan plan_of(int64_t num_owned, int64_t num_rows,
                            const std::vector<std::tuple<int64_t, std::vector<int64_t>>>& sends,
                            const std::vector<std::tuple<int64_t, int64_t, int64_t>>& receives) {
  graph::ExchangePlan plan{num_owned, num_rows, {}, {}};
  for (const auto& [part, rows] : sends) plan.sends.push_back({part, rows});
  for (const auto& [part, begin, count] : receives) plan.receives.push_back({part, begin, count});
  return plan;
}

graph::Library library_named(const std::string& name) {
  for (const auto library :
       {graph::Library::metis, graph::Library::kahip, graph::Library::scotch}) {
    if (graph::name_of(library) == name) return library;
  }
  throw std::invalid_argument("partition: no library is called \"" + name + "\"");
}

/// A read-only property that shows a vector of the object itself.
template <class T, class Class>
void show(Class& cls, const char* name, std::vector<T> graph::Piece::* member) {
  cls.def_property_readonly(name, [member](const py::object& self) {
    return shown(self.cast<graph::Piece&>().*member, self);
  });
}

void bind_pieces(py::module_& m) {
  py::class_<graph::ExchangePlan, std::shared_ptr<graph::ExchangePlan>>(m, "ExchangePlan")
      .def(py::init(&plan_of))
      .def_readonly("num_owned", &graph::ExchangePlan::num_owned)
      .def_readonly("num_rows", &graph::ExchangePlan::num_rows)
      .def_property_readonly("sends",
                             [](const py::object& self) {
                               py::list out;
                               for (const auto& to : self.cast<graph::ExchangePlan&>().sends) {
                                 out.append(py::make_tuple(to.part, shown(to.rows, self)));
                               }
                               return out;
                             })
      .def_property_readonly("receives", [](const graph::ExchangePlan& plan) {
        py::list out;
        for (const auto& from : plan.receives) {
          out.append(py::make_tuple(from.part, from.begin, from.count));
        }
        return out;
      });
  py::class_<graph::Piece, std::shared_ptr<graph::Piece>> piece(m, "Piece");
  piece.def_readonly("part", &graph::Piece::part);
  show(piece, "cells", &graph::Piece::cells);
  show(piece, "cell_owners", &graph::Piece::cell_owners);
  show(piece, "cell_layers", &graph::Piece::cell_layers);
  show(piece, "points", &graph::Piece::points);
  show(piece, "point_owners", &graph::Piece::point_owners);
  show(piece, "kinds", &graph::Piece::kinds);
  show(piece, "offsets", &graph::Piece::offsets);
  show(piece, "nodes", &graph::Piece::nodes);
  piece.def_readonly("cell_exchange", &graph::Piece::cell_exchange);
  piece.def_readonly("point_exchange", &graph::Piece::point_exchange);
}

/// A graph cut into parts, with the arrays that the checker compares them with.
struct HaloParts {
  std::vector<Labels> owners;
  std::vector<std::tuple<int64_t, int64_t, Ints, Ints>> relations;
  graph::WholeGraph whole;
  std::vector<graph::HaloPart> parts;
};

std::shared_ptr<HaloParts> cut_graph(
    std::vector<Labels> owners, std::vector<std::tuple<int64_t, int64_t, Ints, Ints>> relations,
    int64_t num_parts, int64_t hops) {
  auto out = std::make_shared<HaloParts>();
  out->owners = std::move(owners);
  out->relations = std::move(relations);
  out->whole.num_parts = num_parts;
  for (const Labels& list : out->owners) out->whole.owners.push_back(view(list));
  for (const auto& [source_kind, target_kind, sources, targets] : out->relations) {
    out->whole.relations.push_back({source_kind, target_kind, view(sources), view(targets)});
  }
  const py::gil_scoped_release no_gil;
  out->parts = graph::cut_graph(out->whole, hops);
  return out;
}

py::dict local_nodes(const py::object& self, size_t part, size_t kind) {
  auto& nodes = self.cast<HaloParts&>().parts.at(part).kinds.at(kind);
  py::dict out;
  out["nodes"] = shown(nodes.nodes, self);
  out["owners"] = shown(nodes.owners, self);
  out["hops"] = shown(nodes.hops, self);
  out["exchange"] = std::make_shared<graph::ExchangePlan>(nodes.exchange);
  return out;
}

py::dict local_links(const py::object& self, size_t part, size_t relation) {
  const auto& links = self.cast<HaloParts&>().parts.at(part).relations.at(relation);
  py::dict out;
  out["links"] = shown(links.links, self);
  out["sources"] = shown(links.sources, self);
  out["targets"] = shown(links.targets, self);
  out["target_hops"] = shown(links.target_hops, self);
  out["num_interior"] = links.num_interior;
  out["in_degrees"] = shown(links.in_degrees, self);
  out["out_degrees"] = shown(links.out_degrees, self);
  return out;
}

std::shared_ptr<exchange::ListedRows> listed_rows(const spec::Mesh& mesh, int axis,
                                                  const graph::ExchangePlan& plan,
                                                  const std::string& device) {
  std::vector<exchange::ListedRows::Send> sends;
  std::vector<exchange::ListedRows::Receive> receives;
  for (const graph::RowsTo& to : plan.sends) {
    sends.push_back({static_cast<int>(to.part), at::tensor(to.rows, at::kLong).to(device)});
  }
  for (const graph::RowsFrom& from : plan.receives) {
    receives.push_back({static_cast<int>(from.part), from.begin, from.count});
  }
  return std::make_shared<exchange::ListedRows>(mesh, axis, plan.num_owned, plan.num_rows,
                                                std::move(sends), std::move(receives));
}

void bind_halo_graphs(py::module_& m) {
  py::class_<HaloParts, std::shared_ptr<HaloParts>>(m, "HaloParts")
      .def("nodes", &local_nodes)
      .def("links", &local_links)
      .def("faults",
           [](const HaloParts& cut) {
             const py::gil_scoped_release no_gil;
             return graph::faults_of(cut.whole, cut.parts);
           })
      .def("cost", [](const HaloParts& cut, int64_t num_layers, bool exchange_per_layer) {
        const auto cost = graph::cost_of(cut.parts, num_layers, exchange_per_layer);
        return std::make_pair(cost.exchanged_rows, cost.redundant_links);
      });
  m.def("graph_cut_graph", &cut_graph);
  const py::class_<exchange::ListedRows::Pending, std::shared_ptr<exchange::ListedRows::Pending>>
      pending(m, "PendingRows");
  py::class_<exchange::ListedRows, std::shared_ptr<exchange::ListedRows>>(m, "ListedRows")
      .def("fetch",
           [](const std::shared_ptr<exchange::ListedRows>& rows, const at::Tensor& own) {
             const py::gil_scoped_release no_gil;
             return exchange::fetch_rows(own, rows);
           })
      .def("give_back",
           [](const std::shared_ptr<exchange::ListedRows>& rows, const at::Tensor& all) {
             const py::gil_scoped_release no_gil;
             return exchange::return_rows(all, rows);
           })
      .def("start",
           [](const exchange::ListedRows& rows, const at::Tensor& own) {
             const py::gil_scoped_release no_gil;
             return rows.start(own);
           })
      .def("finish", [](const std::shared_ptr<exchange::ListedRows>& rows, const at::Tensor& own,
                        const std::shared_ptr<exchange::ListedRows::Pending>& pending) {
        const py::gil_scoped_release no_gil;
        return exchange::finish_rows(own, rows, pending);
      });
  m.def("graph_listed_rows", &listed_rows);
}

}  // namespace

void bind_graph(py::module_& m) {
  py::class_<graph::Mesh, std::shared_ptr<graph::Mesh>>(m, "GraphMesh")
      .def(py::init(&mesh_of))
      .def_property_readonly("num_points", &graph::Mesh::num_points)
      .def_property_readonly("num_cells", &graph::Mesh::num_cells)
      .def_property_readonly("cell_dim", &graph::Mesh::cell_dim)
      .def("centroids", [](const graph::Mesh& mesh, int num_threads) {
        auto flat = given(mesh.centroids(num_threads));
        return flat.reshape({static_cast<py::ssize_t>(mesh.num_cells()), py::ssize_t{3}});
      });
  bind_pieces(m);
  bind_halo_graphs(m);
  m.def("graph_label_cells", &label_cells);
  m.def("graph_label_range", &label_range);
  m.def("graph_cut_mesh", &cut_mesh);
  m.def("graph_cut_by_labels", &cut_by_labels);
  m.def("graph_plan_exchanges", &plan_rows);
  m.def("graph_label_nodes", &label_nodes);
  m.def("graph_bistride_levels", &coarse_levels);
  m.def("graph_methods", &graph::methods_here, NoGil());
  m.def("graph_add_library_path", [](const std::string& name, const std::string& path) {
    graph::add_library_path(library_named(name), path);
  });
}

}  // namespace shardfield::bindings
