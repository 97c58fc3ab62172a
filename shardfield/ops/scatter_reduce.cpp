// scatter, scatter_add, scatter_reduce, index_add, index_copy, index_fill, index_reduce. Index and
// source are whole along the written dim; each rank writes the positions it owns and leaves the
// others on a spare row behind its piece. Nothing is sent for plain indices and sources.

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/exchange/owner_lists.h"
#include "shardfield/ops/index.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Scalar;
using at::Tensor;
using spec::Cut;
using spec::Layout;
using tensor::is_sharded;
using tensor::layout_of;

/// A sharded tensor to be written along `dim` and this rank's share of the work.
class Target {
 public:
  /// @param index  1-d (a list of rows) or of the target's dims (an element each)
  Target(const char* op, const Tensor& self, int64_t dim_arg, const Tensor& index)
      : op_(op), dim_(at::maybe_wrap_dim(dim_arg, self.dim())), by_rows_(index.dim() < self.dim()) {
    x_ = with_simple_cuts(self);
    if (!by_rows_) drop_cuts_that_index_lacks(index);
    if (!is_sharded(x_)) return;
    layout_ = &layout_of(x_);
    cut_ = layout_->cut_on(static_cast<int>(dim_));
    operand_layout_ = without_cuts_on(*layout_, {dim_});
  }
  /// Own positions, the spare row for all others.
  Tensor index(const Tensor& given) const {
    Tensor own = by_rows_ ? tensor::gather(given) : operand(given);
    const int64_t n = x_.size(dim_);
    if (own.numel() > 0) {
      const int64_t low = own.min().item<int64_t>(), high = own.max().item<int64_t>();
      TORCH_CHECK_INDEX(low >= (by_rows_ ? -n : 0) && high < n, op_, ": index ",
                        low < 0 ? low : high, " is out of bounds for dimension ", dim_,
                        " with size ", n, " of ", tensor::describe(x_));
    }
    if (cut_ < 0) return own;
    const Tensor wrapped = at::where(own < 0, own + n, own);
    const int64_t begin = layout_->local_offset(cut_), size = layout_->local_size(cut_);
    const Tensor local = wrapped - begin;
    return at::where((local >= 0).logical_and(local < size), local, size);
  }
  /// A source on this rank: cut as the target is, whole along `dim`.
  Tensor source(const Tensor& given) const {
    return given.dim() == 0 ? entered(given) : operand(given);
  }
  Tensor piece() const {
    Tensor own = is_sharded(x_) ? tensor::local(x_) : x_;
    if (cut_ < 0) return own;
    auto spare = own.sizes().vec();
    spare[dim_] = 1;
    return at::cat({own, at::zeros(spare, own.options())}, dim_);
  }
  Tensor finish(const Tensor& written) const {
    if (!layout_) return written;
    const Tensor own = cut_ < 0 ? written : written.narrow(dim_, 0, layout_->local_size(cut_));
    return tensor::wrap(own.contiguous(), layout_, x_.sizes());
  }
  int64_t dim() const { return dim_; }

 private:
  /// An index shorter than the target along a cut dim belongs to the first pieces only.
  void drop_cuts_that_index_lacks(const Tensor& index) {
    if (!is_sharded(x_)) return;
    std::vector<int64_t> shorter;
    for (const Cut& cut : layout_of(x_).cuts())
      if (cut.dim != dim_ && index.size(cut.dim) != x_.size(cut.dim)) shorter.push_back(cut.dim);
    if (!shorter.empty()) x_ = tensor::redistribute(x_, without_cuts_on(layout_of(x_), shorter));
  }
  /// Mesh axes along which operands are whole.
  std::vector<int> whole_axes() const {
    if (!operand_layout_) return layout_->axes();
    return cut_ < 0 ? std::vector<int>{} : layout_->cuts()[cut_].axes;
  }
  Tensor entered(const Tensor& plain) const {
    return layout_ ? tensor::enter(tensor::gather(plain), *layout_) : tensor::gather(plain);
  }
  Tensor operand(const Tensor& given) const {
    if (!operand_layout_) return entered(given);
    // A source may be longer than the index; its surplus is not read.
    Tensor t = given;
    for (const Cut& cut : operand_layout_->cuts())
      if (t.size(cut.dim) != x_.size(cut.dim))
        t = tensor::gather(t).narrow(cut.dim, 0, x_.size(cut.dim));
    const Tensor moved = tensor::redistribute(t, operand_layout_);
    return tensor::enter(tensor::local(moved), layout_->mesh(), whole_axes());
  }

