// Sampling at the points of a grid.
//
// Where the points of a rank lie near its piece of the image (a registration, an advection), it
// fetches the rows they touch and samples those: the rows depend on the data, so the ranks first
// tell each other which they need. Where points lie anywhere, channels are sampled alike, so a cut
// spatial dim of the image moves to the channels (or the batch) and back behind the sampling; a cut
// of the grid's points stays where it is when it uses other mesh axes than the image.

#include <limits>

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/collectives.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/exchange/rows.h"
#include "shardfield/ops/cut_rows.h"
#include "shardfield/ops/exact_sums.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/spec/range.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using spec::Cut;
using spec::Layout;
using tensor::is_sharded;
using tensor::layout_of;

/// The image with whole spatial dims.
Tensor with_whole_image(const char* op, const Tensor& image) {
  std::vector<int64_t> spatial;
  for (int64_t d = 2; d < image.dim(); ++d) spatial.push_back(d);
  Tensor x = with_simple_cuts(image);
  for (int64_t d : spatial) x = with_whole_dim(op, x, d, spatial);
  return x;
}

/// Cuts of the result (batch, channels, points...): those of the image, and of the grid (batch,
/// points..., coordinates) those on axes that the image is not cut along.
const Layout* sampled_layout(const Tensor& image, const Tensor& grid) {
  std::vector<Cut> cuts;
  const spec::Mesh* mesh = nullptr;
  if (is_sharded(image)) {
    cuts = layout_of(image).cuts();
    mesh = &layout_of(image).mesh();
  }
  const bool has_batch_cut = std::ranges::any_of(cuts, [](const Cut& c) { return c.dim == 0; });
  if (is_sharded(grid)) {
    mesh = &layout_of(grid).mesh();
    for (Cut cut : layout_of(grid).cuts()) {
      const bool is_free = std::ranges::none_of(cut.axes, [&](int a) {
        return is_sharded(image) && std::ranges::binary_search(layout_of(image).axes(), a);
      });
      if (!is_free || cut.dim == grid.dim() - 1 || (cut.dim == 0 && has_batch_cut)) continue;
      if (cut.dim > 0) ++cut.dim;
      cuts.push_back(std::move(cut));
    }
  }
  return mesh ? spec::intern_layout(*mesh, std::move(cuts)) : nullptr;
}

/// The part of an operand on this rank, its dims numbered as in the result by `dims`.
Tensor own_part(const Tensor& t, const Layout& layout, const std::vector<int>& dims) {
  const Layout* own = spec::renumber(layout, dims);
  std::vector<int> whole_axes;
  for (int a : layout.axes())
    if (!own || !std::ranges::binary_search(own->axes(), a)) whole_axes.push_back(a);
  const Tensor moved = tensor::redistribute(t, own);
  return tensor::enter(own ? tensor::local(moved) : moved, layout.mesh(), whole_axes);
}

/// Where the dims of a result lie in the grid.
std::vector<int> dims_of_grid(int64_t ndim) {
  std::vector<int> dims(ndim, -1);
  dims[0] = 0;
  for (int d = 2; d < ndim; ++d) dims[d] = d - 1;
  return dims;
}

/// The result cut along the points as the image was along its spatial dims.
Tensor cut_like_image(const Tensor& y, const Tensor& image) {
  if (!is_sharded(image) || !is_sharded(y)) return y;
  std::vector<Cut> cuts = layout_of(image).cuts();
  for (Cut& cut : cuts)
    if (image.size(cut.dim) != y.size(cut.dim))
      cut.sizes = spec::balanced_sizes(y.size(cut.dim), static_cast<int64_t>(cut.sizes.size()));
  return tensor::redistribute(y, spec::intern_layout(layout_of(image).mesh(), std::move(cuts)));
}

/// The modes of one call, and the dims of the image.
struct Sampling {
  const char* op;
  int64_t mode;     ///< 0 bilinear, 1 nearest, 2 bicubic
  int64_t padding;  ///< 0 zeros, 1 border, 2 reflection
  bool align_corners;
  int64_t dim;

  Tensor stock(const Tensor& image, const Tensor& grid) const {
    return dim == 4 ? at::grid_sampler_2d(image, grid, mode, padding, align_corners)
                    : at::grid_sampler_3d(image, grid, mode, padding, align_corners);
  }

