#pragma once

#include <optional>
#include <span>

#include "shardfield/spec/layout.h"

namespace shardfield::spec {

/// Where the cuts are after viewing a tensor of `sizes` as `new_sizes`, each rank keeping just its
/// own elements in order. Merged dims become factors of one dim; a cut dim splits where every
/// piece border falls between the new rows.
///
/// Example: (2, 5, 3) with dim 1 cut 3 + 2, viewed as (2, 15): cut 9 + 6 on dim 1; as (10, 3):
/// dim 0 reads [outer 2][cut 3 + 2]. (4, 6) with dim 0 cut 3 + 1, viewed as (2, 12): no layout,
/// row 1 of the result would need row 2 of rank 0 and row 3 of rank 1.
/// @return nothing when the pieces do not fit the new shape.
std::optional<const Layout*> reshape_layout(const Layout& layout, std::span<const int64_t> sizes,
                                            std::span<const int64_t> new_sizes);

/// As reshape_layout, remembering recent answers per thread.
std::optional<const Layout*> cached_reshape_layout(const Layout& layout,
                                                   std::span<const int64_t> sizes,
                                                   std::span<const int64_t> new_sizes);

/// A layout of `sizes` near `layout` that reshape_layout accepts: cuts moved to the nearest row
/// borders, and dropped (nullptr when none is left) where that is not enough.
const Layout* layout_before_reshape(const Layout& layout, std::span<const int64_t> sizes,
                                    std::span<const int64_t> new_sizes);

}  // namespace shardfield::spec
