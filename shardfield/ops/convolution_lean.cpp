#include "shardfield/ops/convolution_lean.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "shardfield/comm/backward_scope.h"
#include "shardfield/ops/convolution_composed.h"
#include "shardfield/ops/convolution_lean_plan.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using OptTensor = std::optional<Tensor>;
using spec::Range;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

/// PyTorch's rule on the CPU: small float inputs go to a kernel that writes out every window
/// (columns as large as the input times the kernel), larger ones to oneDNN, which does not.
bool is_small_for_onednn(at::IntArrayRef sizes) {
  int64_t product = 1;
  for (size_t d = 0; d < 4 && d < sizes.size(); ++d) product *= sizes[d];
  return sizes[0] == 1 && product <= 20480;
}

/// Outputs of the first spatial dim to compute at once where the piece is small for oneDNN though
/// the whole is not: columns for all of them could outweigh the saving of the split. 0: no limit.
int64_t rows_per_block(const LeanPlan& lean, const Tensor& piece, const Tensor& weight) {
  const ConvSettings& s = lean.conv->settings;
  const auto kernel = weight.sizes().slice(2);
  const bool unfolds =
      piece.device().is_cpu() && piece.scalar_type() == at::kFloat && at::hasMKLDNN() &&
      s.groups == 1 && !(kernel.size() > 1 && kernel.back() > 3 && kernel[kernel.size() - 2] > 3) &&
      is_small_for_onednn(piece.sizes()) && !is_small_for_onednn(lean.conv->input_sizes);
  if (!unfolds) return 0;
  constexpr size_t kLeastColumns = 1 << 20;
  int64_t columns = piece.itemsize() * c10::multiply_integers(kernel) *
                    (s.transposed ? lean.conv->output_sizes[1] : piece.size(1));
  const at::IntArrayRef places = s.transposed ? piece.sizes() : lean.conv->output_piece;
  for (size_t d = 3; d < places.size(); ++d) columns *= places[d];
  const size_t budget = std::max<size_t>(piece.nbytes(), kLeastColumns);
  return std::max<int64_t>(static_cast<int64_t>(budget) / std::max<int64_t>(columns, 1), 1);
}

/// A box cut along its first spatial dim.
std::vector<Box> in_blocks(const Box& box, int64_t rows) {
  std::vector<Box> blocks;
  for (int64_t begin = box[2].begin; begin < box[2].end; begin += rows) {
    blocks.push_back(box);
    blocks.back()[2] = {begin, std::min(begin + rows, box[2].end)};
  }
  return blocks;
}

Tensor run_without_padding(const LeanPlan& lean, const Tensor& rows, const Tensor& weight,
                           const OptTensor& bias) {
  const ConvSettings& s = lean.conv->settings;
  const std::vector<int64_t> none(lean.dims.size(), 0);
  return at::convolution(rows, weight, bias, lean.stride, none, lean.dilation, s.transposed, none,
                         s.groups);
}

/// Own outputs from own rows; those at the edges of the piece come out wrong.
Tensor main_forward(const LeanPlan& lean, const Tensor& piece, const Tensor& weight,
                    const OptTensor& bias) {
  const ConvSettings& s = lean.conv->settings;
  Tensor y = at::convolution(piece, weight, bias, lean.stride, lean.padding, lean.dilation,
                             s.transposed, lean.output_padding, s.groups);
  if (lean.exact) return y;
  Box keep{{0, y.size(0)}, {0, y.size(1)}};
  for (const LeanDim& d : lean.dims) keep.push_back({d.skip, d.skip + d.outputs.size()});
  return compacted(y, keep);
}

/// Overwrites the outputs `slab` from all rows they read.
void forward_slab(const LeanPlan& lean, const Halo& halo, const Tensor& piece, const Tensor& weight,
                  const OptTensor& bias, const Box& slab, Tensor& y) {
  const ConvPlan& plan = *lean.conv;
  const int64_t channels = plan.input_sizes[1];
  const auto hull = [](const LeanDim& d, Range r) { return d.hull(r); };
  const auto covering = [](const LeanDim& d, Range r) { return d.covering(r); };
  const bool transposed = plan.settings.transposed;
  const Box rows = transposed ? lean.map(slab, channels, covering) : lean.map(slab, channels, hull);
  const Box made = transposed ? lean.map(rows, plan.output_sizes[1], hull) : slab;
  const Tensor part = run_without_padding(lean, halo.block(rows, rows, piece), weight, bias);
  box_view(y, lean.own_outputs, slab).copy_(box_view(part, made, slab));
}

