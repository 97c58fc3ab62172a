#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include "shardfield/spec/layout.h"

namespace shardfield::tensor {

/// A tensor whose elements live on several ranks: global sizes and strides outside, this rank's
/// piece and the layout inside. It has no storage of its own.
///
/// The outer geometry is the one a single device would have. It is never inferred from the piece:
/// ranks whose pieces have length 1 would report other strides and branch differently.
class ShardTensorImpl final : public c10::TensorImpl {
 public:
  ShardTensorImpl(at::Tensor piece, const spec::Layout* layout, at::IntArrayRef sizes,
                  at::IntArrayRef strides, int64_t storage_offset = 0);

  struct SameGeometry {};
  /// Same sizes and strides as `like`; the cheap way for pointwise results.
  ShardTensorImpl(SameGeometry, at::Tensor&& piece, const ShardTensorImpl* like);

  struct ViewOf {};
  /// A view of `source`: its keys, other geometry.
  ShardTensorImpl(ViewOf, at::Tensor&& piece, const spec::Layout* layout, at::IntArrayRef sizes,
                  at::IntArrayRef strides, int64_t storage_offset, const ShardTensorImpl& source);

  /// A training step makes and drops hundreds of these, all of one size: each thread keeps some
  /// blocks instead of giving them back.
  static void* operator new(size_t size);
  static void operator delete(void* block) noexcept;

  const at::Tensor& piece() const { return piece_; }
  /// Where the pieces lie; not the memory layout, which the base class calls layout().
  const spec::Layout* piece_layout() const { return layout_; }

  /// True for what stands where one device has a view but holds copies, as its elements had to move
  /// to other ranks. Views of it inherit this. It may be read, not written: see check_writable.
  bool is_moved_view() const { return is_moved_view_; }
  void mark_moved_view() { is_moved_view_ = true; }

  /// New piece, layout and geometry for in-place view ops (squeeze_, transpose_).
  void become(const ShardTensorImpl& other);

  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
      const c10::VariableVersion& version_counter,
      bool allow_tensor_metadata_change) const override;
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
      c10::VariableVersion&& version_counter, bool allow_tensor_metadata_change) const override;
  void shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& impl) override;
  const char* tensorimpl_type_name() const override;

 private:
  template <class Version>
  c10::intrusive_ptr<c10::TensorImpl> copy_with(Version&& version, bool allow_change) const;
  void share_version_with_piece();

  at::Tensor piece_;
  const spec::Layout* layout_;
  bool is_moved_view_ = false;
};

/// True for sharded tensors only; false for tensors that functorch or functionalization wrapped.
inline bool is_sharded(const at::Tensor& t) {
  constexpr c10::DispatchKeySet wrapped(
      {c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchBatched,
       c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Python});
  const c10::DispatchKeySet keys = t.unsafeGetTensorImpl()->key_set();
  return keys.has_backend(c10::BackendComponent::PrivateUse3Bit) && !keys.has_any(wrapped);
}

inline ShardTensorImpl* impl_of(const at::Tensor& t) {
  return static_cast<ShardTensorImpl*>(t.unsafeGetTensorImpl());
}
inline const at::Tensor& piece_of(const at::Tensor& t) {
  return impl_of(t)->piece();
}
inline const spec::Layout& layout_of(const at::Tensor& t) {
  return *impl_of(t)->piece_layout();
}

/// A sharded tensor around a piece, without autograd. Local.
/// @param layout  nullptr returns the piece itself (nothing is cut).
/// @param format  memory format of the outer strides.
/// @throws c10::Error when the piece's sizes are not those the layout gives it.
at::Tensor make_sharded(at::Tensor piece, const spec::Layout* layout, at::IntArrayRef sizes,
                        at::MemoryFormat format = at::MemoryFormat::Contiguous);
at::Tensor make_sharded_strided(at::Tensor piece, const spec::Layout* layout, at::IntArrayRef sizes,
                                at::IntArrayRef strides, int64_t storage_offset = 0);
/// A view result: as make_sharded_strided, with the keys of `source`.
at::Tensor make_view(at::Tensor piece, const spec::Layout* layout, at::IntArrayRef sizes,
                     at::IntArrayRef strides, int64_t storage_offset, const at::Tensor& source);
/// Same layout, sizes and strides as `like`.
inline at::Tensor make_like(at::Tensor&& piece, const ShardTensorImpl* like) {
  return at::Tensor(c10::make_intrusive<ShardTensorImpl>(ShardTensorImpl::SameGeometry{},
                                                         std::move(piece), like));
}

/// A view of a piece with other geometry, without the dispatcher (below autograd only).
at::Tensor strided_piece(const at::Tensor& piece, at::IntArrayRef sizes, at::IntArrayRef strides,
                         int64_t storage_offset);

/// Call before writing to a tensor in place. Plain tensors pass.
/// @throws c10::Error for a moved view: the tensor it was taken from would not see the write.
void check_writable(const at::Tensor& t, const char* op);
/// t, marked as a moved view; one that did not become sharded is plain and stays as it is.
at::Tensor as_moved_view(const at::Tensor& t);

/// Strides of a dense tensor of these sizes in a memory format.
c10::SmallVector<int64_t, 5> dense_strides(at::IntArrayRef sizes, at::MemoryFormat format);
/// The piece sizes this rank holds.
std::vector<int64_t> piece_sizes(const spec::Layout& layout, at::IntArrayRef sizes);
/// "(2, 3, 197, 233) Shard(dim=2, ...)" for messages.
std::string describe(const at::Tensor& t);

}  // namespace shardfield::tensor
