// Dropout and random filling of sharded tensors. Masks and noise are indexed by the element's place
// in the whole tensor (see random_words.h), so they are those of one rank for any mesh; nothing is
// sent. Recomputation under checkpointing restores the generator and so repeats them.

#include <cmath>

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/random_words.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using spec::Layout;
using tensor::is_sharded;
using tensor::layout_of;
using tensor::make_sharded;
using tensor::piece_of;

using Generator = std::optional<at::Generator>;
using Dtype = std::optional<at::ScalarType>;
using Place = std::optional<at::Device>;
using Format = std::optional<at::MemoryFormat>;
using StorageLayout = std::optional<at::Layout>;
using Flag = std::optional<bool>;

RandomSource source_for(const Tensor& x, const Generator& generator = std::nullopt) {
  const Layout& layout = layout_of(x);
  return {draw_seed(generator, &layout, piece_of(x).device()), &layout, x.sizes().vec()};
}

/// One value per (sample, channel): feature dropout drops whole channels.
RandomSource feature_source(const Tensor& x) {
  SHARDFIELD_CHECK(x.dim() >= 2, "feature_dropout", "expected an input of two or more dims, got ",
                   x.sizes());
  std::vector<int> keep(x.dim(), -1);
  keep[0] = 0;
  keep[1] = 1;
  std::vector<int64_t> sizes(x.dim(), 1);
  sizes[0] = x.size(0);
  sizes[1] = x.size(1);
  const uint64_t seed = draw_seed(std::nullopt, &layout_of(x), piece_of(x).device());
  return {seed, spec::renumber(layout_of(x), keep), std::move(sizes)};
}

Tensor whole(const RandomSource& source, Tensor piece) {
  return source.layout ? make_sharded(std::move(piece), source.layout, source.sizes) : piece;
}

/// Keep-or-drop factors in x's dtype.
Tensor keep_noise(const Tensor& x, double p, bool feature) {
  const RandomSource source = feature ? feature_source(x) : source_for(x);
  return whole(source, random_mask(source, 1 - p, piece_of(x).device()).to(x.scalar_type()));
}

void check_probability(double p) {
  SHARDFIELD_CHECK(p >= 0 && p <= 1, "dropout", "expected a probability between 0 and 1, got ", p);
}

bool drops_nothing(const Tensor& x, double p, bool train) {
  return p == 0 || !train || x.numel() == 0;
}

/// x * factor + shift of alpha dropout, which keeps mean and variance of SELU inputs.
struct AlphaNoise {
  Tensor factor, shift;
};
AlphaNoise alpha_noise(const Tensor& x, double p, bool feature) {
  constexpr double kAlpha = 1.7580993408473766;
  const double a = 1 / std::sqrt((kAlpha * kAlpha * p + 1) * (1 - p));
  const Tensor noise = keep_noise(x, p, feature);
  return {noise * a, (noise - 1) * (kAlpha * a) + kAlpha * a * p};
}

template <bool feature>
Tensor dropout(const Tensor& x, double p, bool train) {
  check_probability(p);
  if (drops_nothing(x, p, train)) return x;
  if (p == 1) return x * at::zeros({}, piece_of(x).options());
  return x * keep_noise(x, p, feature).div_(1 - p);
}

template <bool feature>
Tensor& dropout_(Tensor& x, double p, bool train) {
  check_probability(p);
  if (drops_nothing(x, p, train)) return x;
  if (p == 1) return x.mul_(at::zeros({}, piece_of(x).options()));
  return x.mul_(keep_noise(x, p, feature).div_(1 - p));
}

template <bool feature>
Tensor alpha_dropout(const Tensor& x, double p, bool train) {
  check_probability(p);
  if (drops_nothing(x, p, train)) return x;
  if (p == 1) return x * at::zeros({}, piece_of(x).options());
  const AlphaNoise noise = alpha_noise(x, p, feature);
  return x * noise.factor + noise.shift;
}

