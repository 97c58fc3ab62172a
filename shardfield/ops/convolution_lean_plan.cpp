#include "shardfield/ops/convolution_lean_plan.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "shardfield/spec/integer.h"

namespace shardfield::ops {

namespace {

using spec::ceil_div;
using spec::floor_div;
using spec::Range;

Range hull_of(Range a, Range b) {
  if (a.empty()) return b;
  if (b.empty()) return a;
  return {std::min(a.begin, b.begin), std::max(a.end, b.end)};
}

/// Padding with which the plain op over the own rows yields all own outputs. False when there is
/// none of a reasonable size.
bool fit_window(LeanDim& d, int64_t num_rows) {
  const auto& w = d.window;
  const int64_t extent = w.extent();
  const int64_t first = d.outputs.begin * w.stride - w.pad_lo - d.inputs.begin;
  const int64_t overhang = first + (d.outputs.size() - 1) * w.stride + extent - d.inputs.size();
  const int64_t least = std::max({-first, overhang, int64_t{0}});
  d.padding = least + spec::floor_mod(-first - least, w.stride);
  d.skip = (d.padding + first) / w.stride;
  d.main_rows = floor_div(d.inputs.size() + 2 * d.padding - extent, w.stride) + 1;
  d.core = d.outputs;
  if (d.inputs.begin > 0)
    d.core.begin = std::max(d.core.begin, ceil_div(d.inputs.begin + w.pad_lo, w.stride));
  if (d.inputs.end < num_rows)
    d.core.end = std::min(d.core.end, floor_div(d.inputs.end - extent + w.pad_lo, w.stride) + 1);
  return !d.core.empty() && d.padding < extent + w.stride;
}

bool fit_transposed(LeanDim& d, int64_t num_rows) {
  const auto& w = d.window;
  const Range reach = d.hull(d.inputs);
  const int64_t crop_lo = d.outputs.begin - reach.begin;
  const int64_t crop_hi = reach.end - d.outputs.end;
  const int64_t most = std::max(w.stride, w.dilation) - 1;
  d.padding = std::min(crop_lo, crop_hi + most);
  d.output_padding = std::max<int64_t>(d.padding - crop_hi, 0);
  d.skip = crop_lo - d.padding;
  d.main_rows = reach.size() - 2 * d.padding + d.output_padding;
  d.core = d.outputs;
  if (d.inputs.begin > 0)
    d.core.begin = std::max(d.core.begin, (d.inputs.begin - 1) * w.stride - w.pad_lo + w.extent());
  if (d.inputs.end < num_rows)
    d.core.end = std::min(d.core.end, d.inputs.end * w.stride - w.pad_lo);
  return !d.core.empty() && d.padding >= 0 && d.skip + d.outputs.size() <= d.main_rows;
}

std::vector<Range> gradient_rows(const ConvPlan& plan, const ConvDim& d) {
  const auto& sizes = plan.input->cuts()[d.cut].sizes;
  std::vector<Range> rows;
  const int64_t outputs = plan.output_sizes[d.dim];
  if (plan.settings.transposed) {
    for (const auto& p : spec::plan_transposed_window_gradient(sizes, d.window, outputs))
      rows.push_back(p.inputs);
  } else {
    for (const auto& p : spec::plan_window_gradient(sizes, d.window, outputs))
      rows.push_back(p.inputs);
  }
  return rows;
}

void plan_halos(LeanPlan& lean) {
  const ConvPlan& plan = *lean.conv;
  std::vector<NeededRows> inputs, grads;
  for (const ConvDim& d : plan.dims) {
    inputs.push_back({d.cut, d.inputs});
    size_t out_cut = 0;
    while (plan.output->cuts()[out_cut].dim != d.dim) ++out_cut;
    grads.push_back({out_cut, gradient_rows(plan, d)});
  }
  lean.input_halo = plan_halo(*plan.input, plan.input_sizes, inputs);
  lean.grad_halo = plan_halo(*plan.output, plan.output_sizes, grads);
  lean.own_inputs = lean.input_hull = lean.input_halo.own;
  lean.own_outputs = lean.grad_hull = lean.grad_halo.own;
  for (size_t i = 0; i < plan.dims.size(); ++i) {
    const ConvDim& d = plan.dims[i];
    const int piece = plan.input->piece(d.cut);
    lean.input_hull[d.dim] = hull_of(lean.own_inputs[d.dim], inputs[i].rows[piece]);
    lean.grad_hull[d.dim] = hull_of(lean.own_outputs[d.dim], grads[i].rows[piece]);
  }
}

LeanPlan make_plan(const std::shared_ptr<const ConvPlan>& conv) {
  LeanPlan lean;
  lean.conv = conv;
  plan_halos(lean);
  const ConvSettings& s = conv->settings;
  lean.stride = s.stride;
  lean.dilation = s.dilation;
  lean.has_main = !is_empty(lean.own_inputs) && !is_empty(lean.own_outputs);
  lean.core_outputs = lean.own_outputs;
  for (int i = 0; i < s.num_spatial(); ++i) {
    LeanDim d;
    d.window = s.window(i, conv->weight_sizes);
    d.inputs = lean.own_inputs[i + 2];
    d.outputs = lean.own_outputs[i + 2];
    const int64_t rows = conv->input_sizes[i + 2];
    if (lean.has_main) lean.has_main = s.transposed ? fit_transposed(d, rows) : fit_window(d, rows);
    lean.core_outputs[i + 2] = d.core;
    lean.padding.push_back(d.padding);
    lean.output_padding.push_back(d.output_padding);
    lean.dims.push_back(d);
  }
  if (!lean.has_main) lean.core_outputs[2] = {0, 0};
  lean.exact =
      lean.has_main && std::all_of(lean.dims.begin(), lean.dims.end(), [](const LeanDim& d) {
        return d.skip == 0 && d.main_rows == d.outputs.size();
      });
  return lean;
}

}  // namespace

Range LeanDim::hull(Range coarse) const {
  return {coarse.begin * window.stride - window.pad_lo,
          (coarse.end - 1) * window.stride - window.pad_lo + window.extent()};
}

Range LeanDim::touching(Range fine) const {
  return {ceil_div(fine.begin + window.pad_lo - window.extent() + 1, window.stride),
          floor_div(fine.end - 1 + window.pad_lo, window.stride) + 1};
}

Range LeanDim::covering(Range fine) const {
  const Range rows = touching(fine);
  return {
      std::min(rows.begin, floor_div(fine.begin + window.pad_lo, window.stride)),
      std::max(rows.end, ceil_div(fine.end + window.pad_lo - window.extent(), window.stride) + 1)};
}

const LeanPlan& lean_plan(const std::shared_ptr<const ConvPlan>& plan) {
  static auto* mutex = new std::mutex();
  static auto* plans = new std::map<const ConvPlan*, std::unique_ptr<const LeanPlan>>();
  const std::lock_guard<std::mutex> lock(*mutex);
  auto& entry = (*plans)[plan.get()];
  if (!entry) entry = std::make_unique<const LeanPlan>(make_plan(plan));
  return *entry;
}

}  // namespace shardfield::ops
