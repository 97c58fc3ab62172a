#include "shardfield/graph/curve.h"

#include <algorithm>
#include <barrier>
#include <bit>
#include <cstdlib>
#include <numeric>
#include <random>
#include <thread>

#include <gtest/gtest.h>

#include "graph/meshes.h"

#include "shardfield/graph/bisection.h"

namespace shardfield::graph {
namespace {

/// Skilling's transform as his paper states it, bit loops and all.
uint64_t skilling(std::array<uint32_t, 3> x) {
  constexpr uint32_t kTop = 1U << (kCurveBits - 1);
  for (uint32_t q = kTop; q > 1; q >>= 1) {
    const uint32_t p = q - 1;
    for (size_t i = 0; i < 3; ++i) {
      if ((x[i] & q) != 0) {
        x[0] ^= p;
      } else {
        const uint32_t t = (x[0] ^ x[i]) & p;
        x[0] ^= t;
        x[i] ^= t;
      }
    }
  }
  for (size_t i = 1; i < 3; ++i) x[i] ^= x[i - 1];
  uint32_t t = 0;
  for (uint32_t q = kTop; q > 1; q >>= 1) {
    if ((x[2] & q) != 0) t ^= q - 1;
  }
  uint64_t key = 0;
  for (int level = kCurveBits - 1; level >= 0; --level) {
    for (const uint32_t axis : x) key = key << 1 | (((axis ^ t) >> level) & 1U);
  }
  return key;
}

TEST(Curve, HilbertIsSkillingsTransform) {
  std::mt19937 draw(0);
  for (int i = 0; i < 20000; ++i) {
    const uint32_t mask = (1U << (i % 21 + 1)) - 1;
    std::array<uint32_t, 3> point{};
    for (uint32_t& x : point) x = static_cast<uint32_t>(draw()) & mask;
    ASSERT_EQ(hilbert_key(point), skilling(point));
  }
}

TEST(Curve, HilbertStepsToANeighbour) {
  std::vector<std::pair<uint64_t, std::array<uint32_t, 3>>> cells;
  for (uint32_t x = 0; x < 8; ++x) {
    for (uint32_t y = 0; y < 8; ++y) {
      for (uint32_t z = 0; z < 8; ++z) cells.push_back({hilbert_key({x, y, z}), {x, y, z}});
    }
  }
  std::sort(cells.begin(), cells.end());
  for (size_t i = 1; i < cells.size(); ++i) {
    EXPECT_EQ(cells[i].first, cells[i - 1].first + 1);
    int distance = 0;
    for (size_t axis = 0; axis < 3; ++axis) {
      distance += std::abs(static_cast<int>(cells[i].second[axis]) -
                           static_cast<int>(cells[i - 1].second[axis]));
    }
    EXPECT_EQ(distance, 1);
  }
}

TEST(Curve, MortonInterleavesBits) {
  EXPECT_EQ(morton_key({1, 0, 0}), 4U);
  EXPECT_EQ(morton_key({0, 0, 1}), 1U);
  EXPECT_EQ(morton_key({3, 1, 2}), 0b101110U);
}

std::vector<double> random_centers(size_t count, int seed) {
  std::mt19937 draw(static_cast<uint32_t>(seed));
  std::uniform_real_distribution<double> unit(0, 1);
  std::vector<double> centers(count * 3);
  for (double& x : centers) x = unit(draw);
  return centers;
}

/// The cut as the words say it: rank r of n goes to part floor(r * parts / n).
std::vector<int32_t> slow_cut(const std::vector<uint64_t>& keys, int64_t parts) {
  std::vector<size_t> order(keys.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return keys[a] < keys[b]; });
  std::vector<int32_t> labels(keys.size());
  for (size_t r = 0; r < order.size(); ++r) {
    labels[order[r]] =
        static_cast<int32_t>(static_cast<int64_t>(r) * parts / static_cast<int64_t>(keys.size()));
  }
  return labels;
}

TEST(Curve, CutEqualsTheSortedOneForAnyThreads) {
  for (const int64_t parts : {1, 2, 7, 64, 5000}) {
    const auto centers = random_centers(70000, 3);
    for (const Curve curve : {Curve::hilbert, Curve::morton}) {
      const auto keys = curve_keys(centers, curve, CurveBox::stretched, 1);
      const auto expected = slow_cut(keys, parts);
      for (const int threads : {1, 2, 3, 7}) {
        ASSERT_EQ(curve_keys(centers, curve, CurveBox::stretched, threads), keys);
        ASSERT_EQ(cut_order(keys, {}, parts, threads), expected);
      }
    }
  }
}

/// Ranks as threads that meet at a barrier.
class Meeting {
 public:
  explicit Meeting(int ranks) : barrier_(ranks), numbers_(static_cast<size_t>(ranks)) {}

  Together of(size_t rank) {
    Together together;
    together.max = [this, rank](std::span<double> values) {
      std::vector<int64_t> bits;
      for (const double v : values) bits.push_back(std::bit_cast<int64_t>(v));
      const auto all = meet(rank, bits);
      for (size_t i = 0; i < all.size(); ++i) {
        double& v = values[i % values.size()];
        v = std::max(v, std::bit_cast<double>(all[i]));
      }
    };
    together.sum = [this, rank](std::span<int64_t> values) {
      const auto all = meet(rank, {values.begin(), values.end()});
      std::fill(values.begin(), values.end(), 0);
      for (size_t i = 0; i < all.size(); ++i) values[i % values.size()] += all[i];
    };
    together.first = [this, rank](int64_t value) {
      const auto all = meet(rank, {value});
      return std::accumulate(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(rank),
                             int64_t{0});
    };
    together.gather = [this, rank](std::span<const int64_t> own) {
      return meet(rank, {own.begin(), own.end()});
    };
    return together;
  }

