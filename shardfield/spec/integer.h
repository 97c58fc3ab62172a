#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace shardfield::spec {

/// Division rounding down, for a divisor > 0. Example: floor_div(-1, 2) is -1.
[[nodiscard]] constexpr int64_t floor_div(int64_t dividend, int64_t divisor) {
  return dividend / divisor - (dividend % divisor < 0 ? 1 : 0);
}

/// Division rounding up, for a divisor > 0. Example: ceil_div(-1, 2) is 0, ceil_div(3, 2) is 2.
[[nodiscard]] constexpr int64_t ceil_div(int64_t dividend, int64_t divisor) {
  return -floor_div(-dividend, divisor);
}

/// Remainder in [0, divisor), for a divisor > 0. Example: floor_mod(-1, 4) is 3.
[[nodiscard]] constexpr int64_t floor_mod(int64_t dividend, int64_t divisor) {
  return dividend - floor_div(dividend, divisor) * divisor;
}

/// Throws std::invalid_argument with `message` unless `condition` holds.
inline void require(bool condition, const std::string& message) {
  if (!condition) {
    throw std::invalid_argument(message);
  }
}

}  // namespace shardfield::spec
