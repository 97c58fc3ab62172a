#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace shardfield::graph {

/// Order along a space-filling curve: hilbert has no jumps, morton (Z order) is cheaper to explain.
enum class Curve { hilbert, morton };

/// Bits per axis of a curve's grid.
inline constexpr int kCurveBits = 21;

/// Place of a grid point (each coordinate < 2^21) along the curve, 63 bits. The Hilbert curve is
/// the one of J. Skilling, "Programming the Hilbert curve" (2004), with x as its first axis.
/// Example: morton_key({1, 0, 0}) is 4, morton_key({0, 0, 1}) is 1.
[[nodiscard]] uint64_t hilbert_key(const std::array<uint32_t, 3>& point);
[[nodiscard]] uint64_t morton_key(const std::array<uint32_t, 3>& point);

/// How centers are laid on the curve's grid.
enum class CurveBox {
  stretched,  ///< Each axis of the bounding box of the centers fills the grid.
  cubic,      ///< The longest axis does; the others keep their proportion.
};

/// Keys of centers (num_cells, 3). The same for any number of threads.
[[nodiscard]] std::vector<uint64_t> curve_keys(std::span<const double> centers, Curve curve,
                                               CurveBox box, int num_threads);

/// Cell numbers in ascending order of (key, number).
[[nodiscard]] std::vector<int64_t> order_of(std::span<const uint64_t> keys, int num_threads);

/// Cuts the cells, taken in order of (key, number), into `num_parts` parts.
///
/// Without weights the r-th of n cells goes to part floor(r * num_parts / n): sizes differ by at
/// most one. With weights a cell whose weight spans [a, a + w) of the total W goes to part
/// floor((a + w / 2) * num_parts / W): a part holds at most W / num_parts plus one cell's weight.
/// Parts are empty only where there are fewer cells than parts or a weight exceeds W / num_parts.
///
/// Example: 3 cells in 8 parts give 0, 2, 5.
[[nodiscard]] std::vector<int32_t> cut_order(std::span<const uint64_t> keys,
                                             std::span<const double> weights, int64_t num_parts,
                                             int num_threads);

/// What ranks do together, given by whoever has a transport. Every rank calls in the same order.
struct Together {
  std::function<void(std::span<double>)> max;   ///< Replaces each number by the ranks' largest.
  std::function<void(std::span<int64_t>)> sum;  ///< Replaces each number by the ranks' sum.
  std::function<int64_t(int64_t)> first;        ///< Sum of the numbers of the ranks before this.
  /// The numbers of all ranks, in rank order; ranks may give different counts.
  std::function<std::vector<int64_t>(std::span<const int64_t>)> gather;
};

/// A single rank's Together: nothing to do.
[[nodiscard]] Together alone();

/// Labels of this rank's cells where each rank holds consecutive cells of one mesh: exactly the
/// labels that cut_order gives for the whole mesh, whatever the number of ranks. No rank needs the
/// whole: ranks exchange a box, counts of 2^18 buckets along the curve, and the keys of those cells
/// whose bucket holds a border between parts. Collective over the ranks of `together`.
///
/// @param centers  of this rank's cells, (num_cells here, 3)
/// @return part of each of this rank's cells
[[nodiscard]] std::vector<int32_t> cut_ranges(std::span<const double> centers, Curve curve,
                                              CurveBox box, int64_t num_parts,
                                              const Together& together, int num_threads);

/// Rank of the first of n cells that belongs to `part` in an even cut. Example: 3 cells in 2
/// parts start at 0 and 2.
[[nodiscard]] constexpr int64_t even_border(int64_t part, int64_t num_cells, int64_t num_parts) {
  return (part * num_cells + num_parts - 1) / num_parts;
}

}  // namespace shardfield::graph
