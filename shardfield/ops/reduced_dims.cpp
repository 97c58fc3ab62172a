#include "shardfield/ops/reduced_dims.h"

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>
#include <torch/csrc/autograd/custom_function.h>

#include "shardfield/base/error.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

ReducedDims::ReducedDims(const at::Tensor& x, at::OptionalIntArrayRef dims_arg, bool keepdim)
    : source(&tensor::layout_of(x)), keepdim(keepdim) {
  std::vector<bool> reduced(x.dim(), !dims_arg.has_value() || dims_arg->empty());
  if (dims_arg.has_value()) {
    for (int64_t d : *dims_arg) {
      d = at::maybe_wrap_dim(d, x.dim());
      SHARDFIELD_CHECK(dims_arg->size() == 1 || !reduced[d], "reduction", "dim ", d,
                       " appears twice in ", *dims_arg);
      reduced[d] = true;
    }
  }
  std::vector<int> new_dim(x.dim());
  int next = 0;
  for (int d = 0; d < x.dim(); ++d) {
    if (reduced[d]) dims.push_back(d);
    if (!reduced[d] || keepdim) sizes.push_back(reduced[d] ? 1 : x.size(d));
    new_dim[d] = reduced[d] ? -1 : next;
    next += !reduced[d] || keepdim;
  }
  for (const spec::Cut& cut : source->cuts())
    if (reduced[cut.dim]) axes.insert(axes.end(), cut.axes.begin(), cut.axes.end());
  std::sort(axes.begin(), axes.end());
  layout = spec::renumber(*source, new_dim);
}

int64_t ReducedDims::count(const at::Tensor& x) const {
  int64_t n = 1;
  for (int64_t d : dims) n *= x.size(d);
  return n;
}

at::Tensor ReducedDims::finish(const at::Tensor& partial) const {
  return tensor::wrap(partial, layout, sizes);
}

at::Tensor ReducedDims::stack_partials(const at::Tensor& partial) const {
  int64_t ranks = 1;
  for (int a : axes) ranks *= source->mesh().shape[a];
  if (!crosses_ranks()) return partial.unsqueeze(0);
  std::vector<int> moved(sizes.size());
  for (size_t d = 0; d < moved.size(); ++d) moved[d] = static_cast<int>(d) + 1;
  const spec::Layout* rest = layout ? spec::renumber(*layout, moved) : nullptr;
  std::vector<spec::Cut> cuts = rest ? rest->cuts() : std::vector<spec::Cut>();
  cuts.push_back({0, axes, std::vector<int64_t>(ranks, 1)});
  std::vector<int64_t> stacked = sizes;
  stacked.insert(stacked.begin(), ranks);
  const at::Tensor rows =
      tensor::wrap(partial.unsqueeze(0), spec::intern_layout(source->mesh(), cuts), stacked);
  const at::Tensor all = tensor::redistribute(rows, rest);
  return rest ? tensor::local(all) : all;
}

at::Tensor ReducedDims::combine(const at::Tensor& partial, comm::Reduction reduction) const {
  return crosses_ranks() ? comm::all_reduce(partial, source->mesh(), axes, reduction)
                         : partial.detach();
}

at::Tensor ReducedDims::keep_dims(const at::Tensor& partial) const {
  if (keepdim) return partial;
  at::Tensor out = partial;
  for (int64_t d : dims) out = out.unsqueeze(d);
  return out;
}

at::Tensor ReducedDims::finish_sum(const at::Tensor& partial) const {
  return finish(crosses_ranks() ? tensor::reduce_sum(partial, source->mesh(), axes) : partial);
}

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

struct PickFn : Function<PickFn> {
  static Tensor forward(AutogradContext* ctx, const Tensor& /*piece*/, const Tensor& weight,
                        const Tensor& value, const std::vector<int64_t>& dims,
                        const std::vector<int64_t>& axes, int64_t mesh) {
    ctx->save_for_backward({weight});
    ctx->saved_data["dims"] = dims;
    ctx->saved_data["axes"] = axes;
    ctx->saved_data["mesh"] = mesh;
    comm::remember_scope(ctx);
    return value.detach();
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const comm::BackwardScope scope(ctx);
    const Tensor weight = ctx->get_saved_variables()[0];
    const auto axes = ctx->saved_data["axes"].toIntVector();
    const auto* mesh = reinterpret_cast<const spec::Mesh*>(ctx->saved_data["mesh"].toInt());
    Tensor grad = tensor::enter(grads[0], *mesh, std::vector<int>(axes.begin(), axes.end()));
    for (int64_t d : ctx->saved_data["dims"].toIntVector()) grad = grad.unsqueeze(d);
    return {grad * weight, {}, {}, {}, {}, {}};
  }
};

}  // namespace

at::Tensor ReducedDims::pick(const at::Tensor& piece, const at::Tensor& weight,
                             const at::Tensor& value) const {
  const std::vector<int64_t> gone = keepdim ? std::vector<int64_t>() : dims;
  return PickFn::apply(piece, weight, value, gone, std::vector<int64_t>(axes.begin(), axes.end()),
                       reinterpret_cast<int64_t>(&source->mesh()));
}

}  // namespace shardfield::ops
