// Adaptive pooling. One output along a cut dim is a reduction over the ranks: partial results and
// one all-reduce, plain along that dim. More outputs stay sharded; each rank fetches the rows its
// own windows read.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/backward_scope.h"
#include "shardfield/comm/collectives.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/cut_rows.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/spec/adaptive.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::IntArrayRef;
using at::Tensor;
using spec::Cut;
using spec::Layout;
using spec::Range;
using tensor::is_sharded;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

void check_adaptive(const char* op, const Tensor& x, IntArrayRef out, size_t n) {
  const auto ndim = static_cast<size_t>(x.dim());
  SHARDFIELD_CHECK(out.size() == n, op, "output_size must be ", n, " numbers, got ", out);
  SHARDFIELD_CHECK(ndim == n + 1 || ndim == n + 2, op, "expected ", n + 1, "D or ", n + 2,
                   "D tensor, got ", tensor::describe(x));
  for (size_t i = 0; i < n; ++i) {
    SHARDFIELD_CHECK(out[i] >= 0, op,
                     "elements of output_size must be greater than or equal to 0, got ", out);
    SHARDFIELD_CHECK(
        x.size(static_cast<int64_t>(ndim - n + i)) > 0, op,
        "Expected input to have non-zero size for non-batch dimensions, but input has ",
        tensor::describe(x), " with dimension ", ndim - n + i, " being empty");
  }
}

/// Layout of the result: `sizes_of_dim` gives new piece sizes, dims in `plain` lose their cuts.
const Layout* result_layout(const Layout& layout, int ndim,
                            const std::map<int, std::vector<int64_t>>& sizes_of_dim,
                            const std::vector<int64_t>& plain) {
  std::vector<int> new_dim(ndim);
  for (int d = 0; d < ndim; ++d) new_dim[d] = d;
  for (int64_t d : plain) new_dim[d] = -1;
  return spec::renumber(*with_piece_sizes(layout, sizes_of_dim), new_dim);
}

// ------------------------------------------------------------------------------------- averages

/// Mean of consecutive rows of one dim for every window. Linear: backward is its transpose.
struct WindowMeanFn : Function<WindowMeanFn> {
  static Tensor forward(AutogradContext* ctx, const Tensor& in, int64_t dim,
                        const std::vector<int64_t>& begins, const std::vector<int64_t>& ends,
                        int64_t num_rows, bool adjoint) {
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["begins"] = begins;
    ctx->saved_data["ends"] = ends;
    ctx->saved_data["rows"] = num_rows;
    ctx->saved_data["adjoint"] = adjoint;
    return run(in, dim, begins, ends, num_rows, adjoint);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto begins = ctx->saved_data["begins"].toIntVector();
    const auto ends = ctx->saved_data["ends"].toIntVector();
    const int64_t dim = ctx->saved_data["dim"].toInt();
    const int64_t num_rows = ctx->saved_data["rows"].toInt();
    const bool adjoint = !ctx->saved_data["adjoint"].toBool();
    const Tensor grad = comm::records_grad(grads[0])
                            ? WindowMeanFn::apply(grads[0], dim, begins, ends, num_rows, adjoint)
                            : run(grads[0], dim, begins, ends, num_rows, adjoint);
    return {grad, {}, {}, {}, {}, {}};
  }
  static Tensor run(const Tensor& in, int64_t dim, IntArrayRef begins, IntArrayRef ends,
                    int64_t num_rows, bool adjoint) {
    auto sizes = in.sizes().vec();
    sizes[dim] = adjoint ? num_rows : static_cast<int64_t>(begins.size());
    Tensor out = adjoint ? in.new_zeros(sizes) : in.new_empty(sizes);
    for (size_t o = 0; o < begins.size(); ++o) {
      const int64_t count = ends[o] - begins[o];
      const auto at = static_cast<int64_t>(o);
      if (adjoint) {
        out.narrow(dim, begins[o], count).add_(in.narrow(dim, at, 1) / count);
      } else {
        out.narrow(dim, at, 1).copy_(in.narrow(dim, begins[o], count).mean(dim, true));
      }
    }
    return out;
  }
};

/// Averages the windows of own outputs along one dim of local rows.
Tensor window_means(const Tensor& rows, int64_t dim, int64_t num_rows, int64_t num_outputs,
                    Range outputs, int64_t first_row) {
  if (num_rows % num_outputs == 0) {
    return rows.unflatten(dim, {outputs.size(), num_rows / num_outputs}).mean(dim + 1);
  }
  std::vector<int64_t> begins, ends;
  for (int64_t o = outputs.begin; o < outputs.end; ++o) {
    const Range window = spec::adaptive_window(o, num_rows, num_outputs);
    begins.push_back(window.begin - first_row);
    ends.push_back(window.end - first_row);
  }
  if (comm::records_grad(rows))
    return WindowMeanFn::apply(rows, dim, begins, ends, rows.size(dim), false);
  return WindowMeanFn::run(rows, dim, begins, ends, rows.size(dim), false);
}

