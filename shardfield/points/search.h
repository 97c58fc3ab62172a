#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

namespace shardfield::points {

/// Nearest points of each query, or those within a radius.
struct Neighbors {
  at::Tensor indices;
  at::Tensor points;     ///< undefined where not asked for
  at::Tensor distances;  ///< undefined where not asked for
};

/// The k nearest points of each query, nearest first; of equally near ones the lower index first,
/// whatever the number of ranks. Exact. Each rank searches its own points in a k-d tree, then those
/// of other ranks that can be nearer, told by boxes around its queries. Collective over the mesh
/// when one argument is sharded; either may be plain.
///
/// @param points   (n, dims), floating, finite
/// @param queries  (m, dims), same dtype
/// @param k        1 to n
/// @return indices int64 (m, k), not differentiable, and distances (m, k) with gradients to points
///   and queries (0 where a query is a point), both cut as the queries' rows (plain queries:
///   plain).
/// @throws c10::Error  on every rank alike.
Neighbors knn(const at::Tensor& points, const at::Tensor& queries, int64_t k);

struct RadiusOptions {
  std::optional<int64_t> max_points;  ///< keep the nearest ones only; fixed shape
  bool return_points = false;
  bool return_distances = false;
};

/// All points within `radius` of each query, at the radius included; nearest first, of equally near
/// ones the lower index first. Exact. Only points within the radius of another rank's queries go
/// there. Collective over the mesh when one argument is sharded; either may be plain.
///
/// Without max_points: indices int64 (2, pairs), rows query and point, in order of the queries,
/// cut along the pairs where the queries are; points (pairs, dims), distances (pairs).
/// With max_points: indices (m, max_points), points (m, max_points, dims), distances (m,
/// max_points), unused places 0. Gradients go to points and queries.
/// @throws c10::Error  on every rank alike.
Neighbors radius_search(const at::Tensor& points, const at::Tensor& queries, double radius,
                        const RadiusOptions& options = {});

}  // namespace shardfield::points