  /// Coordinates in rows, by the arithmetic of PyTorch's kernels: the vectorized one of images on
  /// the CPU, the plain one elsewhere.
  Tensor rows_of(const Tensor& grid, int64_t n) const {
    const auto rows = static_cast<double>(align_corners ? n - 1 : n);
    Tensor x = dim == 4 && grid.is_cpu() ? (grid + 1) * (rows / 2)
               : align_corners           ? (grid + 1) / 2 * rows
                                         : (grid + 1) * rows;
    if (!align_corners) x = dim == 4 && grid.is_cpu() ? x - 0.5 : (x - 1) / 2;
    return padding == 2 ? reflected(x, n) : x;
  }
  Tensor grid_of(const Tensor& rows, int64_t n) const {
    const auto count = static_cast<double>(n);
    return align_corners ? rows * 2 / (count - 1) - 1 : (rows * 2 + 1) / count - 1;
  }

  /// The image is read as if mirrored at its first and last row (or at their outer edges).
  Tensor reflected(const Tensor& rows, int64_t n) const {
    const double low = align_corners ? 0 : -0.5;
    const auto span = static_cast<double>(align_corners ? n - 1 : n);
    if (span == 0) return rows * 0;
    Tensor distance = rows - low;
    distance = at::where(distance < 0, -distance, distance);
    const Tensor turns = (distance.detach() / span).floor();
    const Tensor rest = distance - turns * span;
    return at::where(turns.remainder(2) == 0, rest, span - rest) + low;
  }

  /// All rows that points at these coordinates of a dim of n rows read, and at least two.
  spec::Range touched(const Tensor& grid, int64_t n) const {
    if (grid.numel() == 0) return {0, 0};
    const auto count = static_cast<double>(n);
    const Tensor rows = rows_of(grid.detach(), n).nan_to_num(0).clamp(-1, count);
    const auto [low, high] = rows.aminmax();
    const int64_t reach = mode == 2 ? 2 : 1;
    const auto first = static_cast<int64_t>(std::floor(low.item<double>())) - reach;
    const auto end = static_cast<int64_t>(std::floor(high.item<double>())) + reach + 1;
    const int64_t begin = std::clamp<int64_t>(first, 0, std::max<int64_t>(n - 2, 0));
    return {begin, std::clamp<int64_t>(end, std::min(begin + 2, n), n)};
  }

  /// The same places as coordinates of a window of the rows, for `local()`.
  Tensor within(const Tensor& grid, int64_t n, spec::Range window) const {
    if (window.size() == n && local().padding == padding) return grid;
    Tensor rows = rows_of(grid, n);
    // Rounding on the way back must not carry a point over a row: the nearest row and the
    // derivative jump there.
    const Tensor place = rows.detach();
    if (mode == 1) rows = rows + (place.round() - place);
    if (mode == 0) {
      const double eps = std::numeric_limits<double>::epsilon() *
                         (grid.scalar_type() == at::kDouble ? 1.0 : 0x1p29);
      const double margin = eps * static_cast<double>(window.size() + 1);
      const Tensor cell = place.floor();
      Tensor safe = cell + (place - cell).clamp(margin, 1 - margin);
      if (padding != 0) {
        const auto last = static_cast<double>(n - 1);
        safe = at::where(place <= 0, place - margin, safe);
        safe = at::where(place >= last, place + margin, safe);
      }
      rows = rows + (safe - place);
    }
    return grid_of(rows - static_cast<double>(window.begin), window.size());
  }
  /// How a window is sampled: what `within` has mirrored is not mirrored again.
  Sampling local() const {
    Sampling s = *this;
    if (padding == 2 && mode != 2) s.padding = 1;
    return s;
  }
};

bool uses_any(const std::vector<int>& axes, const std::vector<int>& of) {
  return std::ranges::any_of(axes, [&](int a) { return std::ranges::count(of, a) > 0; });
}

