#pragma once

#include <vector>

#include "shardfield/spec/layout.h"

namespace shardfield::exchange {

/// Mesh ranks that differ from this one along these axes only, itself among them, ascending.
std::vector<int> ranks_over(const spec::Mesh& mesh, const std::vector<int>& axes);

/// Mesh rank of each piece of cut c among the ranks that differ from this one along the cut only.
std::vector<int> ranks_along(const spec::Layout& layout, size_t c);

}  // namespace shardfield::exchange
