// The PyTorch releases this code builds against, and every difference between them.
#pragma once

#include <torch/headeronly/version.h>

/// A release as one number that compares: 2.13 is 213.
#define SHARDFIELD_TORCH_VERSION (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR)

/// True when built against PyTorch `major.minor` or later.
#define SHARDFIELD_TORCH_AT_LEAST(major, minor) \
  (SHARDFIELD_TORCH_VERSION >= (major) * 100 + (minor))

#if !SHARDFIELD_TORCH_AT_LEAST(2, 11)
#error "Shardfield needs PyTorch 2.11 or later; install torch>=2.11,<2.15 and configure again."
#endif
#if SHARDFIELD_TORCH_AT_LEAST(2, 15)
#warning "Shardfield is tested with PyTorch 2.11 to 2.14; this one is newer."
#endif
