#include "shardfield/tensor/shard_tensor_impl.h"

#include <array>
#include <new>
#include <sstream>

#include <c10/core/InferenceMode.h>
#include <c10/core/MemoryFormat.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/check_level.h"
#include "shardfield/tensor/operand_check_key.h"

namespace shardfield::tensor {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

DispatchKeySet keys_for(const at::Tensor& piece) {
  DispatchKeySet keys(
      {DispatchKey::PrivateUse3, DispatchKey::AutogradPrivateUse3, DispatchKey::ADInplaceOrView});
  if (C10_UNLIKELY(comm::check_level() == comm::CheckLevel::kFull))
    keys = keys.add(kOperandCheckKey);
  // TensorImpl adds autocast keys by backend bit, and PrivateUse3 has none of its own.
  return keys.add(piece.is_cuda() ? DispatchKey::AutocastCUDA : DispatchKey::AutocastCPU);
}

c10::Storage& dummy_storage() {
  static thread_local c10::Storage storage(c10::Storage::use_byte_size_t(), 0,
                                           at::DataPtr(nullptr, at::kCPU), nullptr, false);
  return storage;
}

/// Blocks of one thread that wait for their next use. Plain data: tensors may be dropped after the
/// thread's other objects.
struct FreeBlocks {
  static constexpr size_t kMost = 64;
  std::array<void*, kMost> blocks;
  size_t count;
  bool is_watched;  ///< by an object that gives the blocks back when the thread ends
  bool is_closed;
};
constinit thread_local FreeBlocks free_blocks{};

struct GivesBackBlocks {
  ~GivesBackBlocks() {
    free_blocks.is_closed = true;
    while (free_blocks.count > 0) ::operator delete(free_blocks.blocks[--free_blocks.count]);
  }
};

void watch_thread() {
  static thread_local const GivesBackBlocks at_exit;
  (void)at_exit;
  free_blocks.is_watched = true;
}

// Sanitizers follow a block only through the allocator itself.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kKeepsBlocks = false;
#else
constexpr bool kKeepsBlocks = true;
#endif

}  // namespace

void* ShardTensorImpl::operator new(size_t size) {
  if (C10_LIKELY(free_blocks.count > 0)) return free_blocks.blocks[--free_blocks.count];
  return ::operator new(size);
}

void ShardTensorImpl::operator delete(void* block) noexcept {
  if (!kKeepsBlocks || free_blocks.count == FreeBlocks::kMost || free_blocks.is_closed)
    return ::operator delete(block);
  if (C10_UNLIKELY(!free_blocks.is_watched)) watch_thread();
  free_blocks.blocks[free_blocks.count++] = block;
}

ShardTensorImpl::ShardTensorImpl(at::Tensor piece, const spec::Layout* layout,
                                 at::IntArrayRef sizes, at::IntArrayRef strides,
                                 int64_t storage_offset)
    : TensorImpl(keys_for(piece), piece.dtype(), piece.device()),
      piece_(std::move(piece)),
      layout_(layout) {
  set_sizes_and_strides(sizes, strides, storage_offset);
  set_storage_access_should_throw();
  share_version_with_piece();
}

// The VIEW constructor with a key set without autograd keys skips the version counter and the
// contiguity refresh; the rest is copied. The ordinary constructor costs 0.1 us more.
ShardTensorImpl::ShardTensorImpl(SameGeometry, at::Tensor&& piece, const ShardTensorImpl* like)
    : TensorImpl(TensorImpl::VIEW, std::move(dummy_storage()),
                 DispatchKeySet(DispatchKey::PrivateUse3), piece.dtype()),
      piece_(std::move(piece)),
      layout_(like->layout_) {
  dummy_storage() = std::move(storage_);
  sizes_and_strides_ = like->sizes_and_strides_;
  numel_ = like->numel_;
  device_opt_ = piece_.device();
  is_contiguous_ = like->is_contiguous_;
  is_channels_last_ = like->is_channels_last_;
  is_channels_last_contiguous_ = like->is_channels_last_contiguous_;
  is_channels_last_3d_ = like->is_channels_last_3d_;
  is_channels_last_3d_contiguous_ = like->is_channels_last_3d_contiguous_;
  is_non_overlapping_and_dense_ = like->is_non_overlapping_and_dense_;
  storage_access_should_throw_ = true;
  if (C10_LIKELY(!c10::InferenceMode::is_enabled())) {
    key_set_ = keys_for(piece_);
    share_version_with_piece();
  } else {
    key_set_ = keys_for(piece_) - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  }
}

