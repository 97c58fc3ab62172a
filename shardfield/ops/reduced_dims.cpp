#include "shardfield/ops/reduced_dims.h"

#include <ATen/WrapDimUtils.h>

#include "shardfield/base/error.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

ReducedDims::ReducedDims(const at::Tensor& x, at::OptionalIntArrayRef dims_arg, bool keepdim)
    : source(&tensor::layout_of(x)) {
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

at::Tensor ReducedDims::finish_sum(const at::Tensor& partial) const {
  return finish(crosses_ranks() ? tensor::reduce_sum(partial, source->mesh(), axes) : partial);
}

}  // namespace shardfield::ops
