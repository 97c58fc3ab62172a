#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace shardfield::graph {

/// A read-only array that is borrowed or owned; copying one never copies its elements.
///
/// Example: Array<int64_t>::owning({1, 2}) owns two numbers; Array<double>{view, keeper} shows
/// memory that `keeper` keeps alive (a NumPy array, a tensor); an empty keeper means that the
/// caller keeps it.
template <class T>
struct Array {
  std::span<const T> values;
  std::shared_ptr<const void> keeper;

  Array() = default;
  explicit Array(std::span<const T> view, std::shared_ptr<const void> owner = {})
      : values(view), keeper(std::move(owner)) {}

  /// Takes the vector over.
  static Array owning(std::vector<T> numbers) {
    auto kept = std::make_shared<const std::vector<T>>(std::move(numbers));
    const std::span<const T> view(*kept);
    return Array(view, std::move(kept));
  }

  [[nodiscard]] int64_t size() const { return static_cast<int64_t>(values.size()); }
  [[nodiscard]] bool empty() const { return values.empty(); }
  const T& operator[](int64_t i) const { return values[static_cast<size_t>(i)]; }
};

}  // namespace shardfield::graph
