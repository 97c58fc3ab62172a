#include "shardfield/points/search.h"

#include <algorithm>
#include <cmath>
#include <set>

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/collectives.h"
#include "shardfield/exchange/cut_ranks.h"
#include "shardfield/ops/index.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/points/boxes.h"
#include "shardfield/points/kd_tree.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::points {

namespace {

using at::Tensor;
using spec::Layout;
using tensor::is_sharded;
using tensor::layout_of;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kBoxes = 32;  // per rank: a few kB tell well where its points lie

/// Points or queries, cut on rows.
struct Cloud {
  Tensor rows;
  const Layout* layout = nullptr;  ///< null when plain
  Tensor values;                   ///< float64 (own rows, dims) on the CPU
  int64_t first = 0;               ///< global number of the first own row

  explicit Cloud(const Tensor& x) : rows(x) {
    if (is_sharded(x)) {
      const Tensor simple = ops::with_simple_cuts(x);
      rows = tensor::redistribute(simple, ops::cut_on_first(simple, 0, 2));
      layout = &layout_of(rows);
      first = layout->local_offset(0);
    }
    const at::NoGradGuard no_grad;
    values = (layout ? tensor::piece_of(rows) : rows).detach().to(at::kCPU, at::kDouble);
    values = values.contiguous();
  }
  int64_t size() const { return values.size(0); }
  int64_t dims() const { return values.size(1); }
  const double* at(int64_t row) const { return values.const_data_ptr<double>() + row * dims(); }
  Tensor numbers() const { return at::arange(first, first + size(), at::kLong); }
};

/// Points on their way, in their own dtype.
struct Sent {
  Tensor coordinates, numbers;
};

/// The ranks that hold all points between them.
struct Group {
  const spec::Mesh* mesh = nullptr;
  std::vector<int> axes;
  std::vector<int> peers;  ///< mesh ranks, in the order of their pieces' gathers
  size_t own = 0;
  c10::Device device;

  explicit Group(const Cloud& points) : device(points.rows.device()) {
    if (!points.layout) return;
    mesh = &points.layout->mesh();
    axes = points.layout->axes();
    peers = exchange::ranks_over(*mesh, axes);
    own = static_cast<size_t>(std::find(peers.begin(), peers.end(), mesh->rank) - peers.begin());
  }
  bool is_alone() const { return peers.size() < 2; }

  std::vector<Boxes> gather(const Boxes& mine) const {
    const Tensor tables = comm::all_gather(mine.table(kBoxes).to(device), *mesh, axes).cpu();
    std::vector<Boxes> all;
    for (const Tensor& table : tables.unbind(0)) all.push_back(Boxes::from_table(table));
    return all;
  }