Tensor stock_adaptive_avg(const Tensor& x, IntArrayRef out) {
  return out.size() == 3 ? at::adaptive_avg_pool3d(x, out) : at::adaptive_avg_pool2d(x, out);
}

struct Averaging {
  const Tensor& x;
  IntArrayRef out;
  int64_t first;  ///< first spatial dim
  Tensor piece;
  std::vector<int64_t> plain = {};
  std::map<int, std::vector<int64_t>> piece_sizes = {};

  /// Dims with one output: local sums, one all-reduce for all of them.
  void reduce_to_one() {
    const Layout& layout = tensor::layout_of(x);
    std::vector<int64_t> dims;
    std::vector<int> axes;
    int64_t count = 1;
    for (size_t i = 0; i < out.size(); ++i) {
      const int64_t d = first + static_cast<int64_t>(i);
      if (out[i] != 1) continue;
      dims.push_back(d);
      count *= x.size(d);
    }
    for (const Cut& cut : layout.cuts()) {
      if (std::find(dims.begin(), dims.end(), cut.dim) == dims.end()) continue;
      plain.push_back(cut.dim);
      axes.insert(axes.end(), cut.axes.begin(), cut.axes.end());
    }
    if (dims.empty()) return;
    std::sort(axes.begin(), axes.end());
    piece = piece.sum(dims, true);
    if (!axes.empty()) piece = tensor::reduce_sum(piece, layout.mesh(), axes);
    piece = piece / count;
  }

  /// Whole dims with more outputs: the stock op, one output per row along the cut ones.
  void average_whole_dims() {
    const Layout& layout = tensor::layout_of(x);
    auto local_out = piece.sizes().slice(first).vec();
    bool any = false;
    for (size_t i = 0; i < out.size(); ++i) {
      if (out[i] == 1 || layout.is_cut(static_cast<int>(first + static_cast<int64_t>(i)))) continue;
      any |= local_out[i] != out[i];
      local_out[i] = out[i];
    }
    if (!any) return;
    auto sizes = piece.sizes().vec();
    std::copy(local_out.begin(), local_out.end(), sizes.begin() + first);
    if (piece.numel() == 0 || c10::multiply_integers(sizes) == 0) {
      const std::vector<int64_t> one(out.size(), 1);
      const Tensor block = grown_to(piece, std::vector<int64_t>(piece.dim(), 1));
      piece = empty_result_like(stock_adaptive_avg(block, one), sizes);
    } else {
      piece = stock_adaptive_avg(piece, local_out);
    }
  }

  void average_cut_dims() {
    const Layout& layout = tensor::layout_of(x);
    for (size_t c = 0; c < layout.cuts().size(); ++c) {
      const Cut& cut = layout.cuts()[c];
      if (cut.dim < first || out[cut.dim - first] == 1) continue;
      const int64_t num_outputs = out[cut.dim - first];
      const auto pieces = spec::plan_adaptive(cut.sizes, num_outputs);
      std::vector<Range> needed;
      for (const auto& p : pieces) {
        needed.push_back(p.inputs);
        piece_sizes[cut.dim].push_back(p.outputs.size());
      }
      const auto& own = pieces[layout.piece(c)];
      piece = fetch_rows(piece, layout, c, needed);
      auto sizes = piece.sizes().vec();
      sizes[cut.dim] = own.outputs.size();
      piece = c10::multiply_integers(sizes) == 0
                  ? empty_result(piece, sizes)
                  : window_means(piece, cut.dim, x.size(cut.dim), num_outputs, own.outputs,
                                 own.inputs.begin);
    }
  }
};

Tensor adaptive_avg(const char* op, const Tensor& input, IntArrayRef out) {
  check_adaptive(op, input, out, out.size());
  const Tensor x = with_simple_cuts(input);
  if (!is_sharded(x)) return stock_adaptive_avg(x, out);
  const int64_t first = x.dim() - static_cast<int64_t>(out.size());
  auto sizes = x.sizes().vec();
  std::copy(out.begin(), out.end(), sizes.begin() + first);
  const auto type = x.scalar_type();
  const bool half = type == at::kHalf || type == at::kBFloat16;
  Averaging a{x, out, first, tensor::local(x)};
  if (half) a.piece = a.piece.to(at::kFloat);
  a.reduce_to_one();
  a.average_whole_dims();
  a.average_cut_dims();
  const Layout* layout =
      result_layout(tensor::layout_of(x), static_cast<int>(x.dim()), a.piece_sizes, a.plain);
  return wrap_in_format_of(x, half ? a.piece.to(type) : a.piece, layout, sizes);
}

