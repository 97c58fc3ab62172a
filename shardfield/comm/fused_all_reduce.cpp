#include "shardfield/comm/fused_all_reduce.h"

#include <map>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/backward_scope.h"
#include "shardfield/comm/call_agreement.h"
#include "shardfield/comm/carried_dtype.h"
#include "shardfield/comm/failure.h"
#include "shardfield/comm/gradient_law.h"
#include "shardfield/comm/group_mesh.h"
#include "shardfield/comm/traffic.h"

namespace shardfield::comm {

namespace {

using at::Tensor;
using spec::Mesh;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

constexpr const char* kOp = "fused_all_reduce";

struct Plan : torch::CustomClassHolder {
  const Mesh* group = nullptr;
  std::optional<at::ScalarType> buffer_dtype;
  int64_t bucket_bytes = kBucketBytes;
};
using PlanPtr = c10::intrusive_ptr<Plan>;

at::ScalarType message_dtype(const Tensor& t, std::optional<at::ScalarType> wanted) {
  if (wanted && t.is_floating_point()) return carried_dtype(*wanted);
  const bool narrow = t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
  return narrow ? at::kFloat : carried_dtype(t.scalar_type());
}

/// Tensors that travel in one buffer.
struct Bucket {
  at::ScalarType dtype = at::kFloat;
  bool holds_flags = false;
  std::vector<size_t> members;
  int64_t bytes = 0;
};

/// In the order of the tensors, by dtype and device; the same on every rank.
std::vector<Bucket> buckets_of(const std::vector<Tensor>& tensors, const Plan& plan) {
  std::vector<Bucket> buckets;
  std::map<std::pair<at::ScalarType, bool>, size_t> open;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto dtype = message_dtype(tensors[i], plan.buffer_dtype);
    const auto bytes = tensors[i].numel() * static_cast<int64_t>(c10::elementSize(dtype));
    const auto key = std::pair(dtype, tensors[i].scalar_type() == at::kBool);
    const auto found = open.find(key);
    if (found == open.end() || buckets[found->second].bytes + bytes > plan.bucket_bytes) {
      open[key] = buckets.size();
      buckets.push_back({dtype, key.second, {}, 0});
    }
    Bucket& bucket = buckets[open[key]];
    bucket.members.push_back(i);
    bucket.bytes += bytes;
  }
  return buckets;
}

Tensor pack(const std::vector<Tensor>& tensors, const Bucket& bucket) {
  std::vector<Tensor> flat;
  for (const size_t i : bucket.members)
    flat.push_back(tensors[i].detach().to(bucket.dtype).resolve_conj().resolve_neg().reshape(-1));
  return at::cat(flat);
}

/// Starts one buffer's sum or product on the group.
Exchange start(Tensor& buffer, const Mesh& group, Reduction reduction, bool holds_flags) {
  const Comm& comm = groups_of(group).whole;
  if (comm.size() == 1 || buffer.numel() == 0) return {};
  c10d::AllreduceOptions options;
  const bool sums = reduction == Reduction::kSum;
  options.reduceOp = sums ? c10d::ReduceOp::SUM : c10d::ReduceOp::PRODUCT;
  // In bytes the sum of 256 flags would be 0.
  if (holds_flags) options.reduceOp = sums ? c10d::ReduceOp::MAX : c10d::ReduceOp::MIN;
  std::vector<Tensor> one{buffer.is_complex() ? at::view_as_real(buffer) : buffer};
  count_message(group.context,
                2 * static_cast<int64_t>(buffer.nbytes()) * (comm.size() - 1) / comm.size());
  auto work = comm.backend(kOp)->allreduce(one, options);
  return {{std::move(work)},
          one,
          std::string(kOp) + " on rank " + std::to_string(group.rank) + " of " +
              std::to_string(group.size()) + in_current_layer()};
}

void unpack(const Tensor& buffer, const Bucket& bucket, const std::vector<Tensor>& like,
            std::vector<Tensor>& out) {
  int64_t at = 0;
  for (const size_t i : bucket.members) {
    const Tensor part = buffer.narrow(0, at, like[i].numel()).reshape(like[i].sizes());
    at += like[i].numel();
    out[i] = like[i].scalar_type() == at::kBool
                 ? part != 0
                 : part.to(like[i].scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  }
}

std::vector<Tensor> reduce_buckets(const std::vector<Tensor>& tensors, const Plan& plan,
                                   Reduction reduction) {
  const at::NoGradGuard no_grad;
  const bool ordered = reduction == Reduction::kMin || reduction == Reduction::kMax;
  const std::vector<Bucket> buckets = buckets_of(tensors, plan);
  std::vector<Tensor> buffers;
  std::vector<Exchange> travelling;
  for (const Bucket& bucket : buckets) {
    buffers.push_back(pack(tensors, bucket));
    if (ordered) {
      buffers.back() = all_reduce(buffers.back(), *plan.group, {0}, reduction);
    } else {
      travelling.push_back(start(buffers.back(), *plan.group, reduction, bucket.holds_flags));
    }
  }
  std::vector<Tensor> out(tensors.size());
  for (size_t b = 0; b < buckets.size(); ++b) {
    if (!ordered) travelling[b].wait();
    unpack(buffers[b], buckets[b], tensors, out);
  }
  return out;
}

std::vector<Tensor> sum(const std::vector<Tensor>& tensors, const PlanPtr& plan);

/// The sum over ranks; its adjoint is itself.
struct SumFn : Function<SumFn> {
  static variable_list forward(AutogradContext* ctx, const PlanPtr& plan, at::TensorList tensors) {
    ctx->saved_data["plan"] = c10::IValue::make_capsule(plan);
    remember_scope(ctx);
    variable_list out = reduce_buckets(tensors.vec(), *plan, Reduction::kSum);
    variable_list whole;
    for (const Tensor& t : out)
      if (!isDifferentiableType(t.scalar_type())) whole.push_back(t);
    ctx->mark_non_differentiable(whole);
    return out;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const BackwardScope scope(ctx);
    const auto plan = c10::static_intrusive_pointer_cast<Plan>(ctx->saved_data["plan"].toCapsule());
    variable_list present;
    for (const Tensor& grad : grads)
      if (grad.defined() && isDifferentiableType(grad.scalar_type()))
        present.push_back(with_common_grad(grad, *plan->group));
    const variable_list summed = sum(present, plan);
    variable_list out(1);  // for the plan
    size_t next = 0;
    for (const Tensor& grad : grads) {
      const bool had = grad.defined() && isDifferentiableType(grad.scalar_type());
      out.push_back(had ? summed[next++] : Tensor());
    }
    return out;
  }
  static bool isDifferentiableType(at::ScalarType dtype) {
    return at::isFloatingType(dtype) || at::isComplexType(dtype);
  }
};

std::vector<Tensor> sum(const std::vector<Tensor>& tensors, const PlanPtr& plan) {
  for (const Tensor& t : tensors)
    if (records_grad(t)) return SumFn::apply(plan, at::TensorList(tensors));
  return reduce_buckets(tensors, *plan, Reduction::kSum);
}

/// The extreme with the gradient of a sum of the ranks' shares: 1/k of it on each of k holders.
std::vector<Tensor> extreme(const std::vector<Tensor>& tensors, const PlanPtr& plan,
                            Reduction reduction) {
  std::vector<Tensor> out = reduce_buckets(tensors, *plan, reduction);
  std::vector<Tensor> holds, shares;
  std::vector<size_t> which;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].is_floating_point()) continue;
    which.push_back(i);
    holds.push_back((tensors[i].detach() == out[i]).to(tensors[i].scalar_type()));
  }
  const std::vector<Tensor> holders = reduce_buckets(holds, *plan, Reduction::kSum);
  for (size_t k = 0; k < which.size(); ++k)
    shares.push_back(at::where(holds[k] != 0, tensors[which[k]] / holders[k].clamp_min(1),
                               at::zeros_like(holds[k])));
  const std::vector<Tensor> sums = sum(shares, plan);
  for (size_t k = 0; k < which.size(); ++k) {
    // The sum of the shares carries the gradient; the value is the extreme itself.
    const Tensor& value = out[which[k]];
    const Tensor rest = (value - sums[k].detach()).masked_fill(value.isinf(), 0);
    out[which[k]] = sums[k] + rest;
  }
  return out;
}