  /// Points for each peer and those that the peers have for this rank, one exchange; how many is
  /// told first.
  Sent swap(const std::vector<Sent>& mine) const {
    std::vector<int64_t> counts;
    for (const Sent& part : mine) counts.push_back(part.numbers.size(0));
    const Tensor all =
        comm::all_gather(at::tensor(counts, at::kLong).to(device), *mesh, axes).cpu();
    const Tensor theirs = all.select(1, static_cast<int64_t>(own)).contiguous();
    std::vector<comm::Message> sends, recvs;
    std::vector<Tensor> coordinates, numbers;
    for (size_t p = 0; p < peers.size(); ++p) {
      const int64_t count = p == own ? 0 : theirs.const_data_ptr<int64_t>()[p];
      const Sent& part = mine[p];
      coordinates.push_back(
          at::empty({count, part.coordinates.size(1)}, part.coordinates.options().device(device)));
      numbers.push_back(at::empty({count}, part.numbers.options().device(device)));
      if (p == own) continue;
      for (const Tensor& t : {part.coordinates, part.numbers})
        sends.push_back({peers[p], t.to(device)});
      for (const Tensor& t : {coordinates.back(), numbers.back()}) recvs.push_back({peers[p], t});
    }
    comm::start_exchange(*mesh, std::move(sends), std::move(recvs)).wait();
    return {at::cat(coordinates).cpu(), at::cat(numbers).cpu()};
  }
};

/// The same on every rank of every axis that cuts something, or an error on all of them.
void check_alike(const char* op, const Cloud& points, const Cloud& queries, double asked) {
  const bool finite =
      points.values.isfinite().all().item<bool>() && queries.values.isfinite().all().item<bool>();
  bool alike = true, all_finite = finite;
  const Cloud& sharded = points.layout ? points : queries;
  if (sharded.layout) {
    std::set<int> axes(sharded.layout->axes().begin(), sharded.layout->axes().end());
    if (queries.layout) axes.insert(queries.layout->axes().begin(), queries.layout->axes().end());
    const Tensor mine = at::tensor(
        {asked, static_cast<double>(points.rows.size(0)), static_cast<double>(queries.rows.size(0)),
         static_cast<double>(points.dims()), finite ? 1.0 : 0.0},
        at::kDouble);
    const Tensor all = comm::all_gather(mine.to(sharded.rows.device()), sharded.layout->mesh(),
                                        {axes.begin(), axes.end()})
                           .cpu()
                           .view({-1, 5});
    alike = (all.narrow(1, 0, 4) == mine.narrow(0, 0, 4)).all().item<bool>();
    all_finite = all.select(1, 4).all().item<bool>();
  }
  SHARDFIELD_CHECK(alike, op,
                   "expected the same k or radius and the same sizes on every rank, got ", asked,
                   ", points ", points.rows.sizes(), ", queries ", queries.rows.sizes(),
                   " here and others elsewhere; pass equal ones");
  SHARDFIELD_CHECK(all_finite, op, "expected finite coordinates, got ",
                   finite ? "NaN or infinity on another rank" : "NaN or infinity on this rank",
                   "; leave such points out");
}

void check_arguments(const char* op, const Tensor& points, const Tensor& queries) {
  SHARDFIELD_CHECK(points.dim() == 2 && queries.dim() == 2 && points.size(1) == queries.size(1) &&
                       points.size(1) > 0,
                   op, "expected points (n, dims) and queries (m, dims), got ", points.sizes(),
                   " and ", queries.sizes(), "; search the samples of a batch one by one");
  SHARDFIELD_CHECK(points.is_floating_point() && points.scalar_type() == queries.scalar_type(), op,
                   "expected floating points and queries of one dtype, got ", points.scalar_type(),
                   " and ", queries.scalar_type(), "; convert one of them");
  SHARDFIELD_CHECK(!is_sharded(points) || !is_sharded(queries) ||
                       &layout_of(points).mesh() == &layout_of(queries).mesh(),
                   op, "points and queries are of two meshes: ", tensor::describe(points), " and ",
                   tensor::describe(queries), "; bring them to one mesh");
}

/// Plain queries of sharded points are shared out: every rank would do the same work otherwise.
Tensor shared_out(const Tensor& points, const Tensor& queries) {
  if (is_sharded(queries) || !is_sharded(points)) return queries;
  return tensor::redistribute(queries,
                              ops::cut_over_all_axes(layout_of(points), 0, queries.size(0)));
}

/// Per own query its neighbours.
using Lists = std::vector<std::vector<Found>>;

/// Squared distance within which the k nearest points of a query lie at the latest.
double extent_of(const std::vector<Boxes>& boxes, const double* query, int64_t k) {
  std::vector<std::pair<double, int64_t>> extent;
  for (const Boxes& b : boxes) b.add_extent(query, extent);
  std::sort(extent.begin(), extent.end());
  int64_t held = 0;
  for (const auto& [squared, count] : extent) {
    held += count;
    if (held >= k) return squared;
  }
  return kInfinity;
}

/// The points of other ranks that the reach of this rank's queries, told by boxes, includes.
KdTree fetch_near(const Cloud& points, const Group& group, const Boxes& reach) {
  const auto boxes = group.gather(reach);
  std::vector<Sent> parts;
  for (size_t p = 0; p < boxes.size(); ++p) {
    std::vector<int64_t> near;
    for (int64_t i = 0; p != group.own && i < points.size(); ++i)
      if (boxes[p].reach_to(points.at(i))) near.push_back(i);
    const Tensor rows = at::tensor(near, at::kLong);
    parts.push_back(
        {points.values.index_select(0, rows).to(points.rows.scalar_type()), rows + points.first});
  }
  const Sent near = group.swap(parts);
  return {near.coordinates.to(at::kDouble), near.numbers};
}

/// Adds what is found elsewhere, keeping the order and the number.
void merge(std::vector<Found>& list, const std::vector<Found>& more, int64_t most) {
  const auto middle = static_cast<int64_t>(list.size());
  list.insert(list.end(), more.begin(), more.end());
  std::inplace_merge(list.begin(), list.begin() + middle, list.end());
  if (static_cast<int64_t>(list.size()) > most) list.resize(static_cast<size_t>(most));
}

Lists nearest(const Cloud& points, const Cloud& queries, int64_t k) {
  const KdTree tree(points.values, points.numbers());
  Lists lists;
  for (int64_t q = 0; q < queries.size(); ++q)
    lists.push_back(tree.search(queries.at(q), k, kInfinity));
  const Group group(points);
  if (group.is_alone()) return lists;
  const std::vector<double> none(static_cast<size_t>(points.size()));
  const auto boxes = group.gather(Boxes::around(points.values, none, kBoxes));
  // Queries that may have a nearer point elsewhere, and how far they look.
  std::vector<int64_t> open;
  std::vector<double> bounds;
  for (int64_t q = 0; q < queries.size(); ++q) {
    const auto& found = lists[static_cast<size_t>(q)];
    const double bound = static_cast<int64_t>(found.size()) == k ? found.back().squared : kInfinity;
    double away = kInfinity;
    for (size_t p = 0; p < boxes.size(); ++p)
      if (p != group.own) away = std::min(away, boxes[p].squared_distance(queries.at(q)));
    if (away > bound || away == kInfinity) continue;
    open.push_back(q);
    bounds.push_back(std::min(bound, extent_of(boxes, queries.at(q), k)));
  }
  const Tensor rows = queries.values.index_select(0, at::tensor(open, at::kLong));
  const KdTree others = fetch_near(points, group, Boxes::around(rows, bounds, kBoxes));
  for (size_t i = 0; i < open.size(); ++i)
    merge(lists[static_cast<size_t>(open[i])], others.search(queries.at(open[i]), k, bounds[i]), k);
  return lists;
}

Lists within(const Cloud& points, const Cloud& queries, double radius, int64_t most) {
  const double squared = radius * radius;
  const auto search = [&](const KdTree& tree) {
    Lists lists;
    for (int64_t q = 0; q < queries.size(); ++q)
      lists.push_back(tree.search(queries.at(q), most, squared));
    return lists;
  };
  Lists lists = search(KdTree(points.values, points.numbers()));
  const Group group(points);
  if (group.is_alone()) return lists;
  const std::vector<double> reach(static_cast<size_t>(queries.size()), squared);
  const Lists more =
      search(fetch_near(points, group, Boxes::around(queries.values, reach, kBoxes)));
  for (size_t q = 0; q < lists.size(); ++q) merge(lists[q], more[q], most);
  return lists;
}

/// (queries, width) of indices and distances from lists; unused places 0.
struct Table {
  Tensor indices, distances, is_used;