ShardTensorImpl::ShardTensorImpl(ViewOf, at::Tensor&& piece, const spec::Layout* layout,
                                 at::IntArrayRef sizes, at::IntArrayRef strides,
                                 int64_t storage_offset, const ShardTensorImpl& source)
    : TensorImpl(TensorImpl::VIEW, std::move(dummy_storage()),
                 DispatchKeySet(DispatchKey::PrivateUse3), piece.dtype()),
      piece_(std::move(piece)),
      layout_(layout),
      is_moved_view_(source.is_moved_view_) {
  dummy_storage() = std::move(storage_);
  device_opt_ = piece_.device();
  set_sizes_and_strides(sizes, strides, storage_offset);
  storage_access_should_throw_ = true;
  key_set_ = source.key_set_;
  share_version_with_piece();
}

// In-place on the piece (x.to_local()) must be seen by autograd's saved-tensor check.
void ShardTensorImpl::share_version_with_piece() {
  if (is_inference()) return;
  const c10::VariableVersion& version = piece_.unsafeGetTensorImpl()->version_counter();
  version_counter_ = version.enabled() ? version : c10::VariableVersion(0);
}

void ShardTensorImpl::become(const ShardTensorImpl& other) {
  piece_ = other.piece_;
  layout_ = other.layout_;
  is_moved_view_ = other.is_moved_view_;
  sizes_and_strides_ = other.sizes_and_strides_;
  storage_offset_ = other.storage_offset_;
  refresh_numel();
  refresh_contiguous();
}

template <class Version>
c10::intrusive_ptr<c10::TensorImpl> ShardTensorImpl::copy_with(Version&& version,
                                                               bool allow_change) const {
  auto copy =
      c10::make_intrusive<ShardTensorImpl>(piece_, layout_, sizes(), strides(), storage_offset());
  copy->key_set_ = key_set_;
  copy->is_moved_view_ = is_moved_view_;
  if (copy->is_inference()) {
    copy->version_counter_ = c10::VariableVersion();
  } else {
    copy->set_version_counter(std::forward<Version>(version));
  }
  copy->set_allow_tensor_metadata_change(allow_change);
  return copy;
}

c10::intrusive_ptr<c10::TensorImpl> ShardTensorImpl::shallow_copy_and_detach(
    const c10::VariableVersion& version_counter, bool allow_tensor_metadata_change) const {
  return copy_with(version_counter, allow_tensor_metadata_change);
}

c10::intrusive_ptr<c10::TensorImpl> ShardTensorImpl::shallow_copy_and_detach(
    c10::VariableVersion&& version_counter, bool allow_tensor_metadata_change) const {
  return copy_with(std::move(version_counter), allow_tensor_metadata_change);
}

// The default copies TensorImpl's own fields only: x.data = y would keep the old elements.
void ShardTensorImpl::shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& impl) {
  SHARDFIELD_CHECK(impl->key_set().has_backend(c10::BackendComponent::PrivateUse3Bit), "set_data",
                   "x.data = y with x sharded and y plain; scatter y first");
  auto* other = static_cast<ShardTensorImpl*>(impl.get());
  copy_tensor_metadata(other, this, version_counter(), allow_tensor_metadata_change());
  piece_ = other->piece_;
  layout_ = other->layout_;
  is_moved_view_ = other->is_moved_view_;
}

