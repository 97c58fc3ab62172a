#pragma once

#include <ATen/core/Tensor.h>

namespace shardfield::comm {

/// The dtype in which values of another one are reduced over ranks: transports know bool, 8-bit and
/// wide integers and floating point from 16 bits on. Every value has its place in it, and a sum
/// that runs over wraps as in the dtype itself once it is cast back. Pure.
inline at::ScalarType carried_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBool:
      return at::kByte;
    case at::kShort:
    case at::kUInt16:
      return at::kInt;
    case at::kUInt32:
    case at::kUInt64:
      return at::kLong;
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e4m3fnuz:
    case at::kFloat8_e5m2:
    case at::kFloat8_e5m2fnuz:
      return at::kFloat;
    default:
      return dtype;
  }
}

}  // namespace shardfield::comm
