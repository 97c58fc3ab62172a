#include "shardfield/tensor/autograd.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "shardfield/base/error.h"
#include "shardfield/base/torch_version.h"
#include "shardfield/comm/backward_scope.h"
#include "shardfield/comm/traffic.h"
#include "shardfield/tensor/gathered_gradient.h"
#include "shardfield/tensor/redistribute.h"

namespace shardfield::tensor {

namespace {

using at::Tensor;
using spec::Layout;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

int64_t as_int(const void* p) {
  return reinterpret_cast<int64_t>(p);
}
const Layout* as_layout(const c10::IValue& v) {
  return reinterpret_cast<const Layout*>(v.toInt());
}

/// An output of Function::forward must be a fresh tensor object.
Tensor fresh(const Tensor& t) {
  return t.detach();
}

/// A gradient in memory of its own: one value for many elements, as a sum gives it, would be taken
/// over as a dense `.grad`, which nobody could write. (An empty one calls itself contiguous.)
Tensor dense(const Tensor& grad) {
  for (int64_t d = 0; d < grad.dim(); ++d)
    if (grad.stride(d) == 0 && grad.size(d) > 1) return grad.clone(at::MemoryFormat::Contiguous);
  return grad;
}

/// The node of local(). Every composed op has one, on one rank too, so it is lean:
/// torch::autograd's Function keeps what it saves in a table of names.
class LocalNode final : public torch::autograd::Node {
 public:
  explicit LocalNode(const Tensor& x)
      : layout_(&layout_of(x)), sizes_(x.sizes()), format_(x.suggest_memory_format()) {}

  variable_list apply(variable_list&& grads) override {
    // Whether a formula gives no gradient may depend on the piece: the other ranks go on, so does
    // this one.
    const Tensor grad = grads[0].defined() ? std::move(grads[0]) : input_metadata(0).zeros_like();
    // The piece is all of it: PyTorch's own strides, those of one value for many elements too.
    if (layout_->is_alone() && !records_grad(grad))
      return {make_sharded_strided(grad, layout_, sizes_, grad.strides())};
    return {wrap(dense(grad), layout_, sizes_, format_)};
  }

 private:
  const Layout* layout_;
  c10::SmallVector<int64_t, 5> sizes_;
  at::MemoryFormat format_;
};

Tensor local_recorded(const Tensor& x) {
  Tensor piece;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    piece = fresh(piece_of(x));
  }
  const NodePointer node = make_node<LocalNode>(x);
  node->set_next_edges(torch::autograd::collect_next_edges(x));
  torch::autograd::set_history(piece, node);
  comm::remember_formula(piece);
  return piece;
}

struct WrapFn : Function<WrapFn> {
  static Tensor forward(AutogradContext* ctx, const Tensor& piece, int64_t layout,
                        at::IntArrayRef sizes, int64_t format) {
    ctx->saved_data["layout"] = layout;
    comm::remember_scope(ctx);
    return make_sharded(fresh(piece), reinterpret_cast<const Layout*>(layout), sizes,
                        static_cast<at::MemoryFormat>(format));
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const comm::BackwardScope scope(ctx);
    return {local(redistribute(grads[0], as_layout(ctx->saved_data["layout"]))), {}, {}, {}};
  }
};

Tensor sum_over(const Tensor& value, const spec::Mesh& mesh, const std::vector<int64_t>& axes) {
  return reduce_sum(value, mesh, std::vector<int>(axes.begin(), axes.end()));
}

struct EnterFn : Function<EnterFn> {
  static Tensor forward(AutogradContext* ctx, const Tensor& plain, int64_t mesh,
                        const std::vector<int64_t>& axes) {
    ctx->saved_data["mesh"] = mesh;
    ctx->saved_data["axes"] = axes;
    comm::remember_scope(ctx);
    return fresh(plain);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const comm::BackwardScope scope(ctx);
    const auto* mesh = reinterpret_cast<const spec::Mesh*>(ctx->saved_data["mesh"].toInt());
    return {sum_over(grads[0], *mesh, ctx->saved_data["axes"].toIntVector()), {}, {}};
  }
};

struct ReduceSumFn : Function<ReduceSumFn> {
  static Tensor forward(AutogradContext* ctx, const Tensor& partial, int64_t mesh,
                        const std::vector<int64_t>& axes) {
    ctx->saved_data["mesh"] = mesh;
    ctx->saved_data["axes"] = axes;
    comm::remember_scope(ctx);
    return comm::all_reduce(partial, *reinterpret_cast<const spec::Mesh*>(mesh),
                            std::vector<int>(axes.begin(), axes.end()));
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    Tensor grad = grads[0];
    if (records_grad(grad)) {
      grad = EnterFn::apply(grad, ctx->saved_data["mesh"].toInt(),
                            ctx->saved_data["axes"].toIntVector());
    }
    return {grad, {}, {}};
  }
};

struct GatherFn : Function<GatherFn> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    ctx->saved_data["layout"] = as_int(&layout_of(x));
    comm::remember_scope(ctx);
    return redistribute_piece(piece_of(x), &layout_of(x), nullptr, x.sizes());
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const comm::BackwardScope scope(ctx);
    return {redistribute(grads[0], as_layout(ctx->saved_data["layout"]))};
  }
};

