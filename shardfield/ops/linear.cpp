// Matrix products. One rule serves all of them: of the letters of "...nk,...km->...nm" each mesh
// axis cuts one. The larger operand keeps its cuts, the other follows; a cut k gives partial
// results that are summed over the ranks. Linear over whole features is local and uses PyTorch's
// own derivative.

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/WrapDimUtils.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/formula.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Scalar;
using at::Tensor;
using spec::Cut;
using spec::Layout;
using tensor::is_sharded;
using tensor::layout_of;
using tensor::make_sharded;
using tensor::piece_of;
using OptTensor = std::optional<Tensor>;

/// Which mesh axes cut which letter. Letters are the result's batch dims 0 .. b-1, then n, m, k.
class Letters {
 public:
  Letters(const Tensor& a, const Tensor& b)
      : batch_(at::infer_size(a.sizes().slice(0, a.dim() - 2), b.sizes().slice(0, b.dim() - 2))) {
    const bool first_a = !is_sharded(b) || (is_sharded(a) && a.numel() >= b.numel());
    first_a ? adopt(a, true) : adopt(b, false);
    first_a ? adopt(b, false) : adopt(a, true);
  }

  const Layout* layout_of_a(const Tensor& a) const { return layout_for(a, true); }
  const Layout* layout_of_b(const Tensor& b) const { return layout_for(b, false); }
  const Layout* layout_of_result() const {
    std::vector<Cut> cuts;
    for (const Cut& cut : cuts_)
      if (cut.dim != k()) cuts.push_back(cut);
    return spec::intern_layout(*mesh_, std::move(cuts));
  }
  const spec::Mesh& mesh() const { return *mesh_; }
  std::vector<int> summed_axes() const {
    std::vector<int> axes;
    for (const Cut& cut : cuts_)
      if (cut.dim == k()) axes.insert(axes.end(), cut.axes.begin(), cut.axes.end());
    std::sort(axes.begin(), axes.end());
    return axes;
  }
  /// Axes that cut some letter, but none of this operand: it is replicated along them.
  std::vector<int> foreign_axes(const Layout* own) const {
    std::vector<int> axes;
    for (const Cut& cut : cuts_)
      for (int a : cut.axes)
        if (!own || !std::binary_search(own->axes().begin(), own->axes().end(), a))
          axes.push_back(a);
    std::sort(axes.begin(), axes.end());
    return axes;
  }
  std::vector<int64_t> result_sizes(int64_t n, int64_t m) const {
    std::vector<int64_t> sizes = batch_;
    sizes.push_back(n);
    sizes.push_back(m);
    return sizes;
  }

 private:
  int num_batch() const { return static_cast<int>(batch_.size()); }
  int n() const { return num_batch(); }
  int m() const { return num_batch() + 1; }
  int k() const { return num_batch() + 2; }

  /// The letter of an operand's dim; -1 for a dim that is broadcast.
  int letter(const Tensor& t, int dim, bool is_a) const {
    const int last = static_cast<int>(t.dim()) - 1;
    if (dim == last) return is_a ? k() : m();
    if (dim == last - 1) return is_a ? n() : k();
    const int batch = dim + num_batch() - (static_cast<int>(t.dim()) - 2);
    return t.size(dim) == batch_[batch] ? batch : -1;
  }

  bool uses(int axis) const {
    return std::any_of(cuts_.begin(), cuts_.end(), [&](const Cut& c) {
      return std::find(c.axes.begin(), c.axes.end(), axis) != c.axes.end();
    });
  }

