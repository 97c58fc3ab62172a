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

/// A row of a cut dim is plain, so views of it are too. For a write through them PyTorch copies the
/// gradient of the whole into its sizes and strides and takes the same views of that; its row is
/// plain only where it is cut as the whole was. Reading the row leaves that here.
void remember_row_source(const spec::Layout* source, at::IntArrayRef sizes,
                         at::IntArrayRef strides);

/// The layout last remembered for a tensor of these sizes and strides on this mesh, or nullptr.
const spec::Layout* row_source(const spec::Mesh& mesh, at::IntArrayRef sizes,
                               at::IntArrayRef strides);

}  // namespace shardfield::ops