  const char* op_;
  Tensor x_;
  int64_t dim_;
  bool by_rows_;
  const Layout* layout_ = nullptr;
  const Layout* operand_layout_ = nullptr;
  int cut_ = -1;
};

/// Runs `write(piece, dim, index)`; a plain target beside sharded operands gets them whole.
template <class F>
Tensor written(const char* op, const Tensor& self, int64_t dim, const Tensor& index, F&& write) {
  const Target t(op, self, dim, index);
  return t.finish(write(t, t.piece(), t.dim(), t.index(index)));
}

/// A list of rows that was expanded to an index for every element (as message passing does it); the
/// index itself when it is a list, undefined when it is neither.
Tensor list_of_rows(const Tensor& index, const Tensor& source, int64_t dim) {
  if (index.dim() == 0 || index.sizes() != source.sizes()) return {};
  dim = at::maybe_wrap_dim(dim, index.dim());
  Tensor list = index;
  for (int64_t d = index.dim(); d-- > 0;) {
    if (d == dim) continue;
    if (index.size(d) == 0 || (index.stride(d) != 0 && index.size(d) > 1)) return {};
    if (is_sharded(list) && layout_of(list).is_cut(static_cast<int>(d))) return {};
    list = list.select(d, 0);
  }
  return list;
}

/// A plain self: every rank adds up its own part of the list, the sums are added over the ranks.
std::optional<Tensor> add_to_plain(const Tensor& self, int64_t dim, const Tensor& index,
                                   const Tensor& source, const Scalar& alpha) {
  if (!index.defined() || index.dim() != 1 || source.dim() != self.dim() || self.dim() == 0 ||
      !is_sharded(index) || !layout_of(index).is_simple(index.sizes().data()))
    return std::nullopt;
  dim = at::maybe_wrap_dim(dim, self.dim());
  auto sizes = self.sizes().vec();
  sizes[dim] = index.numel();
  if (source.sizes() != at::IntArrayRef(sizes)) return std::nullopt;
  const Layout& list = layout_of(index);
  const Layout* of_source = spec::renumber(list, std::vector<int>{static_cast<int>(dim)});
  const Tensor rows = tensor::piece_for(source, *of_source, sizes);
  const Tensor own = at::zeros(self.sizes(), rows.options())
                         .index_add(dim, tensor::piece_of(index).to(at::kLong), rows);
  return at::add(self, tensor::reduce_sum(own, list), alpha);
}

/// The reduction of rows by their owners: each row of `source` goes to the owner of the row it
/// belongs to, which meets them in the order of one device.
std::optional<Tensor> reduce_at_owners(const char* op, const Tensor& self, int64_t dim,
                                       const Tensor& index, const Tensor& source,
                                       c10::string_view reduce, bool include_self) {
  if (!index.defined() || index.dim() != 1 || source.dim() != self.dim() || self.dim() == 0)
    return std::nullopt;
  dim = at::maybe_wrap_dim(dim, self.dim());
  auto sizes = self.sizes().vec();
  sizes[dim] = index.numel();
  if (source.sizes() != at::IntArrayRef(sizes)) return std::nullopt;
  const RequestedList list = request_list(op, self, dim, index, false);
  if (!list.rows || !list.other_axes.empty()) return std::nullopt;
  const Layout &of_list = *list.layout, &of_self = layout_of(self);
  const int c = of_list.cut_on(static_cast<int>(dim));
  if (of_list.cuts()[c].axes != of_self.cuts()[list.cut].axes) return std::nullopt;
  const exchange::OwnerList named = exchange::list_at_owners(
      of_self, list.cut, tensor::piece_of(index).to(at::kLong), of_list.local_offset(c));
  const auto plan = std::make_shared<const exchange::RequestedRows>(of_list, c, named.entries);
  const Tensor rows =
      exchange::fetch_requested(tensor::piece_for(source, of_list, list.sizes), plan);
  std::vector<int64_t> shape(self.dim(), 1);
  shape[dim] = -1;
  const Tensor places = named.rows.view(shape).expand_as(rows);
  // A copy: the formula keeps it, and the in-place form writes to self next.
  const Tensor own = tensor::local(self).clone();
  const Tensor reduced = at::scatter_reduce(own, dim, places, rows, reduce, include_self);
  return tensor::wrap(reduced, &of_self, self.sizes());
}

