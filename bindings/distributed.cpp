#include <array>

#include "bindings/module.h"

#include "shardfield/base/error.h"
#include "shardfield/comm/call_agreement.h"
#include "shardfield/comm/check_level.h"
#include "shardfield/comm/failure.h"
#include "shardfield/comm/fused_all_reduce.h"
#include "shardfield/comm/gradient_law.h"
#include "shardfield/comm/launch_environment.h"
#include "shardfield/comm/rank_alignment.h"
#include "shardfield/comm/vector_collectives.h"
#include "shardfield/spec/rank_groups.h"
#include "shardfield/tensor/shard_tensor_impl.h"

namespace shardfield::bindings {

namespace py = pybind11;
using at::Tensor;
using Sizes = std::vector<int64_t>;
using SizeTable = std::vector<Sizes>;

namespace {

/// These collectives move a rank's own tensors; a sharded one is already spread over ranks.
const Tensor& own(const Tensor& x, const char* op) {
  SHARDFIELD_CHECK(!tensor::is_sharded(x), op, "expected this rank's own tensor, got the sharded ",
                   tensor::describe(x), "; pass x.to_local(), or use x.redistribute()");
  return x;
}

std::vector<Tensor> fused(const std::vector<Tensor>& tensors, const spec::Mesh& group,
                          const std::string& op, std::optional<at::ScalarType> buffer_dtype,
                          int64_t bucket_bytes) {
  for (const Tensor& t : tensors) own(t, "fused_all_reduce");
  const auto reduction = op == "min"       ? comm::Reduction::kMin
                         : op == "max"     ? comm::Reduction::kMax
                         : op == "product" ? comm::Reduction::kProduct
                                           : comm::Reduction::kSum;
  return comm::fused_all_reduce(tensors, group, reduction, op == "avg", buffer_dtype, bucket_bytes);
}

std::vector<spec::GroupNode> nodes_of(const std::vector<std::tuple<std::string, int64_t, int>>& l) {
  std::vector<spec::GroupNode> nodes;
  for (const auto& [name, size, parent] : l) nodes.push_back({name, size, parent});
  return nodes;
}

void bind_launch(py::module_& m) {
  m.def("launch_variables", &comm::launch_variables);
  m.def("device_index", &comm::device_index);
  m.def("read_launch_environment", [](const comm::Variables& variables, const std::string& method) {
    const auto e = comm::read_launch_environment(variables, method);
    return py::make_tuple(e.launcher, e.rank, e.world_size, e.local_rank, e.master_address,
                          e.master_port);
  });
  m.def("consecutive_groups", &spec::consecutive_groups);
  m.def("orthogonal_groups", &spec::orthogonal_groups);
  m.def("infer_group_sizes",
        [](const std::vector<std::tuple<std::string, int64_t, int>>& nodes, int64_t world_size) {
          Sizes sizes;
          for (const auto& n : spec::infer_sizes(nodes_of(nodes), world_size))
            sizes.push_back(n.size);
          return sizes;
        });
  m.def("plan_groups", [](const std::vector<std::tuple<std::string, int64_t, int>>& nodes,
                          int64_t world_size, bool first_is_innermost) {
    py::list plan;
    for (auto& p : spec::plan_groups(nodes_of(nodes), world_size, first_is_innermost))
      plan.append(py::make_tuple(p.name, p.groups, p.within));
    return plan;
  });
}

void bind_alignment(py::module_& m) {
  using comm::RankCard;
  py::class_<RankCard>(m, "RankCard")
      .def(py::init<>())
      .def_readwrite("solver_rank", &RankCard::solver_rank)
      .def_readwrite("solver_size", &RankCard::solver_size)
      .def_readwrite("torch_rank", &RankCard::torch_rank)
      .def_readwrite("torch_size", &RankCard::torch_size)
      .def_readwrite("host", &RankCard::host)
      .def_readwrite("pid", &RankCard::pid)
      .def_readwrite("device", &RankCard::device)
      .def_readwrite("gpu", &RankCard::gpu)
      .def_readwrite("launcher", &RankCard::launcher)
      .def_readwrite("token", &RankCard::token)
      .def("to_text", [](const RankCard& card) { return comm::to_text(card); });
  m.def("card_from_text", &comm::card_from_text);
  m.def("alignment_table", &comm::alignment_table);
  m.def("alignment_fault", &comm::alignment_fault);
}

/// The check level by its name.
void set_check_level(const std::string& level) {
  using comm::CheckLevel;
  SHARDFIELD_CHECK(level == "off" || level == "cheap" || level == "full", "set_check_level",
                   "expected 'off', 'cheap' or 'full', got '", level, "'");
  comm::set_check_level(level == "off"    ? CheckLevel::kOff
                        : level == "full" ? CheckLevel::kFull
                                          : CheckLevel::kCheap);
}

/// Failures happen without the GIL, and also while the interpreter goes down.
void set_failure_notes(const py::object& notes) {
  if (notes.is_none()) return comm::set_failure_notes({});
  auto* kept = new py::object(notes);  // for the life of the process
  comm::set_failure_notes([kept](const std::string& call, const std::string& cause) {
    if (!Py_IsInitialized()) return std::string();
    const py::gil_scoped_acquire gil;
    try {
      return (*kept)(call, cause).cast<std::string>();
    } catch (const std::exception&) {  // the failure itself is what must be told
      return std::string();
    }
  });
}

void bind_faults(py::module_& m) {
  m.def("set_check_level", &set_check_level);
  m.def("check_level", [] {
    constexpr std::array kNames{"off", "cheap", "full"};
    return kNames[static_cast<size_t>(comm::check_level())];
  });
  m.def("set_failure_notes", &set_failure_notes);
  m.def("in_current_layer", &comm::in_current_layer);
  m.def(
      "summed_ranks",
      [](const Tensor& t) -> std::optional<Sizes> {
        const auto sum = comm::gradient_sum_of(t);
        return sum ? std::optional(comm::domain_ranks(*sum)) : std::nullopt;
      },
      NoGil());
}

}  // namespace

void bind_distributed(py::module_& m) {
  bind_launch(m);
  bind_alignment(m);
  bind_faults(m);
  m.def("set_call_checks", &comm::set_call_checks);
  m.def("call_checks", &comm::call_checks);
  m.def(
      "all_to_all_v",
      [](const Tensor& x, const spec::Mesh& group, const SizeTable& sizes, int64_t dim) {
        return comm::all_to_all_v(own(x, "all_to_all_v"), group, sizes, dim);
      },
      NoGil());
  m.def(
      "all_gather_v",
      [](const Tensor& x, const spec::Mesh& group, const Sizes& sizes, int64_t dim, bool use_fp32) {
        return comm::all_gather_v(own(x, "all_gather_v"), group, sizes, dim, use_fp32);
      },
      NoGil());
  m.def(
      "reduce_scatter_v",
      [](const Tensor& x, const spec::Mesh& group, const Sizes& sizes, int64_t dim, bool use_fp32) {
        return comm::reduce_scatter_v(own(x, "reduce_scatter_v"), group, sizes, dim, use_fp32);
      },
      NoGil());
  m.def(
      "gather_v",
      [](const Tensor& x, const spec::Mesh& group, const Sizes& sizes, int64_t dim, int dst) {
        return comm::gather_v(own(x, "gather_v"), group, sizes, dim, dst);
      },
      NoGil());
  m.def(
      "scatter_v",
      [](const std::optional<Tensor>& x, const spec::Mesh& group, const Sizes& sizes, int64_t dim,
         int src, const std::string& device) {
        if (x) own(*x, "scatter_v");
        return comm::scatter_v(x, group, sizes, dim, src, c10::Device(device));
      },
      NoGil());
  m.def(
      "indexed_all_to_all_v",
      [](const Tensor& x, const spec::Mesh& group, const std::vector<Tensor>& indices,
         const SizeTable& sizes, bool use_fp32, int64_t dim) {
        return comm::indexed_all_to_all_v(own(x, "indexed_all_to_all_v"), group, indices, sizes,
                                          use_fp32, dim);
      },
      NoGil());
  m.def("fused_all_reduce", &fused, NoGil());
}

}  // namespace shardfield::bindings
