#pragma once

#include <ATen/core/Tensor.h>

#include "shardfield/spec/layout.h"

namespace shardfield::exchange {

/// For the rows of one cut that this rank owns: which entries of a list name them. In order of the
/// list over all ranks, as one device would meet them.
struct OwnerList {
  at::Tensor entries;  ///< int64, global numbers of list entries
  at::Tensor rows;     ///< int64, own rows (from 0) that they name
};

/// Tells every owner which entries of a list that is cut over the same ranks name its rows: one
/// gather of counts and two messages of numbers per pair of ranks. Collective over the layout's
/// mesh.
/// @param layout  of the named rows, cut c
/// @param named   int64 (n), rows that this rank's part of the list names, in range
/// @param first_entry  global number of the part's first entry
OwnerList list_at_owners(const spec::Layout& layout, size_t c, const at::Tensor& named,
                         int64_t first_entry);

}  // namespace shardfield::exchange
