#pragma once

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace shardfield::spec {

/// Random numbers of one test. The seed is printed and can be fixed by SHARDFIELD_TEST_SEED.
class Draws {
 public:
  Draws() : seed_(choose_seed()), engine_(seed_) {
    std::cout << "seed " << seed_ << " (repeat with SHARDFIELD_TEST_SEED=" << seed_ << ")\n";
  }

  /// A number in [low, high].
  int64_t in(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(engine_);
  }

  /// True once in `n` draws.
  bool once_in(int64_t n) { return in(1, n) == 1; }

  /// Sizes of `ranks` pieces, each in [low, high].
  std::vector<int64_t> sizes(int64_t ranks, int64_t low, int64_t high) {
    std::vector<int64_t> drawn;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      drawn.push_back(in(low, high));
    }
    return drawn;
  }

 private:
  static uint64_t choose_seed() {
    const char* fixed = std::getenv("SHARDFIELD_TEST_SEED");
    return fixed != nullptr ? std::stoull(fixed) : std::random_device{}();
  }

  uint64_t seed_;
  std::mt19937_64 engine_;
};

/// "3, 0, 2"
inline std::string join(const std::vector<int64_t>& numbers) {
  std::ostringstream text;
  for (size_t i = 0; i < numbers.size(); ++i) {
    text << (i == 0 ? "" : ", ") << numbers[i];
  }
  return text.str();
}

}  // namespace shardfield::spec
