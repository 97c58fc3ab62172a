#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardfield/spec/mesh.h"

/// Differentiable collectives on this rank's own tensors, uneven along any dim.
///
/// Values are per-rank: each rank has its own tensor and its own loss, and the gradient is that of
/// the sum of all ranks' losses. Each function's backward is its adjoint, another function of this
/// file, so any order of derivative works; every rank must run backward when one does. All take any
/// dtype, empty pieces and strided, conjugated or channels-last input, return fresh contiguous
/// tensors and are collective over `group`, a mesh of one axis. `sizes` must be equal on all ranks;
/// calls are compared before data moves (call_agreement.h), and c10::Error names what differs.
namespace shardfield::comm {

/// Row blocks to every rank and from every rank.
/// @param x           the blocks for rank 0, 1, ... one after the other along dim
/// @param sizes       sizes[i][j]: rows that rank i sends to rank j
/// @return the blocks from rank 0, 1, ... Adjoint: the same with `sizes` transposed.
at::Tensor all_to_all_v(const at::Tensor& x, const spec::Mesh& group,
                        const std::vector<std::vector<int64_t>>& sizes, int64_t dim = 0);

/// Every rank's rows on every rank, in rank order. Adjoint: reduce_scatter_v.
/// @param sizes     rows of each rank
/// @param use_fp32  sum 16-bit gradients in float
at::Tensor all_gather_v(const at::Tensor& x, const spec::Mesh& group,
                        const std::vector<int64_t>& sizes, int64_t dim = 0, bool use_fp32 = true);

/// This rank's rows of the sum over ranks (bool: of the "or"). Adjoint: all_gather_v.
at::Tensor reduce_scatter_v(const at::Tensor& x, const spec::Mesh& group,
                            const std::vector<int64_t>& sizes, int64_t dim = 0,
                            bool use_fp32 = true);

/// All rows on rank dst; the others get a tensor without rows. Adjoint: scatter_v.
at::Tensor gather_v(const at::Tensor& x, const spec::Mesh& group, const std::vector<int64_t>& sizes,
                    int64_t dim = 0, int dst = 0);

/// Rank src's rows to their ranks. Adjoint: gather_v.
/// @param x  read on src only; may be absent elsewhere
at::Tensor scatter_v(const std::optional<at::Tensor>& x, const spec::Mesh& group,
                     const std::vector<int64_t>& sizes, int64_t dim, int src, c10::Device device);

/// Chosen rows to every rank, and theirs back. A row may go to several ranks or twice to one; its
/// gradient is the sum of all of them.
/// @param indices  int64, one per rank: rows of x along dim that go there
/// @param sizes    sizes[i][j]: how many rows rank i sends to rank j
at::Tensor indexed_all_to_all_v(const at::Tensor& x, const spec::Mesh& group,
                                const std::vector<at::Tensor>& indices,
                                const std::vector<std::vector<int64_t>>& sizes,
                                bool use_fp32 = true, int64_t dim = 0);

}  // namespace shardfield::comm