  Table(const Lists& lists, int64_t width, const Cloud& queries)
      : indices(at::zeros({queries.size(), width}, at::kLong)),
        distances(at::zeros({queries.size(), width}, at::kDouble)),
        is_used(at::zeros({queries.size(), width}, at::kBool)) {
    auto* index = indices.data_ptr<int64_t>();
    auto* distance = distances.data_ptr<double>();
    auto* used = is_used.data_ptr<bool>();
    for (size_t q = 0; q < lists.size(); ++q) {
      for (size_t i = 0; i < lists[q].size(); ++i) {
        const size_t place = q * static_cast<size_t>(width) + i;
        index[place] = lists[q][i].number;
        distance[place] = std::sqrt(lists[q][i].squared);
        used[place] = true;
      }
    }
    const auto device = queries.rows.device();
    const std::vector<int64_t> sizes{queries.rows.size(0), width};
    const auto shared = [&](const Tensor& t) {
      return tensor::make_sharded(t.to(device), queries.layout, sizes);
    };
    indices = shared(indices);
    distances = shared(distances.to(queries.rows.scalar_type()));
    is_used = shared(is_used);
  }
};

/// Rows of points as differentiable values; a row that several ranks want travels to each once.
Tensor rows_of(const Cloud& cloud, const Tensor& indices) {
  std::vector<int64_t> sizes = indices.sizes().vec();
  sizes.push_back(cloud.dims());
  return cloud.rows.index_select(0, indices.reshape(-1)).view(sizes);
}

bool records(const Cloud& points, const Cloud& queries) {
  return tensor::records_grad(points.rows) || tensor::records_grad(queries.rows);
}

Tensor distance_of(const Tensor& a, const Tensor& b) {
  return at::linalg_vector_norm(a - b, 2, at::IntArrayRef{-1});
}

/// Fixed shape: the nearest ones per query.
Neighbors in_table(const Lists& lists, int64_t width, const Cloud& points, const Cloud& queries,
                   bool with_points, bool with_distances) {
  const Table table(lists, width, queries);
  Neighbors out{table.indices, {}, with_distances ? table.distances : Tensor()};
  const bool recorded = with_distances && records(points, queries);
  if (!with_points && !recorded) return out;
  const Tensor rows = rows_of(points, table.indices);
  if (recorded)
    out.distances = distance_of(rows, queries.rows.unsqueeze(1)).masked_fill(~table.is_used, 0);
  if (with_points) out.points = rows.masked_fill(~table.is_used.unsqueeze(-1), 0);
  return out;
}

/// All pairs, cut along the pairs.
Neighbors in_pairs(const Lists& lists, const Cloud& points, const Cloud& queries, bool with_points,
                   bool with_distances) {
  std::vector<int64_t> from, to;
  std::vector<double> distances;
  for (size_t q = 0; q < lists.size(); ++q) {
    for (const Found& one : lists[q]) {
      from.push_back(queries.first + static_cast<int64_t>(q));
      to.push_back(one.number);
      distances.push_back(std::sqrt(one.squared));
    }
  }
  const auto device = queries.rows.device();
  auto total = static_cast<int64_t>(to.size());
  const Layout* rows = nullptr;
  const Layout* columns = nullptr;
  if (queries.layout) {
    spec::Cut cut = queries.layout->cuts()[0];
    cut.sizes = ops::selected_counts(*queries.layout, 0, total, device);
    total = cut.total();
    rows = spec::intern_layout(queries.layout->mesh(), {cut});
    cut.dim = 1;
    columns = spec::intern_layout(queries.layout->mesh(), {cut});
  }
  const Tensor pairs = at::stack({at::tensor(from, at::kLong), at::tensor(to, at::kLong)});
  Neighbors out{tensor::make_sharded(pairs.to(device), columns, {2, total}), {}, {}};
  const bool recorded = with_distances && records(points, queries);
  if (with_points || recorded) out.points = rows_of(points, out.indices.select(0, 1));
  if (recorded) {
    out.distances = distance_of(out.points, rows_of(queries, out.indices.select(0, 0)));
  } else if (with_distances) {
    const Tensor own = at::tensor(distances, at::kDouble);
    out.distances = tensor::make_sharded(own.to(device, queries.rows.scalar_type()), rows, {total});
  }
  if (!with_points) out.points = Tensor();
  return out;
}

/// Results of plain queries are plain.
Neighbors as_asked(Neighbors found, const Tensor& queries) {
  if (is_sharded(queries)) return found;
  for (Tensor* t : {&found.indices, &found.points, &found.distances})
    if (t->defined()) *t = tensor::gather(*t);
  return found;
}

}  // namespace