struct Forward {
  Tensor y;
  std::vector<Tensor> halo;
};

Forward lean_forward(const LeanPlan& lean, const Tensor& piece, const Tensor& weight,
                     const OptTensor& bias) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  Halo halo(lean.input_halo, piece);
  const int64_t rows = rows_per_block(lean, piece, weight);
  const bool has_main = lean.has_main && rows == 0;
  Tensor y = has_main
                 ? main_forward(lean, piece, weight, bias)
                 : at::empty(lean.conv->output_piece, piece.options(), conv_format(piece, weight));
  halo.wait();
  const auto slabs =
      rows == 0 ? shell_of(lean.own_outputs, lean.core_outputs) : in_blocks(lean.own_outputs, rows);
  for (const Box& slab : slabs)
    if (!is_empty(slab)) forward_slab(lean, halo, piece, weight, bias, slab, y);
  return {y, halo.parts()};
}

/// Which gradients are wanted.
using Mask = std::array<bool, 3>;
struct Gradients {
  Tensor x, weight, bias;

  void add_weight(const Tensor& part) {
    if (!part.defined()) return;
    if (weight.defined()) {
      weight.add_(part);
    } else {
      weight = part;
    }
  }
};

/// The pairs of own rows and own outputs, in one call of the plain op.
Gradients main_backward(const LeanPlan& lean, const Tensor& grad, const Tensor& piece,
                        const Tensor& weight, const Mask& mask) {
  const ConvSettings& s = lean.conv->settings;
  Tensor whole = grad;
  if (!lean.exact) {
    std::vector<int64_t> surplus;
    for (size_t i = lean.dims.size(); i-- > 0;) {
      const LeanDim& d = lean.dims[i];
      surplus.insert(surplus.end(), {d.skip, d.main_rows - d.skip - d.outputs.size()});
    }
    whole = at::constant_pad_nd(grad, surplus, 0);
  }
  const std::vector<int64_t> bias_sizes{grad.size(1)};
  auto [dx, dw, db] =
      at::convolution_backward(whole, piece, weight, bias_sizes, lean.stride, lean.padding,
                               lean.dilation, s.transposed, lean.output_padding, s.groups, mask);
  return {dx, dw, db};
}

/// One rank's part of a backward pass.
class LeanBackward {
 public:
  LeanBackward(const LeanPlan& lean, const Tensor& grad, const Tensor& piece, const Tensor& weight,
               Mask mask)
      : lean_(lean),
        grad_(grad),
        piece_(piece),
        weight_(weight),
        mask_(mask),
        rows_(rows_per_block(lean, piece, weight)),
        has_main_(lean.has_main && rows_ == 0 && (lean.exact || grad.nbytes() < kSmallGradient)) {}

  /// The halo of the output gradient travels; nothing is added across ranks but the weights'.
  void by_output_gradients() {
    Halo halo(lean_.grad_halo, grad_);
    start_own();
    halo.wait();
    for (const Box& slab : slabs(lean_.grad_hull, lean_.own_outputs)) {
      Box rows;
      const Tensor dx = run_slab(slab, halo, false, rows);
      if (dx.defined()) add_own(dx, rows, intersect(rows, lean_.own_inputs));
    }
  }

  /// The gradient of the input's halo travels back to its owners.
  void by_input_gradients(std::vector<Tensor> saved_halo) {
    const auto& receives = lean_.input_halo.receives;
    Halo halo(lean_.input_halo, std::move(saved_halo));
    std::vector<Tensor> back;
    if (mask_[0])
      for (const auto& r : receives)
        back.push_back(at::zeros(sizes_of_box(r.box), piece_.options()));
    if (!has_main_) start_own();
    for (const Box& slab : slabs(lean_.input_hull, lean_.own_inputs)) {
      Box rows;
      const Tensor dx = run_slab(slab, halo, true, rows);
      if (!dx.defined()) continue;
      const Box valid = intersect(rows, slab);
      for (size_t i = 0; i < back.size(); ++i) {
        const Box part = intersect(valid, receives[i].box);
        if (!is_empty(part))
          box_view(back[i], receives[i].box, part).add_(box_view(dx, rows, part));
      }
      if (!has_main_) add_own(dx, rows, intersect(valid, lean_.own_inputs));
    }
    if (!mask_[0]) return has_main_ ? start_own() : void();
    HaloReturn transfer(lean_.input_halo, std::move(back), piece_.options());
    if (has_main_) start_own();
    transfer.finish(out_.x);
  }

