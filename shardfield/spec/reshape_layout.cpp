#include "shardfield/spec/reshape_layout.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "shardfield/spec/range.h"

namespace shardfield::spec {

namespace {

/// The tensor read as one mixed-radix number: a leading whole digit, then cut digits; whole digits
/// behind a cut are taken into it (its sizes scale).
struct Digit {
  int64_t size = 1;
  const Cut* cut = nullptr;
  std::vector<int64_t> sizes;
};

void push_whole(std::vector<Digit>& digits, int64_t n) {
  Digit& last = digits.back();
  last.size *= n;
  for (int64_t& s : last.sizes) s *= n;
}

std::vector<Digit> digits_of(const Layout& layout, std::span<const int64_t> sizes) {
  std::vector<Digit> digits(1);
  size_t c = 0;
  const auto& cuts = layout.cuts();
  for (size_t d = 0; d < sizes.size(); ++d) {
    int64_t inner = 1;
    size_t last = c;
    for (; last < cuts.size() && cuts[last].dim == static_cast<int>(d); ++last)
      inner *= cuts[last].total();
    push_whole(digits, sizes[d] / inner);
    for (; c < last; ++c) digits.push_back({cuts[c].total(), &cuts[c], cuts[c].sizes});
  }
  return digits;
}

/// Takes the leading `part` of a digit; false when a piece border falls inside a row.
bool split(Digit& digit, int64_t part, Digit& head) {
  if (digit.size % part != 0) return false;
  const int64_t row = digit.size / part;
  head = {part, digit.cut, digit.sizes};
  for (int64_t& s : head.sizes) {
    if (s % row != 0) return false;
    s /= row;
  }
  digit = {row, nullptr, {}};
  return true;
}

}  // namespace

std::optional<const Layout*> reshape_layout(const Layout& layout, std::span<const int64_t> sizes,
                                            std::span<const int64_t> new_sizes) {
  if (std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>()) == 0)
    return std::nullopt;
  std::vector<Digit> digits = digits_of(layout, sizes);
  std::vector<Cut> cuts;
  size_t at = 0;
  const auto take = [&](const Digit& digit, size_t dim) {
    if (digit.cut) {
      cuts.push_back({static_cast<int>(dim), digit.cut->axes, digit.sizes});
    } else if (!cuts.empty() && cuts.back().dim == static_cast<int>(dim)) {
      for (int64_t& s : cuts.back().sizes) s *= digit.size;
    }
  };
  for (size_t d = 0; d < new_sizes.size(); ++d) {
    int64_t need = new_sizes[d];
    const bool last_dim = d + 1 == new_sizes.size();
    // A cut of a single row goes to a dim of size 1 where there is one.
    const auto fits_one = [&](const Digit& g) {
      return g.size == 1 && (!g.cut || new_sizes[d] == 1 || last_dim);
    };
    while (at < digits.size() && (need > 1 || fits_one(digits[at]))) {
      Digit& digit = digits[at];
      if (digit.size == 1 && !digit.cut) {
        ++at;
      } else if (need % digit.size == 0) {
        need /= digit.size;
        take(digit, d);
        ++at;
      } else {
        Digit head;
        if (!split(digit, need, head)) return std::nullopt;
        take(head, d);
        need = 1;
      }
    }
    if (need != 1) return std::nullopt;
  }
  if (at < digits.size()) {
    for (; at < digits.size(); ++at)
      if (digits[at].size != 1 || digits[at].cut) return std::nullopt;
  }
  return intern_layout(layout.mesh(), std::move(cuts));
}

std::optional<const Layout*> cached_reshape_layout(const Layout& layout,
                                                   std::span<const int64_t> sizes,
                                                   std::span<const int64_t> new_sizes) {
  struct Entry {
    const Layout* from = nullptr;
    std::vector<int64_t> sizes, new_sizes;
    std::optional<const Layout*> to;
  };
  constexpr size_t kEntries = 256;
  static thread_local std::vector<Entry> cache(kEntries);
  size_t hash = reinterpret_cast<uintptr_t>(&layout) / 64;
  for (int64_t s : new_sizes) hash = hash * 31 + static_cast<size_t>(s);
  Entry& entry = cache[hash % kEntries];
  if (entry.from != &layout || !std::ranges::equal(entry.sizes, sizes) ||
      !std::ranges::equal(entry.new_sizes, new_sizes)) {
    entry = {&layout,
             {sizes.begin(), sizes.end()},
             {new_sizes.begin(), new_sizes.end()},
             reshape_layout(layout, sizes, new_sizes)};
  }
  return entry.to;
}

namespace {

/// Cut c moved to `dim` with its borders on multiples of ever larger row counts; the first that can
/// be reshaped is the finest. nullptr when none can.
const Layout* aligned_cut(const Layout& layout, size_t c, int dim, int64_t total,
                          std::span<const int64_t> sizes, std::span<const int64_t> new_sizes) {
  for (int64_t row = 1; row <= total; ++row) {
    if (total % row != 0) continue;
    std::vector<Cut> cuts = layout.cuts();
    cuts[c].dim = dim;
    cuts[c].sizes = chunk_sizes(total / row, static_cast<int64_t>(cuts[c].sizes.size()));
    for (int64_t& s : cuts[c].sizes) s *= row;
    const Layout* moved = intern_layout(layout.mesh(), std::move(cuts));
    if (reshape_layout(*moved, sizes, new_sizes)) return moved;
  }
  return nullptr;
}

}  // namespace

const Layout* layout_before_reshape(const Layout& layout, std::span<const int64_t> sizes,
                                    std::span<const int64_t> new_sizes) {
  const auto& cuts = layout.cuts();
  for (size_t c = 0; c < cuts.size(); ++c)
    if (const Layout* moved =
            aligned_cut(layout, c, cuts[c].dim, cuts[c].total(), sizes, new_sizes))
      return moved;
  // Another dim may fit where this one cannot: an all-to-all is less than a gather.
  for (size_t c = 0; c < cuts.size(); ++c)
    for (int d = 0; d < static_cast<int>(sizes.size()); ++d) {
      if (layout.is_cut(d) || sizes[d] < static_cast<int64_t>(cuts[c].sizes.size())) continue;
      if (const Layout* moved = aligned_cut(layout, c, d, sizes[d], sizes, new_sizes)) return moved;
    }
  std::vector<Cut> fewer = layout.cuts();
  while (!fewer.empty()) {
    fewer.pop_back();
    const Layout* less = intern_layout(layout.mesh(), fewer);
    if (!less || reshape_layout(*less, sizes, new_sizes)) return less;
  }
  return nullptr;
}

}  // namespace shardfield::spec
