#pragma once

#include <c10/util/Exception.h>

/// Throws a c10::Error whose text starts with the op: "conv2d: expected .., got .. on rank r; do
/// ..".
#define SHARDFIELD_CHECK(condition, op, ...) TORCH_CHECK(condition, op, ": ", __VA_ARGS__)
