#include "shardfield/ops/random_words.h"

#include <cmath>
#include <mutex>
#include <numbers>
#include <set>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include "shardfield/base/error.h"
#include "shardfield/base/philox.h"
#include "shardfield/comm/collectives.h"
#include "shardfield/comm/traffic.h"

namespace shardfield::ops {

namespace {

using at::Tensor;

/// Streams of one seed; the high half of the counter.
constexpr uint64_t kBlocks = 0;  // four words for each element
constexpr uint64_t kWords = 1;   // one word for each element

constexpr double kTwoTo32 = 4294967296.0;

/// For each dim, the global index of each local one.
std::vector<std::vector<int64_t>> global_indices(const RandomSource& source) {
  std::vector<std::vector<int64_t>> maps(source.sizes.size());
  for (size_t d = 0; d < maps.size(); ++d) {
    int64_t outer = source.sizes[d];
    if (source.layout) {
      for (const spec::Cut& cut : source.layout->cuts())
        if (cut.dim == static_cast<int>(d)) outer /= std::max<int64_t>(cut.total(), 1);
    }
    std::vector<int64_t> map(outer);
    for (int64_t i = 0; i < outer; ++i) map[i] = i;
    for (size_t c = 0; source.layout && c < source.layout->cuts().size(); ++c) {
      const spec::Cut& cut = source.layout->cuts()[c];
      if (cut.dim != static_cast<int>(d)) continue;
      std::vector<int64_t> finer;
      for (int64_t i : map)
        for (int64_t k = 0; k < source.layout->local_size(c); ++k)
          finer.push_back(i * cut.total() + source.layout->local_offset(c) + k);
      map = std::move(finer);
    }
    maps[d] = std::move(map);
  }
  return maps;
}

std::vector<int64_t> piece_sizes(const RandomSource& source) {
  if (!source.layout) return source.sizes;
  return source.layout->local_sizes(source.sizes.data(), static_cast<int>(source.sizes.size()));
}

/// Calls f(first, base, columns) for every row of the piece, in parallel: its element i has flat
/// index first + i in the piece and base + columns[i] in the whole tensor.
template <class F>
void for_each_row(const RandomSource& source, F&& f) {
  auto maps = global_indices(source);
  if (maps.empty()) maps.push_back({0});
  const std::vector<int64_t>& columns = maps.back();
  const auto width = static_cast<int64_t>(columns.size());
  int64_t rows = 1, stride = source.sizes.empty() ? 1 : source.sizes.back();
  std::vector<int64_t> strides(maps.size(), 1);
  for (size_t d = maps.size() - 1; d-- > 0;) {
    rows *= static_cast<int64_t>(maps[d].size());
    strides[d] = stride;
    stride *= source.sizes[d];
  }
  if (rows == 0 || width == 0) return;
  at::parallel_for(0, rows, std::max<int64_t>(1, 16384 / width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      int64_t rest = row, base = 0;
      for (size_t d = maps.size() - 1; d-- > 0;) {
        const auto n = static_cast<int64_t>(maps[d].size());
        base += maps[d][rest % n] * strides[d];
        rest /= n;
      }
      f(row * width, base, columns);
    }
  });
}

/// The words of the counters in `index` by tensor arithmetic, as int64 values below 2^32.
std::array<Tensor, 4> philox_tensors(uint64_t key, const Tensor& index, uint64_t stream) {
  constexpr int64_t kMask = 0xffffffff;
  std::array<Tensor, 4> c{
      index.bitwise_and(kMask), index.bitwise_right_shift(32).bitwise_and(kMask),
      at::full_like(index, static_cast<int64_t>(stream)), at::zeros_like(index)};
  auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const Tensor p0 = c[0] * int64_t{0xD2511F53}, p1 = c[2] * int64_t{0xCD9E8D57};
    const auto high = [&](const Tensor& p) { return p.bitwise_right_shift(32).bitwise_and(kMask); };
    c = {high(p1).bitwise_xor(c[1]).bitwise_xor(int64_t{k0}), p1.bitwise_and(kMask),
         high(p0).bitwise_xor(c[3]).bitwise_xor(int64_t{k1}), p0.bitwise_and(kMask)};
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return c;
}

/// Global flat index of every own element, flat, on a device.
Tensor index_tensor(const RandomSource& source, c10::Device device) {
  const auto maps = global_indices(source);
  Tensor index = at::zeros({1}, at::TensorOptions().dtype(at::kLong).device(device));
  for (size_t d = 0; d < maps.size(); ++d) {
    const Tensor map = at::tensor(maps[d], at::kLong).to(device);
    index = (index.unsqueeze(1) * source.sizes[d] + map).reshape(-1);
  }
  return index;
}

constexpr int64_t kChunk = int64_t{1} << 22;

/// Fills by `element(blocks) -> value`: on the CPU by a loop, elsewhere by tensors of kChunk
/// elements at a time.
template <class T, class Scalar, class Vector>
Tensor fill_blocks(const RandomSource& source, Tensor out, Scalar&& scalar, Vector&& vector) {
  if (out.numel() == 0) return out;
  if (out.is_cpu()) {
    T* data = out.mutable_data_ptr<T>();
    for_each_row(source, [&](int64_t first, int64_t base, const std::vector<int64_t>& columns) {
      for (size_t i = 0; i < columns.size(); ++i)
        data[first + static_cast<int64_t>(i)] =
            scalar(base::philox(source.seed, static_cast<uint64_t>(base + columns[i]), kBlocks));
    });
    return out;
  }
  const Tensor index = index_tensor(source, out.device());
  Tensor flat = out.view(-1);
  for (int64_t at = 0; at < flat.numel(); at += kChunk) {
    const int64_t n = std::min(kChunk, flat.numel() - at);
    flat.narrow(0, at, n).copy_(
        vector(philox_tensors(source.seed, index.narrow(0, at, n), kBlocks)));
  }
  return out;
}

/// A uniform of `digits` bits from two words, exact in a double.
double uniform_of(uint32_t high, uint32_t low, int digits) {
  const uint64_t word = (uint64_t{high} << 32) | low;
  return std::ldexp(static_cast<double>(word >> (64 - digits)), -digits);
}
Tensor uniform_of(const Tensor& high, const Tensor& low, int digits) {
  const int from_low = std::max(digits - 32, 0);
  const Tensor top = digits >= 32 ? high : high.bitwise_right_shift(32 - digits);
  if (from_low == 0) return top.to(at::kDouble) * std::ldexp(1.0, -digits);
  return (top.to(at::kDouble) * std::ldexp(1.0, from_low) +
          low.bitwise_right_shift(32 - from_low).to(at::kDouble)) *
         std::ldexp(1.0, -digits);
}

int digits_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return 53;
    case at::kHalf:
      return 11;
    case at::kBFloat16:
      return 8;
    default:
      return 24;
  }
}