/// A copy of this rank's piece, in the memory order of the whole.
Tensor cut_from(const Tensor& plain, const Layout* layout) {
  const at::NoGradGuard no_grad;
  const auto format = plain.suggest_memory_format();
  return make_sharded(slice_piece(plain, *layout).clone(format), layout, plain.sizes(), format);
}

struct ScatterFn : Function<ScatterFn> {
  static Tensor forward(AutogradContext* ctx, const Tensor& plain, int64_t layout) {
    comm::remember_scope(ctx);
    const auto* to = reinterpret_cast<const Layout*>(layout);
    return cut_from(plain, to);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const comm::BackwardScope scope(ctx);
    return {gathered_gradient(grads[0]), {}};
  }
};

struct MoveFn : Function<MoveFn> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, int64_t layout) {
    ctx->saved_data["layout"] = as_int(&layout_of(x));
    comm::remember_scope(ctx);
    const auto* to = reinterpret_cast<const Layout*>(layout);
    return make_sharded(redistribute_piece(piece_of(x), &layout_of(x), to, x.sizes()), to,
                        x.sizes());
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const comm::BackwardScope scope(ctx);
    return {redistribute(grads[0], as_layout(ctx->saved_data["layout"])), {}};
  }
};

/// A forward-mode tangent would be dropped without a word by the nodes above.
void refuse_tangent(const Tensor& t, const char* op) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(t);
  // Below autograd the formula above has dealt with it.
  if (C10_LIKELY(!meta) ||
      c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality))
    return;
  SHARDFIELD_CHECK(
      !meta->fw_grad(0, t).defined(), comm::current_op() ? comm::current_op() : op,
      "forward-mode derivatives (jvp, make_dual) are not available for this op on sharded tensors; "
      "use torch.func.jvp or reverse mode (torch.autograd.grad, torch.func.vjp)");
}

}  // namespace

Tensor local(const Tensor& x) {
  TORCH_INTERNAL_ASSERT(is_sharded(x));
  refuse_tangent(x, "to_local");
  if (records_grad(x)) return local_recorded(x);
  return fresh(piece_of(x));
}

Tensor wrap(const Tensor& piece, const Layout* layout, at::IntArrayRef sizes,
            at::MemoryFormat format) {
  if (!layout) return piece;
  if (records_grad(piece))
    return WrapFn::apply(piece, as_int(layout), sizes, static_cast<int64_t>(format));
  return make_sharded(piece, layout, sizes, format);
}

Tensor enter(const Tensor& plain, const Layout& layout) {
  return enter(plain, layout.mesh(), layout.axes());
}