template <bool feature>
Tensor& alpha_dropout_(Tensor& x, double p, bool train) {
  check_probability(p);
  if (drops_nothing(x, p, train)) return x;
  if (p == 1) return x.mul_(at::zeros({}, piece_of(x).options()));
  const AlphaNoise noise = alpha_noise(x, p, feature);
  return x.mul_(noise.factor).add_(noise.shift);
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, Flag train) {
  check_probability(p);
  if (!train.value_or(true) || x.numel() == 0) return {x.clone(), at::ones_like(x, at::kBool)};
  const RandomSource source = source_for(x);
  const Tensor mask = whole(source, random_mask(source, 1 - p, piece_of(x).device()));
  return {x * mask * (p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

/// Slopes drawn for the negative elements, 1 for the others.
Tensor random_slopes(const Tensor& x, double lower, double upper, const Generator& generator) {
  const Tensor& piece = piece_of(x);
  const Tensor slopes =
      random_uniform(source_for(x, generator), piece.options()).mul_(upper - lower).add_(lower);
  return make_sharded(at::where(piece.detach() <= 0, slopes, 1).to(x.scalar_type()), &layout_of(x),
                      x.sizes());
}

Tensor rrelu(const Tensor& x, const at::Scalar& lower, const at::Scalar& upper, bool train,
             Generator generator) {
  const double low = lower.toDouble(), high = upper.toDouble();
  SHARDFIELD_CHECK(low <= high, "rrelu", "expected lower <= upper, got ", low, " and ", high);
  if (!train) return at::leaky_relu(x, (low + high) / 2);
  return x * random_slopes(x, low, high, generator);
}

Tensor& rrelu_(Tensor& x, const at::Scalar& lower, const at::Scalar& upper, bool train,
               Generator generator) {
  const double low = lower.toDouble(), high = upper.toDouble();
  SHARDFIELD_CHECK(low <= high, "rrelu_", "expected lower <= upper, got ", low, " and ", high);
  if (!train) return at::leaky_relu_(x, (low + high) / 2);
  return x.mul_(random_slopes(x, low, high, generator));
}

/// Writes a piece of random values; below autograd.
Tensor& fill(Tensor& x, const Tensor& values) {
  tensor::check_writable(x, "a random fill");
  piece_of(x).copy_(values.view_as(piece_of(x)));
  return x;
}

at::TensorOptions options_of(const Tensor& x, Dtype dtype = std::nullopt,
                             Place device = std::nullopt) {
  auto options = piece_of(x).options();
  if (dtype.has_value()) options = options.dtype(dtype);
  SHARDFIELD_CHECK(!device.has_value() || device->type() == options.device().type(), "rand_like",
                   "expected the device of the sharded tensor, ", options.device(), ", got ",
                   *device);
  return options;
}

Tensor bernoulli_with(const Tensor& x, double p, Generator generator) {
  SHARDFIELD_CHECK(p >= 0 && p <= 1, "bernoulli", "expected a probability between 0 and 1, got ",
                   p);
  const RandomSource source = source_for(x, generator);
  return whole(source, random_mask(source, p, piece_of(x).device()).to(x.scalar_type()));
}

Tensor uniform_below(const Tensor& x, const Tensor& p, const Generator& generator) {
  const auto wide = at::isFloatingType(p.scalar_type()) ? p.scalar_type() : at::kFloat;
  const Tensor u =
      random_uniform(source_for(x, generator), piece_of(x).options().dtype(at::kDouble));
  return u < tensor::piece_for(p, layout_of(x), x.sizes()).to(wide);
}

Tensor bernoulli(const Tensor& x, Generator generator) {
  return make_sharded(uniform_below(x, x, generator).to(x.scalar_type()), &layout_of(x), x.sizes());
}

Tensor bernoulli_tensor(const Tensor& x, const Tensor& p, Generator generator) {
  if (!is_sharded(x)) return at::bernoulli(x, tensor::gather(p), generator);
  return make_sharded(uniform_below(x, p, generator).to(x.scalar_type()), &layout_of(x), x.sizes());
}

Tensor& bernoulli_tensor_(Tensor& x, const Tensor& p, Generator generator) {
  if (!is_sharded(x)) return x.bernoulli_(tensor::gather(p), generator);
  return fill(x, uniform_below(x, p, generator));
}

Tensor& bernoulli_(Tensor& x, double p, Generator generator) {
  SHARDFIELD_CHECK(p >= 0 && p <= 1, "bernoulli_", "expected a probability between 0 and 1, got ",
                   p);
  return fill(x, random_mask(source_for(x, generator), p, piece_of(x).device()));
}

Tensor& uniform_(Tensor& x, double from, double to, Generator generator) {
  SHARDFIELD_CHECK(from <= to, "uniform_", "expected from <= to, got ", from, " and ", to);
  return fill(x,
              random_uniform(source_for(x, generator), options_of(x)).mul_(to - from).add_(from));
}

Tensor& normal_(Tensor& x, double mean, double std, Generator generator) {
  SHARDFIELD_CHECK(std >= 0, "normal_", "expected std >= 0, got ", std);
  return fill(x, random_normal(source_for(x, generator), options_of(x)).mul_(std).add_(mean));
}

Tensor& exponential_(Tensor& x, double rate, Generator generator) {
  SHARDFIELD_CHECK(rate > 0, "exponential_", "expected a rate above 0, got ", rate);
  const Tensor u = random_uniform(source_for(x, generator), options_of(x));
  return fill(x, at::log1p(-u).div_(-rate));
}

/// Largest integer that a dtype holds exactly, plus one: the range of random_().
int64_t integer_limit(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return (int64_t{1} << 53) + 1;
    case at::kFloat:
      return (int64_t{1} << 24) + 1;
    case at::kHalf:
      return (int64_t{1} << 11) + 1;
    case at::kBFloat16:
      return (int64_t{1} << 8) + 1;
    case at::kBool:
      return 2;
    case at::kByte:
      return 256;
    case at::kChar:
      return 128;
    case at::kShort:
      return int64_t{1} << 15;
    case at::kInt:
      return int64_t{1} << 31;
    default:
      return std::numeric_limits<int64_t>::max();
  }
}

Tensor integers(const Tensor& x, int64_t low, int64_t high, const Generator& generator,
                at::ScalarType type) {
  SHARDFIELD_CHECK(low < high, "random", "expected from < to, got ", low, " and ", high);
  const uint64_t range = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
  return random_integers(source_for(x, generator), low, range, options_of(x, type));
}

Tensor& random_from(Tensor& x, int64_t from, std::optional<int64_t> to, Generator generator) {
  return fill(x, integers(x, from, to.value_or(integer_limit(x.scalar_type())), generator,
                          x.scalar_type()));
}
Tensor& random_to(Tensor& x, int64_t to, Generator generator) {
  return random_from(x, 0, to, generator);
}
Tensor& random_(Tensor& x, Generator generator) {
  return random_from(x, 0, std::nullopt, generator);
}

Tensor rand_like_from(const Tensor& x, Generator generator, Dtype dtype, StorageLayout,
                      Place device, Flag, Format) {
  return make_sharded(random_uniform(source_for(x, generator), options_of(x, dtype, device)),
                      &layout_of(x), x.sizes());
}
Tensor rand_like(const Tensor& x, Dtype dtype, StorageLayout layout, Place device, Flag pin,
                 Format format) {
  return rand_like_from(x, std::nullopt, dtype, layout, device, pin, format);
}

Tensor randn_like_from(const Tensor& x, Generator generator, Dtype dtype, StorageLayout,
                       Place device, Flag, Format) {
  return make_sharded(random_normal(source_for(x, generator), options_of(x, dtype, device)),
                      &layout_of(x), x.sizes());
}
Tensor randn_like(const Tensor& x, Dtype dtype, StorageLayout layout, Place device, Flag pin,
                  Format format) {
  return randn_like_from(x, std::nullopt, dtype, layout, device, pin, format);
}

Tensor randint_like_between(const Tensor& x, c10::SymInt low, c10::SymInt high, Dtype dtype,
                            StorageLayout, Place, Flag, Format) {
  const Tensor values =
      integers(x, low.guard_int(__FILE__, __LINE__), high.guard_int(__FILE__, __LINE__),
               std::nullopt, dtype.value_or(x.scalar_type()));
  return make_sharded(values, &layout_of(x), x.sizes());
}
Tensor randint_like(const Tensor& x, c10::SymInt high, Dtype dtype, StorageLayout layout,
                    Place device, Flag pin, Format format) {
  return randint_like_between(x, 0, high, dtype, layout, device, pin, format);
}

}  // namespace

SHARDFIELD_OPS(dropout) {
  table.composed("aten::dropout", TORCH_FN(dropout<false>));
  table.composed("aten::dropout_", TORCH_FN(dropout_<false>));
  table.composed("aten::feature_dropout", TORCH_FN(dropout<true>));
  table.composed("aten::feature_dropout_", TORCH_FN(dropout_<true>));
  table.composed("aten::alpha_dropout", TORCH_FN(alpha_dropout<false>));
  table.composed("aten::alpha_dropout_", TORCH_FN(alpha_dropout_<false>));
  table.composed("aten::feature_alpha_dropout", TORCH_FN(alpha_dropout<true>));
  table.composed("aten::feature_alpha_dropout_", TORCH_FN(alpha_dropout_<true>));
  table.composed("aten::rrelu", TORCH_FN(rrelu));
  table.composed("aten::rrelu_", TORCH_FN(rrelu_));
  table.composed("aten::native_dropout", TORCH_FN(native_dropout));
  table.backend("aten::bernoulli", TORCH_FN(bernoulli));
  table.backend("aten::bernoulli.p", TORCH_FN(bernoulli_with));
  table.backend("aten::bernoulli.Tensor", TORCH_FN(bernoulli_tensor));
  table.backend("aten::bernoulli_.Tensor", TORCH_FN(bernoulli_tensor_));
  table.backend("aten::bernoulli_.float", TORCH_FN(bernoulli_));
  table.backend("aten::uniform_", TORCH_FN(uniform_));
  table.backend("aten::normal_", TORCH_FN(normal_));
  table.backend("aten::exponential_", TORCH_FN(exponential_));
  table.backend("aten::random_", TORCH_FN(random_));
  table.backend("aten::random_.to", TORCH_FN(random_to));
  table.backend("aten::random_.from", TORCH_FN(random_from));
  table.composed("aten::rand_like", TORCH_FN(rand_like));
  table.composed("aten::rand_like.generator", TORCH_FN(rand_like_from));
  table.composed("aten::randn_like", TORCH_FN(randn_like));
  table.composed("aten::randn_like.generator", TORCH_FN(randn_like_from));
  table.composed("aten::randint_like", TORCH_FN(randint_like));
  table.composed("aten::randint_like.low_dtype", TORCH_FN(randint_like_between));
}

}  // namespace shardfield::ops