  /// Sums the weight's and bias's gradients over the ranks, in one message.
  Gradients finish() {
    if (!mask_[1] && !mask_[2]) return out_;
    if (mask_[1] && !out_.weight.defined()) out_.weight = at::zeros_like(weight_);
    const spec::Layout& layout = *lean_.conv->input;
    if (layout.mesh().size() == 1) return out_;
    std::vector<Tensor> flat;
    for (const Tensor& t : {out_.weight, out_.bias})
      if (t.defined()) flat.push_back(t.flatten());
    Tensor sum =
        comm::all_reduce(flat.size() == 1 ? flat[0] : at::cat(flat), layout.mesh(), layout.axes());
    const int64_t n = mask_[1] ? weight_.numel() : 0;
    if (mask_[1]) out_.weight = sum.narrow(0, 0, n).view(weight_.sizes());
    if (mask_[2]) out_.bias = sum.narrow(0, n, sum.size(0) - n);
    return out_;
  }

 private:
  /// What the main call leaves; everything, row block by row block, when there is none.
  std::vector<Box> slabs(const Box& hull, const Box& own) const {
    if (has_main_) return shell_of(hull, own);
    if (is_empty(hull)) return {};
    if (rows_ > 0) return in_blocks(hull, rows_);
    return in_blocks(hull, grad_.nbytes() < kSmallGradient
                               ? hull[2].size()
                               : std::max<int64_t>(hull[2].size() / kBlocks, 1));
  }

  void start_own() {
    if (has_main_) {
      Gradients main = main_backward(lean_, grad_, piece_, weight_, mask_);
      out_.x = main.x;
      out_.bias = main.bias;
      out_.add_weight(main.weight);
      return;
    }
    if (mask_[0]) out_.x = at::zeros_like(piece_, at::MemoryFormat::Contiguous);
    if (!mask_[2]) return;
    std::vector<int64_t> dims{0};
    for (int64_t d = 2; d < grad_.dim(); ++d) dims.push_back(d);
    out_.bias = grad_.sum(dims);
  }

  void add_own(const Tensor& dx, const Box& rows, const Box& part) {
    if (mask_[0] && !is_empty(part))
      box_view(out_.x, lean_.own_inputs, part).add_(box_view(dx, rows, part));
  }

  /// Zeros of `box` with the own values of t.
  static Tensor own_block(const Tensor& t, const Box& own, const Box& box) {
    Tensor out = at::zeros(sizes_of_box(box), t.options());
    const Box part = intersect(box, own);
    box_view(out, box, part).copy_(box_view(t, own, part));
    return out;
  }

  /// The pairs of the rows in `slab` (of the input, or of the output gradient) with own rows of
  /// the other side. Adds to the weight's gradient; returns that of the input rows `rows`.
  Tensor run_slab(const Box& slab, const Halo& halo, bool of_input, Box& rows) {
    if (!mask_[0] && !mask_[1]) return {};
    const ConvPlan& plan = *lean_.conv;
    const bool transposed = plan.settings.transposed;
    const int64_t fine_channels = transposed ? plan.output_sizes[1] : plan.input_sizes[1];
    const int64_t coarse_channels = transposed ? plan.input_sizes[1] : plan.output_sizes[1];
    const Box& own_coarse = transposed ? lean_.own_inputs : lean_.own_outputs;
    const Box& own_fine = transposed ? lean_.own_outputs : lean_.own_inputs;
    const Tensor& coarse_piece = transposed ? piece_ : grad_;
    const Tensor& fine_piece = transposed ? grad_ : piece_;
    const bool slab_is_fine = of_input != transposed;
    Box coarse = slab;
    if (slab_is_fine) {
      coarse = intersect(
          lean_.map(slab, coarse_channels, [](const LeanDim& d, Range r) { return d.touching(r); }),
          own_coarse);
      if (is_empty(coarse)) return {};
    }
    const Box fine =
        lean_.map(coarse, fine_channels, [](const LeanDim& d, Range r) { return d.hull(r); });
    if (is_empty(intersect(fine, slab_is_fine ? slab : own_fine))) return {};
    const Tensor coarse_values = slab_is_fine ? box_view(coarse_piece, own_coarse, coarse)
                                              : halo.block(coarse, coarse, coarse_piece);
    const Tensor fine_values =
        slab_is_fine ? halo.block(fine, slab, fine_piece) : own_block(fine_piece, own_fine, fine);
    rows = transposed ? coarse : fine;
    const std::vector<int64_t> none(lean_.dims.size(), 0);
    auto [dx, dw, db] = at::convolution_backward(
        transposed ? fine_values : coarse_values, transposed ? coarse_values : fine_values, weight_,
        std::nullopt, lean_.stride, none, lean_.dilation, transposed, none, plan.settings.groups,
        {mask_[0], mask_[1], false});
    out_.add_weight(dw);
    return dx;
  }

