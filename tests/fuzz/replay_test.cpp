// The fuzzers' inputs that are kept, and mutations of them, without libFuzzer.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "fuzz/targets.h"

namespace shardfield::fuzz {
namespace {

namespace fs = std::filesystem;
using Input = std::vector<uint8_t>;

constexpr int kMutations = 2000;

/// The kept inputs of a target by file name; what starts with "bad_" must be refused.
std::map<std::string, Input> corpus_of(const std::string& target) {
  std::map<std::string, Input> inputs;
  for (const auto& entry : fs::directory_iterator(fs::path(SHARDFIELD_FUZZ_CORPUS) / target)) {
    std::ifstream file(entry.path(), std::ios::binary);
    inputs[entry.path().filename()] = Input(std::istreambuf_iterator<char>(file), {});
  }
  return inputs;
}

/// One to four changes: a byte, a cut, a piece said twice, a piece of another input, other digits.
Input mutated(Input input, const Input& other, std::mt19937& draw) {
  const auto below = [&](size_t n) { return n == 0 ? 0 : draw() % n; };
  for (size_t change = below(4) + 1; change-- > 0;) {
    const auto at = static_cast<std::ptrdiff_t>(below(input.size()));
    switch (draw() % 6) {
      case 0:
        if (!input.empty()) input[at] = static_cast<uint8_t>(draw());
        break;
      case 1:
        input.resize(below(input.size() + 1));
        break;
      case 2: {
        const Input piece(input.begin() + at, input.begin() + at + below(input.size() - at));
        input.insert(input.begin() + at, piece.begin(), piece.end());
        break;
      }
      case 3: {
        const auto from = static_cast<std::ptrdiff_t>(below(other.size()));
        input.insert(input.begin() + at, other.begin() + from,
                     other.begin() + from + below(other.size() - from));
        break;
      }
      case 4:
        for (uint8_t& byte : input)
          if (byte >= '0' && byte <= '9' && draw() % 8 == 0) byte = '0' + draw() % 10;
        break;
      default:
        input.erase(input.begin() + at, input.begin() + at + below(input.size() - at));
    }
  }
  return input;
}

class Fuzz : public ::testing::TestWithParam<Target> {};

TEST_P(Fuzz, KeptInputs) {
  const auto corpus = corpus_of(GetParam().name);
  EXPECT_GE(corpus.size(), 5U);
  for (const auto& [name, input] : corpus)
    EXPECT_EQ(GetParam().run(input), !name.starts_with("bad_")) << name;
}

TEST_P(Fuzz, MutationsOfThem) {
  std::vector<Input> corpus;
  for (auto& [name, input] : corpus_of(GetParam().name)) corpus.push_back(std::move(input));
  const uint32_t seed = 20261130;
  std::mt19937 draw(seed);
  int taken = 0;
  for (int i = 0; i < kMutations; ++i) {
    const Input& input = corpus[draw() % corpus.size()];
    taken += GetParam().run(mutated(input, corpus[draw() % corpus.size()], draw));
  }
  EXPECT_GT(taken, 0) << "seed " << seed;
  EXPECT_LT(taken, kMutations) << "seed " << seed;
}

INSTANTIATE_TEST_SUITE_P(Targets, Fuzz, ::testing::ValuesIn(kTargets),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace shardfield::fuzz