Tensor adaptive_avg_2d(const Tensor& x, c10::SymIntArrayRef out) {
  return adaptive_avg("adaptive_avg_pool2d", x, C10_AS_INTARRAYREF_SLOW(out));
}
Tensor adaptive_avg_3d(const Tensor& x, c10::SymIntArrayRef out) {
  return adaptive_avg("adaptive_avg_pool3d", x, C10_AS_INTARRAYREF_SLOW(out));
}

// -------------------------------------------------------------------------------------- maxima

using ValueAndIndex = std::tuple<Tensor, Tensor>;

ValueAndIndex stock_adaptive_max(const Tensor& x, IntArrayRef out) {
  return out.size() == 3 ? at::adaptive_max_pool3d(x, out) : at::adaptive_max_pool2d(x, out);
}

/// The windows of one dim of local rows, made equally wide by repeating their last row, which
/// changes neither a maximum nor its place.
struct EqualWindows {
  std::vector<int64_t> rows;  ///< local rows, window after window
  int64_t width = 0;
  bool identity = true;  ///< rows is 0, 1, 2, ...
};

EqualWindows equal_windows(const std::vector<Range>& windows, int64_t num_rows) {
  EqualWindows e;
  for (const Range& w : windows) e.width = std::max(e.width, w.size());
  for (const Range& w : windows)
    for (int64_t k = 0; k < e.width; ++k) e.rows.push_back(std::min(w.begin + k, w.end - 1));
  e.identity = static_cast<int64_t>(e.rows.size()) == num_rows;
  for (size_t k = 0; e.identity && k < e.rows.size(); ++k)
    e.identity = e.rows[k] == static_cast<int64_t>(k);
  return e;
}

/// Max pooling of local rows over given windows per spatial dim; indices are of the global input,
/// the first local row of dim i being row_begin[i].
ValueAndIndex max_over_windows(const Tensor& rows, const std::vector<std::vector<Range>>& windows,
                               const std::vector<int64_t>& row_begin, IntArrayRef input_sizes) {
  const size_t n = windows.size();
  const int64_t first = rows.dim() - static_cast<int64_t>(n);
  Tensor expanded = rows;
  std::vector<int64_t> kernel(n);
  std::vector<Tensor> row_of(n);
  for (size_t i = 0; i < n; ++i) {
    const int64_t d = first + static_cast<int64_t>(i);
    EqualWindows e = equal_windows(windows[i], rows.size(d));
    kernel[i] = e.width;
    row_of[i] = index_tensor(e.rows, rows);
    if (!e.identity) expanded = expanded.index_select(d, row_of[i]);
    row_of[i] = row_of[i] + row_begin[i];
  }
  auto [out, index] = n == 3 ? at::max_pool3d_with_indices(expanded, kernel, kernel)
                             : at::max_pool2d_with_indices(expanded, kernel, kernel);
  Tensor rest = index, global;
  int64_t step = 1;
  for (size_t i = n; i-- > 0;) {
    const int64_t d = first + static_cast<int64_t>(i);
    const Tensor at = i == 0 ? rest : rest.remainder(expanded.size(d));
    if (i > 0) rest = rest.div(expanded.size(d), "floor");
    const Tensor row = row_of[i].index_select(0, at.reshape(-1)).view(at.sizes()).mul_(step);
    global = global.defined() ? global.add_(row) : row;
    step *= input_sizes[d];
  }
  return {out, global};
}

/// Best value over ranks: the first index of the greatest value, the last one among NaN, as the
/// stock scan leaves it. The value's gradient goes to the rank that holds it.
ValueAndIndex best_over_ranks(const Tensor& value, const Tensor& index, const spec::Mesh& mesh,
                              const std::vector<int>& axes) {
  const Tensor own = value.detach();
  const Tensor best = comm::all_reduce(own, mesh, axes, comm::Reduction::kMax);
  const Tensor nan = best.ne(best);
  const Tensor matches = at::where(nan, own.ne(own), own.eq(best)).logical_and_(index.ge(0));
  const int64_t none = std::numeric_limits<int64_t>::max();
  const Tensor key = at::where(matches, at::where(nan, index.neg(), index), none);
  const Tensor first = comm::all_reduce(key, mesh, axes, comm::Reduction::kMin);
  const Tensor wins = key.eq(first).logical_and_(matches);
  const Tensor share = at::where(wins, value, at::zeros({}, value.options()));
  return {tensor::reduce_sum(share, mesh, axes), at::where(nan, first.neg(), first)};
}

struct Maximum {
  const Tensor& x;
  IntArrayRef out;
  int64_t first;
  Tensor piece;
  std::vector<std::vector<Range>> windows = {};
  std::vector<int64_t> row_begin = {};
  std::vector<int64_t> plain = {};
  std::vector<int> axes = {};
  std::map<int, std::vector<int64_t>> piece_sizes = {};

