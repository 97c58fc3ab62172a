#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>

namespace shardfield::dispatch {

/// Reproducible mode: losses, norms, convolutions, products and weight gradients have the same bits
/// for every number of ranks, every placement and every number of threads, one rank included.
/// Sums are taken without rounding over slices of the operands (ops/exact_sums.h), elementwise ops
/// in blocks whose ends do not depend on the piece. About ten times slower. For the whole process;
/// off at the start. Set it on all ranks, between steps. Local.
void set_reproducible(bool on);
bool is_reproducible();

/// Inside, ops work as they do outside of reproducible mode: for kernels whose arithmetic is exact
/// already. Of this thread.
class OrdinaryArithmetic {
 public:
  OrdinaryArithmetic();
  ~OrdinaryArithmetic();
  OrdinaryArithmetic(const OrdinaryArithmetic&) = delete;
  OrdinaryArithmetic& operator=(const OrdinaryArithmetic&) = delete;
};

/// What stands in for an op's kernels in reproducible mode. At most one of the two.
struct ReproducibleForm {
  void (*composed)() = nullptr;  ///< a function of the op's signature
  bool decomposed = false;       ///< PyTorch's decomposition
};

namespace detail {
extern std::atomic<bool> reproducible;
bool is_reproducible_here();
/// The form of an op by name, made empty when it is first asked for; stays for the life of the
/// process.
ReproducibleForm& reproducible_form(const std::string& name);
}  // namespace detail

/// True when the op whose form this is should use it now.
inline bool in_reproducible_form(const ReproducibleForm* form) {
  if (!detail::reproducible.load(std::memory_order_relaxed)) [[likely]]
    return false;
  return (form->composed || form->decomposed) && detail::is_reproducible_here();
}

}  // namespace shardfield::dispatch