/// All tensors as one call: shapes and dtypes go into the compared sizes.
CollectiveCall call_of(const std::vector<Tensor>& tensors, Reduction reduction, bool average) {
  CollectiveCall call;
  call.op = kOp;
  call.sizes = {static_cast<int64_t>(reduction), average};
  for (const Tensor& t : tensors) call.problem += call.problem.empty() ? memory_problem(t) : "";
  if (!call.problem.empty()) {
    call.device = tensors.front().device();
    return call;
  }
  for (const Tensor& t : tensors) {
    call.sizes.push_back(static_cast<int64_t>(t.scalar_type()));
    call.sizes.push_back(t.dim());
    call.sizes.insert(call.sizes.end(), t.sizes().begin(), t.sizes().end());
    if (average && !t.is_floating_point() && !t.is_complex())
      call.problem = "expected floating-point tensors for an average, got " +
                     std::string(toString(t.scalar_type())) + "; sum and divide yourself";
    if (t.is_complex() && reduction != Reduction::kSum)
      call.problem = "complex values can only be summed over ranks";
    if (t.scalar_type() == at::kUInt64 && reduction != Reduction::kSum)
      call.problem = "64-bit numbers without a sign can only be summed over ranks; convert them";
    if (t.device() != tensors.front().device()) call.problem = "expected all tensors on one device";
    if (reduction == Reduction::kProduct && records_grad(t))
      call.problem = "the product over ranks has no gradient here; detach the tensors";
  }
  if (tensors.empty()) return call;
  call.device = tensors.front().device();
  call.tensor = tensors.front();
  for (const Tensor& t : tensors) call.records_grad |= records_grad(t);
  call.dim = -1;
  call.own_rows = call.expected_rows = -1;
  return call;
}

}  // namespace