/// Cuts of the result when the image stays cut along its spatial dims: those of the batch and the
/// channels, and of the points by every axis that cuts the image; the grid's own where it has them.
/// nullptr when there are none such.
const Layout* layout_of_points(const Tensor& image, const Tensor& grid) {
  if (!is_sharded(image) || layout_of(image).is_alone()) return nullptr;
  std::vector<Cut> cuts, spatial;
  std::vector<int> used;
  const auto add = [&](Cut cut) {
    used.insert(used.end(), cut.axes.begin(), cut.axes.end());
    cuts.push_back(std::move(cut));
  };
  for (const Cut& cut : layout_of(image).cuts())
    if (cut.dim < 2)
      add(cut);
    else
      spatial.push_back(cut);
  if (is_sharded(grid)) {
    for (Cut cut : layout_of(grid).cuts()) {
      if (cut.dim == 0 || cut.dim == grid.dim() - 1 || uses_any(cut.axes, used)) continue;
      ++cut.dim;
      add(std::move(cut));
    }
  }
  for (Cut& cut : spatial) {
    const auto is_used = [&](int a) { return std::ranges::count(used, a) > 0; };
    if (std::ranges::all_of(cut.axes, is_used)) continue;
    const auto same_dim = [&](const Cut& other) { return other.dim == cut.dim; };
    if (uses_any(cut.axes, used) || std::ranges::any_of(cuts, same_dim)) return nullptr;
    cut.sizes =
        spec::balanced_sizes(grid.size(cut.dim - 1), static_cast<int64_t>(cut.sizes.size()));
    add(cut);
  }
  if (spatial.empty()) return nullptr;
  return spec::intern_layout(layout_of(image).mesh(), std::move(cuts));
}

/// Which rows of each spatial cut the points of every rank touch: [mesh rank][cut].
std::vector<std::vector<spec::Range>> touched_rows(const Sampling& sampling, const Tensor& image,
                                                   const std::vector<Cut>& spatial,
                                                   const Tensor& own_grid) {
  std::vector<int64_t> mine;
  for (const Cut& cut : spatial) {
    const spec::Range rows =
        sampling.touched(own_grid.select(-1, image.dim() - 1 - cut.dim), image.size(cut.dim));
    mine.insert(mine.end(), {rows.begin, rows.end});
  }
  std::vector<std::vector<spec::Range>> touched;
  for (const auto& ends : comm::all_gather_ints(mine, layout_of(image).mesh(), own_grid.device())) {
    touched.emplace_back();
    for (size_t i = 0; i < ends.size(); i += 2) touched.back().push_back({ends[i], ends[i + 1]});
  }
  return touched;
}

/// True when some rank would hold much more of the image than its share.
bool reach_far(const Tensor& image, const std::vector<Cut>& spatial,
               const std::vector<std::vector<spec::Range>>& touched) {
  double share = 1, most = 0;
  for (const Cut& cut : spatial) share /= static_cast<double>(cut.sizes.size());
  for (const auto& rows : touched) {
    double held = 1;
    for (size_t i = 0; i < spatial.size(); ++i)
      held *= static_cast<double>(rows[i].size()) / static_cast<double>(image.size(spatial[i].dim));
    most = std::max(most, held);
  }
  return most > (1 + share) / 2;
}

/// The rows along spatial cut i for each of its pieces. Ranks of one piece that serve each other
/// along another cut take the same.
std::vector<spec::Range> windows_along(const spec::Mesh& mesh, const std::vector<Cut>& spatial,
                                       size_t i,
                                       const std::vector<std::vector<spec::Range>>& touched) {
  std::vector<bool> is_shared(mesh.shape.size(), false);
  for (const Cut& cut : spatial)
    for (int a : cut.axes) is_shared[a] = true;
  std::vector<spec::Range> windows(spatial[i].sizes.size());
  for (int r = 0; r < mesh.size(); ++r) {
    const auto coord = mesh.coord_of(r);
    bool together = true;
    for (size_t a = 0; a < coord.size(); ++a) together &= is_shared[a] || coord[a] == mesh.coord[a];
    const spec::Range own = touched[r][i];
    if (!together || own.empty()) continue;
    spec::Range& all = windows[spatial[i].piece_at(mesh, coord)];
    all =
        all.empty() ? own : spec::Range{std::min(all.begin, own.begin), std::max(all.end, own.end)};
  }
  return windows;
}

/// This rank's samples, as a piece of the result.
Tensor sampled_piece(const Sampling& sampling, const Tensor& own_image, const Tensor& own_grid,
                     const Layout& layout, at::IntArrayRef sizes) {
  const auto own_sizes = tensor::piece_sizes(layout, sizes);
  Tensor piece;
  if (c10::multiply_integers(own_sizes) > 0) {
    piece = sampling.stock(own_image, own_grid);
  } else {
    const auto at_least_one = [&](const Tensor& t) {
      return grown_to(t, std::vector<int64_t>(t.dim(), 1));
    };
    piece = empty_result_like(sampling.stock(at_least_one(own_image), at_least_one(own_grid)),
                              own_sizes);
  }
  return tensor::wrap(piece.contiguous(), &layout, sizes);
}

