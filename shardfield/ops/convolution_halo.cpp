#include "shardfield/ops/convolution_halo.h"

#include <algorithm>
#include <numeric>

#include <ATen/ATen.h>

namespace shardfield::ops {

namespace {

using at::Tensor;
using spec::Cut;
using spec::Layout;
using spec::Mesh;
using spec::Range;

constexpr int64_t kBlocks = 30;

Box box_at(const Layout& layout, at::IntArrayRef sizes, const std::vector<int64_t>& coord) {
  Box box;
  for (int64_t n : sizes) box.push_back({0, n});
  for (const Cut& cut : layout.cuts()) {
    const int p = cut.piece_at(layout.mesh(), coord);
    const int64_t begin = cut.offset(p);
    box[cut.dim] = {begin, begin + cut.sizes[p]};
  }
  return box;
}

Box needed_at(const Layout& layout, at::IntArrayRef sizes, const std::vector<NeededRows>& needed,
              const std::vector<int64_t>& coord) {
  Box box = box_at(layout, sizes, coord);
  for (const NeededRows& n : needed) {
    const Cut& cut = layout.cuts()[n.cut];
    box[cut.dim] = n.rows[cut.piece_at(layout.mesh(), coord)];
  }
  return box;
}

int64_t elements(const Box& box) {
  int64_t n = 1;
  for (const Range& r : box) n *= r.size();
  return n;
}

/// Replicas along axes the layout leaves whole serve themselves.
bool serves(const Layout& layout, const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
  for (size_t axis = 0; axis < a.size(); ++axis) {
    const bool cut =
        std::binary_search(layout.axes().begin(), layout.axes().end(), static_cast<int>(axis));
    if (!cut && a[axis] != b[axis]) return false;
  }
  return true;
}

Tensor zeros_like_format(at::IntArrayRef sizes, const Tensor& like) {
  return at::empty(sizes, like.options(), like.suggest_memory_format()).zero_();
}

}  // namespace

Box intersect(const Box& a, const Box& b) {
  Box out = a;
  for (size_t d = 0; d < a.size(); ++d) out[d] = a[d].intersect(b[d]);
  return out;
}

bool is_empty(const Box& box) {
  return std::any_of(box.begin(), box.end(), [](const Range& r) { return r.empty(); });
}

std::vector<int64_t> sizes_of_box(const Box& box) {
  std::vector<int64_t> sizes;
  for (const Range& r : box) sizes.push_back(r.size());
  return sizes;
}

Tensor box_view(const Tensor& t, const Box& whole, const Box& part) {
  Tensor view = t;
  for (size_t d = 0; d < whole.size(); ++d)
    if (!(whole[d] == part[d]))
      view = view.narrow(static_cast<int64_t>(d), part[d].begin - whole[d].begin, part[d].size());
  return view;
}

std::vector<Box> shell_of(const Box& full, const Box& core) {
  if (is_empty(full)) return {};
  if (is_empty(core)) return {full};
  std::vector<Box> slabs;
  Box rest = full;
  for (size_t d = 0; d < full.size(); ++d) {
    for (const Range side :
         {Range{full[d].begin, core[d].begin}, Range{core[d].end, full[d].end}}) {
      if (side.empty()) continue;
      slabs.push_back(rest);
      slabs.back()[d] = side;
    }
    rest[d] = core[d];
  }
  return slabs;
}

HaloPlan plan_halo(const Layout& layout, at::IntArrayRef sizes,
                   const std::vector<NeededRows>& needed) {
  const Mesh& mesh = layout.mesh();
  HaloPlan plan;
  plan.mesh = &mesh;
  plan.own = box_at(layout, sizes, mesh.coord);
  const Box wanted = needed_at(layout, sizes, needed, mesh.coord);
  for (int r = 0; r < mesh.size(); ++r) {
    const auto coord = mesh.coord_of(r);
    const Box theirs = box_at(layout, sizes, coord);
    const Box their_needs = needed_at(layout, sizes, needed, coord);
    plan.elements_moved += elements(their_needs) - elements(intersect(their_needs, theirs));
    if (r == mesh.rank || !serves(layout, coord, mesh.coord)) continue;
    const Box send = intersect(plan.own, their_needs), receive = intersect(theirs, wanted);
    if (!is_empty(send)) plan.sends.push_back({r, send});
    if (!is_empty(receive)) plan.receives.push_back({r, receive});
  }
  return plan;
}

Halo::Halo(const HaloPlan& plan, const Tensor& piece) : plan_(&plan) {
  if (plan.elements_moved == 0) return;
  std::vector<comm::Message> sends, recvs;
  for (const auto& s : plan.sends)
    sends.push_back({s.peer, box_view(piece, plan.own, s.box).contiguous()});
  for (const auto& r : plan.receives) {
    parts_.push_back(at::empty(sizes_of_box(r.box), piece.options()));
    recvs.push_back({r.peer, parts_.back()});
  }
  transfer_ = comm::start_exchange(*plan.mesh, std::move(sends), std::move(recvs));
}

Tensor Halo::block(const Box& box, const Box& allowed, const Tensor& piece) const {
  Tensor out = zeros_like_format(sizes_of_box(box), piece);
  const Box target = intersect(box, allowed);
  const auto fill = [&](const Box& source, const Tensor& values) {
    const Box part = intersect(target, source);
    if (!is_empty(part)) box_view(out, box, part).copy_(box_view(values, source, part));
  };
  fill(plan_->own, piece);
  for (size_t i = 0; i < parts_.size(); ++i) fill(plan_->receives[i].box, parts_[i]);
  return out;
}

HaloReturn::HaloReturn(const HaloPlan& plan, std::vector<Tensor> parts,
                       const at::TensorOptions& options)
    : plan_(&plan) {
  if (plan.elements_moved == 0) return;
  std::vector<comm::Message> sends, recvs;
  for (size_t i = 0; i < parts.size(); ++i) sends.push_back({plan.receives[i].peer, parts[i]});
  for (const auto& s : plan.sends) {
    arriving_.push_back(at::empty(sizes_of_box(s.box), options));
    recvs.push_back({s.peer, arriving_.back()});
  }
  transfer_ = comm::start_exchange(*plan.mesh, std::move(sends), std::move(recvs));
}

void HaloReturn::finish(Tensor& grad) {
  transfer_.wait();
  for (size_t i = 0; i < arriving_.size(); ++i)
    box_view(grad, plan_->own, plan_->sends[i].box).add_(arriving_[i]);
}

Tensor compacted(const Tensor& t, const Box& box) {
  const auto sizes = sizes_of_box(box);
  if (t.sizes() == at::IntArrayRef(sizes)) return t;
  // Outermost in memory first, so that every row moves towards the front, past rows already moved.
  std::vector<int64_t> order(t.dim());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return t.stride(a) > t.stride(b); });
  Box whole;
  for (int64_t n : t.sizes()) whole.push_back({0, n});
  const Tensor source = box_view(t, whole, box).permute(order);
  std::vector<int64_t> strides(t.dim());
  int64_t step = 1;
  for (size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = step;
    step *= sizes[order[i]];
  }
  Tensor out = t.as_strided(sizes, strides, t.storage_offset());
  const Tensor target = out.permute(order);
  const int64_t outer = target.size(0), inner = target.dim() > 1 ? target.size(1) : 1;
  const int64_t parts = std::clamp<int64_t>((kBlocks + outer - 1) / outer, 1, inner);
  const int64_t rows = (inner + parts - 1) / parts;
  for (int64_t i = 0; i < outer; ++i)
    for (int64_t k = 0; k < inner; k += rows) {
      const int64_t n = std::min(rows, inner - k);
      target.select(0, i).narrow(0, k, n).copy_(source.select(0, i).narrow(0, k, n).clone());
    }
  return out;
}

}  // namespace shardfield::ops
