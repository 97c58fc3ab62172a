// Max and average pooling over windows. Each rank fetches the rows its own outputs need, puts the
// padding of the global edge on, and calls the stock op. Nothing but max pooling's indices is
// saved for backward. 1-D average pooling and Lp pooling decompose into these.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/backward_scope.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/cut_rows.h"
#include "shardfield/ops/moments.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/spec/finer_layout.h"
#include "shardfield/spec/window.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::IntArrayRef;
using at::Tensor;
using spec::Cut;
using spec::Layout;
using spec::Window;
using tensor::is_sharded;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

/// Parameters of the stock op, one per spatial dim.
struct PoolParams {
  std::vector<int64_t> kernel, stride, padding, dilation;
  bool ceil_mode = false;

  size_t num_dims() const { return kernel.size(); }
  Window window(size_t i) const {
    return {kernel[i], stride[i], dilation[i], padding[i], padding[i]};
  }
};

std::vector<int64_t> one_per_dim(const char* op, const char* what, IntArrayRef value, size_t n) {
  SHARDFIELD_CHECK(value.size() == 1 || value.size() == n, op, "expected ", what,
                   " to be a single int, or a tuple of ", n, " ints, got ", value);
  return value.size() == n ? value.vec() : std::vector<int64_t>(n, value[0]);
}

PoolParams pool_params(const char* op, const Tensor& x, size_t n, IntArrayRef kernel,
                       IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                       bool ceil_mode) {
  PoolParams p;
  p.kernel = one_per_dim(op, "kernel_size", kernel, n);
  p.stride = stride.empty() ? p.kernel : one_per_dim(op, "stride", stride, n);
  p.padding = one_per_dim(op, "padding", padding, n);
  p.dilation = one_per_dim(op, "dilation", dilation, n);
  p.ceil_mode = ceil_mode;
  const auto ndim = static_cast<size_t>(x.dim());
  SHARDFIELD_CHECK(ndim == n + 1 || ndim == n + 2, op, "expected ", n + 1, "D or ", n + 2,
                   "D input, got ", tensor::describe(x));
  for (size_t i = 0; i < n; ++i) {
    SHARDFIELD_CHECK(p.kernel[i] > 0 && p.stride[i] > 0 && p.dilation[i] > 0, op,
                     "kernel_size, stride and dilation should be greater than zero, got ", p.kernel,
                     ", ", p.stride, ", ", p.dilation);
    SHARDFIELD_CHECK(p.padding[i] >= 0 && p.padding[i] <= p.window(i).extent() / 2, op,
                     "pad should be at most half of effective kernel size, but got pad=",
                     p.padding[i], ", kernel_size=", p.kernel[i], " and dilation=", p.dilation[i]);
  }
  return p;
}

/// This rank's share of a pooling: the padded rows its outputs read.
struct PoolPiece {
  Tensor rows;                     ///< local input with halo; padding of cut dims attached
  PoolParams local;                ///< parameters of the stock call on `rows`
  const Layout* layout;            ///< of the output
  std::vector<int64_t> sizes;      ///< of the output, global
  std::vector<int64_t> own_sizes;  ///< of the output, local
  std::vector<int64_t> row_begin;  ///< global number of the first row of `rows`, per spatial dim
  std::vector<int64_t> first_output;
  std::vector<int64_t> pad_lo;  ///< attached padding rows in front, per spatial dim
};