/// Sampling by windows; undefined where the points of a rank lie far from its piece.
Tensor sampled_in_windows(const Sampling& sampling, const Tensor& image, const Tensor& grid,
                          at::IntArrayRef sizes) {
  const Layout* layout = layout_of_points(image, grid);
  if (!layout) return {};
  const Layout& cuts = layout_of(image);
  std::vector<Cut> spatial;
  std::ranges::copy_if(cuts.cuts(), std::back_inserter(spatial),
                       [](const Cut& cut) { return cut.dim >= 2; });
  const Tensor points = own_part(grid, *layout, dims_of_grid(image.dim()));
  const auto touched = touched_rows(sampling, image, spatial, points);
  if (reach_far(image, spatial, touched)) return {};
  std::vector<int> whole_axes;
  std::ranges::set_difference(layout->axes(), cuts.axes(), std::back_inserter(whole_axes));
  Tensor rows = tensor::enter(tensor::local(image), cuts.mesh(), whole_axes);
  std::vector<Tensor> coordinates = points.unbind(-1);
  std::vector<spec::Range> window;
  for (const int64_t n : image.sizes()) window.push_back({0, n});
  for (size_t i = 0; i < spatial.size(); ++i) {
    const auto windows = windows_along(cuts.mesh(), spatial, i, touched);
    std::vector<std::vector<spec::Segment>> wanted;
    wanted.reserve(windows.size());
    for (const spec::Range& r : windows) wanted.push_back({spec::segment_of(r)});
    const int dim = spatial[i].dim;
    const auto c = static_cast<size_t>(cuts.cut_on(dim));
    rows = exchange::exchange_rows(
        rows, std::make_shared<const exchange::RowExchange>(cuts, c, std::move(wanted)));
    window[dim] = windows[cuts.piece(c)];
  }
  for (int d = 2; d < image.dim(); ++d) {
    Tensor& x = coordinates[image.dim() - 1 - d];
    if (x.numel() > 0) x = sampling.within(x, image.size(d), window[d]);
  }
  return sampled_piece(sampling.local(), rows, at::stack(coordinates, -1), *layout, sizes);
}

void check_arguments(const char* op, const Tensor& image, const Tensor& grid) {
  SHARDFIELD_CHECK(image.dim() == grid.dim() && image.size(0) == grid.size(0) &&
                       grid.size(-1) == image.dim() - 2,
                   op, "expected an image (N, C, spatial...) and a grid (N, points..., ",
                   image.dim() - 2, "), got ", tensor::describe(image), " and ",
                   tensor::describe(grid), "; give one point list per sample");
}

Tensor sampled(const Sampling& sampling, const Tensor& given, const Tensor& given_grid) {
  check_arguments(sampling.op, given, given_grid);
  const Tensor image = with_simple_cuts(given), grid = with_simple_cuts(given_grid);
  std::vector<int64_t> sizes{image.size(0), image.size(1)};
  sizes.insert(sizes.end(), grid.sizes().begin() + 1, grid.sizes().end() - 1);
  Tensor near = sampled_in_windows(sampling, image, grid, sizes);
  if (near.defined()) return near;
  const Tensor x = with_whole_image(sampling.op, image);
  const Layout* layout = sampled_layout(x, grid);
  if (!layout) return sampling.stock(tensor::gather(x), tensor::gather(grid));
  std::vector<int> of_image(x.dim(), -1);
  of_image[0] = 0;
  of_image[1] = 1;
  const Tensor y = sampled_piece(sampling, own_part(x, *layout, of_image),
                                 own_part(grid, *layout, dims_of_grid(x.dim())), *layout, sizes);
  return x.is_same(image) ? y : cut_like_image(y, image);
}

Tensor grid_sampler_2d(const Tensor& x, const Tensor& grid, int64_t mode, int64_t padding,
                       bool align_corners) {
  return sampled({"grid_sampler_2d", mode, padding, align_corners, 4}, x, grid);
}
Tensor grid_sampler_3d(const Tensor& x, const Tensor& grid, int64_t mode, int64_t padding,
                       bool align_corners) {
  return sampled({"grid_sampler_3d", mode, padding, align_corners, 5}, x, grid);
}

// Reproducible mode: the image is read at whole rows, which copies, and the neighbours are weighed
// by elementwise ops. Coordinates are those of the whole image on every rank.

/// Whole rows around points along one dim, and how much each counts.
struct Neighbours {
  std::vector<Tensor> rows, weights;
};