using Compared = std::set<std::pair<const spec::Mesh*, std::vector<int>>>;

/// Which meshes and axes have proved that their ranks draw alike.
std::pair<std::mutex&, Compared&> compared() {
  static auto* mutex = new std::mutex();
  static auto* seen = new Compared();
  return {*mutex, *seen};
}

bool is_compared(const spec::Layout& layout) {
  auto [mutex, seen] = compared();
  const std::lock_guard lock(mutex);
  return seen.contains({&layout.mesh(), layout.axes()});
}

void compare_ranks(uint64_t seed, const spec::Layout& layout, c10::Device device) {
  if (is_compared(layout)) return;
  const auto low = static_cast<int64_t>(seed & 0xffffffff), high = static_cast<int64_t>(seed >> 32);
  const Tensor own = at::tensor({low, -low, high, -high}, at::kLong).to(device);
  const Tensor top =
      comm::all_reduce(own, layout.mesh(), layout.axes(), comm::Reduction::kMax).cpu();
  const auto* t = top.const_data_ptr<int64_t>();
  SHARDFIELD_CHECK(
      t[0] == -t[1] && t[2] == -t[3], comm::current_op() ? comm::current_op() : "random numbers",
      "expected equal random generator states on the ranks that share a sample, got seeds "
      "that differ (rank ",
      layout.mesh().rank, ", ", layout.to_string(),
      "); call sync_module_over_mesh(module, mesh), which aligns them, or "
      "torch.manual_seed with one number on these ranks");
  auto [mutex, seen] = compared();
  const std::lock_guard lock(mutex);
  seen.insert({&layout.mesh(), layout.axes()});
}

uint64_t draw_number(const std::optional<at::Generator>& generator) {
  if (!generator.has_value() || !generator->defined() || generator->device().is_cpu()) {
    auto* source = at::get_generator_or_default<at::CPUGeneratorImpl>(
        generator, at::detail::getDefaultCPUGenerator());
    const std::lock_guard lock(source->mutex_);
    return source->random64();
  }
  Tensor number = at::empty({}, at::TensorOptions().dtype(at::kLong).device(generator->device()));
  number.random_(std::numeric_limits<int64_t>::min(), std::nullopt, generator);
  return static_cast<uint64_t>(number.item<int64_t>());
}

/// Ranks that are threads share the default generator: the first of the ranks draws for all.
uint64_t draw_among_threads(const std::optional<at::Generator>& generator,
                            const spec::Layout& layout, c10::Device device) {
  bool first = true;
  for (int a : layout.axes()) first &= layout.mesh().coord[a] == 0;
  const auto own = static_cast<int64_t>(first ? draw_number(generator) : 0);
  const Tensor sum =
      comm::all_reduce(at::scalar_tensor(own, at::kLong).to(device), layout.mesh(), layout.axes());
  return static_cast<uint64_t>(sum.item<int64_t>());
}

}  // namespace

