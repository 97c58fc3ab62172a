// Ops that work on the last dims of each batch entry by itself: matrix decompositions and solvers,
// unpooling. Cut batch dims stay as they are; a cut on the last dims moves to a
// batch dim first.

#include <ATen/ATen.h>

#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/cut_rows.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using spec::Layout;
using tensor::is_sharded;
using tensor::layout_of;
using torch::jit::Stack;

std::vector<int64_t> last_dims(const Tensor& t, int64_t count) {
  std::vector<int64_t> dims;
  for (int64_t d = std::max<int64_t>(t.dim() - count, 0); d < t.dim(); ++d) dims.push_back(d);
  return dims;
}

/// t with its last `count` dims whole.
Tensor with_whole_last_dims(const char* op, const Tensor& t, int64_t count) {
  Tensor out = with_simple_cuts(t);
  const auto busy = last_dims(t, count);
  for (int64_t d : busy) out = with_whole_dim(op, out, d, busy);
  return out;
}

/// The batch dims that all operands share and how they are cut.
struct Batch {
  std::vector<int64_t> sizes;
  const Layout* layout = nullptr;
};

/// @param own  dims that an operand may have behind the batch dims
bool has_batch(const Tensor& t, const Batch& batch, std::pair<int64_t, int64_t> own) {
  const int64_t rest = t.dim() - static_cast<int64_t>(batch.sizes.size());
  return rest >= own.first && rest <= own.second &&
         std::equal(batch.sizes.begin(), batch.sizes.end(), t.sizes().begin());
}

/// An operand on this rank: its own batch entries, or all of one that every entry shares.
Tensor operand(const Tensor& t, const Batch& batch, std::pair<int64_t, int64_t> own) {
  if (!batch.layout) return tensor::gather(t);
  if (!has_batch(t, batch, own)) return tensor::enter(tensor::gather(t), *batch.layout);
  return tensor::local(tensor::redistribute(t, batch.layout));
}

/// @tparam last   dims of one batch entry
/// @tparam least  dims that some operand's entry has (a vector of pivots beside matrices)
/// @tparam takes_none  whether the op takes a batch of no entries; else it runs on a dummy entry
/// @tparam least_out  dims that every result has behind the batch dims; shorter is a placeholder
template <int last, int least = last, bool takes_none = true, int least_out = 0>
void batched(const c10::OperatorHandle& op, Stack* stack) {
  const char* name = op.schema().name().c_str();
  const comm::CallScope scope(name);
  const size_t base = stack->size() - op.schema().arguments().size();
  Batch batch;
  std::vector<size_t> tensors;
  for (size_t i = base; i < stack->size(); ++i) {
    c10::IValue& v = (*stack)[i];
    if (!v.isTensor() || !v.toTensor().defined()) continue;
    tensors.push_back(i);
    if (!is_sharded(v.toTensor()) || batch.layout) continue;
    const Tensor whole = with_whole_last_dims(name, v.toTensor(), last);
    v = whole;
    if (!is_sharded(whole)) continue;
    batch.layout = &layout_of(whole);
    batch.sizes = whole.sizes().slice(0, std::max<int64_t>(whole.dim() - last, 0)).vec();
  }
  for (size_t i : tensors) (*stack)[i] = operand((*stack)[i].toTensor(), batch, {least, last});
  const auto num_batch = static_cast<int64_t>(batch.sizes.size());
  std::vector<int64_t> own = batch.sizes;
  if (batch.layout)
    own = batch.layout->local_sizes(batch.sizes.data(), static_cast<int>(num_batch));
  const bool dummy = !takes_none && c10::multiply_integers(own) == 0;
  for (size_t i : tensors) {
    if (!dummy) break;
    const Tensor t = (*stack)[i].toTensor();
    (*stack)[i] = grown_to(t, std::vector<int64_t>(t.dim(), 1));
  }
  op.callBoxed(stack);
  if (!batch.layout) return;
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    c10::IValue& v = (*stack)[i];
    if (!v.isTensor() || !v.toTensor().defined()) continue;
    Tensor piece = v.toTensor();
    if (piece.dim() < num_batch + least_out) continue;
    // lstsq leaves out results that its driver does not give, alike on a rank with a dummy entry.
    if (piece.dim() == 1 && piece.size(0) == 0 && (dummy || c10::multiply_integers(own) != 0))
      continue;
    if (dummy) {
      auto none = piece.sizes().vec();
      std::copy(own.begin(), own.end(), none.begin());
      piece = empty_result_like(piece, none);
    }
    std::vector<int64_t> sizes = batch.sizes;
    sizes.insert(sizes.end(), piece.sizes().begin() + num_batch, piece.sizes().end());
    v = tensor::wrap(piece.contiguous(), batch.layout, sizes);
  }
}

/// Whether some decomposition failed is known on all ranks before one of them raises.
void linalg_check_errors(const Tensor& info, c10::string_view name, bool is_matrix) {
  const Tensor failed = tensor::piece_of(info).ne(0).any();
  const Layout& layout = layout_of(info);
  if (!comm::all_reduce(failed, layout.mesh(), layout.axes(), comm::Reduction::kMax).item<bool>())
    return;
  at::_linalg_check_errors(tensor::gather(info), name, is_matrix);
}

}  // namespace

SHARDFIELD_OPS(batched) {
  for (const char* name :
       {"aten::linalg_qr", "aten::linalg_inv_ex", "aten::_linalg_det", "aten::_linalg_slogdet",
        "aten::linalg_eig", "aten::_linalg_eigvals", "aten::linalg_cholesky_ex",
        "aten::linalg_lu_factor_ex", "aten::linalg_lu", "aten::linalg_solve_triangular",
        "aten::cholesky_solve", "aten::cholesky_inverse", "aten::cholesky", "aten::geqrf",
        "aten::linalg_matrix_exp", "aten::triangular_solve", "aten::linalg_ldl_factor_ex",
        "aten::linalg_pinv.atol_rtol_tensor"})
    table.composed_boxed<&batched<2>>(name);
  for (const char* name :
       {"aten::lu_unpack", "aten::_linalg_solve_ex", "aten::linalg_lu_solve", "aten::ormqr",
        "aten::linalg_householder_product", "aten::linalg_ldl_solve"})
    table.composed_boxed<&batched<2, 1>>(name);
  table.composed_boxed<&batched<2, 1, false>>("aten::linalg_lstsq");
  for (const char* name : {"aten::_linalg_svd", "aten::_linalg_eigh"})
    table.composed_boxed<&batched<2, 2, true, 1>>(name);
  for (const char* name : {"aten::max_unpool2d", "aten::fractional_max_pool2d",
                           "aten::max_pool2d_with_indices_backward"})
    table.composed_boxed<&batched<2, 2, false>>(name);
  for (const char* name : {"aten::max_unpool3d", "aten::fractional_max_pool3d",
                           "aten::max_pool3d_with_indices_backward"})
    table.composed_boxed<&batched<3, 3, false>>(name);
  table.composed("aten::_linalg_check_errors", TORCH_FN(linalg_check_errors));
}

}  // namespace shardfield::ops