Tensor enter(const Tensor& plain, const spec::Mesh& mesh, const std::vector<int>& axes) {
  refuse_tangent(plain, "enter");
  if (axes.empty() || !records_grad(plain)) return plain;
  return EnterFn::apply(plain, as_int(&mesh), std::vector<int64_t>(axes.begin(), axes.end()));
}

std::optional<Tensor> enter(const std::optional<Tensor>& plain, const Layout& layout) {
  if (!plain.has_value() || !plain->defined()) return plain;
  return enter(*plain, layout);
}

Tensor reduce_sum(const Tensor& partial, const spec::Mesh& mesh, const std::vector<int>& axes) {
  if (records_grad(partial)) {
    return ReduceSumFn::apply(partial, as_int(&mesh),
                              std::vector<int64_t>(axes.begin(), axes.end()));
  }
  return comm::all_reduce(partial, mesh, axes);
}

Tensor reduce_sum(const Tensor& partial, const Layout& layout) {
  return reduce_sum(partial, layout.mesh(), layout.axes());
}

Tensor gather(const Tensor& x) {
  if (!is_sharded(x)) return x;
  refuse_tangent(x, "full_tensor");
  if (records_grad(x)) return GatherFn::apply(x);
  return redistribute_piece(piece_of(x), &layout_of(x), nullptr, x.sizes());
}

Tensor scatter_like(const Tensor& plain, const Layout* layout) {
  if (!layout) return plain;
  if (records_grad(plain)) return ScatterFn::apply(plain, as_int(layout));
  return cut_from(plain, layout);
}

Tensor redistribute(const Tensor& x, const Layout* layout) {
  if (!x.defined()) return x;
  if (!is_sharded(x)) return scatter_like(x, layout);
  if (!layout) return gather(x);
  const Layout* from = &layout_of(x);
  if (from == layout) return x;
  SHARDFIELD_CHECK(
      &from->mesh() == &layout->mesh(), comm::current_op() ? comm::current_op() : "redistribute",
      "tensors of two meshes in one call: ", describe(x), " and ", layout->to_string(), " on rank ",
      from->mesh().rank, "; bring them to one mesh with full_tensor() and shard_tensor()");
  refuse_tangent(x, "redistribute");
  if (records_grad(x)) return MoveFn::apply(x, as_int(layout));
  return make_sharded(redistribute_piece(piece_of(x), from, layout, x.sizes()), layout, x.sizes());
}

const Layout* layout_for_operand(const Layout& layout, at::IntArrayRef sizes,
                                 at::IntArrayRef operand_sizes) {
  const int shift = static_cast<int>(sizes.size()) - static_cast<int>(operand_sizes.size());
  if (shift == 0 && sizes == operand_sizes) return &layout;
  std::vector<int> new_dim(sizes.size(), -1);
  for (int d = std::max(shift, 0); d < static_cast<int>(sizes.size()); ++d)
    if (operand_sizes[d - shift] == sizes[d]) new_dim[d] = d - shift;
  return spec::renumber(layout, new_dim);
}

Tensor piece_for(const Tensor& t, const Layout& layout, at::IntArrayRef sizes) {
  if (!t.defined()) return t;
  if (is_sharded(t) && &layout_of(t) == &layout && t.sizes() == sizes) return local(t);
  const Layout* own = layout_for_operand(layout, sizes, t.sizes());
  if (!is_sharded(t) && !records_grad(t)) return own ? slice_piece(t, *own) : t;
  Tensor moved = redistribute(t, own);
  // Axes of `layout` that the operand is not cut along see it as replicated.
  std::vector<int64_t> axes;
  for (int a : layout.axes())
    if (!own || !std::binary_search(own->axes().begin(), own->axes().end(), a)) axes.push_back(a);
  Tensor piece = own ? local(moved) : moved;
  if (axes.empty() || !records_grad(piece)) return piece;
  return EnterFn::apply(piece, as_int(&layout.mesh()), axes);
}

}  // namespace shardfield::tensor
