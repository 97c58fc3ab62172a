#include "shardfield/comm/vector_collectives.h"

#include <numeric>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/backward_scope.h"
#include "shardfield/comm/call_agreement.h"
#include "shardfield/comm/carried_dtype.h"
#include "shardfield/comm/collectives.h"
#include "shardfield/comm/traffic.h"

namespace shardfield::comm {

namespace {

using at::Tensor;
using spec::Mesh;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using Sizes = std::vector<int64_t>;
using SizeTable = std::vector<Sizes>;

int64_t total(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

bool is_short_float(const Tensor& t) {
  return t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
}

/// What the nodes remember; one argument of Function::apply, whatever it holds.
struct Plan : torch::CustomClassHolder {
  const Mesh* group = nullptr;
  Sizes send, recv;  ///< all_to_all: both; all_gather and reduce_scatter: send alone
  int64_t dim = 0;
  bool use_fp32 = true;
};
using PlanPtr = c10::intrusive_ptr<Plan>;

void keep(AutogradContext* ctx, const PlanPtr& plan) {
  ctx->saved_data["plan"] = c10::IValue::make_capsule(plan);
  remember_scope(ctx);
}

PlanPtr kept(AutogradContext* ctx) {
  return c10::static_intrusive_pointer_cast<Plan>(ctx->saved_data["plan"].toCapsule());
}

/// The blocks of `x` along the plan's dim to their ranks, theirs into one tensor.
Tensor exchange_blocks(const Tensor& x, const Plan& plan) {
  const at::NoGradGuard no_grad;
  const Tensor source = x.detach();
  Sizes shape = source.sizes().vec();
  shape[plan.dim] = total(plan.recv);
  Tensor out = at::empty(shape, source.options(), at::MemoryFormat::Contiguous);
  std::vector<Message> sends, recvs;
  std::vector<std::pair<Tensor, Tensor>> copies;  // place in out, buffer
  int64_t to = 0, from = 0;
  for (int r = 0; r < plan.group->size(); ++r) {
    const Tensor block = source.narrow(plan.dim, from, plan.send[r]);
    const Tensor place = out.narrow(plan.dim, to, plan.recv[r]);
    from += plan.send[r];
    to += plan.recv[r];
    if (r == plan.group->rank) {
      copies.emplace_back(place, block);
      continue;
    }
    const Tensor buffer = place.is_contiguous() ? place
                                                : at::empty_like(place, place.options(),
                                                                 at::MemoryFormat::Contiguous);
    if (!place.is_contiguous()) copies.emplace_back(place, buffer);
    sends.push_back({r, block});
    recvs.push_back({r, buffer});
  }
  start_exchange(*plan.group, std::move(sends), std::move(recvs)).wait();
  for (auto& [place, buffer] : copies) place.copy_(buffer);
  return out;
}

/// Own rows to every rank.
Tensor gather_blocks(const Tensor& x, const Plan& plan) {
  const at::NoGradGuard no_grad;
  const int n = plan.group->size();
  const Tensor source = x.detach().contiguous();
  Sizes shape = source.sizes().vec();
  shape[plan.dim] = total(plan.send);
  Tensor out = at::empty(shape, source.options(), at::MemoryFormat::Contiguous);
  const std::vector<Tensor> places = out.split_with_sizes(plan.send, plan.dim);
  std::vector<Message> sends, recvs;
  for (int r = 0; r < n; ++r) {
    if (r == plan.group->rank) continue;
    const bool direct = places[r].is_contiguous();
    sends.push_back({r, source});
    recvs.push_back({r, direct ? places[r] : at::empty(places[r].sizes(), source.options())});
  }
  std::vector<Message> arrived = recvs;
  start_exchange(*plan.group, std::move(sends), std::move(recvs)).wait();
  places[plan.group->rank].copy_(source);
  for (const Message& m : arrived)
    if (!m.data.is_same(places[m.peer])) places[m.peer].copy_(m.data);
  return out;
}

/// Own rows of the sum, added in rank order.
Tensor reduce_blocks(const Tensor& x, const Plan& plan) {
  const at::NoGradGuard no_grad;
  const int64_t n = plan.group->size();
  const int64_t own = plan.send[plan.group->rank];
  Plan blocks = plan;
  blocks.recv.assign(static_cast<size_t>(n), own);
  const Tensor all = exchange_blocks(x, blocks).unflatten(plan.dim, {n, own});
  if (all.scalar_type() == at::kBool) return all.any(plan.dim);
  if (!is_short_float(all) || plan.use_fp32) {
    const auto wide = is_short_float(all) ? at::kFloat : carried_dtype(all.scalar_type());
    return at::sum(all.to(wide), plan.dim, false, wide).to(all.scalar_type());
  }
  Tensor sum = all.select(plan.dim, 0).clone();
  for (int64_t r = 1; r < n; ++r) sum.add_(all.select(plan.dim, r));
  return sum;
}

Tensor all_to_all(const Tensor& x, const PlanPtr& plan);
Tensor gather_all(const Tensor& x, const PlanPtr& plan);
Tensor reduce_scatter(const Tensor& x, const PlanPtr& plan);

struct AllToAllFn : Function<AllToAllFn> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const PlanPtr& plan) {
    keep(ctx, plan);
    return exchange_blocks(x, *plan);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const BackwardScope scope(ctx);
    auto adjoint = c10::make_intrusive<Plan>(*kept(ctx));
    std::swap(adjoint->send, adjoint->recv);
    return {all_to_all(with_common_grad(grads[0], *adjoint->group), adjoint), {}};
  }
};

struct AllGatherFn : Function<AllGatherFn> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const PlanPtr& plan) {
    keep(ctx, plan);
    return gather_blocks(x, *plan);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const BackwardScope scope(ctx);
    const PlanPtr plan = kept(ctx);
    return {reduce_scatter(with_common_grad(grads[0], *plan->group), plan), {}};
  }
};