Neighbors knn(const Tensor& points_arg, const Tensor& queries_arg, int64_t k) {
  const char* op = "knn";
  const comm::CallScope scope(op);
  check_arguments(op, points_arg, queries_arg);
  SHARDFIELD_CHECK(k >= 1 && k <= points_arg.size(0), op, "expected k from 1 to the ",
                   points_arg.size(0), " points, got ", k);
  const Cloud points(points_arg), queries(shared_out(points_arg, queries_arg));
  check_alike(op, points, queries, static_cast<double>(k));
  return as_asked(in_table(nearest(points, queries, k), k, points, queries, false, true),
                  queries_arg);
}

Neighbors radius_search(const Tensor& points_arg, const Tensor& queries_arg, double radius,
                        const RadiusOptions& options) {
  const char* op = "radius_search";
  const comm::CallScope scope(op);
  check_arguments(op, points_arg, queries_arg);
  SHARDFIELD_CHECK(radius >= 0 && std::isfinite(radius), op,
                   "expected a finite radius of at least 0, got ", radius);
  const int64_t most = options.max_points.value_or(KdTree::kAll);
  SHARDFIELD_CHECK(most >= 1, op, "expected max_points of at least 1, got ", most,
                   "; leave it out for all points");
  const Cloud points(points_arg), queries(shared_out(points_arg, queries_arg));
  check_alike(op, points, queries, radius);
  const Lists lists = within(points, queries, radius, most);
  const bool with_points = options.return_points, with_distances = options.return_distances;
  return as_asked(options.max_points
                      ? in_table(lists, most, points, queries, with_points, with_distances)
                      : in_pairs(lists, points, queries, with_points, with_distances),
                  queries_arg);
}

}  // namespace shardfield::points
