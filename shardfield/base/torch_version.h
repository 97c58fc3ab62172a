// The PyTorch releases this code builds against, and every difference between them.
#pragma once

#include <torch/csrc/autograd/function.h>
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

namespace shardfield {

/// How PyTorch holds the nodes of its graph: counted inside of the node since 2.13.
#if SHARDFIELD_TORCH_AT_LEAST(2, 13)
using NodePointer = c10::intrusive_ptr<torch::autograd::Node>;
using WeakNodePointer = c10::weak_intrusive_ptr<torch::autograd::Node>;

template <class T, class... A>
NodePointer make_node(A&&... arguments) {
  return c10::make_intrusive<T>(std::forward<A>(arguments)...);
}
#else
using NodePointer = std::shared_ptr<torch::autograd::Node>;
using WeakNodePointer = std::weak_ptr<torch::autograd::Node>;

template <class T, class... A>
NodePointer make_node(A&&... arguments) {
  return NodePointer(new T(std::forward<A>(arguments)...), torch::autograd::deleteNode);
}
#endif

}  // namespace shardfield