struct ReduceScatterFn : Function<ReduceScatterFn> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const PlanPtr& plan) {
    keep(ctx, plan);
    return reduce_blocks(x, *plan);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const BackwardScope scope(ctx);
    const PlanPtr plan = kept(ctx);
    return {gather_all(with_common_grad(grads[0], *plan->group), plan), {}};
  }
};

/// index_select whose gradient adds 16-bit rows in float.
struct SelectRowsFn : Function<SelectRowsFn> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& rows, int64_t dim) {
    ctx->save_for_backward({rows});
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["sizes"] = x.sizes().vec();
    return x.detach().index_select(dim, rows);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Tensor zeros =
        at::zeros(ctx->saved_data["sizes"].toIntVector(), grads[0].options().dtype(at::kFloat));
    const Tensor sum = zeros.index_add(ctx->saved_data["dim"].toInt(),
                                       ctx->get_saved_variables()[0], grads[0].to(at::kFloat));
    return {sum.to(grads[0].scalar_type()), {}, {}};
  }
};

Tensor all_to_all(const Tensor& x, const PlanPtr& plan) {
  return records_grad(x) ? AllToAllFn::apply(x, plan) : exchange_blocks(x, *plan);
}

Tensor gather_all(const Tensor& x, const PlanPtr& plan) {
  return records_grad(x) ? AllGatherFn::apply(x, plan) : gather_blocks(x, *plan);
}

Tensor reduce_scatter(const Tensor& x, const PlanPtr& plan) {
  return records_grad(x) ? ReduceScatterFn::apply(x, plan) : reduce_blocks(x, *plan);
}

/// A leaf where this rank's value needs no gradient but another rank's does.
Tensor joined(const Tensor& x, const Agreement& agreement) {
  return agreement.records_grad && !x.requires_grad() ? x.detach().requires_grad_() : x;
}

std::string text(c10::IntArrayRef sizes) {
  std::ostringstream out;
  out << sizes;
  return out.str();
}

/// Fills `problem` with the first thing wrong with this rank's own arguments.
class Problem {
 public:
  explicit Problem(CollectiveCall& call) : call_(call) {}
  bool require(bool condition, const std::string& text) {
    if (!condition && call_.problem.empty()) call_.problem = text;
    return condition;
  }

 private:
  CollectiveCall& call_;
};

