#include "shardfield/ops/ring_attention.h"

#include <numeric>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "shardfield/ops/blockwise_attention.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using torch::autograd::AutogradContext;

/// Contiguous tensors for the keys and values that arrive next, if any.
Tensors room_for(const RingAttention& r, int step, const Tensor& key, const Tensor& value) {
  if (step >= r.ring.size() || !r.ring.holds(step)) return {};
  Tensors room;
  for (const Tensor& like : {key, value}) {
    std::vector<int64_t> sizes = like.sizes().vec();
    sizes[like.dim() - 2] = r.key_sizes[r.ring.block_at(step)];
    room.push_back(at::empty(sizes, like.options()));
  }
  return room;
}

/// The block held at a step, with its columns of the mask.
KeyBlock block_of(const RingAttention& r, int step, const Tensors& held, const Tensor& mask) {
  const int b = r.ring.block_at(step);
  const int64_t first = std::accumulate(r.key_sizes.begin(), r.key_sizes.begin() + b, int64_t{0});
  KeyBlock block{held[0], held[1], mask, r.is_causal, r.first_row, first};
  if (mask.defined() && mask.size(-1) != 1) block.mask = mask.narrow(-1, first, r.key_sizes[b]);
  return block;
}

/// use(step, block) for every block that this rank needs, while the next one travels.
template <class Use>
void for_each_block(const RingAttention& r, const Tensor& key, const Tensor& value,
                    const Tensor& mask, Use use) {
  Tensors held{key.contiguous(), value.contiguous()};
  for (int step = 0; step < r.ring.size(); ++step) {
    const Tensors next = room_for(r, step + 1, key, value);
    comm::Exchange passing;
    if (step + 1 < r.ring.size()) passing = r.ring.pass_on(step, held, next);
    if (r.ring.uses(step)) {
      use(step, block_of(r, step, held, mask));
    } else {
      use(step, std::nullopt);
    }
    passing.wait();
    held = next;
  }
}

struct RingAttentionFn : torch::autograd::Function<RingAttentionFn> {
  static Tensor forward(AutogradContext* ctx, const Tensor& query, const Tensor& key,
                        const Tensor& value, const Tensor& mask_or_empty, bool masked,
                        std::shared_ptr<const RingAttention> r) {
    comm::remember_scope(ctx);
    const at::AutoDispatchBelowADInplaceOrView below;
    const Tensor mask = masked ? mask_or_empty : Tensor();
    BlockwiseAttention attention(query, value.size(-1), r->scale);
    for_each_block(*r, key, value, mask, [&](int, const std::optional<KeyBlock>& block) {
      if (block) attention.add(*block);
    });
    const Tensor out = attention.output();
    ctx->save_for_backward({query, key, value, mask, out, attention.logsumexp()});
    auto held = c10::make_intrusive<Held>();
    held->ring = std::move(r);
    ctx->saved_data["ring"] = c10::IValue::make_capsule(std::move(held));
    return out;
  }

  static torch::autograd::variable_list backward(AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const comm::BackwardScope scope(ctx);
    const auto saved = ctx->get_saved_variables();
    const auto held = ctx->saved_data["ring"].toCapsule();
    const RingAttention& r = *static_cast<const Held&>(*held).ring;
    const std::array<bool, 4> wanted = {ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                                        ctx->needs_input_grad(2), ctx->needs_input_grad(3)};
    Tensors result = at::GradMode::is_enabled() ? differentiable(r, saved, grads[0], wanted)
                                                : in_ring(r, saved, grads[0], wanted);
    result.resize(6);
    return result;
  }

 private:
  struct Held : torch::CustomClassHolder {
    std::shared_ptr<const RingAttention> ring;
  };

  static Tensors in_ring(const RingAttention& r, const Tensors& saved, const Tensor& grad,
                         const std::array<bool, 4>& wanted) {
    const Tensor &query = saved[0], &key = saved[1], &value = saved[2], &mask = saved[3];
    BlockwiseAttentionGradient gradient(query, saved[4], saved[5], grad, r.scale);
    const bool of_keys = wanted[1] || wanted[2];
    // Summed as one device would; what travels has the keys' type.
    Tensor grad_key, grad_value;
    Tensor grad_mask = wanted[3] ? at::zeros_like(mask, at::MemoryFormat::Contiguous) : Tensor();
    Tensors arriving;
    comm::Exchange returning;
    const auto add = [&](const Tensor& of_key, const Tensor& of_value) {
      grad_key = grad_key.defined() ? grad_key.add_(of_key) : of_key;
      grad_value = grad_value.defined() ? grad_value.add_(of_value) : of_value;
    };
    const auto take_in = [&] {
      returning.wait();
      if (!arriving.empty()) add(arriving[0], arriving[1]);
    };
    for_each_block(r, key, value, mask, [&](int step, const std::optional<KeyBlock>& block) {
      BlockGradients part;
      if (block) part = gradient.add(*block, wanted[3]);
      if (part.mask.defined()) {
        const bool whole = mask.size(-1) == 1;
        (whole ? grad_mask : grad_mask.narrow(-1, block->first_key, block->key.size(-2)))
            .add_(part.mask);
      }
      if (!of_keys) return;
      if (step == 0) {
        if (block) add(part.key, part.value);
        return;
      }
      take_in();
      arriving.clear();
      if (r.ring.is_used_after(step))
        arriving = {at::empty(key.sizes(), key.options()),
                    at::empty(value.sizes(), value.options())};
      Tensors parts;
      if (block) parts = {part.key.to(key.scalar_type()), part.value.to(value.scalar_type())};
      returning = r.ring.to_owner(step, parts, arriving);
    });
    take_in();
    if (of_keys && !grad_key.defined()) add(at::zeros_like(key), at::zeros_like(value));
    if (!of_keys) return {gradient.query(), {}, {}, grad_mask};
    return {gradient.query(), grad_key.to(key.scalar_type()), grad_value.to(value.scalar_type()),
            grad_mask};
  }

  static Tensors differentiable(const RingAttention& r, const Tensors& saved, const Tensor& grad,
                                const std::array<bool, 4>& wanted) {
    const auto mask = saved[3].defined() ? std::optional<Tensor>(saved[3]) : std::nullopt;
    const Tensor out = r.gathered(saved[0], saved[1], saved[2], mask);
    Tensors inputs, result(4);
    for (size_t i = 0; i < 4; ++i)
      if (wanted[i]) inputs.push_back(saved[i]);
    const Tensors found = torch::autograd::grad({out}, inputs, {grad}, /*retain_graph=*/true,
                                                /*create_graph=*/true);
    for (size_t i = 0, next = 0; i < 4; ++i)
      if (wanted[i]) result[i] = found[next++];
    return result;
  }
};

}  // namespace

Tensor attend_in_ring(const Tensor& query, const Tensor& key, const Tensor& value,
                      const std::optional<Tensor>& mask,
                      std::shared_ptr<const RingAttention> ring) {
  // A node takes no undefined tensor.
  const bool masked = mask && mask->defined();
  return RingAttentionFn::apply(query, key, value, masked ? *mask : at::empty({0}, query.options()),
                                masked, std::move(ring));
}

}  // namespace shardfield::ops