  /// Takes over the operand's cuts on letters and axes that are still free.
  void adopt(const Tensor& t, bool is_a) {
    if (!is_sharded(t)) return;
    const Layout& layout = tensor::layout_of(t);
    SHARDFIELD_CHECK(!mesh_ || mesh_ == &layout.mesh(), "matmul",
                     "operands live on two meshes: ", tensor::describe(t),
                     "; bring them to one with full_tensor() and shard_tensor()");
    mesh_ = &layout.mesh();
    std::vector<Cut> taken;
    for (const Cut& cut : layout.cuts()) {
      bool group_free = true;  // cuts of one dim only make sense together
      const int where = letter(t, cut.dim, is_a);
      for (const Cut& other : layout.cuts())
        if (other.dim == cut.dim)
          for (int a : other.axes) group_free &= !uses(a);
      for (const Cut& c : cuts_) group_free &= c.dim != where;
      if (where < 0 || !group_free) continue;
      taken.push_back(cut);
      taken.back().dim = where;
    }
    cuts_.insert(cuts_.end(), taken.begin(), taken.end());
  }

  const Layout* layout_for(const Tensor& t, bool is_a) const {
    std::vector<Cut> cuts;
    for (int d = 0; d < static_cast<int>(t.dim()); ++d) {
      const int where = letter(t, d, is_a);
      for (const Cut& cut : cuts_) {
        if (cut.dim != where) continue;
        cuts.push_back(cut);
        cuts.back().dim = d;
      }
    }
    return spec::intern_layout(*mesh_, std::move(cuts));
  }

  std::vector<int64_t> batch_;
  std::vector<Cut> cuts_;
  const spec::Mesh* mesh_ = nullptr;
};

/// An operand's piece for the local product; its gradient sums over the axes it is replicated on.
Tensor operand_piece(const Tensor& t, const Layout* own, const Letters& letters) {
  const Tensor moved = tensor::redistribute(t, own);
  return tensor::enter(own ? tensor::local(moved) : moved, letters.mesh(),
                       letters.foreign_axes(own));
}

/// a @ b for operands of two or more dims, batch dims broadcast. With `bias` (broadcastable to the
/// result) beta * bias + alpha * (a @ b).
Tensor product(const char* op, const Tensor& a, const Tensor& b, const Tensor* bias = nullptr,
               const Scalar& beta = 1, const Scalar& alpha = 1) {
  SHARDFIELD_CHECK(a.size(-1) == b.size(-2), op,
                   "mat1 and mat2 shapes cannot be multiplied: ", a.sizes(), " and ", b.sizes());
  const Letters letters(a, b);
  const Tensor pa = operand_piece(a, letters.layout_of_a(a), letters);
  const Tensor pb = operand_piece(b, letters.layout_of_b(b), letters);
  const auto sizes = letters.result_sizes(a.size(-2), b.size(-1));
  const Layout* layout = letters.layout_of_result();
  const auto summed = letters.summed_axes();
  const bool with_bias =
      bias && !(beta.isIntegral(true) ? beta.toLong() == 0 : beta.toComplexDouble() == 0.0);
  if (with_bias && layout && summed.empty() && a.dim() <= 3 && b.dim() == a.dim()) {
    const Tensor p = tensor::piece_for(*bias, *layout, sizes);
    return tensor::wrap(
        a.dim() == 2 ? at::addmm(p, pa, pb, beta, alpha) : at::baddbmm(p, pa, pb, beta, alpha),
        layout, sizes);
  }
  Tensor part = at::matmul(pa, pb);
  if (bias && alpha.toComplexDouble() != 1.0) part = part * alpha;
  if (!summed.empty()) part = tensor::reduce_sum(part, letters.mesh(), summed);
  Tensor result = tensor::wrap(part, layout, sizes);
  if (!with_bias) return result;
  const Layout* of_bias =
      layout ? tensor::layout_for_operand(*layout, sizes, bias->sizes()) : nullptr;
  return at::add(result, tensor::redistribute(*bias, of_bias), beta);
}

Tensor matmul_sharded(const Tensor& a, const Tensor& b) {
  SHARDFIELD_CHECK(a.dim() > 0 && b.dim() > 0, "matmul", "both arguments need at least 1 dim, got ",
                   a.sizes(), " and ", b.sizes());
  const bool vec_a = a.dim() == 1, vec_b = b.dim() == 1;
  Tensor out = product("matmul", vec_a ? a.unsqueeze(0) : a, vec_b ? b.unsqueeze(1) : b);
  if (vec_b) out = out.squeeze(-1);
  return vec_a ? out.squeeze(vec_b ? -1 : -2) : out;
}