 private:
  std::vector<int64_t> meet(size_t rank, std::vector<int64_t> own) {
    numbers_[rank] = std::move(own);
    barrier_.arrive_and_wait();
    std::vector<int64_t> all;
    for (const auto& list : numbers_) all.insert(all.end(), list.begin(), list.end());
    barrier_.arrive_and_wait();
    return all;
  }

  std::barrier<> barrier_;
  std::vector<std::vector<int64_t>> numbers_;
};

TEST(Curve, RangesOfRanksGetTheLabelsOfTheWhole) {
  const auto centers = random_centers(3000, 11);
  for (const auto& borders :
       {std::vector<size_t>{0, 3000}, {0, 1500, 3000}, {0, 1, 1, 2999, 3000}, {0, 0, 3000}}) {
    for (const int64_t parts : {1, 5, 64}) {
      const auto expected =
          cut_order(curve_keys(centers, Curve::hilbert, CurveBox::stretched, 1), {}, parts, 1);
      const size_t ranks = borders.size() - 1;
      Meeting meeting(static_cast<int>(ranks));
      std::vector<std::vector<int32_t>> labels(ranks);
      {
        std::vector<std::jthread> threads;
        for (size_t rank = 0; rank < ranks; ++rank) {
          threads.emplace_back([&, rank] {
            const auto own = std::span(centers).subspan(borders[rank] * 3,
                                                        (borders[rank + 1] - borders[rank]) * 3);
            labels[rank] =
                cut_ranges(own, Curve::hilbert, CurveBox::stretched, parts, meeting.of(rank), 1);
          });
        }
      }
      std::vector<int32_t> all;
      for (const auto& list : labels) all.insert(all.end(), list.begin(), list.end());
      EXPECT_EQ(all, expected) << ranks << " ranks, " << parts << " parts";
    }
  }
}

TEST(Curve, EqualCentersStillGiveEvenParts) {
  const std::vector<double> centers(300, 1.5);
  const auto labels =
      cut_order(curve_keys(centers, Curve::hilbert, CurveBox::stretched, 2), {}, 8, 2);
  for (const int64_t size : sizes_of(labels, 8)) EXPECT_NEAR(static_cast<double>(size), 12.5, 0.5);
}

TEST(Curve, WeightsCutAtTheMiddleOfACell) {
  const std::vector<uint64_t> keys{0, 1, 2, 3};
  EXPECT_EQ(cut_order(keys, std::vector<double>{3, 1, 1, 1}, 2, 1),
            (std::vector<int32_t>{0, 1, 1, 1}));
  EXPECT_EQ(cut_order(keys, std::vector<double>{1, 1, 1, 3}, 2, 1),
            (std::vector<int32_t>{0, 0, 0, 1}));
  EXPECT_EQ(cut_order(keys, std::vector<double>{0, 0, 5, 0}, 3, 1),
            (std::vector<int32_t>{0, 0, 1, 2}));
}

// CASES L9: 4 cells on 2 ranks are described by the borders 0, 2, 4, not by counts.
TEST(Cases, L9BordersAreAPrefixSum) {
  EXPECT_EQ(even_border(0, 4, 2), 0);
  EXPECT_EQ(even_border(1, 4, 2), 2);
  EXPECT_EQ(even_border(2, 4, 2), 4);
  EXPECT_EQ(even_border(1, 3, 2), 2);
}

TEST(Bisection, SizesDifferByAtMostOneForAnyPartsAndThreads) {
  const auto centers = random_centers(1009, 5);
  for (const int64_t parts : {1, 2, 3, 5, 16, 63, 1009, 2000}) {
    const auto labels = bisect(centers, {}, parts, 1);
    for (const int threads : {2, 5}) ASSERT_EQ(bisect(centers, {}, parts, threads), labels);
    for (const int64_t size : sizes_of(labels, parts)) {
      EXPECT_GE(size, 1009 / parts);
      EXPECT_LE(size, (1009 + parts - 1) / parts);
    }
  }
}

TEST(Bisection, CutsABoxIntoBlocks) {
  const Mesh mesh = box_of_cubes(8, 4, 4);
  const auto labels = bisect(mesh.centroids(1), {}, 8, 1);
  for (int64_t cell = 0; cell < mesh.num_cells(); ++cell) {
    const int64_t x = cell / 16;
    const int64_t y = cell / 4 % 4;
    const int64_t z = cell % 4;
    // First across x, then again (4 x 4 x 4 is left: the first of equal axes), then across y.
    EXPECT_EQ(labels[static_cast<size_t>(cell)], x / 4 * 4 + x % 4 / 2 * 2 + y / 2) << z;
  }
}

TEST(Bisection, WeightsBalanceWithinOneCell) {
  const auto centers = random_centers(500, 7);
  std::vector<double> weights(500);
  std::mt19937 draw(1);
  double total = 0;
  for (double& w : weights) total += w = static_cast<double>(draw() % 1000) / 100;
  const auto labels = bisect(centers, weights, 6, 2);
  std::vector<double> loads(6);
  for (size_t i = 0; i < labels.size(); ++i) loads[static_cast<size_t>(labels[i])] += weights[i];
  for (const double load : loads) EXPECT_NEAR(load, total / 6, 10);
}

}  // namespace
}  // namespace shardfield::graph
