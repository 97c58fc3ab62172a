#include "shardfield/ops/ring_attention.h"

#include <numeric>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "shardfield/ops/blockwise_attention.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using exchange::BlockRing;
using Counts = std::vector<int64_t>;
using Tensors = std::vector<Tensor>;
using torch::autograd::AutogradContext;

int64_t total(const Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}
int64_t first_of(const Counts& counts, int block) {
  return std::accumulate(counts.begin(), counts.begin() + block, int64_t{0});
}

/// use(step, tensors) for every block: this rank's own first, then those that arrive, each while
/// the next one travels; no tensors where this rank needs none. Blocks differ in their last but one
/// dim.
template <class Use>
void for_each_block(const BlockRing& ring, const Counts& counts, const Tensors& own, Use use) {
  Tensors held;
  for (const Tensor& t : own) held.push_back(t.contiguous());
  for (int step = 0; step < ring.size(); ++step) {
    Tensors next;
    comm::Exchange passing;
    if (step + 1 < ring.size()) {
      for (size_t i = 0; i < own.size() && ring.holds(step + 1); ++i) {
        Counts sizes = own[i].sizes().vec();
        sizes[sizes.size() - 2] = counts[ring.block_at(step + 1)];
        next.push_back(at::empty(sizes, own[i].options()));
      }
      passing = ring.pass_on(step, held, next);
    }
    use(step, ring.uses(step) ? held : Tensors());
    passing.wait();
    held = std::move(next);
  }
}

/// Gradients of this rank's block: its own and those that the others send home. Summed as one
/// device would; what travels has the block's type.
class GradientsComingHome {
 public:
  GradientsComingHome(const BlockRing& ring, Tensors own) : ring_(&ring), own_(std::move(own)) {}

  /// What the block held at `step` got here; nothing where it was not needed. Collective.
  void send(int step, const Tensors& parts) {
    if (step == 0) return add(parts);
    take_in();
    Tensors packed;
    for (size_t i = 0; i < parts.size(); ++i) packed.push_back(parts[i].to(own_[i].scalar_type()));
    for (size_t i = 0; i < own_.size() && ring_->is_used_after(step); ++i)
      arriving_.push_back(at::empty(own_[i].sizes(), own_[i].options()));
    returning_ = ring_->to_owner(step, packed, arriving_);
  }
  Tensors sums() {
    take_in();
    Tensors result;
    for (size_t i = 0; i < own_.size(); ++i)
      result.push_back(sums_.empty() ? at::zeros_like(own_[i])
                                     : sums_[i].to(own_[i].scalar_type()));
    return result;
  }

 private:
  void add(const Tensors& parts) {
    for (size_t i = 0; i < parts.size(); ++i) {
      if (sums_.size() <= i)
        sums_.push_back(parts[i].to(at::toOpMathType(parts[i].scalar_type())));
      else
        sums_[i].add_(parts[i]);
    }
  }
  void take_in() {
    returning_.wait();
    add(std::exchange(arriving_, {}));
  }

  const BlockRing* ring_;
  Tensors own_, sums_, arriving_;
  comm::Exchange returning_;
};

/// The keys held at a step as this rank's rows see them.
KeyBlock key_block(const RingAttention& r, int step, const Tensors& held, const Tensor& mask) {
  const int b = r.keys.block_at(step);
  const int64_t first_row = first_of(r.row_counts, r.keys.block_at(0));
  const int64_t first_key = first_of(r.key_counts, b);
  KeyBlock block{held[0], held[1], mask, r.is_causal, first_row, first_key};
  if (mask.defined() && mask.size(-1) != 1)
    block.mask = mask.narrow(-1, first_key, r.key_counts[b]);
  return block;
}

/// Values of this rank that backward works on.
struct Saved {
  Tensor query, key, value, mask, output, logsumexp;
};

/// Whether rows and their gradients are fewer bytes than keys, values and theirs. Equal on all
/// ranks.
bool queries_travel(const RingAttention& r, const Saved& s) {
  if (s.mask.defined()) return false;  // a rank has its own rows of it
  const auto bytes_per_row = [](const Tensor& t, int64_t columns) {
    const int64_t heads = c10::multiply_integers(t.sizes().slice(0, t.dim() - 2));
    return static_cast<double>(heads * columns * t.itemsize());
  };
  const double rows = bytes_per_row(s.query, 2 * s.query.size(-1) + s.value.size(-1)) +
                      bytes_per_row(s.logsumexp, 2);
  const double keys =
      bytes_per_row(s.key, 2 * s.key.size(-1)) + bytes_per_row(s.value, 2 * s.value.size(-1));
  return rows * total(r.row_counts) < keys * total(r.key_counts);
}

