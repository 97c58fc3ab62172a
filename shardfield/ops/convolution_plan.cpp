#include "shardfield/ops/convolution_plan.h"

#include <map>
#include <mutex>
#include <numeric>
#include <tuple>

#include "shardfield/base/error.h"

namespace shardfield::ops {

namespace {

using spec::Cut;
using spec::Layout;
using spec::Range;

void check_sizes(const char* op, const Layout& layout, at::IntArrayRef input,
                 at::IntArrayRef weight, const ConvSettings& s) {
  const int rank = layout.mesh().rank;
  SHARDFIELD_CHECK(
      input.size() == weight.size() && static_cast<int>(input.size()) == s.num_spatial() + 2, op,
      "expected input and weight of equal dims (batch, channels, ", s.num_spatial(),
      " spatial), got input ", input, " and weight ", weight, " on rank ", rank,
      "; add or remove a dim");
  const int64_t channels = s.transposed ? weight[0] : weight[1] * s.groups;
  SHARDFIELD_CHECK(s.groups > 0 && input[1] == channels && weight[0] % s.groups == 0, op,
                   "expected ", channels, " input channels for weight ", weight, " and groups ",
                   s.groups, ", got input ", input, " on rank ", rank,
                   "; check in_channels and groups of the layer");
  for (int d = 0; d < s.num_spatial(); ++d) {
    SHARDFIELD_CHECK(
        s.stride[d] > 0 && s.dilation[d] > 0 && s.pad_lo[d] >= 0 && s.pad_hi[d] >= 0, op,
        "expected positive stride and dilation and non-negative padding, got stride ",
        at::IntArrayRef(s.stride), ", dilation ", at::IntArrayRef(s.dilation), ", padding ",
        at::IntArrayRef(s.pad_lo), " on rank ", rank, "; change the layer's numbers");
    SHARDFIELD_CHECK(weight[d + 2] > 0, op, "expected a kernel of at least 1, got weight ", weight,
                     " on rank ", rank, "; change kernel_size");
    SHARDFIELD_CHECK(!s.transposed || s.output_padding[d] < std::max(s.stride[d], s.dilation[d]),
                     op, "expected output_padding smaller than stride or dilation, got ",
                     at::IntArrayRef(s.output_padding), " on rank ", rank,
                     "; lower output_padding");
  }
}

int64_t output_rows(const char* op, const ConvPlan& plan, int d) {
  const ConvSettings& s = plan.settings;
  const spec::Window window = s.window(d, plan.weight_sizes);
  const int64_t rows = plan.input_sizes[d + 2];
  const int64_t n = s.transposed ? spec::num_transposed_outputs(rows, window, s.output_padding[d])
                                 : spec::num_outputs(rows, window);
  SHARDFIELD_CHECK(
      n > 0, op, "expected a kernel that fits into the padded input, got input ",
      at::IntArrayRef(plan.input_sizes), ", weight ", at::IntArrayRef(plan.weight_sizes),
      ", padding ", at::IntArrayRef(s.pad_lo), " on rank ", plan.input->mesh().rank,
      "; the kernel size can't be greater than the input size: pad more or use a smaller kernel");
  return n;
}

ConvDim plan_dim(const ConvPlan& plan, size_t c) {
  const Cut& cut = plan.input->cuts()[c];
  const ConvSettings& s = plan.settings;
  ConvDim d;
  d.dim = cut.dim;
  d.cut = c;
  d.window = s.window(cut.dim - 2, plan.weight_sizes);
  d.num_rows = plan.input_sizes[cut.dim];
  const auto own = static_cast<size_t>(plan.input->piece(c));
  if (s.transposed) {
    const auto pieces =
        spec::plan_transposed_window(cut.sizes, d.window, s.output_padding[cut.dim - 2]);
    for (const auto& p : pieces) {
      d.inputs.push_back(p.inputs);
      d.outputs.push_back(p.outputs);
    }
    d.pad_lo = pieces[own].pad_lo;
    d.pad_hi = pieces[own].pad_hi;
    d.crop_lo = pieces[own].crop_lo;
    d.crop_hi = pieces[own].crop_hi;
  } else {
    const auto pieces = spec::plan_window(cut.sizes, d.window, plan.output_sizes[cut.dim]);
    for (const auto& p : pieces) {
      d.inputs.push_back(p.inputs);
      d.outputs.push_back(p.outputs);
    }
    d.pad_lo = pieces[own].pad_lo;
    d.pad_hi = pieces[own].pad_hi;
  }
  return d;
}

bool falls_between_groups(const Cut& cut, int64_t channels, int64_t groups) {
  const int64_t per_group = channels / groups;
  return groups > 1 && std::all_of(cut.sizes.begin(), cut.sizes.end(),
                                   [&](int64_t n) { return n % per_group == 0; });
}

/// Whole groups stay where they are; else every rank sums over its own input channels.
Cut plan_channels(ConvPlan& plan, size_t c) {
  const Cut& cut = plan.input->cuts()[c];
  const ConvSettings& s = plan.settings;
  plan.channel_cut = static_cast<int>(c);
  const int64_t offset = plan.input->local_offset(c);
  const int64_t n = plan.input->local_size(c);
  plan.weight_rows = {offset, offset + n};
  if (s.groups == 1) {
    plan.channels = ConvPlan::Channels::kPartial;
    return {};
  }
  plan.channels = ConvPlan::Channels::kGroups;
  const int64_t in_group = plan.input_sizes[1] / s.groups;
  const int64_t out_group = plan.output_sizes[1] / s.groups;
  plan.local_groups = n / in_group;
  plan.bias_rows = {offset / in_group * out_group, (offset + n) / in_group * out_group};
  if (!s.transposed) plan.weight_rows = plan.bias_rows;
  Cut out = cut;
  for (int64_t& size : out.sizes) size = size / in_group * out_group;
  return out;
}

ConvPlan make_plan(const char* op, const Layout& layout, at::IntArrayRef input,
                   at::IntArrayRef weight, const ConvSettings& settings) {
  check_sizes(op, layout, input, weight, settings);
  ConvPlan plan;
  plan.input = &layout;
  plan.input_sizes = input.vec();
  plan.weight_sizes = weight.vec();
  plan.settings = settings;
  plan.local_groups = settings.groups;
  plan.output_sizes = {input[0], settings.transposed ? weight[1] * settings.groups : weight[0]};
  for (int d = 0; d < settings.num_spatial(); ++d)
    plan.output_sizes.push_back(output_rows(op, plan, d));
  std::vector<Cut> cuts;
  for (size_t c = 0; c < layout.cuts().size(); ++c) {
    Cut cut = layout.cuts()[c];
    if (cut.dim == 1) {
      cut = plan_channels(plan, c);
      if (cut.sizes.empty()) continue;
    } else if (cut.dim >= 2) {
      plan.dims.push_back(plan_dim(plan, c));
      cut.sizes = spec::sizes_of(plan.dims.back().outputs);
    }
    cuts.push_back(std::move(cut));
  }
  plan.output = spec::intern_layout(layout.mesh(), std::move(cuts));
  const int ndim = static_cast<int>(plan.output_sizes.size());
  plan.output_piece =
      plan.output ? plan.output->local_sizes(plan.output_sizes.data(), ndim) : plan.output_sizes;
  return plan;
}

}  // namespace

spec::Window ConvSettings::window(int s, at::IntArrayRef weight) const {
  return {weight[s + 2], stride[s], dilation[s], pad_lo[s], pad_hi[s]};
}

bool ConvPlan::is_cut(int dim) const {
  return std::any_of(dims.begin(), dims.end(), [&](const ConvDim& d) { return d.dim == dim; });
}

std::shared_ptr<const ConvPlan> plan_convolution(const char* op, const Layout& layout,
                                                 at::IntArrayRef input, at::IntArrayRef weight,
                                                 const ConvSettings& s) {
  using Key = std::tuple<const Layout*, std::vector<int64_t>>;
  Key key{&layout, {}};
  auto& numbers = std::get<1>(key);
  numbers = {static_cast<int64_t>(input.size()), static_cast<int64_t>(weight.size()),
             static_cast<int64_t>(s.stride.size()), s.transposed, s.groups};
  for (at::IntArrayRef part :
       {input, weight, at::IntArrayRef(s.stride), at::IntArrayRef(s.dilation),
        at::IntArrayRef(s.pad_lo), at::IntArrayRef(s.pad_hi), at::IntArrayRef(s.output_padding)})
    numbers.insert(numbers.end(), part.begin(), part.end());
  static auto* mutex = new std::mutex();
  static auto* plans = new std::map<Key, std::shared_ptr<const ConvPlan>>();
  {
    const std::lock_guard<std::mutex> lock(*mutex);
    const auto it = plans->find(key);
    if (it != plans->end()) return it->second;
  }
  auto plan = std::make_shared<const ConvPlan>(make_plan(op, layout, input, weight, s));
  const std::lock_guard<std::mutex> lock(*mutex);
  return plans->emplace(std::move(key), std::move(plan)).first->second;
}

const Layout* convolvable_layout(const Layout& layout, at::IntArrayRef sizes, int64_t groups) {
  std::vector<int> new_dim(sizes.size());
  std::iota(new_dim.begin(), new_dim.end(), 0);
  std::vector<int> cuts_on(sizes.size(), 0);
  for (const Cut& cut : layout.cuts()) {
    const bool whole = ++cuts_on[cut.dim] == 1 && cut.total() == sizes[cut.dim];
    const bool usable = cut.dim != 1 || groups <= 1 || falls_between_groups(cut, sizes[1], groups);
    if (!whole || !usable) new_dim[cut.dim] = -1;
  }
  const bool all = std::none_of(new_dim.begin(), new_dim.end(), [](int d) { return d < 0; });
  return all ? &layout : spec::renumber(layout, new_dim);
}

}  // namespace shardfield::ops