uint64_t draw_seed(const std::optional<at::Generator>& generator, const spec::Layout* layout,
                   c10::Device device) {
  if (!layout) return draw_number(generator);
  if (layout->mesh().context != 0) return draw_among_threads(generator, *layout, device);
  const uint64_t seed = draw_number(generator);
  compare_ranks(seed, *layout, device);
  return seed;
}

Tensor random_uniform(const RandomSource& source, const at::TensorOptions& options) {
  Tensor out = at::empty(piece_sizes(source), options.memory_format(std::nullopt));
  const int digits = digits_of(out.scalar_type());
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, out.scalar_type(), "random_uniform", [&] {
        fill_blocks<scalar_t>(
            source, out,
            [&](const std::array<uint32_t, 4>& w) {
              return static_cast<scalar_t>(uniform_of(w[0], w[1], digits));
            },
            [&](const std::array<Tensor, 4>& w) { return uniform_of(w[0], w[1], digits); });
      });
  return out;
}

Tensor random_normal(const RandomSource& source, const at::TensorOptions& options) {
  Tensor out = at::empty(piece_sizes(source), options.memory_format(std::nullopt));
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, out.scalar_type(), "random_normal", [&] {
        fill_blocks<scalar_t>(
            source, out,
            [](const std::array<uint32_t, 4>& w) {
              const double u1 = uniform_of(w[0], w[1], 53), u2 = uniform_of(w[2], w[3], 53);
              return static_cast<scalar_t>(std::sqrt(-2 * std::log1p(-u1)) *
                                           std::cos(2 * std::numbers::pi * u2));
            },
            [](const std::array<Tensor, 4>& w) {
              const Tensor u1 = uniform_of(w[0], w[1], 53), u2 = uniform_of(w[2], w[3], 53);
              return (at::log1p(-u1) * -2).sqrt() * at::cos(u2 * (2 * std::numbers::pi));
            });
      });
  return out;
}

Tensor random_integers(const RandomSource& source, int64_t low, uint64_t range,
                       const at::TensorOptions& options) {
  // A range below 2^32 is drawn from one word, as PyTorch does.
  const bool wide = range == 0 || range > 0xffffffff;
  Tensor out = at::empty(piece_sizes(source), options.memory_format(std::nullopt).dtype(at::kLong));
  const auto signed_range = static_cast<int64_t>(range);
  fill_blocks<int64_t>(
      source, out,
      [&](const std::array<uint32_t, 4>& w) {
        const uint64_t word = wide ? (uint64_t{w[0]} << 32) | w[1] : w[0];
        return static_cast<int64_t>((range ? word % range : word) + static_cast<uint64_t>(low));
      },
      [&](const std::array<Tensor, 4>& w) {
        if (!wide) return w[0].remainder(signed_range) + low;
        const Tensor word = w[0].bitwise_left_shift(32).bitwise_or(w[1]);
        if (!range) return word + low;
        // 64-bit remainder by halves: the high word contributes (2^32 mod range) * high.
        SHARDFIELD_CHECK(range <= (uint64_t{1} << 62), "random",
                         "expected a range of at most 2^62, got ", range, " on ", out.device());
        const Tensor positive =
            word.bitwise_right_shift(1).bitwise_and(std::numeric_limits<int64_t>::max());
        const Tensor half = positive.remainder(signed_range);
        return (half * 2 + w[1].bitwise_and(1)).remainder(signed_range) + low;
      });
  return out.to(options.dtype());
}

Tensor random_mask(const RandomSource& source, double p, c10::Device device) {
  Tensor out = at::empty(piece_sizes(source), at::TensorOptions().dtype(at::kBool).device(device));
  if (out.numel() == 0) return out;
  const double limit = p * kTwoTo32;
  if (!out.is_cpu()) {
    const Tensor index = index_tensor(source, device);
    Tensor flat = out.view(-1);
    for (int64_t at = 0; at < flat.numel(); at += kChunk) {
      const int64_t n = std::min(kChunk, flat.numel() - at);
      const Tensor own = index.narrow(0, at, n);
      const auto words = philox_tensors(source.seed, own.bitwise_right_shift(2), kWords);
      const Tensor word = at::stack(words).gather(0, own.bitwise_and(3).unsqueeze(0)).squeeze(0);
      flat.narrow(0, at, n).copy_(word.to(at::kDouble) < limit);
    }
    return out;
  }
  bool* data = out.mutable_data_ptr<bool>();
  for_each_row(source, [&](int64_t first, int64_t base, const std::vector<int64_t>& columns) {
    int64_t block = -1;
    std::array<uint32_t, 4> words{};
    for (size_t i = 0; i < columns.size(); ++i) {
      const int64_t index = base + columns[i];
      if (index / 4 != block) {
        block = index / 4;
        words = base::philox(source.seed, static_cast<uint64_t>(block), kWords);
      }
      data[first + static_cast<int64_t>(i)] = words[index % 4] < limit;
    }
  });
  return out;
}

}  // namespace shardfield::ops