/// self + the rows of `source` added up at their owners, all three in pieces; nothing where
/// request_list does not apply.
std::optional<Tensor> add_to_owners(const char* op, const Tensor& self, int64_t dim,
                                    const Tensor& index, const Tensor& source,
                                    const Scalar& alpha) {
  if (!index.defined() || index.dim() != 1 || source.dim() != self.dim() || self.dim() == 0)
    return std::nullopt;
  dim = at::maybe_wrap_dim(dim, self.dim());
  auto sizes = self.sizes().vec();
  sizes[dim] = index.numel();
  if (source.sizes() != at::IntArrayRef(sizes)) return std::nullopt;
  const RequestedList list = request_list(op, self, dim, index, false);
  if (!list.rows) return std::nullopt;
  const Tensor rows = tensor::piece_for(source, *list.layout, list.sizes);
  Tensor sum = exchange::add_requested(rows, list.rows);
  if (!list.other_axes.empty())
    sum = tensor::reduce_sum(sum, layout_of(self).mesh(), list.other_axes);
  return at::add(self, tensor::wrap(sum, &layout_of(self), self.sizes()), alpha);
}

Tensor scatter_src(const Tensor& self, int64_t dim, const Tensor& index, const Tensor& src) {
  if (!is_sharded(self)) return at::scatter(self, dim, tensor::gather(index), tensor::gather(src));
  return written("scatter", self, dim, index,
                 [&](const Target& t, const Tensor& x, int64_t d, const Tensor& i) {
                   return at::scatter(x, d, i, t.source(src));
                 });
}
Tensor scatter_value(const Tensor& self, int64_t dim, const Tensor& index, const Scalar& value) {
  if (!is_sharded(self)) return at::scatter(self, dim, tensor::gather(index), value);
  return written("scatter", self, dim, index,
                 [&](const Target&, const Tensor& x, int64_t d, const Tensor& i) {
                   return at::scatter(x, d, i, value);
                 });
}
Tensor scatter_src_reduce(const Tensor& self, int64_t dim, const Tensor& index, const Tensor& src,
                          c10::string_view reduce) {
  if (!is_sharded(self))
    return at::scatter(self, dim, tensor::gather(index), tensor::gather(src), reduce);
  return written("scatter", self, dim, index,
                 [&](const Target& t, const Tensor& x, int64_t d, const Tensor& i) {
                   return at::scatter(x, d, i, t.source(src), reduce);
                 });
}
Tensor scatter_value_reduce(const Tensor& self, int64_t dim, const Tensor& index,
                            const Scalar& value, c10::string_view reduce) {
  if (!is_sharded(self)) return at::scatter(self, dim, tensor::gather(index), value, reduce);
  return written("scatter", self, dim, index,
                 [&](const Target&, const Tensor& x, int64_t d, const Tensor& i) {
                   return at::scatter(x, d, i, value, reduce);
                 });
}
Tensor scatter_add(const Tensor& self, int64_t dim, const Tensor& index, const Tensor& src) {
  if (!is_sharded(self)) {
    if (const auto sum = add_to_plain(self, dim, list_of_rows(index, src, dim), src, 1))
      return *sum;
    return at::scatter_add(self, dim, tensor::gather(index), tensor::gather(src));
  }
  if (const auto sum =
          add_to_owners("scatter_add", self, dim, list_of_rows(index, src, dim), src, 1))
    return *sum;
  return written("scatter_add", self, dim, index,
                 [&](const Target& t, const Tensor& x, int64_t d, const Tensor& i) {
                   return at::scatter_add(x, d, i, t.source(src));
                 });
}
Tensor scatter_reduce(const Tensor& self, int64_t dim, const Tensor& index, const Tensor& src,
                      c10::string_view reduce, bool include_self) {
  if (!is_sharded(self))  // a copy, as in reduce_at_owners
    return at::scatter_reduce(self.clone(), dim, tensor::gather(index), tensor::gather(src), reduce,
                              include_self);
  if (const auto out = reduce_at_owners("scatter_reduce", self, dim, list_of_rows(index, src, dim),
                                        src, reduce, include_self))
    return *out;
  return written("scatter_reduce", self, dim, index,
                 [&](const Target& t, const Tensor& x, int64_t d, const Tensor& i) {
                   return at::scatter_reduce(x, d, i, t.source(src), reduce, include_self);
                 });
}
Tensor index_add(const Tensor& self, int64_t dim, const Tensor& index, const Tensor& source,
                 const Scalar& alpha) {
  if (!is_sharded(self)) {
    if (const auto sum = add_to_plain(self, dim, index, source, alpha)) return *sum;
    return at::index_add(self, dim, tensor::gather(index), tensor::gather(source), alpha);
  }
  if (const auto sum = add_to_owners("index_add", self, dim, index, source, alpha)) return *sum;
  return written("index_add", self, dim, index,
                 [&](const Target& t, const Tensor& x, int64_t d, const Tensor& i) {
                   return at::index_add(x, d, i, t.source(source), alpha);
                 });
}
Tensor index_copy(const Tensor& self, int64_t dim, const Tensor& index, const Tensor& source) {
  if (!is_sharded(self))
    return at::index_copy(self, dim, tensor::gather(index), tensor::gather(source));
  return written("index_copy", self, dim, index,
                 [&](const Target& t, const Tensor& x, int64_t d, const Tensor& i) {
                   return at::index_copy(x, d, i, t.source(source));
                 });
}
Tensor index_reduce(const Tensor& self, int64_t dim, const Tensor& index, const Tensor& source,
                    c10::string_view reduce, bool include_self) {
  if (!is_sharded(self))
    return at::index_reduce(self.clone(), dim, tensor::gather(index), tensor::gather(source),
                            reduce, include_self);
  return written("index_reduce", self, dim, index,
                 [&](const Target& t, const Tensor& x, int64_t d, const Tensor& i) {
                   return at::index_reduce(x, d, i, t.source(source), reduce, include_self);
                 });
}
Tensor index_fill_scalar(const Tensor& self, int64_t dim, const Tensor& index,
                         const Scalar& value) {
  if (!is_sharded(self)) return at::index_fill(self, dim, tensor::gather(index), value);
  return written("index_fill", self, dim, index,
                 [&](const Target&, const Tensor& x, int64_t d, const Tensor& i) {
                   return at::index_fill(x, d, i, value);
                 });
}
Tensor index_fill_tensor(const Tensor& self, int64_t dim, const Tensor& index,
                         const Tensor& value) {
  if (!is_sharded(self))
    return at::index_fill(self, dim, tensor::gather(index), tensor::gather(value));
  return written("index_fill", self, dim, index,
                 [&](const Target& t, const Tensor& x, int64_t d, const Tensor& i) {
                   return at::index_fill(x, d, i, t.source(value));
                 });
}

