#include "shardfield/ops/cut_rows.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "shardfield/exchange/rows.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

using at::Tensor;
using spec::Cut;
using spec::Layout;

const Layout* with_piece_sizes(const Layout& layout,
                               const std::map<int, std::vector<int64_t>>& sizes_of_dim) {
  std::vector<Cut> cuts = layout.cuts();
  for (Cut& cut : cuts)
    if (const auto it = sizes_of_dim.find(cut.dim); it != sizes_of_dim.end())
      cut.sizes = it->second;
  return spec::intern_layout(layout.mesh(), std::move(cuts));
}

const Layout* layout_when_alone(const Layout& layout, at::IntArrayRef sizes) {
  const auto fits = [&](const Cut& cut) { return cut.sizes[0] == sizes[cut.dim]; };
  if (std::ranges::all_of(layout.cuts(), fits)) return &layout;
  std::vector<Cut> cuts = layout.cuts();
  for (Cut& cut : cuts) cut.sizes = {sizes[cut.dim]};
  return spec::intern_layout(layout.mesh(), std::move(cuts));
}

Tensor fetch_rows(const Tensor& piece, const Layout& layout, size_t c,
                  const std::vector<spec::Range>& needed) {
  return exchange::exchange_rows(piece, exchange::row_exchange(layout, c, needed));
}

Tensor fetch_rows(const Tensor& piece, const Layout& layout, size_t c,
                  std::vector<std::vector<spec::Segment>> wanted) {
  return exchange::exchange_rows(piece, exchange::row_exchange(layout, c, std::move(wanted)));
}

Tensor empty_result(const Tensor& rows, at::IntArrayRef sizes) {
  const Tensor out = rows.new_zeros(sizes);
  return comm::records_grad(rows) ? out + rows.sum() * 0 : out;
}

Tensor grown_to(const Tensor& x, at::IntArrayRef least_sizes) {
  std::vector<int64_t> pad(2 * x.dim(), 0);
  for (int64_t d = 0; d < x.dim(); ++d)
    pad[2 * (x.dim() - 1 - d) + 1] = std::max<int64_t>(least_sizes[d] - x.size(d), 0);
  return at::constant_pad_nd(x, pad, 0);
}

Tensor empty_result_like(const Tensor& dummy, at::IntArrayRef sizes) {
  const Tensor out = dummy.new_zeros(sizes);
  return comm::records_grad(dummy) ? out + dummy.flatten().narrow(0, 0, 0).sum() : out;
}

Tensor wrap_in_format_of(const Tensor& x, const Tensor& piece, const Layout* layout,
                         at::IntArrayRef sizes) {
  const auto format = x.suggest_memory_format();
  return tensor::wrap(piece.contiguous(format), layout, sizes, format);
}

Tensor sizes_only(const Tensor& like, at::IntArrayRef sizes) {
  return at::zeros({}, like.options()).expand(sizes);
}

Tensor index_tensor(const std::vector<int64_t>& index, const Tensor& like) {
  return at::tensor(index, at::kLong).to(like.device());
}

}  // namespace shardfield::ops
