#include "shardfield/dispatch/op_table.h"

#include <mutex>

#include <ATen/core/dispatch/Dispatcher.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/boxed.h"
#include "shardfield/dispatch/elementwise.h"
#include "shardfield/dispatch/out_forms.h"
#include "shardfield/dispatch/tensor_lists.h"

namespace shardfield::dispatch {

namespace {

using c10::DispatchKey;

using Registration = void (*)(OpTable&);

std::vector<Registration>& registrations() {
  static auto* list = new std::vector<Registration>();
  return *list;
}

bool registrations_are_read = false;

torch::Library make_library(const char* ns, DispatchKey key) {
  return {torch::Library::IMPL, ns, key, __FILE__, __LINE__};
}

/// Bookkeeping ops whose autograd kernels are right for a ShardTensor as they are.
bool is_bookkeeping(const std::string& name) {
  static const std::set<std::string> names = {"aten::detach",
                                              "aten::detach_",
                                              "aten::_backward",
                                              "aten::set_data",
                                              "aten::requires_grad_",
                                              "aten::_fw_primal",
                                              "aten::_make_dual",
                                              "aten::_unpack_dual",
                                              "aten::is_leaf",
                                              "aten::output_nr",
                                              "aten::_version",
                                              "aten::retain_grad",
                                              "aten::retains_grad",
                                              "aten::data",
                                              "aten::record_stream",
                                              "aten::storage_offset",
                                              "aten::size",
                                              "aten::rename_",
                                              "aten::is_same_size",
                                              "aten::_has_same_storage_numel",
                                              "aten::_new_zeros_with_same_feature_meta"};
  return names.contains(name);
}

/// Ops of PyTorch that only allocate or loop through ops we have kernels for.
bool decomposes_well(const std::string& name) {
  static const std::set<std::string> names = {"aten::zeros_like",
                                              "aten::ones_like",
                                              "aten::full_like",
                                              "aten::new_full",
                                              "aten::new_ones",
                                              "aten::new_zeros",
                                              "aten::_unsafe_masked_index",
                                              "aten::_unsafe_masked_index_put_accumulate"};
  return names.contains(name);
}

bool is_elementwise(const c10::OperatorHandle& op) {
  static const std::set<std::string> not_really = {"aten::equal", "aten::native_dropout"};
  // Elementwise too, though PyTorch does not tag them.
  static const std::set<std::string> untagged = {"aten::complex",
                                                 "aten::polar",
                                                 "aten::elu_backward",
                                                 "aten::rsub",
                                                 "aten::floor_divide",
                                                 "aten::floor_divide_",
                                                 "aten::hardshrink_backward",
                                                 "aten::hardsigmoid_backward",
                                                 "aten::hardswish",
                                                 "aten::hardswish_",
                                                 "aten::hardswish_backward",
                                                 "aten::hardtanh_backward",
                                                 "aten::leaky_relu_backward",
                                                 "aten::softplus_backward",
                                                 "aten::softshrink_backward",
                                                 "aten::mish_backward",
                                                 "aten::native_dropout_backward",
                                                 "aten::mish_",
                                                 "aten::gelu_",
                                                 "aten::threshold_",
                                                 "aten::_prelu_kernel",
                                                 "aten::_prelu_kernel_backward"};
  if (untagged.contains(op.operator_name().name)) return true;
  return op.hasTag(at::Tag::pointwise) && !op.hasTag(at::Tag::nondeterministic_seeded) &&
         !not_really.contains(op.operator_name().name);
}

}  // namespace

OpRegistration::OpRegistration(Registration registration) {
  SHARDFIELD_CHECK(!registrations_are_read, "SHARDFIELD_OPS",
                   "expected inside the library, got a block of another one, whose ops would stay "
                   "unknown; use SHARDFIELD_EXTENSION (dispatch/extension.h) there");
  registrations().push_back(registration);
}

OpTable::OpTable()
    : autograd_(make_library("aten", DispatchKey::AutogradPrivateUse3)),
      backend_(make_library("aten", DispatchKey::PrivateUse3)),
      autograd_fallback_(make_library("_", DispatchKey::AutogradPrivateUse3)),
      backend_fallback_(make_library("_", DispatchKey::PrivateUse3)) {
  autograd_fallback_.fallback(torch::CppFunction::makeFromBoxedFunction<&unknown_op>());
  backend_fallback_.fallback(torch::CppFunction::makeFromBoxedFunction<&gather_and_call>());
}

bool OpTable::has_formula(const char* name) const {
  if (is_bookkeeping(name) || own_autograd_.contains(name)) return false;
  return find_op(name).hasKernelForDispatchKey(DispatchKey::Autograd);
}

c10::OperatorHandle OpTable::find_op(const char* name) {
  const auto op = c10::Dispatcher::singleton().findSchema(torch::jit::parseName(name));
  TORCH_CHECK(op, "shardfield: this libtorch has no op ", name);
  return *op;
}

bool OpTable::has_derivatives(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(DispatchKey::Autograd) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
}

void OpTable::check_forward_mode(const char* name, bool knows_tangents) {
  SHARDFIELD_CHECK(knows_tangents, name,
                   "forward-mode derivatives (make_dual) are not available for this op on sharded "
                   "tensors; use torch.func.jvp or reverse mode (torch.autograd.grad)");
}

void OpTable::add_elementwise_formula(const char* name) {
  autograd_.impl(name, torch::CppFunction::makeFromBoxedFunction<&formula_of_elementwise>());
}

void OpTable::fill_defaults() {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& op_name : dispatcher.getAllOpNames()) {
    if (!op_name.name.starts_with("aten::")) continue;
    const std::string name = c10::toString(op_name);
    if (own_.contains(name)) continue;
    const auto op = dispatcher.findSchema(op_name);
    if (!op || op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd)) continue;
    if (is_list_op(name)) {
      backend_.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&list_kernel>());
      if (op->hasKernelForDispatchKey(DispatchKey::Autograd) && !own_autograd_.contains(name))
        autograd_.impl(name.c_str(),
                       torch::CppFunction::makeFromBoxedFunction<&formula_of_lists>());
      continue;
    }
    if (is_view_copy(*op)) {
      backend_.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&copy_of_view>());
      autograd_.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&copy_of_view>());
      continue;
    }
    const bool elementwise = is_elementwise(*op);
    if (!elementwise && has_functional_form(*op)) {
      backend_.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&out_form>());
      autograd_.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&out_form>());
      continue;
    }
    const bool has_default =
        op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional) ||
        op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
    const bool formula_above =
        op->hasKernelForDispatchKey(DispatchKey::Autograd) && !own_autograd_.contains(name);
    if (elementwise && register_unboxed(*op, name.c_str(), backend_, autograd_, formula_above))
      continue;
    if (elementwise) {
      backend_.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&elementwise_kernel>());
    } else if (has_default && !decomposes_well(name) && !is_bookkeeping(name)) {
      backend_.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&gather_and_call>());
    }
    if (!formula_above || is_bookkeeping(name)) continue;
    if (elementwise) {
      autograd_.impl(name.c_str(),
                     torch::CppFunction::makeFromBoxedFunction<&formula_of_elementwise>());
    } else if (decomposes_well(name)) {
      autograd_.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&formula>());
    } else {
      autograd_.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&gather_and_call>());
    }
  }
}

