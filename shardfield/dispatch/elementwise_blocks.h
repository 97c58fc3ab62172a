#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace shardfield::dispatch {

/// Runs an elementwise op on plain tensors so that every element's bits depend on its operands
/// alone. PyTorch's vector loops end in a scalar loop over what does not fill a vector, and its
/// exponentials differ there in the last bit: here the operands are copied to full blocks.
/// Arguments on the stack are replaced by the results, as by callBoxed. Local.
void call_in_blocks(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace shardfield::dispatch
