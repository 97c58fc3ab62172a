#pragma once

#include <c10/util/ArrayRef.h>

#include "shardfield/spec/layout.h"

namespace shardfield::ops {

/// slice_backward gets the gradient of the slice and the sizes of the source, not how the source
/// was cut. The forward slice leaves that here. A miss is not wrong: the gradient then gets some
/// valid cut and is moved later where the source's own is needed.
void remember_slice_origin(const spec::Layout* sliced, at::IntArrayRef source_sizes, int64_t dim,
                           int64_t begin, int64_t step, const spec::Layout* source);

/// The source's layout, or one that extends the first and last piece of the slice.
const spec::Layout* slice_origin(const spec::Layout* sliced, at::IntArrayRef source_sizes,
                                 int64_t dim, int64_t begin, int64_t step);

}  // namespace shardfield::ops