PoolPiece pool_piece(const char* op, const Tensor& x, const PoolParams& params,
                     const at::Scalar& fill) {
  const size_t n = params.num_dims();
  const int64_t first = x.dim() - static_cast<int64_t>(n);
  const Layout& layout = tensor::layout_of(x);
  PoolPiece p;
  p.local = params;
  p.sizes = x.sizes().vec();
  p.row_begin.assign(n, 0);
  p.first_output.assign(n, 0);
  p.pad_lo.assign(n, 0);
  for (size_t i = 0; i < n; ++i) {
    int64_t& size = p.sizes[first + i];
    size = spec::num_outputs(x.size(first + static_cast<int64_t>(i)), params.window(i),
                             params.ceil_mode);
    SHARDFIELD_CHECK(size > 0, op, "Output size is too small: ", size, " at dimension ", first + i,
                     " for input ", tensor::describe(x), ", kernel_size=", params.kernel);
  }
  p.rows = tensor::local(x);
  std::vector<int64_t> pad(2 * n, 0);
  std::map<int, std::vector<int64_t>> piece_sizes;
  for (size_t c = 0; c < layout.cuts().size(); ++c) {
    const Cut& cut = layout.cuts()[c];
    if (cut.dim < first) continue;
    const size_t i = cut.dim - first;
    const auto pieces = spec::plan_window(cut.sizes, params.window(i), p.sizes[cut.dim]);
    std::vector<spec::Range> needed;
    for (const auto& piece : pieces) {
      needed.push_back(piece.inputs);
      piece_sizes[cut.dim].push_back(piece.outputs.size());
    }
    const auto& own = pieces[layout.piece(c)];
    p.rows = fetch_rows(p.rows, layout, c, needed);
    p.local.padding[i] = 0;
    pad[2 * (n - 1 - i)] = own.pad_lo;
    pad[2 * (n - 1 - i) + 1] = own.pad_hi;
    p.pad_lo[i] = own.pad_lo;
    p.row_begin[i] = own.outputs.begin * params.stride[i] - params.padding[i];
    p.first_output[i] = own.outputs.begin;
  }
  p.layout = with_piece_sizes(layout, piece_sizes);
  spec::remember_finer(p.layout, &layout);
  p.own_sizes = p.layout->local_sizes(p.sizes.data(), static_cast<int>(x.dim()));
  const bool padded = std::any_of(pad.begin(), pad.end(), [](int64_t v) { return v != 0; });
  if (padded && c10::multiply_integers(p.own_sizes) > 0)
    p.rows = at::constant_pad_nd(p.rows, pad, fill);
  return p;
}

/// The stock op's result for an x of which no other rank holds a part.
Tensor result_alone(const Tensor& x, const Tensor& out) {
  return wrap_in_format_of(x, out, layout_when_alone(tensor::layout_of(x), out.sizes()),
                           out.sizes());
}

// ---------------------------------------------------------------------------------- max pooling

std::tuple<Tensor, Tensor> stock_max_pool(const Tensor& x, const PoolParams& p) {
  if (p.num_dims() == 3) {
    return at::max_pool3d_with_indices(x, p.kernel, p.stride, p.padding, p.dilation, p.ceil_mode);
  }
  return at::max_pool2d_with_indices(x, p.kernel, p.stride, p.padding, p.dilation, p.ceil_mode);
}

/// A window of nothing but -inf reports its first row, which may be padding here; PyTorch reports
/// the first row inside the input. Moves such indices, in place.
void move_out_of_padding(Tensor& index, const PoolPiece& p) {
  const size_t n = p.local.num_dims();
  const int64_t first = p.rows.dim() - static_cast<int64_t>(n);
  int64_t step = 1;
  for (size_t i = n; i-- > 0;) {
    const int64_t d = first + static_cast<int64_t>(i);
    const int64_t num_rows = p.rows.size(d);
    if (p.pad_lo[i] > 0) {
      const int64_t s = p.local.stride[i], dilation = p.local.dilation[i];
      Tensor touched = index.narrow(d, 0, std::min(index.size(d), (p.pad_lo[i] + s - 1) / s));
      const Tensor row = touched.div(step, "floor").remainder_(num_rows);
      const Tensor short_of = row.neg_().add_(p.pad_lo[i]).clamp_min_(0);
      touched.add_(short_of.add_(dilation - 1).div_(dilation, "floor").mul_(dilation * step));
    }
    step *= num_rows;
  }
}