  /// Own windows along every spatial dim, in local rows, and the rows they read.
  void plan_and_fetch() {
    const Layout& layout = tensor::layout_of(x);
    for (size_t i = 0; i < out.size(); ++i) {
      const auto d = static_cast<int>(first + static_cast<int64_t>(i));
      const int c = layout.cut_on(d);
      windows.emplace_back();
      row_begin.push_back(0);
      if (c < 0) {
        add_windows({0, out[i]}, x.size(d), out[i]);
      } else if (out[i] == 1) {
        const Cut& cut = layout.cuts()[c];
        windows.back().push_back({0, layout.local_size(c)});
        row_begin.back() = layout.local_offset(c);
        plain.push_back(d);
        axes.insert(axes.end(), cut.axes.begin(), cut.axes.end());
      } else {
        fetch_windows(d, static_cast<size_t>(c));
      }
    }
    std::sort(axes.begin(), axes.end());
  }

  void add_windows(Range outputs, int64_t num_rows, int64_t num_outputs) {
    for (int64_t o = outputs.begin; o < outputs.end; ++o)
      windows.back().push_back(
          spec::adaptive_window(o, num_rows, num_outputs).shifted(-row_begin.back()));
  }

  void fetch_windows(int d, size_t c) {
    const Layout& layout = tensor::layout_of(x);
    const int64_t num_outputs = out[d - first];
    const auto pieces = spec::plan_adaptive(layout.cuts()[c].sizes, num_outputs);
    std::vector<Range> needed;
    for (const auto& p : pieces) {
      needed.push_back(p.inputs);
      piece_sizes[d].push_back(p.outputs.size());
    }
    const auto& own = pieces[layout.piece(c)];
    row_begin.back() = own.inputs.begin;
    add_windows(own.outputs, x.size(d), num_outputs);
    piece = fetch_rows(piece, layout, c, needed);
  }

  /// Own maxima; the lowest value and index -1 where this rank has no row of the window.
  ValueAndIndex local_maxima() const {
    auto sizes = piece.sizes().vec();
    for (size_t i = 0; i < out.size(); ++i)
      sizes[first + static_cast<int64_t>(i)] = static_cast<int64_t>(windows[i].size());
    if (piece.numel() > 0 && c10::multiply_integers(sizes) > 0) {
      return max_over_windows(piece, windows, row_begin, x.sizes());
    }
    const Tensor nothing =
        at::full(sizes, -std::numeric_limits<double>::infinity(), piece.options());
    const Tensor value = comm::records_grad(piece) ? nothing + piece.sum() * 0 : nothing;
    return {value, at::full(sizes, -1, piece.options().dtype(at::kLong))};
  }
};

ValueAndIndex adaptive_max(const char* op, const Tensor& input, IntArrayRef out) {
  check_adaptive(op, input, out, out.size());
  const Tensor x = with_simple_cuts(input);
  if (!is_sharded(x)) return stock_adaptive_max(x, out);
  const int64_t first = x.dim() - static_cast<int64_t>(out.size());
  auto sizes = x.sizes().vec();
  std::copy(out.begin(), out.end(), sizes.begin() + first);
  const Layout& layout = tensor::layout_of(x);
  Maximum m{x, out, first, tensor::local(x)};
  m.plan_and_fetch();
  auto [value, index] = m.local_maxima();
  if (!m.axes.empty())
    std::tie(value, index) = best_over_ranks(value, index, layout.mesh(), m.axes);
  const Layout* result = result_layout(layout, static_cast<int>(x.dim()), m.piece_sizes, m.plain);
  return {wrap_in_format_of(x, value, result, sizes), wrap_in_format_of(x, index, result, sizes)};
}

ValueAndIndex adaptive_max_2d(const Tensor& x, IntArrayRef out) {
  return adaptive_max("adaptive_max_pool2d", x, out);
}
ValueAndIndex adaptive_max_3d(const Tensor& x, IntArrayRef out) {
  return adaptive_max("adaptive_max_pool3d", x, out);
}

}  // namespace

SHARDFIELD_OPS(adaptive_pooling) {
  table.composed("aten::adaptive_avg_pool2d", TORCH_FN(adaptive_avg_2d));
  table.composed("aten::adaptive_avg_pool3d", TORCH_FN(adaptive_avg_3d));
  table.composed("aten::_adaptive_avg_pool2d", TORCH_FN(adaptive_avg_2d));
  table.composed("aten::_adaptive_avg_pool3d", TORCH_FN(adaptive_avg_3d));
  table.composed("aten::adaptive_max_pool2d", TORCH_FN(adaptive_max_2d));
  table.composed("aten::adaptive_max_pool3d", TORCH_FN(adaptive_max_3d));
}

}  // namespace shardfield::ops