std::vector<Tensor> fused_all_reduce(const std::vector<Tensor>& tensors, const Mesh& group,
                                     Reduction reduction, bool average,
                                     std::optional<at::ScalarType> buffer_dtype,
                                     int64_t bucket_bytes) {
  const OpScope scope(kOp);
  count_call(group.context);
  if (reduction == Reduction::kSum && !average)
    for (const Tensor& t : tensors)
      if (gradient_sum_of(t)) check_summed_once(t, *groups_of(group).whole.backend(kOp), kOp);
  const Agreement agreement = agree_on_call(call_of(tensors, reduction, average), group);
  auto plan = c10::make_intrusive<Plan>();
  plan->group = &group;
  plan->buffer_dtype = buffer_dtype;
  plan->bucket_bytes = bucket_bytes;
  if (!agreement.records_grad) {
    std::vector<Tensor> out = reduce_buckets(tensors, *plan, reduction);
    if (average)
      for (Tensor& t : out) t.div_(group.size());
    return out;
  }
  std::vector<Tensor> joined = tensors;
  for (Tensor& t : joined)
    if (!t.requires_grad() && SumFn::isDifferentiableType(t.scalar_type()))
      t = t.detach().requires_grad_();
  if (reduction != Reduction::kSum) return extreme(joined, plan, reduction);
  std::vector<Tensor> out = sum(joined, plan);
  if (average)
    for (Tensor& t : out) t = t / group.size();
  return out;
}

}  // namespace shardfield::comm