void cover_late_ops() {
  static auto* mutex = new std::mutex();
  static auto* covered = new std::set<std::string>();
  static auto* libraries = new std::vector<torch::Library>();
  static const std::set<std::string> torch_namespaces = {
      "aten",     "prim",        "prims", "_c10d_functional", "c10d", "c10d_functional",
      "inductor", "higher_order"};
  const std::lock_guard<std::mutex> lock(*mutex);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& op_name : dispatcher.getAllOpNames()) {
    const std::string name = c10::toString(op_name);
    const std::string ns = op_name.name.substr(0, op_name.name.find("::"));
    if (torch_namespaces.contains(ns) || !covered->insert(name).second) continue;
    const auto op = dispatcher.findSchema(op_name);
    if (!op || op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd)) continue;
    for (const DispatchKey key : {DispatchKey::PrivateUse3, DispatchKey::AutogradPrivateUse3}) {
      if (op->hasKernelForDispatchKey(key)) continue;
      libraries->push_back(make_library(ns.c_str(), key));
      libraries->back().impl(name.c_str(),
                             torch::CppFunction::makeFromBoxedFunction<&gather_and_call>());
    }
  }
}

namespace {

/// Kernels are in place as soon as the library is loaded, and stay for the life of the process.
const bool installed = [] {
  auto* table = new OpTable();
  for (Registration registration : registrations()) registration(*table);
  table->fill_defaults();
  registrations_are_read = true;
  return true;
}();

}  // namespace

}  // namespace shardfield::dispatch