  // A gradient of surplus rows would be a copy: a small one is worth the single call.
  static constexpr size_t kSmallGradient = 1 << 20;
  static constexpr int64_t kBlocks = 24;

  const LeanPlan& lean_;
  const Tensor grad_, piece_, weight_;
  const Mask mask_;
  const int64_t rows_;
  const bool has_main_;
  Gradients out_;
};

/// Gradients as functions of their own, for second derivatives.
variable_list composed_backward(const ConvPlan& plan, const Tensor& grad, const Tensor& x,
                                const Tensor& weight, const Mask& mask) {
  const at::AutoGradMode record(true);
  OptTensor bias;
  if (mask[2]) bias = at::zeros({plan.output_sizes[1]}, weight.options()).requires_grad_();
  const Tensor y = convolve_composed(x, weight, bias, plan);
  variable_list wanted;
  if (mask[0]) wanted.push_back(x);
  if (mask[1]) wanted.push_back(weight);
  if (mask[2]) wanted.push_back(*bias);
  const variable_list grads = torch::autograd::grad({y}, wanted, {grad}, std::nullopt, true);
  variable_list out(4);
  size_t next = 0;
  for (size_t i = 0; i < 3; ++i)
    if (mask[i]) out[i] = grads[next++];
  return out;
}

struct LeanFn : Function<LeanFn> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const OptTensor& bias, int64_t plan) {
    const auto& lean = *reinterpret_cast<const LeanPlan*>(plan);
    const Tensor& piece = tensor::piece_of(x);
    Forward result = lean_forward(lean, piece, weight, bias);
    const bool by_grads = x.requires_grad() && lean.grads_are_cheaper();
    variable_list saved{x, weight};
    if (!by_grads && weight.requires_grad())
      saved.insert(saved.end(), result.halo.begin(), result.halo.end());
    ctx->save_for_backward(saved);
    ctx->saved_data["plan"] = plan;
    ctx->saved_data["by_grads"] = by_grads;
    ctx->saved_data["bias"] = bias.has_value();
    comm::remember_scope(ctx);
    return tensor::make_sharded(result.y, lean.conv->output, lean.conv->output_sizes,
                                conv_format(x, weight));
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const comm::BackwardScope scope(ctx);
    const auto& lean = *reinterpret_cast<const LeanPlan*>(ctx->saved_data["plan"].toInt());
    variable_list saved = ctx->get_saved_variables();
    const Tensor x = saved[0], weight = saved[1];
    const Mask mask{ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                    ctx->saved_data["bias"].toBool() && ctx->needs_input_grad(2)};
    if (at::GradMode::is_enabled()) return composed_backward(*lean.conv, grads[0], x, weight, mask);
    const Tensor grad = tensor::redistribute(grads[0], lean.conv->output);
    const at::AutoDispatchBelowADInplaceOrView guard;
    LeanBackward run(lean, tensor::piece_of(grad), tensor::piece_of(x), weight, mask);
    if (ctx->saved_data["by_grads"].toBool()) {
      run.by_output_gradients();
    } else {
      run.by_input_gradients({saved.begin() + 2, saved.end()});
    }
    const Gradients out = run.finish();
    Tensor dx = out.x;
    if (dx.defined())
      dx = tensor::make_sharded(dx, lean.conv->input, lean.conv->input_sizes,
                                x.suggest_memory_format());
    return {dx, out.weight, out.bias, Tensor()};
  }
};

}  // namespace

Tensor convolve_lean(const Tensor& x, const Tensor& weight, const OptTensor& bias,
                     const std::shared_ptr<const ConvPlan>& plan) {
  const LeanPlan& lean = lean_plan(plan);
  // An undefined tensor is no bias.
  const OptTensor b = bias.has_value() && bias->defined() ? bias : OptTensor();
  if (tensor::records_grad(x) || tensor::records_grad(weight) ||
      tensor::records_grad(b.value_or(Tensor())))
    return LeanFn::apply(x, weight, b, reinterpret_cast<int64_t>(&lean));
  const Tensor y = lean_forward(lean, tensor::piece_of(x), weight, b).y;
  return tensor::make_sharded(y, plan->output, plan->output_sizes, conv_format(x, weight));
}

}  // namespace shardfield::ops
