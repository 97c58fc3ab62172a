#pragma once

#include <cstdint>

#include "shardfield/spec/layout.h"

namespace shardfield::spec {

/// Remembers that a list cut as `list` (1-d) named rows that are cut as `rows` (1-d): edges that
/// name nodes. Message passing then allocates its sums by `messages.new_zeros(num_nodes, ...)`,
/// which should be cut as the nodes are.
///
/// Kept per thread, as every rank runs the same calls: all ranks remember the same. Local.
void remember_listed_rows(const Layout* list, const Layout* rows);

/// The 1-d layout of `num_rows` rows that a list cut as `list` named last; nullptr when none did.
/// Local.
const Layout* listed_rows(const Layout* list, int64_t num_rows);

}  // namespace shardfield::spec