CollectiveCall call_of(const char* op, const std::optional<Tensor>& x, int64_t dim, int root = -1) {
  CollectiveCall call;
  call.op = op;
  call.root = root;
  call.dim = dim;
  call.own_rows = call.expected_rows = -1;
  if (!x) return call;
  call.device = x->device();
  call.problem = memory_problem(*x);
  if (!call.problem.empty()) return call;
  call.tensor = x;
  Problem problem(call);
  const int64_t dims = x->dim();
  if (!problem.require(dims > 0, "expected a tensor of at least one dim, got a scalar") ||
      !problem.require(dim >= -dims && dim < dims, "expected dim in [" + std::to_string(-dims) +
                                                       ", " + std::to_string(dims) + "), got " +
                                                       std::to_string(dim)))
    return call;
  call.dim = dim < 0 ? dim + dims : dim;
  call.own_rows = call.expected_rows = x->size(call.dim);
  return call;
}

void check_sizes(CollectiveCall& call, const Sizes& sizes, int num_ranks) {
  Problem problem(call);
  call.sizes.insert(call.sizes.end(), sizes.begin(), sizes.end());
  problem.require(
      static_cast<int>(sizes.size()) == num_ranks,
      "expected " + std::to_string(num_ranks) + " sizes (one per rank), got " + text(sizes));
  for (const int64_t size : sizes)
    problem.require(size >= 0, "expected sizes of 0 or more, got " + text(sizes));
}

/// @param rows  what the sizes promise for this rank along dim
void check_rows(CollectiveCall& call, int64_t rows) {
  if (!call.problem.empty() || !call.tensor) return;
  call.expected_rows = rows;
  Problem(call).require(call.own_rows == rows, "expected " + std::to_string(rows) +
                                                   " rows along dim " + std::to_string(call.dim) +
                                                   " (from sizes), got a tensor of " +
                                                   text(call.tensor->sizes()));
}

void check_table(CollectiveCall& call, const SizeTable& sizes, int num_ranks) {
  Problem(call).require(static_cast<int>(sizes.size()) == num_ranks,
                        "expected a table of " + std::to_string(num_ranks) + " x " +
                            std::to_string(num_ranks) + " sizes, got " +
                            std::to_string(sizes.size()) + " rows");
  for (const Sizes& row : sizes) check_sizes(call, row, num_ranks);
}

PlanPtr table_plan(const Mesh& group, const SizeTable& sizes, int64_t dim) {
  auto plan = c10::make_intrusive<Plan>();
  plan->group = &group;
  plan->dim = dim;
  plan->send = sizes[group.rank];
  for (const Sizes& row : sizes) plan->recv.push_back(row[group.rank]);
  return plan;
}

PlanPtr list_plan(const Mesh& group, const Sizes& sizes, int64_t dim, bool use_fp32) {
  auto plan = c10::make_intrusive<Plan>();
  plan->group = &group;
  plan->dim = dim;
  plan->send = sizes;
  plan->use_fp32 = use_fp32;
  return plan;
}

void check_root(CollectiveCall& call, const Mesh& group) {
  Problem(call).require(call.root >= 0 && call.root < group.size(),
                        "expected a rank in [0, " + std::to_string(group.size()) + "), got " +
                            std::to_string(call.root));
}

}  // namespace

Tensor all_to_all_v(const Tensor& x, const Mesh& group, const SizeTable& sizes, int64_t dim) {
  const OpScope scope("all_to_all_v");
  count_call(group.context);
  CollectiveCall call = call_of("all_to_all_v", x, dim);
  check_table(call, sizes, group.size());
  if (call.problem.empty()) check_rows(call, total(sizes[group.rank]));
  const Agreement agreement = agree_on_call(call, group);
  return all_to_all(joined(x, agreement), table_plan(group, sizes, call.dim));
}

Tensor all_gather_v(const Tensor& x, const Mesh& group, const Sizes& sizes, int64_t dim,
                    bool use_fp32) {
  const OpScope scope("all_gather_v");
  count_call(group.context);
  CollectiveCall call = call_of("all_gather_v", x, dim);
  check_sizes(call, sizes, group.size());
  if (call.problem.empty()) check_rows(call, sizes[group.rank]);
  const Agreement agreement = agree_on_call(call, group);
  return gather_all(joined(x, agreement), list_plan(group, sizes, call.dim, use_fp32));
}

Tensor reduce_scatter_v(const Tensor& x, const Mesh& group, const Sizes& sizes, int64_t dim,
                        bool use_fp32) {
  const OpScope scope("reduce_scatter_v");
  count_call(group.context);
  CollectiveCall call = call_of("reduce_scatter_v", x, dim);
  check_sizes(call, sizes, group.size());
  check_rows(call, total(sizes));
  const Agreement agreement = agree_on_call(call, group);
  return reduce_scatter(joined(x, agreement), list_plan(group, sizes, call.dim, use_fp32));
}