/// Max pooling of the padded rows. Linear in them once the indices are known, so backward is the
/// stock backward op, which has a derivative of its own. Saves the indices only.
struct MaxPoolFn : Function<MaxPoolFn> {
  static variable_list forward(AutogradContext* ctx, const Tensor& rows, const PoolPiece* piece) {
    auto [out, index] = stock_max_pool(rows, piece->local);
    move_out_of_padding(index, *piece);
    const PoolParams& p = piece->local;
    comm::remember_scope(ctx);
    ctx->saved_data["kernel"] = p.kernel;
    ctx->saved_data["stride"] = p.stride;
    ctx->saved_data["padding"] = p.padding;
    ctx->saved_data["dilation"] = p.dilation;
    ctx->saved_data["ceil"] = p.ceil_mode;
    ctx->saved_data["sizes"] = rows.sizes().vec();
    ctx->save_for_backward({index});
    ctx->mark_non_differentiable({index});
    return {out, index};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto list = [&](const char* key) { return ctx->saved_data[key].toIntVector(); };
    const auto kernel = list("kernel");
    const Tensor index = ctx->get_saved_variables()[0];
    const Tensor like = sizes_only(grads[0], list("sizes"));
    const auto backward_op = kernel.size() == 3 ? &at::max_pool3d_with_indices_backward
                                                : &at::max_pool2d_with_indices_backward;
    return {backward_op(grads[0], like, kernel, list("stride"), list("padding"), list("dilation"),
                        ctx->saved_data["ceil"].toBool(), index),
            {}};
  }
};

std::tuple<Tensor, Tensor> pooled_piece(const PoolPiece& p) {
  if (c10::multiply_integers(p.own_sizes) == 0) {
    return {empty_result(p.rows, p.own_sizes),
            at::empty(p.own_sizes, p.rows.options().dtype(at::kLong))};
  }
  if (comm::records_grad(p.rows)) {
    const auto result = MaxPoolFn::apply(p.rows, &p);
    return {result[0], result[1]};
  }
  auto [out, index] = stock_max_pool(p.rows, p.local);
  move_out_of_padding(index, p);
  return {out, index};
}

/// Index in the flattened global input, from the index in the flattened padded rows.
Tensor global_index(const Tensor& index, const PoolPiece& p, IntArrayRef input_sizes) {
  const size_t n = p.local.num_dims();
  const int64_t first = static_cast<int64_t>(input_sizes.size() - n);
  Tensor rest = index;
  Tensor out;
  int64_t step = 1;
  for (size_t i = n; i-- > 0;) {
    const int64_t num_rows = p.rows.size(first + static_cast<int64_t>(i));
    Tensor row = i == 0 ? rest : rest.remainder(num_rows);
    if (i > 0) rest = rest.div(num_rows, "floor");
    row = (row + p.row_begin[i]) * step;
    out = out.defined() ? out.add_(row) : row;
    step *= input_sizes[first + static_cast<int64_t>(i)];
  }
  return out;
}

at::Scalar lowest(at::ScalarType type) {
  if (at::isIntegralType(type, false)) {
    return AT_DISPATCH_INTEGRAL_TYPES(type, "max_pool", [] {
      return at::Scalar(static_cast<int64_t>(std::numeric_limits<scalar_t>::lowest()));
    });
  }
  return -std::numeric_limits<double>::infinity();
}

template <size_t n>
std::tuple<Tensor, Tensor> max_pool_sharded(const Tensor& input, IntArrayRef kernel,
                                            IntArrayRef stride, IntArrayRef padding,
                                            IntArrayRef dilation, bool ceil_mode, bool want_index) {
  const char* op = n == 3 ? "max_pool3d" : "max_pool2d";
  const PoolParams params = pool_params(op, input, n, kernel, stride, padding, dilation, ceil_mode);
  const Tensor x = with_simple_cuts(input);
  if (!is_sharded(x)) return stock_max_pool(x, params);
  if (tensor::layout_of(x).is_alone()) {
    const auto [out, index] = stock_max_pool(tensor::local(x), params);
    return {result_alone(x, out), want_index ? result_alone(x, index) : Tensor()};
  }
  const PoolPiece p = pool_piece(op, x, params, lowest(x.scalar_type()));
  auto [out, index] = pooled_piece(p);
  const Tensor wrapped = wrap_in_format_of(x, out, p.layout, p.sizes);
  if (!want_index) return {wrapped, Tensor()};
  return {wrapped, wrap_in_format_of(x, global_index(index, p, x.sizes()), p.layout, p.sizes)};
}