const char* ShardTensorImpl::tensorimpl_type_name() const {
  return "a ShardTensor (its elements live on several ranks: use x.to_local() for this rank's "
         "piece "
         "or x.full_tensor() for all of it)";
}

void check_writable(const at::Tensor& t, const char* op) {
  if (!is_sharded(t) || C10_LIKELY(!impl_of(t)->is_moved_view())) return;
  SHARDFIELD_CHECK(
      false, op, "cannot write in place to ", describe(t), " on rank ", layout_of(t).mesh().rank,
      ": it is a view whose elements had to move between ranks, so the tensor it was "
      "taken from would not see the write; write to that tensor, or take .clone() first");
}

at::Tensor as_moved_view(const at::Tensor& t) {
  if (is_sharded(t)) impl_of(t)->mark_moved_view();
  return t;
}

c10::SmallVector<int64_t, 5> dense_strides(at::IntArrayRef sizes, at::MemoryFormat format) {
  if (format == at::MemoryFormat::ChannelsLast && sizes.size() == 4) {
    const auto s = c10::get_channels_last_strides_2d(sizes);
    return {s.begin(), s.end()};
  }
  if (format == at::MemoryFormat::ChannelsLast3d && sizes.size() == 5) {
    const auto s = c10::get_channels_last_strides_3d(sizes);
    return {s.begin(), s.end()};
  }
  c10::SmallVector<int64_t, 5> strides;
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides.push_back(step);
    step *= std::max<int64_t>(sizes[d], 1);
  }
  std::reverse(strides.begin(), strides.end());
  return strides;
}

std::vector<int64_t> piece_sizes(const spec::Layout& layout, at::IntArrayRef sizes) {
  return layout.local_sizes(sizes.data(), static_cast<int>(sizes.size()));
}

at::Tensor strided_piece(const at::Tensor& piece, at::IntArrayRef sizes, at::IntArrayRef strides,
                         int64_t storage_offset) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(piece.storage()), piece.key_set(), piece.dtype());
  impl->set_sizes_and_strides(sizes, strides, storage_offset);
  if (!impl->is_inference())
    impl->set_version_counter(piece.unsafeGetTensorImpl()->version_counter());
  return at::Tensor(std::move(impl));
}

at::Tensor make_sharded_strided(at::Tensor piece, const spec::Layout* layout, at::IntArrayRef sizes,
                                at::IntArrayRef strides, int64_t storage_offset) {
  if (!layout) return piece;
  return at::Tensor(c10::make_intrusive<ShardTensorImpl>(std::move(piece), layout, sizes, strides,
                                                         storage_offset));
}

at::Tensor make_view(at::Tensor piece, const spec::Layout* layout, at::IntArrayRef sizes,
                     at::IntArrayRef strides, int64_t storage_offset, const at::Tensor& source) {
  if (!layout) return piece;
  return at::Tensor(c10::make_intrusive<ShardTensorImpl>(ShardTensorImpl::ViewOf{},
                                                         std::move(piece), layout, sizes, strides,
                                                         storage_offset, *impl_of(source)));
}

at::Tensor make_sharded(at::Tensor piece, const spec::Layout* layout, at::IntArrayRef sizes,
                        at::MemoryFormat format) {
  if (!layout) return piece;
  TORCH_INTERNAL_ASSERT(
      layout->is_alone() ? piece.sizes() == sizes
                         : piece.sizes() == at::IntArrayRef(piece_sizes(*layout, sizes)),
      "piece ", piece.sizes(), " of a tensor ", sizes, " does not fit ", layout->to_string());
  return make_sharded_strided(std::move(piece), layout, sizes, dense_strides(sizes, format));
}

std::string describe(const at::Tensor& t) {
  std::ostringstream out;
  if (!t.defined()) return "undefined";
  out << t.sizes() << " " << t.scalar_type();
  if (is_sharded(t))
    out << " " << layout_of(t).to_string();
  else
    out << " plain";
  return out.str();
}

}  // namespace shardfield::tensor
