// Fourier transforms along dims that may be cut: whole dims first, on the pieces; then the cut of
// another dim moves to one that is done (an all-to-all, every rank keeps its share), and so on:
// slabs and pencils as in Pekurovsky, "P3DFFT: a framework for parallel computations of Fourier
// transforms in three dimensions" (SIAM J. Sci. Comput. 34, 2012). The result stays where the last
// step left it, and an inverse transform walks back: two all-to-alls for both along one cut dim.
// In reproducible mode dims follow each other in one order and lines are transformed one by one.

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>

#include "shardfield/dispatch/op_table.h"
#include "shardfield/dispatch/reproducible.h"
#include "shardfield/ops/cut_rows.h"
#include "shardfield/ops/fft_lines.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using tensor::is_sharded;
using tensor::layout_of;
using Kind = FourierTransform::Kind;
using Dims = std::vector<int64_t>;

bool contains(const Dims& dims, int64_t d) {
  return std::find(dims.begin(), dims.end(), d) != dims.end();
}
int64_t pieces_along(const Tensor& x, int64_t d) {
  int64_t pieces = 1;
  if (!is_sharded(x)) return pieces;
  for (const spec::Cut& cut : layout_of(x).cuts())
    if (cut.dim == d) pieces *= static_cast<int64_t>(cut.sizes.size());
  return pieces;
}
bool is_cut(const Tensor& x, int64_t d) {
  return pieces_along(x, d) > 1;
}

/// The layout of x with other lengths of dims that one rank holds.
const spec::Layout* layout_with(const Tensor& x, const Dims& dims, const Dims& sizes) {
  std::vector<spec::Cut> cuts = layout_of(x).cuts();
  for (spec::Cut& cut : cuts)
    if (contains(dims, cut.dim)) cut.sizes = {sizes[cut.dim]};
  return spec::intern_layout(layout_of(x).mesh(), std::move(cuts));
}

/// Non-negative dims; none when none are given.
Dims non_negative(at::IntArrayRef dims, int64_t ndim) {
  Dims result = dims.vec();
  at::maybe_wrap_dims(result, ndim);
  return result;
}

/// A transform along whole dims, on this rank's piece. In reproducible mode there is one dim.
Tensor on_pieces(const Tensor& x, const Dims& dims, const FourierTransform& transform) {
  if (!is_sharded(x)) return transform.along(x, dims);
  const Tensor own = tensor::local(x);
  Tensor piece;
  if (own.numel() > 0) {
    piece = dispatch::is_reproducible() ? transform_lines(own, dims[0], transform)
                                        : transform.along(own, dims);
  } else {
    // FFT libraries refuse an empty batch.
    const Tensor dummy = transform.along(grown_to(own, Dims(own.dim(), 1)), dims);
    Dims own_sizes = own.sizes().vec();
    for (int64_t d : dims) own_sizes[d] = dummy.size(d);
    piece = empty_result_like(dummy, own_sizes);
  }
  Dims sizes = x.sizes().vec();
  for (int64_t d : dims) sizes[d] = piece.size(d);
  return tensor::wrap(piece.contiguous(), layout_with(x, dims, sizes), sizes);
}

/// Where the cut of `dim` may go, best first: dims that are done, so that what follows (a product
/// of channels for each frequency) stays on its rank; the batch; dims that wait for their transform
/// and pass the cut on; last the channels.
std::vector<Dims> places_for_cut(const Tensor& x, int64_t dim, const Dims& done,
                                 const Dims& waiting) {
  Dims spare, batch;
  for (int64_t d = 0; d < x.dim(); ++d)
    if (d != dim && !contains(done, d) && !contains(waiting, d)) spare.push_back(d);
  if (spare.size() > 1 && spare[0] == 0) batch = {0};
  return {done, batch, waiting, spare};
}

Tensor with_dim_ready(const Tensor& x, int64_t dim, const Dims& done, const Dims& waiting) {
  if (!is_cut(x, dim)) return x;
  const int64_t pieces = pieces_along(x, dim);
  for (const Dims& places : places_for_cut(x, dim, done, waiting)) {
    Dims busy;
    bool fits = false;
    for (int64_t d = 0; d < x.dim(); ++d) {
      if (!contains(places, d))
        busy.push_back(d);
      else
        fits |= d != dim && !is_cut(x, d) && x.size(d) >= pieces;
    }
    if (fits) return with_whole_dim("fft", x, dim, busy);
  }
  return with_whole_dim("fft", x, dim, {});
}

/// Complex transforms along the dims `waiting`, which go over to `done`.
Tensor complex_transform(Tensor x, Dims waiting, Dims& done, int64_t norm, bool forward) {
  const FourierTransform transform{Kind::kComplex, norm, forward};
  while (!waiting.empty()) {
    Dims whole, rest;
    for (int64_t d : waiting) {
      const bool has_turn = d == waiting.front() || !dispatch::is_reproducible();
      (has_turn && !is_cut(x, d) ? whole : rest).push_back(d);
    }
    if (whole.empty()) {
      x = with_dim_ready(x, waiting.front(), done, waiting);
      continue;
    }
    x = on_pieces(x, whole, transform);
    done.insert(done.end(), whole.begin(), whole.end());
    waiting = rest;
  }
  return x;
}

Tensor complex_to_complex(const Tensor& input, c10::SymIntArrayRef dims, int64_t norm,
                          bool forward) {
  Dims done;
  const Dims wanted = non_negative(C10_AS_INTARRAYREF_SLOW(dims), input.dim());
  return complex_transform(with_simple_cuts(input), wanted, done, norm, forward);
}

Tensor real_to_complex(const Tensor& input, at::IntArrayRef dims, int64_t norm, bool onesided) {
  Dims waiting = non_negative(dims, input.dim());
  const int64_t last = waiting.back();
  waiting.pop_back();
  const Tensor x = with_dim_ready(with_simple_cuts(input), last, {}, waiting);
  Dims done = {last};
  const Tensor half = on_pieces(x, done, {Kind::kToComplex, norm, /*forward=*/true, onesided});
  return complex_transform(half, waiting, done, norm, true);
}

Tensor complex_to_real(const Tensor& input, at::IntArrayRef dims, int64_t norm,
                       c10::SymInt length) {
  Dims waiting = non_negative(dims, input.dim()), done;
  const int64_t last = waiting.back();
  waiting.pop_back();
  Tensor x = complex_transform(with_simple_cuts(input), waiting, done, norm, false);
  x = with_dim_ready(x, last, done, {});
  return on_pieces(x, {last}, {Kind::kToReal, norm, /*forward=*/false, true, length.expect_int()});
}

}  // namespace

SHARDFIELD_OPS(fft) {
  table.composed("aten::_fft_c2c", TORCH_FN(complex_to_complex));
  table.composed("aten::_fft_r2c", TORCH_FN(real_to_complex));
  table.composed("aten::_fft_c2r", TORCH_FN(complex_to_real));
}

}  // namespace shardfield::ops