/// Coordinates beyond the image moved into it, as the padding mode has it. No derivative at the
/// edges and beyond, as in PyTorch.
Tensor inside(const Sampling& sampling, const Tensor& rows, int64_t n) {
  if (sampling.padding == 0) return rows;
  const Tensor x = sampling.padding == 2 ? sampling.reflected(rows, n) : rows;
  const auto last = static_cast<double>(n - 1);
  return at::where(x >= last, last, at::where(x <= 0, 0.0, x));
}

/// Cubic convolution with A = -0.75 (Keys, 1981) at distance t + 1, t, 1 - t and 2 - t.
std::vector<Tensor> cubic_weights(const Tensor& t) {
  constexpr double kA = -0.75;
  const auto near = [&](const Tensor& d) { return ((kA + 2) * d - (kA + 3)) * d * d + 1; };
  const auto far = [&](const Tensor& d) { return ((kA * d - 5 * kA) * d + 8 * kA) * d - 4 * kA; };
  return {far(t + 1), near(t), near(1 - t), far(2 - t)};
}

Neighbours neighbours(const Sampling& sampling, const Tensor& grid, int64_t n) {
  Sampling plain = sampling;
  plain.padding = 0;
  const Tensor raw = plain.rows_of(grid, n);
  if (sampling.mode == 2) {
    const Tensor below = raw.detach().floor();
    Neighbours found{{}, cubic_weights(raw - below)};
    for (int64_t k = -1; k < 3; ++k) found.rows.push_back(inside(sampling, below + k, n));
    return found;
  }
  const Tensor place = inside(sampling, raw, n);
  // The gradient of the nearest row's place is zero.
  if (sampling.mode == 1) return {{place.detach().round()}, {place * 0 + 1}};
  const Tensor below = place.detach().floor(), t = place - below;
  return {{below, below + 1}, {1 - t, t}};
}

/// Sum over all combinations of neighbours along the dims.
Tensor sampled_exactly(const Sampling& sampling, const Tensor& image, const Tensor& grid) {
  check_arguments(sampling.op, image, grid);
  const auto coordinates = grid.unbind(-1);
  const size_t n = coordinates.size();
  std::vector<Neighbours> along;
  size_t count = 1;
  for (size_t i = 0; i < n; ++i) {
    along.push_back(neighbours(sampling, coordinates[i], image.size(image.dim() - 1 - i)));
    count *= along[i].rows.size();
  }
  Tensor out;
  for (size_t k = 0; k < count; ++k) {
    std::vector<Tensor> places;
    Tensor weight;
    for (size_t i = 0, rest = k; i < n; rest /= along[i++].rows.size()) {
      const size_t j = rest % along[i].rows.size();
      const auto rows = static_cast<double>(image.size(image.dim() - 1 - i));
      places.push_back((along[i].rows[j].to(at::kDouble) * 2 + 1) / rows - 1);
      weight = i == 0 ? along[i].weights[j] : weight * along[i].weights[j];
    }
    const Tensor points = at::stack(places, -1).detach();
    const Sampling selecting{sampling.op, 1, 0, false, sampling.dim};
    const Tensor values = with_exact_gradient(
        image, [&](const Tensor& t) { return sampled(selecting, t, points.to(t.scalar_type())); });
    const Tensor share = values * weight.unsqueeze(1);
    out = out.defined() ? out + share : share;
  }
  return out;
}

Tensor grid_sampler_2d_exact(const Tensor& x, const Tensor& grid, int64_t mode, int64_t padding,
                             bool align_corners) {
  return sampled_exactly({"grid_sampler_2d", mode, padding, align_corners, 4}, x, grid);
}
Tensor grid_sampler_3d_exact(const Tensor& x, const Tensor& grid, int64_t mode, int64_t padding,
                             bool align_corners) {
  return sampled_exactly({"grid_sampler_3d", mode, padding, align_corners, 5}, x, grid);
}

}  // namespace

SHARDFIELD_OPS(grid_sample) {
  table.composed("aten::grid_sampler_2d", TORCH_FN(grid_sampler_2d));
  table.composed("aten::grid_sampler_3d", TORCH_FN(grid_sampler_3d));
  table.reproducible_composed("aten::grid_sampler_2d", TORCH_FN(grid_sampler_2d_exact));
  table.reproducible_composed("aten::grid_sampler_3d", TORCH_FN(grid_sampler_3d_exact));
}

}  // namespace shardfield::ops
