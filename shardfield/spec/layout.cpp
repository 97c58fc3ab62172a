#include "shardfield/spec/layout.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <sstream>
#include <tuple>

namespace shardfield::spec {

int64_t Cut::total() const {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

int64_t Cut::offset(int piece) const {
  return std::accumulate(sizes.begin(), sizes.begin() + piece, int64_t{0});
}

int Cut::piece_at(const Mesh& mesh, const std::vector<int64_t>& coord) const {
  int64_t p = 0;
  for (int a : axes) p = p * mesh.shape[a] + coord[a];
  return static_cast<int>(p);
}

int Layout::cut_on(int dim) const {
  for (size_t c = 0; c < cuts_.size(); ++c)
    if (cuts_[c].dim == dim) return static_cast<int>(c);
  return -1;
}

std::vector<int64_t> Layout::local_sizes(const int64_t* global_sizes, int ndim) const {
  return local_sizes_at(global_sizes, ndim, mesh_->coord);
}

std::vector<int64_t> Layout::local_sizes_at(const int64_t* global_sizes, int ndim,
                                            const std::vector<int64_t>& coord) const {
  std::vector<int64_t> local(global_sizes, global_sizes + ndim);
  for (size_t c = 0; c < cuts_.size(); ++c) {
    const Cut& cut = cuts_[c];
    const int64_t n = totals_[c];
    // An empty dim stays empty whatever its outer factor was.
    local[cut.dim] = n == 0 ? 0 : local[cut.dim] / n * cut.sizes[cut.piece_at(*mesh_, coord)];
  }
  return local;
}

std::string Layout::to_string() const {
  std::ostringstream out;
  for (size_t c = 0; c < cuts_.size(); ++c) {
    const Cut& cut = cuts_[c];
    out << (c ? ", " : "") << "Shard(dim=" << cut.dim << ", axes=[";
    for (size_t i = 0; i < cut.axes.size(); ++i) out << (i ? ", " : "") << cut.axes[i];
    out << "], sizes=[";
    for (size_t i = 0; i < cut.sizes.size(); ++i) out << (i ? ", " : "") << cut.sizes[i];
    out << "])";
  }
  return out.str();
}

namespace {

using Key =
    std::tuple<const Mesh*, std::vector<std::tuple<int, std::vector<int>, std::vector<int64_t>>>>;

Key key_of(const Mesh& mesh, const std::vector<Cut>& cuts) {
  Key key{&mesh, {}};
  for (const Cut& c : cuts) std::get<1>(key).emplace_back(c.dim, c.axes, c.sizes);
  return key;
}

}  // namespace

const Layout* intern_layout(const Mesh& mesh, std::vector<Cut> cuts) {
  if (cuts.empty()) return nullptr;
  std::stable_sort(cuts.begin(), cuts.end(),
                   [](const Cut& a, const Cut& b) { return a.dim < b.dim; });
  static std::mutex mutex;
  // Never destroyed: tensors may outlive static destruction.
  static auto* table = new std::map<Key, const Layout*>();
  const std::lock_guard<std::mutex> lock(mutex);
  auto [it, fresh] = table->try_emplace(key_of(mesh, cuts), nullptr);
  if (!fresh) return it->second;
  auto* layout = new Layout();
  layout->mesh_ = &mesh;
  layout->cuts_ = std::move(cuts);
  for (size_t c = 0; c < layout->cuts_.size(); ++c) {
    const Cut& cut = layout->cuts_[c];
    const int piece = cut.piece_at(mesh, mesh.coord);
    layout->pieces_.push_back(piece);
    layout->offsets_.push_back(cut.offset(piece));
    layout->totals_.push_back(cut.total());
    if (cut.sizes.size() > 1) layout->alone_ = false;
    layout->axes_.insert(layout->axes_.end(), cut.axes.begin(), cut.axes.end());
    if (c > 0 && layout->cuts_[c - 1].dim == cut.dim) layout->single_cuts_ = false;
  }
  std::sort(layout->axes_.begin(), layout->axes_.end());
  it->second = layout;
  return layout;
}

namespace {

const Layout* renumber_uncached(const Layout& layout, std::span<const int> new_dim) {
  std::vector<Cut> cuts;
  for (Cut cut : layout.cuts()) {
    cut.dim = new_dim[cut.dim];
    if (cut.dim >= 0) cuts.push_back(std::move(cut));
  }
  return intern_layout(layout.mesh(), std::move(cuts));
}

}  // namespace

const Layout* renumber(const Layout& layout, std::span<const int> new_dim) {
  bool stays = true;
  for (const Cut& cut : layout.cuts()) stays &= new_dim[cut.dim] == cut.dim;
  if (stays) return &layout;
  // Views call this each time: a small direct-mapped cache spares the interning (0.5 us).
  struct Entry {
    const Layout* from = nullptr;
    uint64_t code = 0;
    const Layout* to = nullptr;
  };
  constexpr size_t kEntries = 512;
  static thread_local std::vector<Entry> cache(kEntries);
  if (new_dim.size() > 12) return renumber_uncached(layout, new_dim);
  uint64_t code = new_dim.size();
  for (const Cut& cut : layout.cuts())
    code = code * 31 + static_cast<uint64_t>(cut.dim * 17 + new_dim[cut.dim] + 1);
  uint64_t exact = new_dim.size();
  for (int d : new_dim) exact = exact << 5 | static_cast<uint64_t>(d + 1);
  Entry& entry = cache[(reinterpret_cast<uintptr_t>(&layout) / 64 + code) % kEntries];
  if (entry.from != &layout || entry.code != exact)
    entry = {&layout, exact, renumber_uncached(layout, new_dim)};
  return entry.to;
}

}  // namespace shardfield::spec
