#include "shardfield/spec/range.h"

#include <numeric>
#include <string>

#include "shardfield/spec/integer.h"

namespace shardfield::spec {

namespace {

void check_parts(int64_t num_rows, int64_t parts, const char* who) {
  require(num_rows >= 0 && parts >= 1,
          std::string(who) + ": expected rows >= 0 and parts >= 1, got " +
              std::to_string(num_rows) + " rows and " + std::to_string(parts) + " parts");
}

}  // namespace

std::vector<Range> ranges_of(std::span<const int64_t> sizes) {
  std::vector<Range> ranges;
  ranges.reserve(sizes.size());
  int64_t begin = 0;
  for (const int64_t size : sizes) {
    ranges.push_back({begin, begin + size});
    begin += size;
  }
  return ranges;
}

std::vector<int64_t> sizes_of(std::span<const Range> ranges) {
  std::vector<int64_t> sizes;
  sizes.reserve(ranges.size());
  for (const Range& range : ranges) {
    sizes.push_back(range.size());
  }
  return sizes;
}

int64_t total_of(std::span<const int64_t> sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

int owner_of(std::span<const int64_t> sizes, int64_t row) {
  int64_t begin = 0;
  for (size_t rank = 0; rank < sizes.size(); ++rank) {
    if (row >= begin && row < begin + sizes[rank]) {
      return static_cast<int>(rank);
    }
    begin += sizes[rank];
  }
  return -1;
}

std::vector<int64_t> chunk_sizes(int64_t num_rows, int64_t parts) {
  check_parts(num_rows, parts, "chunk_sizes");
  const int64_t chunk = ceil_div(num_rows, parts);
  std::vector<int64_t> sizes(static_cast<size_t>(parts));
  int64_t left = num_rows;
  for (int64_t& size : sizes) {
    size = std::min(chunk, left);
    left -= size;
  }
  return sizes;
}

std::vector<int64_t> blockwise_sizes(int64_t num_rows, int64_t parts) {
  return chunk_sizes(num_rows, parts);
}

std::vector<int64_t> balanced_sizes(int64_t num_rows, int64_t parts) {
  check_parts(num_rows, parts, "balanced_sizes");
  std::vector<int64_t> sizes(static_cast<size_t>(parts), num_rows / parts);
  for (int64_t part = 0; part < num_rows % parts; ++part) {
    ++sizes[static_cast<size_t>(part)];
  }
  return sizes;
}

}  // namespace shardfield::spec