void check_dims(const char* op, const Tensor& a, int64_t dims_a, const Tensor& b, int64_t dims_b) {
  SHARDFIELD_CHECK(a.dim() == dims_a && b.dim() == dims_b, op, "expected a ", dims_a, "-d and a ",
                   dims_b, "-d tensor, got sizes ", a.sizes(), " and ", b.sizes());
}

Tensor mm_sharded(const Tensor& a, const Tensor& b) {
  check_dims("mm", a, 2, b, 2);
  return product("mm", a, b);
}
Tensor bmm_sharded(const Tensor& a, const Tensor& b) {
  check_dims("bmm", a, 3, b, 3);
  SHARDFIELD_CHECK(a.size(0) == b.size(0), "bmm", "batch sizes differ: ", a.sizes(), " and ",
                   b.sizes());
  return product("bmm", a, b);
}
Tensor mv_sharded(const Tensor& a, const Tensor& b) {
  check_dims("mv", a, 2, b, 1);
  return matmul_sharded(a, b);
}
Tensor dot_sharded(const Tensor& a, const Tensor& b) {
  check_dims("dot", a, 1, b, 1);
  return matmul_sharded(a, b);
}
Tensor vdot_sharded(const Tensor& a, const Tensor& b) {
  check_dims("vdot", a, 1, b, 1);
  return matmul_sharded(a.conj(), b);
}
Tensor addmm_sharded(const Tensor& bias, const Tensor& a, const Tensor& b, const Scalar& beta,
                     const Scalar& alpha) {
  check_dims("addmm", a, 2, b, 2);
  if (is_sharded(a) || is_sharded(b)) return product("addmm", a, b, &bias, beta, alpha);
  return at::add(at::mul(at::mm(a, b), alpha), bias, beta);
}
Tensor baddbmm_sharded(const Tensor& bias, const Tensor& a, const Tensor& b, const Scalar& beta,
                       const Scalar& alpha) {
  check_dims("baddbmm", a, 3, b, 3);
  if (is_sharded(a) || is_sharded(b)) return product("baddbmm", a, b, &bias, beta, alpha);
  return at::add(at::mul(at::bmm(a, b), alpha), bias, beta);
}
Tensor addmv_sharded(const Tensor& bias, const Tensor& a, const Tensor& b, const Scalar& beta,
                     const Scalar& alpha) {
  check_dims("addmv", a, 2, b, 1);
  const Tensor out = at::mul(at::mv(a, b), alpha);
  return beta.toComplexDouble() == 0.0 ? out : at::add(out, bias, beta);
}
Tensor addr_sharded(const Tensor& bias, const Tensor& a, const Tensor& b, const Scalar& beta,
                    const Scalar& alpha) {
  check_dims("addr", a, 1, b, 1);
  const Tensor out = at::mul(a.unsqueeze(1) * b.unsqueeze(0), alpha);
  return beta.toComplexDouble() == 0.0 ? out : at::add(out, bias, beta);
}

// linear: x (..., in), weight (out, in), bias (out).

/// Whole features, plain weight: every rank's rows by themselves.
bool is_local(const Tensor& x, const Tensor& weight, const OptTensor& bias) {
  return is_sharded(x) && !is_sharded(weight) && !(bias && is_sharded(*bias)) &&
         weight.dim() == 2 && x.size(-1) == weight.size(1) &&
         !layout_of(x).is_cut(static_cast<int>(x.dim()) - 1);
}

Tensor linear_general(const Tensor& x, const Tensor& weight, const OptTensor& bias) {
  SHARDFIELD_CHECK(x.dim() > 0 && x.size(-1) == weight.size(-1), "linear", "expected ",
                   weight.size(-1), " features in the last dim of the input, got input ", x.sizes(),
                   " and weight ", weight.sizes());
  const Tensor out = at::matmul(x, weight.dim() == 2 ? weight.t() : weight);
  return bias && bias->defined() ? out + *bias : out;
}

