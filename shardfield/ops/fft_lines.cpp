#include "shardfield/ops/fft_lines.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using Kind = FourierTransform::Kind;

Tensor line_by_line(const Tensor& x, int64_t dim, const FourierTransform& transform) {
  std::vector<int64_t> line_sizes(x.dim(), 1);
  line_sizes[dim] = x.size(dim);
  const Tensor last = x.movedim(dim, -1);
  std::vector<Tensor> lines;
  for (const Tensor& line : last.reshape({-1, x.size(dim)}).unbind(0))
    lines.push_back(transform.along(line.clone().view(line_sizes), dim).reshape(-1));
  std::vector<int64_t> sizes = last.sizes().vec();
  sizes.back() = lines[0].size(0);
  return at::stack(lines).view(sizes).movedim(-1, dim);
}

struct LinesFn : torch::autograd::Function<LinesFn> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, int64_t dim,
                        const FourierTransform& t) {
    ctx->saved_data["transform"] = std::vector<int64_t>{
        dim, static_cast<int64_t>(t.kind), t.norm, t.forward, t.onesided, x.size(dim)};
    const at::AutoDispatchBelowADInplaceOrView below;
    return line_by_line(x, dim, t);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->saved_data["transform"].toIntVector();
    const FourierTransform of{static_cast<Kind>(saved[1]), saved[2], saved[3] != 0, saved[4] != 0};
    return {adjoint(of, grads[0], saved[0], saved[5]), {}, {}};
  }

  /// The adjoint of a transform of `length` values along `dim`, by the rules of PyTorch's formulas.
  static Tensor adjoint(const FourierTransform& of, const Tensor& grad, int64_t dim,
                        int64_t length) {
    switch (of.kind) {
      case Kind::kComplex:
        return transform_lines(grad, dim, {Kind::kComplex, of.norm, !of.forward});
      case Kind::kToComplex: {
        std::vector<int64_t> fill(2 * (grad.dim() - dim), 0);
        fill.back() = length - grad.size(dim);
        const Tensor whole = of.onesided ? at::constant_pad_nd(grad, fill) : grad;
        return at::real(transform_lines(whole, dim, {Kind::kComplex, of.norm, false}));
      }
      case Kind::kToReal: {
        // Frequencies that the half spectrum leaves out count in their mirror images.
        const Tensor half = transform_lines(grad, dim, {Kind::kToComplex, of.norm});
        Tensor weight = at::ones({length}, grad.options());
        weight.narrow(0, 1, grad.size(dim) - length).fill_(2);
        std::vector<int64_t> sizes(grad.dim(), 1);
        sizes[dim] = length;
        return half * weight.view(sizes);
      }
    }
    return {};
  }
};

}  // namespace

Tensor FourierTransform::along(const Tensor& x, at::IntArrayRef dims) const {
  switch (kind) {
    case Kind::kComplex:
      return at::_fft_c2c(x, dims, norm, forward);
    case Kind::kToComplex:
      return at::_fft_r2c(x, dims, norm, onesided);
    case Kind::kToReal:
      return at::_fft_c2r(x, dims, norm, length);
  }
  return {};
}

Tensor transform_lines(const Tensor& x, int64_t dim, const FourierTransform& transform) {
  return tensor::records_grad(x) ? LinesFn::apply(x, dim, transform)
                                 : line_by_line(x, dim, transform);
}

}  // namespace shardfield::ops
