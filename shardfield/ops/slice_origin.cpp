#include "shardfield/ops/slice_origin.h"

#include <map>
#include <mutex>
#include <tuple>
#include <vector>

namespace shardfield::ops {

namespace {

using spec::Layout;
using Key = std::tuple<const Layout*, std::vector<int64_t>, int64_t, int64_t, int64_t>;

std::mutex& mutex() {
  static auto* m = new std::mutex();
  return *m;
}
std::map<Key, const Layout*>& origins() {
  static auto* table = new std::map<Key, const Layout*>();
  return *table;
}

/// The cuts, those on `dim` joined to one.
std::vector<spec::Cut> joined_on(const Layout& layout, int64_t dim) {
  std::vector<spec::Cut> cuts;
  cuts.reserve(layout.cuts().size());  // `joined` points into it
  spec::Cut* joined = nullptr;
  for (const spec::Cut& cut : layout.cuts()) {
    if (cut.dim == dim && joined) {
      joined->axes.insert(joined->axes.end(), cut.axes.begin(), cut.axes.end());
      std::vector<int64_t> sizes;
      for (const int64_t outer : joined->sizes)
        for (const int64_t inner : cut.sizes) sizes.push_back(outer * inner);
      joined->sizes = std::move(sizes);
      continue;
    }
    cuts.push_back(cut);
    if (cut.dim == dim) joined = &cuts.back();
  }
  return cuts;
}

}  // namespace

void remember_slice_origin(const Layout* sliced, at::IntArrayRef source_sizes, int64_t dim,
                           int64_t begin, int64_t step, const Layout* source) {
  if (!sliced) return;
  const std::lock_guard<std::mutex> lock(mutex());
  origins()[{sliced, source_sizes.vec(), dim, begin, step}] = source;
}

const Layout* slice_origin(const Layout* sliced, at::IntArrayRef source_sizes, int64_t dim,
                           int64_t begin, int64_t step) {
  {
    const std::lock_guard<std::mutex> lock(mutex());
    auto it = origins().find({sliced, source_sizes.vec(), dim, begin, step});
    if (it != origins().end()) return it->second;
  }
  std::vector<spec::Cut> cuts = joined_on(*sliced, dim);
  for (spec::Cut& cut : cuts) {
    if (cut.dim != dim) continue;
    // Rows of the source up to and with each piece's last one, the rest to the last piece.
    const int64_t n = source_sizes[dim];
    int64_t taken = 0, before = 0;
    for (int64_t& s : cut.sizes) {
      taken += s;
      const int64_t upto = taken == 0 ? 0 : std::min(begin + (taken - 1) * step + 1, n);
      s = upto - before;
      before = upto;
    }
    cut.sizes.back() += n - before;
  }
  return spec::intern_layout(sliced->mesh(), std::move(cuts));
}

}  // namespace shardfield::ops