/// The in-place form of one of the functions above.
template <auto function>
struct InPlace;
template <class... Args, Tensor (*function)(const Tensor&, Args...)>
struct InPlace<function> {
  static Tensor& call(Tensor& self, Args... args) { return self.copy_(function(self, args...)); }
};

}  // namespace

SHARDFIELD_OPS(scatter_reduce) {
#define SHARDFIELD_WRITES(name, in_place_name, function) \
  table.composed(name, TORCH_FN(function));              \
  table.composed(in_place_name, TORCH_FN(InPlace<function>::call))
  SHARDFIELD_WRITES("aten::scatter.src", "aten::scatter_.src", scatter_src);
  SHARDFIELD_WRITES("aten::scatter.value", "aten::scatter_.value", scatter_value);
  SHARDFIELD_WRITES("aten::scatter.reduce", "aten::scatter_.reduce", scatter_src_reduce);
  SHARDFIELD_WRITES("aten::scatter.value_reduce", "aten::scatter_.value_reduce",
                    scatter_value_reduce);
  SHARDFIELD_WRITES("aten::scatter_add", "aten::scatter_add_", scatter_add);
  SHARDFIELD_WRITES("aten::scatter_reduce.two", "aten::scatter_reduce_.two", scatter_reduce);
  SHARDFIELD_WRITES("aten::index_add", "aten::index_add_", index_add);
  SHARDFIELD_WRITES("aten::index_copy", "aten::index_copy_", index_copy);
  SHARDFIELD_WRITES("aten::index_reduce", "aten::index_reduce_", index_reduce);
  SHARDFIELD_WRITES("aten::index_fill.int_Scalar", "aten::index_fill_.int_Scalar",
                    index_fill_scalar);
  SHARDFIELD_WRITES("aten::index_fill.int_Tensor", "aten::index_fill_.int_Tensor",
                    index_fill_tensor);
#undef SHARDFIELD_WRITES
}

}  // namespace shardfield::ops