Tensor linear_kernel(const Tensor& x, const Tensor& weight, const OptTensor& bias) {
  if (!is_local(x, weight, bias)) return linear_general(x, weight, bias);
  c10::SmallVector<int64_t, 5> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = weight.size(0);
  return make_sharded(at::linear(piece_of(x), weight, bias), &layout_of(x), sizes);
}

/// PyTorch's derivative of linear. Its usual place, AutogradOther, holds the decomposition, because
/// most backends have no linear of their own; the nested-tensor key has the formula.
c10::DispatchKeySet linear_formula_keys(c10::DispatchKeySet keys) {
  return (keys - c10::DispatchKeySet(c10::DispatchKey::AutogradFunctionality))
      .add(c10::DispatchKey::AutogradNestedTensor);
}

Tensor linear_above(c10::DispatchKeySet keys, const Tensor& x, const Tensor& weight,
                    const OptTensor& bias) {
  if (!is_local(x, weight, bias) || dispatch::is_reproducible() || dispatch::has_tangent(x) ||
      dispatch::has_tangent(weight) || dispatch::has_tangent(bias))
    return linear_general(x, weight, bias);
  const auto keep = dispatch::prepare_leaf(x);
  return at::_ops::linear::redispatch(linear_formula_keys(keys), x, weight, bias);
}

/// Weight and bias gradient travel in one message.
std::tuple<Tensor, Tensor> parameter_gradients(const Tensor& x, const Tensor& grad,
                                               const Tensor& weight, bool with_weight,
                                               bool with_bias, const Layout& layout) {
  const int64_t out = weight.size(0), in = weight.size(1);
  const Tensor rows = grad.reshape({-1, out});
  if (!with_weight) {
    return {Tensor(), comm::all_reduce(rows.sum(0), layout.mesh(), layout.axes())};
  }
  Tensor packed = at::empty({out * in + (with_bias ? out : 0)}, grad.options());
  Tensor grad_weight = packed.narrow(0, 0, out * in).view({out, in});
  at::mm_out(grad_weight, rows.t(), x.reshape({-1, in}));
  if (with_bias) packed.narrow(0, out * in, out).copy_(rows.sum(0));
  packed = comm::all_reduce(packed, layout.mesh(), layout.axes());
  return {packed.narrow(0, 0, out * in).view({out, in}),
          with_bias ? packed.narrow(0, out * in, out) : Tensor()};
}