/// Keys pass this rank's rows; their gradients go home. {query, key, value, mask}.
Tensors gradients_with_keys_passing(const RingAttention& r, const Saved& s, const Tensor& grad,
                                    bool of_keys, bool of_mask) {
  BlockwiseAttentionGradient rows(s.query, s.logsumexp, grad, r.scale);
  rows.set_output(s.output);
  GradientsComingHome home(r.keys, {s.key, s.value});
  Tensor mask_gradient = of_mask ? at::zeros_like(s.mask, at::MemoryFormat::Contiguous) : Tensor();
  for_each_block(r.keys, r.key_counts, {s.key, s.value}, [&](int step, const Tensors& held) {
    Tensors parts;
    if (!held.empty()) {
      const KeyBlock block = key_block(r, step, held, s.mask);
      const BlockGradients part = rows.add(block, of_mask);
      parts = {part.key, part.value};
      if (of_mask && s.mask.size(-1) != 1)
        mask_gradient.narrow(-1, block.first_key, block.key.size(-2)).add_(part.mask);
      else if (of_mask)
        mask_gradient.add_(part.mask);
    }
    if (of_keys) home.send(step, parts);
  });
  Tensors sums = of_keys ? home.sums() : Tensors(2);
  return {rows.query().to(s.query.scalar_type()), sums[0], sums[1], mask_gradient};
}

/// Rows pass this rank's keys; their gradients go home: a quarter less than the other way where
/// heads do not share keys. Sun et al., "BurstAttention" (2024).
Tensors gradients_with_queries_passing(const RingAttention& r, const Saved& s, const Tensor& grad,
                                       bool of_query) {
  const Tensor delta = (grad.to(s.logsumexp.scalar_type()) * s.output).sum(-1, true);
  const Tensor statistics = at::cat({s.logsumexp, delta}, -1);
  const int64_t first_key = first_of(r.key_counts, r.queries.block_at(0));
  GradientsComingHome home(r.queries, {s.query});
  GradientsComingHome of_keys(r.keys, {s.key, s.value});
  for_each_block(
      r.queries, r.row_counts, {s.query, grad, statistics}, [&](int step, const Tensors& held) {
        Tensors parts;
        if (!held.empty()) {
          const Tensor &query = held[0], &of_output = held[1];
          BlockwiseAttentionGradient rows(query, held[2].narrow(-1, 0, 1), of_output, r.scale);
          rows.set_delta(held[2].narrow(-1, 1, 1));
          const int64_t first_row = first_of(r.row_counts, r.queries.block_at(step));
          const BlockGradients part =
              rows.add({s.key, s.value, {}, r.is_causal, first_row, first_key}, false);
          of_keys.send(0, {part.key, part.value});
          parts = {rows.query()};
        }
        if (of_query) home.send(step, parts);
      });
  const Tensors sums = of_keys.sums();
  return {of_query ? home.sums()[0] : Tensor(), sums[0], sums[1], {}};
}

/// By way of autograd, the keys gathered.
Tensors differentiable_gradients(const RingAttention& r, const Saved& s, const Tensor& grad,
                                 const std::array<bool, 4>& wanted) {
  const auto mask = s.mask.defined() ? std::optional<Tensor>(s.mask) : std::nullopt;
  const Tensor out = r.gathered(s.query, s.key, s.value, mask);
  const std::array<Tensor, 4> all = {s.query, s.key, s.value, s.mask};
  Tensors inputs, result(4);
  for (size_t i = 0; i < 4; ++i)
    if (wanted[i]) inputs.push_back(all[i]);
  const Tensors found = torch::autograd::grad({out}, inputs, {grad}, /*retain_graph=*/true,
                                              /*create_graph=*/true);
  for (size_t i = 0, next = 0; i < 4; ++i)
    if (wanted[i]) result[i] = found[next++];
  return result;
}

struct RingAttentionFn : torch::autograd::Function<RingAttentionFn> {
  static Tensor forward(AutogradContext* ctx, const Tensor& query, const Tensor& key,
                        const Tensor& value, const Tensor& mask_or_empty, bool masked,
                        std::shared_ptr<const RingAttention> r) {
    comm::remember_scope(ctx);
    const at::AutoDispatchBelowADInplaceOrView below;
    const Tensor mask = masked ? mask_or_empty : Tensor();
    BlockwiseAttention attention(query, value.size(-1), r->scale);
    for_each_block(r->keys, r->key_counts, {key, value}, [&](int step, const Tensors& held) {
      if (!held.empty()) attention.add(key_block(*r, step, held, mask));
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
    const Saved s{saved[0], saved[1], saved[2], saved[3], saved[4], saved[5]};
    const auto held = ctx->saved_data["ring"].toCapsule();
    const RingAttention& r = *static_cast<const Held&>(*held).ring;
    const std::array<bool, 4> wanted = {ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                                        ctx->needs_input_grad(2), ctx->needs_input_grad(3)};
    const bool of_keys = wanted[1] || wanted[2];
    Tensors result;
    if (at::GradMode::is_enabled()) {
      result = differentiable_gradients(r, s, grads[0], wanted);
    } else if (of_keys && queries_travel(r, s)) {
      result = gradients_with_queries_passing(r, s, grads[0], wanted[0]);
    } else {
      result = gradients_with_keys_passing(r, s, grads[0], of_keys, wanted[3]);
    }
    result.resize(6);
    return result;
  }

 private:
  struct Held : torch::CustomClassHolder {
    std::shared_ptr<const RingAttention> ring;
  };
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
