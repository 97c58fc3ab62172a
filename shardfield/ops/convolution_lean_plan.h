#pragma once

#include <memory>

#include "shardfield/ops/convolution_halo.h"
#include "shardfield/ops/convolution_plan.h"

namespace shardfield::ops {

/// One spatial dim of the lean form. A convolution's input is its fine side and its output the
/// coarse one; a transposed convolution's the other way round. Coarse row c meets the fine rows
/// [c*stride - pad, c*stride - pad + extent).
struct LeanDim {
  spec::Window window;
  spec::Range inputs, outputs;  ///< own rows
  spec::Range core;             ///< own outputs that own rows alone decide
  // The local op over the own rows yields the own outputs after `skip` surplus ones.
  int64_t padding = 0, output_padding = 0, skip = 0, main_rows = 0;

  /// Fine rows that coarse rows meet.
  spec::Range hull(spec::Range coarse) const;
  /// Coarse rows that meet some of these fine rows.
  spec::Range touching(spec::Range fine) const;
  /// Coarse rows whose hull covers these fine rows and that include all touching ones.
  spec::Range covering(spec::Range fine) const;
};

/// What a rank does in the lean form.
struct LeanPlan {
  std::shared_ptr<const ConvPlan> conv;
  std::vector<LeanDim> dims;
  bool has_main = false;  ///< false: the piece is too thin, slabs compute everything
  bool exact = false;     ///< the local op yields the own outputs and no more
  HaloPlan input_halo;    ///< input rows that own outputs need
  HaloPlan grad_halo;     ///< output gradients that own rows need
  Box own_inputs, own_outputs, core_outputs;
  Box input_hull, grad_hull;  ///< own rows and needed rows

  std::vector<int64_t> stride, padding, dilation, output_padding;
  /// Backward moves output gradients rather than input gradients.
  bool grads_are_cheaper() const { return grad_halo.elements_moved <= input_halo.elements_moved; }
  /// One function per spatial dim, batch kept and the given channels.
  template <class F>
  Box map(const Box& box, int64_t channels, F&& f) const {
    Box out = box;
    out[1] = {0, channels};
    for (size_t d = 0; d < dims.size(); ++d) out[d + 2] = f(dims[d], box[d + 2]);
    return out;
  }
};

/// From a cache; lives as long as the process. Local.
const LeanPlan& lean_plan(const std::shared_ptr<const ConvPlan>& plan);

}  // namespace shardfield::ops