std::tuple<Tensor, Tensor, Tensor> linear_backward_general(const Tensor& x, const Tensor& grad,
                                                           const Tensor& weight,
                                                           std::array<bool, 3> mask) {
  const Tensor rows = grad.reshape({-1, grad.size(-1)});
  return {mask[0] ? at::matmul(grad, weight) : Tensor(),
          mask[1] ? at::mm(rows.t(), x.reshape({-1, x.size(-1)})) : Tensor(),
          mask[2] ? rows.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor, Tensor> linear_backward_kernel(const Tensor& x, const Tensor& grad,
                                                          const Tensor& weight,
                                                          std::array<bool, 3> mask) {
  if (!is_local(x, weight, std::nullopt)) return linear_backward_general(x, grad, weight, mask);
  const Layout& layout = layout_of(x);
  const Tensor piece = tensor::piece_for(grad, layout, grad.sizes());
  Tensor grad_x, grad_weight, grad_bias;
  if (mask[0]) grad_x = make_sharded(at::matmul(piece, weight), &layout, x.sizes());
  if (mask[1] || mask[2])
    std::tie(grad_weight, grad_bias) =
        parameter_gradients(piece_of(x), piece, weight, mask[1], mask[2], layout);
  return {grad_x, grad_weight, grad_bias};
}

/// y[o] = x1 . weight[o] . x2 (+ bias[o]), as two products.
Tensor bilinear_sharded(const Tensor& x1, const Tensor& x2, const Tensor& weight,
                        const OptTensor& bias) {
  SHARDFIELD_CHECK(
      weight.dim() == 3 && x1.size(-1) == weight.size(1) && x2.size(-1) == weight.size(2),
      "bilinear", "expected features of ", weight.sizes().slice(1),
      " in the last dims, got inputs ", x1.sizes(), " and ", x2.sizes());
  std::vector<int64_t> sizes = x1.sizes().vec();
  sizes.back() = weight.size(0);
  sizes.push_back(weight.size(2));
  const Tensor left = at::matmul(x1, weight.transpose(0, 1).flatten(1)).view(sizes);
  const Tensor out = at::matmul(left, x2.unsqueeze(-1)).squeeze(-1);
  return bias && bias->defined() ? out + *bias : out;
}

/// Rows of a and b belong together along every dim but `dim`, which each rank needs whole.
Tensor cross_sharded(const Tensor& a, const Tensor& b, int64_t dim) {
  const auto sizes = at::infer_size(a.sizes(), b.sizes());
  const auto last = static_cast<int64_t>(sizes.size());
  dim = at::maybe_wrap_dim(dim, last);
  SHARDFIELD_CHECK(a.dim() == b.dim() && a.size(dim) == 3 && b.size(dim) == 3, "linalg_cross",
                   "expected operands of length 3 along dim ", dim, ", got ", a.sizes(), " and ",
                   b.sizes());
  const bool lead_a = is_sharded(a) && a.sizes() == at::IntArrayRef(sizes);
  const Tensor lead = with_whole_dim("linalg_cross", lead_a || !is_sharded(b) ? a : b, dim);
  if (lead.sizes() != at::IntArrayRef(sizes) || !is_sharded(lead)) {
    const Tensor wide_a = with_whole_dim("linalg_cross", a, dim).expand(sizes);
    const Tensor wide_b = with_whole_dim("linalg_cross", b, dim).expand(sizes);
    if (is_sharded(wide_a) || is_sharded(wide_b)) return cross_sharded(wide_a, wide_b, dim);
    return at::linalg_cross(wide_a, wide_b, dim);
  }
  const Layout& layout = layout_of(lead);
  const Tensor pa = tensor::piece_for(lead_a || !is_sharded(b) ? lead : a, layout, sizes);
  const Tensor pb = tensor::piece_for(lead_a || !is_sharded(b) ? b : lead, layout, sizes);
  return tensor::wrap(at::linalg_cross(pa, pb, dim), &layout, sizes);
}

}  // namespace

SHARDFIELD_OPS(linear) {
  table.above_autograd("aten::linear", TORCH_FN(linear_above));
  table.backend("aten::linear", TORCH_FN(linear_kernel));
  table.reproducible_composed("aten::linear", TORCH_FN(linear_general));
  table.backend("aten::linear_backward", TORCH_FN(linear_backward_kernel));
  table.composed("aten::matmul", TORCH_FN(matmul_sharded));
  table.composed("aten::mm", TORCH_FN(mm_sharded));
  table.composed("aten::bmm", TORCH_FN(bmm_sharded));
  table.composed("aten::mv", TORCH_FN(mv_sharded));
  table.composed("aten::dot", TORCH_FN(dot_sharded));
  table.composed("aten::vdot", TORCH_FN(vdot_sharded));
  table.composed("aten::addmm", TORCH_FN(addmm_sharded));
  table.composed("aten::baddbmm", TORCH_FN(baddbmm_sharded));
  table.composed("aten::addmv", TORCH_FN(addmv_sharded));
  table.composed("aten::addr", TORCH_FN(addr_sharded));
  table.composed("aten::bilinear", TORCH_FN(bilinear_sharded));
  table.composed("aten::linalg_cross", TORCH_FN(cross_sharded));
}

}  // namespace shardfield::ops
