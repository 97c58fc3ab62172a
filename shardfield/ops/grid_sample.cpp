// Sampling at the points of a grid. Channels are sampled alike, so a cut spatial dim of the image
// moves to the channels (or the batch) and back behind the sampling; a cut of the grid's points
// stays where it is when it uses other mesh axes than the image.

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/cut_rows.h"
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

/// The result cut along the points as the image was along its spatial dims.
Tensor cut_like_image(const Tensor& y, const Tensor& image) {
  if (!is_sharded(image) || !is_sharded(y)) return y;
  std::vector<Cut> cuts = layout_of(image).cuts();
  for (Cut& cut : cuts)
    if (image.size(cut.dim) != y.size(cut.dim))
      cut.sizes = spec::balanced_sizes(y.size(cut.dim), static_cast<int64_t>(cut.sizes.size()));
  return tensor::redistribute(y, spec::intern_layout(layout_of(image).mesh(), std::move(cuts)));
}

template <class Stock>
Tensor sampled(const char* op, const Tensor& given, const Tensor& given_grid, Stock&& stock) {
  SHARDFIELD_CHECK(given.dim() == given_grid.dim() && given.size(0) == given_grid.size(0) &&
                       given_grid.size(-1) == given.dim() - 2,
                   op, "expected an image (N, C, spatial...) and a grid (N, points..., ",
                   given.dim() - 2, "), got ", tensor::describe(given), " and ",
                   tensor::describe(given_grid), "; give one point list per sample");
  const Tensor image = with_simple_cuts(given), grid = with_simple_cuts(given_grid);
  const Tensor x = with_whole_image(op, image);
  const Layout* layout = sampled_layout(x, grid);
  if (!layout) return stock(tensor::gather(x), tensor::gather(grid));
  const int ndim = static_cast<int>(x.dim());
  std::vector<int> of_image(ndim, -1), of_grid(ndim, -1);
  of_image[0] = of_grid[0] = 0;
  of_image[1] = 1;
  for (int d = 2; d < ndim; ++d) of_grid[d] = d - 1;
  const Tensor own_image = own_part(x, *layout, of_image),
               own_grid = own_part(grid, *layout, of_grid);
  std::vector<int64_t> sizes{x.size(0), x.size(1)};
  sizes.insert(sizes.end(), grid.sizes().begin() + 1, grid.sizes().end() - 1);
  const auto own_sizes = tensor::piece_sizes(*layout, sizes);
  Tensor piece;
  if (c10::multiply_integers(own_sizes) > 0) {
    piece = stock(own_image, own_grid);
  } else {
    const auto at_least_one = [&](const Tensor& t) {
      return grown_to(t, std::vector<int64_t>(t.dim(), 1));
    };
    piece = empty_result_like(stock(at_least_one(own_image), at_least_one(own_grid)), own_sizes);
  }
  const Tensor y = tensor::wrap(piece.contiguous(), layout, sizes);
  return x.is_same(image) ? y : cut_like_image(y, image);
}

Tensor grid_sampler_2d(const Tensor& x, const Tensor& grid, int64_t mode, int64_t padding,
                       bool align_corners) {
  return sampled("grid_sampler_2d", x, grid, [&](const Tensor& t, const Tensor& g) {
    return at::grid_sampler_2d(t, g, mode, padding, align_corners);
  });
}
Tensor grid_sampler_3d(const Tensor& x, const Tensor& grid, int64_t mode, int64_t padding,
                       bool align_corners) {
  return sampled("grid_sampler_3d", x, grid, [&](const Tensor& t, const Tensor& g) {
    return at::grid_sampler_3d(t, g, mode, padding, align_corners);
  });
}

}  // namespace

SHARDFIELD_OPS(grid_sample) {
  table.composed("aten::grid_sampler_2d", TORCH_FN(grid_sampler_2d));
  table.composed("aten::grid_sampler_3d", TORCH_FN(grid_sampler_3d));
}

}  // namespace shardfield::ops