template <size_t n>
std::tuple<Tensor, Tensor> max_pool_with_indices(const Tensor& x, IntArrayRef kernel,
                                                 IntArrayRef stride, IntArrayRef padding,
                                                 IntArrayRef dilation, bool ceil_mode) {
  return max_pool_sharded<n>(x, kernel, stride, padding, dilation, ceil_mode, true);
}

template <size_t n>
Tensor max_pool(const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                IntArrayRef dilation, bool ceil_mode) {
  return std::get<0>(max_pool_sharded<n>(x, kernel, stride, padding, dilation, ceil_mode, false));
}

/// Stock reads the data of a 1-D input that needs no gradient itself.
Tensor max_pool_1d(const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                   IntArrayRef dilation, bool ceil_mode) {
  const auto flat = [](const char* what, IntArrayRef v, int64_t unit) {
    return std::vector<int64_t>{unit, one_per_dim("max_pool1d", what, v, 1)[0]};
  };
  const auto k = flat("kernel_size", kernel, 1);
  const auto s = stride.empty() ? k : flat("stride", stride, 1);
  return at::max_pool2d(x.unsqueeze(-2), k, s, flat("padding", padding, 0),
                        flat("dilation", dilation, 1), ceil_mode)
      .squeeze(-2);
}

// ------------------------------------------------------------------------------- average pooling

Tensor stock_avg_pool(const Tensor& x, const PoolParams& p, std::optional<int64_t> divisor,
                      bool count_include_pad = true) {
  const auto op = p.num_dims() == 3 ? &at::avg_pool3d : &at::avg_pool2d;
  return op(x, p.kernel, p.stride, p.padding, p.ceil_mode, count_include_pad, divisor);
}

/// Sum over each window of the padded rows, divided by one number. Saves nothing.
struct AvgPoolFn : Function<AvgPoolFn> {
  static Tensor forward(AutogradContext* ctx, const Tensor& rows, const PoolParams* p,
                        int64_t divisor) {
    comm::remember_scope(ctx);
    ctx->saved_data["kernel"] = p->kernel;
    ctx->saved_data["stride"] = p->stride;
    ctx->saved_data["padding"] = p->padding;
    ctx->saved_data["ceil"] = p->ceil_mode;
    ctx->saved_data["divisor"] = divisor;
    ctx->saved_data["sizes"] = rows.sizes().vec();
    return stock_avg_pool(rows, *p, divisor);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto list = [&](const char* key) { return ctx->saved_data[key].toIntVector(); };
    const auto kernel = list("kernel");
    const Tensor like = sizes_only(grads[0], list("sizes"));
    const auto backward_op =
        kernel.size() == 3 ? &at::avg_pool3d_backward : &at::avg_pool2d_backward;
    return {backward_op(grads[0], like, kernel, list("stride"), list("padding"),
                        ctx->saved_data["ceil"].toBool(), true, ctx->saved_data["divisor"].toInt()),
            {},
            {}};
  }
};

/// How many elements of dim i each own output divides by.
std::vector<double> window_counts(const PoolParams& params, size_t i, int64_t num_rows,
                                  int64_t first, int64_t num_outputs, bool count_include_pad) {
  std::vector<double> counts;
  for (int64_t o = first; o < first + num_outputs; ++o) {
    const int64_t begin = o * params.stride[i] - params.padding[i];
    const int64_t end = std::min(begin + params.kernel[i], num_rows + params.padding[i]);
    const int64_t inside = std::min(end, num_rows) - std::max<int64_t>(begin, 0);
    counts.push_back(static_cast<double>(count_include_pad ? end - begin : inside));
  }
  return counts;
}

