#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardfield/spec/layout.h"
#include "shardfield/spec/window.h"

namespace shardfield::ops {

/// Numbers of one convolution, one entry per spatial dim.
struct ConvSettings {
  std::vector<int64_t> stride, dilation, pad_lo, pad_hi, output_padding;
  bool transposed = false;
  int64_t groups = 1;

  int num_spatial() const { return static_cast<int>(stride.size()); }
  /// The window along spatial dim s for a weight of these sizes.
  spec::Window window(int s, at::IntArrayRef weight) const;
  friend bool operator==(const ConvSettings&, const ConvSettings&) = default;
};

/// What this rank computes along one cut spatial dim.
struct ConvDim {
  int dim = 0;     ///< tensor dim
  size_t cut = 0;  ///< cut of the input's layout
  spec::Window window;
  int64_t num_rows = 0;              ///< global input rows
  std::vector<spec::Range> inputs;   ///< rows that each piece needs
  std::vector<spec::Range> outputs;  ///< outputs that each piece owns
  int64_t pad_lo = 0, pad_hi = 0;    ///< own virtual rows (transposed: rows no input reaches)
  int64_t crop_lo = 0, crop_hi = 0;  ///< transposed: own surplus rows of the uncropped result

  spec::Range own_inputs(const spec::Layout& layout) const { return inputs[layout.piece(cut)]; }
  spec::Range own_outputs(const spec::Layout& layout) const { return outputs[layout.piece(cut)]; }
};

/// A convolution of a sharded input: output sizes and layout, and the rows each rank needs. Made
/// once per (layout, sizes, settings) and kept.
struct ConvPlan {
  const spec::Layout* input = nullptr;
  const spec::Layout* output = nullptr;  ///< nullptr when the result is plain
  std::vector<int64_t> input_sizes, weight_sizes, output_sizes;
  std::vector<int64_t> output_piece;  ///< sizes of this rank's result
  ConvSettings settings;
  std::vector<ConvDim> dims;  ///< the cut spatial dims

  /// How a cut of the channels is dealt with.
  enum class Channels { kWhole, kGroups, kPartial };
  Channels channels = Channels::kWhole;
  int channel_cut = -1;
  spec::Range weight_rows;  ///< kGroups: own rows of weight dim 0; kPartial: own input channels
  spec::Range bias_rows;    ///< kGroups: own output channels
  int64_t local_groups = 1;

  /// The op's own padding along a spatial dim that is not cut.
  bool is_cut(int dim) const;
};

/// The plan of this convolution, from a cache. Local.
/// @param layout  simple layout of the input
/// @throws c10::Error for sizes that make no convolution.
std::shared_ptr<const ConvPlan> plan_convolution(const char* op, const spec::Layout& layout,
                                                 at::IntArrayRef input, at::IntArrayRef weight,
                                                 const ConvSettings& settings);

/// `layout` without the cuts a convolution cannot use: merged dims, and channels whose cut does not
/// fall between groups. nullptr when none is left.
const spec::Layout* convolvable_layout(const spec::Layout& layout, at::IntArrayRef sizes,
                                       int64_t groups);

}  // namespace shardfield::ops
