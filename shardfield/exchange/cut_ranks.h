#pragma once

#include <vector>

#include "shardfield/spec/layout.h"

namespace shardfield::exchange {

/// Mesh rank of each piece of cut c among the ranks that differ from this one along the cut only.
std::vector<int> ranks_along(const spec::Layout& layout, size_t c);

}  // namespace shardfield::exchange