/// Divisor of every own output, broadcast over batch and channels; undefined where it is the
/// kernel's size throughout.
Tensor divisors(const PoolParams& params, const PoolPiece& p, IntArrayRef input_sizes,
                bool count_include_pad) {
  const size_t n = params.num_dims();
  const size_t first = input_sizes.size() - n;
  Tensor product;
  bool plain = true;
  for (size_t i = 0; i < n; ++i) {
    const auto counts = window_counts(params, i, input_sizes[first + i], p.first_output[i],
                                      p.own_sizes[first + i], count_include_pad);
    for (double c : counts) plain &= c == static_cast<double>(params.kernel[i]);
    std::vector<int64_t> shape(n, 1);
    shape[i] = p.own_sizes[first + i];
    const Tensor along = at::tensor(counts, at::kDouble).view(shape);
    product = product.defined() ? product * along : along;
  }
  return plain ? Tensor() : product;
}

Tensor averaged_piece(const PoolPiece& p, const PoolParams& params, IntArrayRef input_sizes,
                      bool count_include_pad, std::optional<int64_t> divisor_override) {
  if (c10::multiply_integers(p.own_sizes) == 0) return empty_result(p.rows, p.own_sizes);
  const auto averaged = [&](const Tensor& rows, int64_t divisor) {
    if (comm::records_grad(rows)) return AvgPoolFn::apply(rows, &p.local, divisor);
    return stock_avg_pool(rows, p.local, divisor);
  };
  if (divisor_override.has_value()) return averaged(p.rows, *divisor_override);
  const Tensor counts = divisors(params, p, input_sizes, count_include_pad);
  if (!counts.defined()) return averaged(p.rows, c10::multiply_integers(params.kernel));
  const auto type = p.rows.scalar_type();
  if (at::isIntegralType(type, true)) return averaged(p.rows, 1).div(counts.to(type), "trunc");
  // One device sums half types in float and divides before it rounds.
  const auto wide = type == at::kHalf || type == at::kBFloat16 ? at::kFloat : type;
  return averaged(p.rows.to(wide), 1).div(counts.to(p.rows.device(), wide)).to(type);
}

template <size_t n>
Tensor avg_pool(const Tensor& input, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                bool ceil_mode, bool count_include_pad, std::optional<int64_t> divisor_override) {
  const char* op = n == 3 ? "avg_pool3d" : "avg_pool2d";
  SHARDFIELD_CHECK(divisor_override.value_or(1) != 0, op, "divisor must be not zero");
  const PoolParams params = pool_params(op, input, n, kernel, stride, padding, {1}, ceil_mode);
  const Tensor x = with_simple_cuts(input);
  if (!is_sharded(x)) return stock_avg_pool(x, params, divisor_override, count_include_pad);
  if (tensor::layout_of(x).is_alone())
    return result_alone(
        x, stock_avg_pool(tensor::local(x), params, divisor_override, count_include_pad));
  const PoolPiece p = pool_piece(op, x, params, 0);
  const Tensor out = averaged_piece(p, params, x.sizes(), count_include_pad, divisor_override);
  return wrap_in_format_of(x, out, p.layout, p.sizes);
}

}  // namespace

SHARDFIELD_OPS(pooling) {
  table.composed("aten::max_pool1d", TORCH_FN(max_pool_1d));
  table.composed("aten::max_pool2d", TORCH_FN(max_pool<2>));
  table.composed("aten::max_pool3d", TORCH_FN(max_pool<3>));
  table.composed("aten::max_pool2d_with_indices", TORCH_FN(max_pool_with_indices<2>));
  table.composed("aten::max_pool3d_with_indices", TORCH_FN(max_pool_with_indices<3>));
  table.composed("aten::avg_pool2d", TORCH_FN(avg_pool<2>));
  table.composed("aten::avg_pool3d", TORCH_FN(avg_pool<3>));
}

}  // namespace shardfield::ops
