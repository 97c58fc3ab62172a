#pragma once

#include <torch/library.h>

namespace shardfield::dispatch {

/// Registers the unboxed short cuts of an elementwise op at both keys, when its schema is one of
/// the common signatures. They serve operands of one layout and 0-dim plain ones, which is most
/// calls; the rest goes to the boxed kernels.
/// @return false when the signature has no short cut.
bool register_unboxed(const c10::OperatorHandle& op, const char* name, torch::Library& backend,
                      torch::Library& autograd, bool has_formula);

}  // namespace shardfield::dispatch
