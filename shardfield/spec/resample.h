#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "shardfield/spec/adaptive.h"
#include "shardfield/spec/range.h"

namespace shardfield::spec {

/// Interpolation along one dim. Bilinear and trilinear are kLinear per dim, bicubic is kCubic.
/// ('area' is adaptive average pooling: adaptive.h.)
enum class ResampleMode { kNearest, kNearestExact, kLinear, kCubic };

/// How one dim is interpolated.
struct ResampleOptions {
  ResampleMode mode = ResampleMode::kNearest;
  bool align_corners = false;  ///< Linear and cubic only.
  bool antialias = false;      ///< Linear and cubic only; the `_upsample_*_aa` ops.
  /// The `scales` argument of the ATen op: set only when the user gave scale_factor and not
  /// recompute_scale_factor; ATen then takes 1/scale_factor, otherwise num_rows/num_outputs.
  std::optional<double> scale_factor = std::nullopt;
  /// Coordinates and weights in float, as ATen computes them for float and narrower tensors.
  bool single_precision = false;
  /// Nearest modes: ATen's other index rule (float for every dtype, exact for factors 1 and 2).
  /// Its CPU backward kernels always use it, its forward kernels when uses_float_nearest() says.
  bool float_nearest = false;
};

/// Whether ATen's forward nearest kernels on the CPU look rows up in float for every dtype; all
/// sizes are global. The two rules differ where output*scale is a whole number, for instance 49
/// rows to 21: output 3 shows row 7 in double.
///
/// @param output_sizes   spatial output sizes, one to three.
/// @param num_channels   channels of the input.
/// @param channels_last  the input is contiguous in the channels-last format of its rank.
[[nodiscard]] bool uses_float_nearest(std::span<const int64_t> output_sizes, int64_t num_channels,
                                      bool channels_last);

/// Output length for a scale factor: floor(num_rows * scale_factor), in double as PyTorch does.
/// Example: 5 rows by 1.5 give 7.
[[nodiscard]] int64_t resampled_size(int64_t num_rows, double scale_factor);

/// Sources of every output along one dim: output o is the sum over t < width of
/// weights[o*width + t] * input[index[o*width + t]]. Indices lie in [0, num_rows) and may repeat
/// (taps beyond an edge read the edge row).
struct Taps {
  int64_t num_rows = 0;
  int64_t num_outputs = 0;
  int64_t width = 0;
  std::vector<int64_t> index;   ///< (num_outputs, width), row-major.
  std::vector<double> weights;  ///< (num_outputs, width), row-major.

  /// Rows that `outputs` read; taps of weight zero count. Empty for an empty range.
  [[nodiscard]] Range reach(Range outputs) const;
};

/// Sources and weights exactly as ATen computes them (Local, pure). Cubic: A = -0.75, with
/// antialias A = -0.5; antialiased taps are padded with weight zero to a common width.
///
/// @throws std::invalid_argument when num_rows or num_outputs < 1.
///
/// Example: 2 rows to 4, linear: index (0,1) (0,1) (0,1) (1,1), weights (1, 0) (.75, .25)
/// (.25, .75) (.75, .25).
[[nodiscard]] Taps resample_taps(int64_t num_rows, int64_t num_outputs,
                                 const ResampleOptions& options);

/// Places the outputs in proportion to the rows, o_r = b_r*m/n rounded to the side that moves
/// fewer rows (up on a tie), and says which rows every rank needs (Local, pure).
///
/// @throws std::invalid_argument when the sizes do not add up to taps.num_rows.
///
/// Example: sizes 2, 2 to 8 outputs, linear: rank 0 owns {0, 4} and needs {0, 3}; rank 1 owns
/// {4, 8} and needs {1, 4}.
[[nodiscard]] std::vector<MappedPiece> plan_resample(std::span<const int64_t> sizes,
                                                     const Taps& taps);

/// The same with the outputs per rank given: they add up to taps.num_outputs.
[[nodiscard]] std::vector<MappedPiece> plan_resample_to(std::span<const int64_t> outputs,
                                                        const Taps& taps);

}  // namespace shardfield::spec
