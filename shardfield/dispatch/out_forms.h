#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace shardfield::dispatch {

/// True for an out= form whose op also has a form that returns its result.
bool has_functional_form(const c10::OperatorHandle& op);

/// At both keys for such a form: the functional form, then a copy into out. A plain out takes the
/// whole result, a sharded one of the same sizes its part of it. Refuses inputs that require
/// grad, as PyTorch does.
void out_form(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace shardfield::dispatch
