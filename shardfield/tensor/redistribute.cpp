#include "shardfield/tensor/redistribute.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "shardfield/comm/collectives.h"
#include "shardfield/tensor/shard_tensor_impl.h"

namespace shardfield::tensor {

namespace {

using spec::Cut;
using spec::Layout;
using spec::Mesh;

struct Box {
  std::vector<int64_t> begin, size;

  bool empty() const {
    return std::any_of(size.begin(), size.end(), [](int64_t s) { return s <= 0; });
  }
};

Box box_at(const Layout* layout, at::IntArrayRef sizes, const std::vector<int64_t>& coord) {
  Box box{std::vector<int64_t>(sizes.size(), 0), sizes.vec()};
  if (!layout) return box;
  for (const Cut& cut : layout->cuts()) {
    const int p = cut.piece_at(layout->mesh(), coord);
    box.begin[cut.dim] = cut.offset(p);
    box.size[cut.dim] = cut.sizes[p];
  }
  return box;
}

Box intersect(const Box& a, const Box& b) {
  Box out = a;
  for (size_t d = 0; d < a.begin.size(); ++d) {
    const int64_t begin = std::max(a.begin[d], b.begin[d]);
    const int64_t end = std::min(a.begin[d] + a.size[d], b.begin[d] + b.size[d]);
    out.begin[d] = begin;
    out.size[d] = std::max<int64_t>(end - begin, 0);
  }
  return out;
}

at::Tensor sub_box(at::Tensor piece, const Box& of, const Box& part) {
  for (size_t d = 0; d < of.begin.size(); ++d)
    if (part.size[d] != of.size[d])
      piece = piece.narrow(static_cast<int64_t>(d), part.begin[d] - of.begin[d], part.size[d]);
  return piece;
}

/// True when `source` is the rank that serves `target`: same place on every axis `from` leaves
/// whole, so of several replicas the target's own one serves.
bool serves(const Layout& from, const std::vector<int64_t>& source,
            const std::vector<int64_t>& target) {
  for (size_t a = 0; a < source.size(); ++a) {
    const bool cut =
        std::binary_search(from.axes().begin(), from.axes().end(), static_cast<int>(a));
    if (!cut && source[a] != target[a]) return false;
  }
  return true;
}

at::Tensor exchange_boxes(const at::Tensor& piece, const Layout& from, const Layout* to,
                          at::IntArrayRef sizes) {
  const Mesh& mesh = from.mesh();
  const Box own = box_at(&from, sizes, mesh.coord);
  const Box want = box_at(to, sizes, mesh.coord);
  at::Tensor out = at::empty(want.size, piece.options());
  std::vector<comm::Message> sends, recvs;
  std::vector<Box> arriving;
  for (int r = 0; r < mesh.size(); ++r) {
    const auto coord = mesh.coord_of(r);
    if (serves(from, mesh.coord, coord)) {
      const Box part = intersect(own, box_at(to, sizes, coord));
      if (!part.empty()) {
        if (r == mesh.rank)
          sub_box(out, want, part).copy_(sub_box(piece, own, part));
        else
          sends.push_back({r, sub_box(piece, own, part)});
      }
    }
    if (r != mesh.rank && serves(from, coord, mesh.coord)) {
      const Box part = intersect(box_at(&from, sizes, coord), want);
      if (part.empty()) continue;
      at::Tensor target = sub_box(out, want, part);
      recvs.push_back({r, target.is_contiguous() ? target : at::empty(part.size, piece.options())});
      arriving.push_back(part);
    }
  }
  std::vector<comm::Message> received = recvs;
  comm::start_exchange(mesh, std::move(sends), std::move(recvs)).wait();
  for (size_t i = 0; i < received.size(); ++i) {
    at::Tensor target = sub_box(out, want, arriving[i]);
    if (!target.is_contiguous()) target.copy_(received[i].data);
  }
  return out;
}

/// All-gather for layouts with merged dims: pieces arrive whole and are laid into their factors.
at::Tensor gather_blocks(const at::Tensor& piece, const Layout& from, at::IntArrayRef sizes) {
  const Mesh& mesh = from.mesh();
  at::Tensor full = at::empty(sizes, piece.options());
  const at::Tensor mine = piece.contiguous();
  std::vector<comm::Message> sends, recvs;
  for (int r = 0; r < mesh.size(); ++r) {
    const auto coord = mesh.coord_of(r);
    if (r == mesh.rank || !serves(from, mesh.coord, coord)) continue;
    sends.push_back({r, mine});
    recvs.push_back(
        {r, at::empty(from.local_sizes_at(sizes.data(), static_cast<int>(sizes.size()), coord),
                      piece.options())});
  }
  std::vector<comm::Message> received = recvs;
  comm::start_exchange(mesh, std::move(sends), std::move(recvs)).wait();
  received.push_back({mesh.rank, mine});
  for (auto& m : received) {
    at::Tensor block = block_view(full, from, mesh.coord_of(m.peer));
    block.copy_(m.data.view(block.sizes()));
  }
  return full;
}

}  // namespace

at::Tensor block_view(const at::Tensor& full, const Layout& layout,
                      const std::vector<int64_t>& coord) {
  at::Tensor view = full;
  for (size_t c = layout.cuts().size(); c-- > 0;) {
    const int dim = layout.cuts()[c].dim;
    size_t first = c;
    while (first > 0 && layout.cuts()[first - 1].dim == dim) --first;
    // Split the dim into [outer][cut first]..[cut c], then narrow each factor.
    std::vector<int64_t> factors{1};
    int64_t inner = 1;
    for (size_t k = first; k <= c; ++k) {
      factors.push_back(layout.cuts()[k].total());
      inner *= factors.back();
    }
    factors[0] = inner == 0 ? 0 : full.size(dim) / inner;
    view = view.unflatten(dim, factors);
    for (size_t k = first; k <= c; ++k) {
      const Cut& cut = layout.cuts()[k];
      const int p = cut.piece_at(layout.mesh(), coord);
      view = view.narrow(dim + 1 + static_cast<int64_t>(k - first), cut.offset(p), cut.sizes[p]);
    }
    c = first;
  }
  return view;
}

at::Tensor slice_piece(const at::Tensor& full, const Layout& layout) {
  if (layout.is_simple(full.sizes().data())) {
    at::Tensor piece = full;
    for (size_t c = 0; c < layout.cuts().size(); ++c)
      piece = piece.narrow(layout.cuts()[c].dim, layout.local_offset(c), layout.local_size(c));
    return piece;
  }
  return block_view(full, layout, layout.mesh().coord).reshape(piece_sizes(layout, full.sizes()));
}

at::Tensor redistribute_piece(const at::Tensor& piece, const Layout* from, const Layout* to,
                              at::IntArrayRef sizes) {
  const at::NoGradGuard no_grad;
  if (from == to) return piece;
  if (!from) return slice_piece(piece, *to).clone(at::MemoryFormat::Contiguous);
  const bool boxes = from->is_simple(sizes.data()) && (!to || to->is_simple(sizes.data()));
  if (boxes) return exchange_boxes(piece, *from, to, sizes);
  at::Tensor full = from->is_simple(sizes.data()) ? exchange_boxes(piece, *from, nullptr, sizes)
                                                  : gather_blocks(piece, *from, sizes);
  return to ? slice_piece(full, *to).clone(at::MemoryFormat::Contiguous) : full;
}

}  // namespace shardfield::tensor
