#include "shardfield/spec/finer_layout.h"

#include <unordered_map>

namespace shardfield::spec {

namespace {

std::unordered_map<const Layout*, const Layout*>& finer() {
  static thread_local std::unordered_map<const Layout*, const Layout*> table;
  return table;
}

}  // namespace

void remember_finer(const Layout* coarse, const Layout* fine) {
  if (coarse && coarse != fine) finer()[coarse] = fine;
}

std::vector<int64_t> finer_sizes(const Layout& coarse, size_t c, int64_t num_rows) {
  const auto found = finer().find(&coarse);
  if (found == finer().end()) return {};
  const Cut& cut = coarse.cuts()[c];
  for (const Cut& fine : found->second->cuts())
    if (fine.dim == cut.dim && fine.axes == cut.axes && fine.total() == num_rows) return fine.sizes;
  return {};
}

}  // namespace shardfield::spec