Tensor gather_v(const Tensor& x, const Mesh& group, const Sizes& sizes, int64_t dim, int dst) {
  const OpScope scope("gather_v");
  count_call(group.context);
  CollectiveCall call = call_of("gather_v", x, dim, dst);
  check_sizes(call, sizes, group.size());
  check_root(call, group);
  if (call.problem.empty()) check_rows(call, sizes[group.rank]);
  const Agreement agreement = agree_on_call(call, group);
  const PlanPtr plan = list_plan(group, Sizes(sizes.size(), 0), call.dim, true);
  plan->send[dst] = sizes[group.rank];
  plan->recv = group.rank == dst ? sizes : Sizes(sizes.size(), 0);
  return all_to_all(joined(x, agreement), plan);
}

Tensor scatter_v(const std::optional<Tensor>& x, const Mesh& group, const Sizes& sizes, int64_t dim,
                 int src, c10::Device device) {
  const OpScope scope("scatter_v");
  count_call(group.context);
  const bool sends = group.rank == src;
  CollectiveCall call = call_of("scatter_v", sends ? x : std::nullopt, dim, src);
  call.device = device;
  Problem(call).require(!sends || x.has_value(), "expected a tensor on the source rank, got none");
  check_sizes(call, sizes, group.size());
  check_root(call, group);
  if (sends) check_rows(call, total(sizes));
  const Agreement agreement = agree_on_call(call, group);
  const auto dims = static_cast<int64_t>(agreement.other_sizes.size());
  const PlanPtr plan = list_plan(group, Sizes(sizes.size(), 0), dim < 0 ? dim + dims : dim, true);
  plan->recv = plan->send;
  plan->recv[src] = sizes[group.rank];
  if (sends) plan->send = sizes;
  Tensor own =
      sends ? *x : at::empty(agreement.other_sizes, at::dtype(agreement.dtype).device(device));
  // A tensor that is not read is still what backward is asked for on this rank.
  if (!sends && x && records_grad(*x) && x->scalar_type() == agreement.dtype)
    own = x->reshape(-1).narrow(0, 0, 0).view(agreement.other_sizes);
  return all_to_all(joined(own, agreement), plan);
}

Tensor indexed_all_to_all_v(const Tensor& x, const Mesh& group, const std::vector<Tensor>& indices,
                            const SizeTable& sizes, bool use_fp32, int64_t dim) {
  const OpScope scope("indexed_all_to_all_v");
  count_call(group.context);
  CollectiveCall call = call_of("indexed_all_to_all_v", x, dim);
  check_table(call, sizes, group.size());
  Problem problem(call);
  problem.require(static_cast<int>(indices.size()) == group.size(),
                  "expected one index tensor per rank, got " + std::to_string(indices.size()));
  Tensor rows;
  for (size_t r = 0; call.problem.empty() && r < indices.size(); ++r) {
    problem.require(
        at::isIntegralType(indices[r].scalar_type(), /*includeBool=*/false),
        "expected whole numbers as indices, got " +
            std::string(toString(indices[r].scalar_type())) +
            (indices[r].scalar_type() == at::kBool ? "; mask.nonzero() gives them" : ""));
    problem.require(indices[r].dim() == 1 && indices[r].numel() == sizes[group.rank][r],
                    "expected " + std::to_string(sizes[group.rank][r]) + " rows for rank " +
                        std::to_string(r) + " (from sizes), got indices of " +
                        text(indices[r].sizes()));
  }
  if (call.problem.empty()) {
    rows = at::cat(indices).to(x.device(), at::kLong);
    problem.require(rows.numel() == 0 || (rows.min().item<int64_t>() >= 0 &&
                                          rows.max().item<int64_t>() < x.size(call.dim)),
                    "expected indices in [0, " + std::to_string(x.size(call.dim)) + ")");
  }
  const Agreement agreement = agree_on_call(call, group);
  const Tensor source = joined(x, agreement);
  const Tensor chosen = use_fp32 && is_short_float(x) && records_grad(source)
                            ? SelectRowsFn::apply(source, rows, call.dim)
                            : source.index_select(call.dim, rows);
  return all_to_all(chosen, table_plan(group, sizes, call.dim));
}

}  // namespace shardfield::comm
