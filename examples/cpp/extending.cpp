// Three ways to teach Shardfield a computation of your own, from a program that only links it:
// a C++ function, an op of your own (TORCH_LIBRARY), and an op of ATen.
//
//   extending
//
// Each runs on 1 to 4 ranks (threads of this process) and on a 2 x 2 mesh, and is compared with one
// device: the values, the gradient and the gradient of the squared gradient. docs/extending.md
// tells the story.

#include <cmath>
#include <exception>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <shardfield/dispatch/extension.h>
#include <shardfield/exchange/rows.h>
#include <shardfield/shardfield.h>
#include <shardfield/spec/layout.h>

using shardfield::spec::Layout;
using shardfield::spec::Segment;
using torch::Tensor;
namespace exchange = shardfield::exchange;
namespace spec = shardfield::spec;
namespace tensor = shardfield::tensor;

// ---- 1. A function: the Laplacian of a periodic plate, with a halo of one row. -----------------

namespace {

/// The 5-point stencil on a plate with one more row and column on each side.
Tensor stencil(const Tensor& wide) {
  const auto rows = wide.size(0) - 2, columns = wide.size(1) - 2;
  const auto at = [&](int64_t i, int64_t j) {
    return wide.narrow(0, i, rows).narrow(1, j, columns);
  };
  return at(0, 1) + at(2, 1) + at(1, 0) + at(1, 2) - 4.0 * at(1, 1);
}

/// `u` (or this rank's piece of it) with one more row on each side along `dim`, periodic.
/// @param layout  where the pieces live; nullptr when u is whole
Tensor with_halo(const Tensor& u, const Layout* layout, int dim) {
  const int cut = layout ? layout->cut_on(dim) : -1;
  const auto own = u.size(dim);
  if (cut < 0) return torch::cat({u.narrow(dim, own - 1, 1), u, u.narrow(dim, 0, 1)}, dim);
  const auto total = layout->cuts()[cut].total();
  std::vector<std::vector<Segment>> wanted;  // the global rows each rank is to hold
  int64_t begin = 0;
  for (const int64_t rows : layout->cuts()[cut].sizes) {
    wanted.push_back(
        {{(begin + total - 1) % total, 1}, {begin, rows}, {(begin + rows) % total, 1}});
    begin += rows;
  }
  return exchange::exchange_rows(u, exchange::row_exchange(*layout, cut, std::move(wanted)));
}

/// Sum of the four neighbours minus four times the value, for a plate (rows, columns), sharded or
/// not. Collective over the ranks of a sharded one. Differentiable, like every part it is made of.
Tensor laplacian(const Tensor& u) {
  if (!shardfield::is_sharded(u)) return stencil(with_halo(with_halo(u, nullptr, 0), nullptr, 1));
  const Layout& layout = tensor::layout_of(u);
  const Tensor wide = with_halo(with_halo(tensor::local(u), &layout, 0), &layout, 1);
  return tensor::wrap(stencil(wide), &layout, u.sizes());
}

// ---- 2. An op of your own: a numerical flux as a kernel with its own gradient. -----------------
//
// The flux of Burgers' equation through the n - 1 faces between n rows (Rusanov 1961):
//   flux_i = (u_i^2 + u_{i+1}^2) / 4 - speed / 2 (u_{i+1} - u_i)

Tensor flux_kernel(const Tensor& u, double speed) {
  TORCH_CHECK(u.dim() == 2 && u.scalar_type() == torch::kDouble,
              "transport::flux: (rows, columns)");
  const Tensor in = u.contiguous();
  const auto faces = std::max<int64_t>(u.size(0) - 1, 0), columns = u.size(1);
  Tensor out = torch::empty({faces, columns}, u.options());
  const double* a = in.const_data_ptr<double>();
  double* f = out.data_ptr<double>();
  for (int64_t k = 0; k < faces * columns; ++k) {
    const double left = a[k], right = a[k + columns];
    f[k] = 0.25 * (left * left + right * right) - 0.5 * speed * (right - left);
  }
  return out;
}

/// Each face's gradient to the rows on its two sides.
Tensor to_both_sides(const Tensor& left, const Tensor& right) {
  return torch::constant_pad_nd(left, {0, 0, 0, 1}) + torch::constant_pad_nd(right, {0, 0, 1, 0});
}

struct Flux : torch::autograd::Function<Flux> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& u, double speed) {
    ctx->save_for_backward({u});
    ctx->saved_data["speed"] = speed;
    const at::AutoDispatchBelowADInplaceOrView below;
    return flux_kernel(u, speed);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const Tensor u = ctx->get_saved_variables()[0];
    const double half = 0.5 * ctx->saved_data["speed"].toDouble();
    const auto faces = u.size(0) - 1;
    return {to_both_sides(grads[0] * (0.5 * u.narrow(0, 0, faces) + half),
                          grads[0] * (0.5 * u.narrow(0, 1, faces) - half)),
            {}};
  }
};

/// Autograd's kernel; too few rows have no face and no gradient.
Tensor flux_autograd(const Tensor& u, double speed) {
  return u.size(0) > 1 ? Flux::apply(u, speed) : u.narrow(0, 0, 0) * speed;
}

Tensor flux(const Tensor& u, double speed) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("transport::flux", "")
                             .typed<Tensor(const Tensor&, double)>();
  return op.call(u, speed);
}

/// The rule: every rank has the faces above its rows, for which it needs the next rank's first row.
Tensor sharded_flux(const Tensor& u, double speed) {
  const Layout& layout = tensor::layout_of(u);
  std::vector<int64_t> sizes = u.sizes().vec();
  --sizes[0];
  const int cut = layout.cut_on(0);
  if (cut < 0) return tensor::wrap(flux(tensor::local(u), speed), &layout, sizes);
  auto cuts = layout.cuts();
  std::vector<spec::Range> needed;
  int64_t begin = 0;
  for (int64_t& rows : cuts[cut].sizes) {
    needed.push_back({begin, std::min(begin + rows + 1, u.size(0))});
    begin += rows;
    rows = std::max<int64_t>(needed.back().size() - 1, 0);  // now faces
  }
  const Tensor wide =
      exchange::exchange_rows(tensor::local(u), exchange::row_exchange(layout, cut, needed));
  const Layout* faces = spec::intern_layout(layout.mesh(), std::move(cuts));
  return tensor::wrap(flux(wide, speed), faces, sizes);
}

// ---- 3. An op of ATen: fft2 along cut dims by two transpositions instead of a gather. ----------

Tensor sharded_fft2(const Tensor& x, at::OptionalSymIntArrayRef s, at::IntArrayRef dims,
                    std::optional<std::string_view> norm) {
  TORCH_CHECK(!s.has_value(), "fft2: of sharded tensors takes no size s; pad or slice first");
  TORCH_CHECK(dims.size() == 2, "fft2: expected two dims, got ", dims);
  const Layout& layout = tensor::layout_of(x);
  const int d = static_cast<int>(at::maybe_wrap_dim(dims[0], x.dim()));
  const int e = static_cast<int>(at::maybe_wrap_dim(dims[1], x.dim()));
  // Along one dim at a time, which every rank then holds whole: the other one is cut.
  const auto along = [&](const Tensor& t, int transformed, int cut) {
    std::vector<int> cut_dims(layout.mesh().num_axes(), -1);
    for (const int axis : layout.axes()) cut_dims[axis] = cut;
    const Layout* to = tensor::chunk_layout(layout.mesh(), cut_dims, t.sizes());
    const Tensor piece = tensor::local(tensor::redistribute(t, to));
    const Tensor out = piece.numel() > 0  // the FFT library refuses empty pieces
                           ? torch::fft_fft(piece, std::nullopt, transformed, norm)
                           : piece.to(c10::toComplexType(piece.scalar_type()));
    return tensor::wrap(out, to, t.sizes());
  };
  return tensor::redistribute(along(along(x, e, d), d, e), &layout);
}

}  // namespace

TORCH_LIBRARY(transport, m) {
  m.def("flux(Tensor u, float speed) -> Tensor");
}
TORCH_LIBRARY_IMPL(transport, CPU, m) {
  m.impl("flux", flux_kernel);
}
TORCH_LIBRARY_IMPL(transport, Autograd, m) {
  m.impl("flux", flux_autograd);
}

SHARDFIELD_EXTENSION(transport, ops) {
  ops.composed("flux", TORCH_FN(sharded_flux));
}
SHARDFIELD_EXTENSION(aten, ops) {
  ops.composed("fft_fft2", TORCH_FN(sharded_fft2));
}

// ---- The comparison with one device. -----------------------------------------------------------

namespace {

using Field = std::function<Tensor(const Tensor&)>;

struct Derivatives {
  Tensor value, first, second;
};

/// Value, gradient of a loss, and gradient of the squared gradient; whole tensors.
Derivatives derive(const Field& f, Tensor u) {
  u = u.detach().requires_grad_();
  const Tensor y = f(u);
  const auto loss = (y * y * y).sum() + y.sum();
  const Tensor first = torch::autograd::grad({loss}, {u}, {}, true, /*create_graph=*/true)[0];
  const Tensor second = torch::autograd::grad({(first * first).sum()}, {u})[0];
  return {shardfield::full_tensor(y.detach()), shardfield::full_tensor(first.detach()),
          shardfield::full_tensor(second)};
}

void check_close(const Tensor& got, const Tensor& want, const std::string& what) {
  TORCH_CHECK(got.sizes() == want.sizes(), what, ": shape ", got.sizes(), ", serial ",
              want.sizes());
  const double error = (got - want).abs().max().item<double>() / want.abs().max().item<double>();
  TORCH_CHECK(error < 1e-12, what, ": relative difference ", error);
}

/// Uneven pieces on the first axis, the chunk rule on the second.
Tensor cut(const Tensor& u, const shardfield::Mesh& mesh) {
  std::vector<spec::Cut> cuts;
  for (int axis = 0; axis < mesh.num_axes(); ++axis) {
    auto sizes = spec::chunk_sizes(u.size(axis), mesh.shape[axis]);
    if (axis == 0 && sizes.size() > 1) {  // the last rank's rows go to the first: 9 as 5 + 4 + 0
      sizes.front() += sizes.back();
      sizes.back() = 0;
    }
    cuts.push_back({axis, {axis}, sizes});
  }
  return tensor::scatter_like(u, spec::intern_layout(mesh, cuts));
}

void compare(const std::string& name, const Field& f, const std::vector<int64_t>& shape) {
  const Tensor u = torch::sin(torch::arange(9 * 6, torch::kDouble).reshape({9, 6}) * 0.7);
  const Derivatives serial = derive(f, u);
  shardfield::run_in_process(shape, [&](const shardfield::Mesh& mesh) {
    torch::set_num_threads(1);
    const auto record = shardfield::comm::start_recording();
    const Derivatives ours = derive(f, cut(u, mesh));
    shardfield::comm::stop_recording(record);
    check_close(ours.value, serial.value, name);
    check_close(ours.first, serial.first, name + ", gradient");
    check_close(ours.second, serial.second, name + ", second gradient");
    for (const auto& [key, traffic] : record->rows)
      TORCH_CHECK(traffic.fallbacks == 0, name, ": ", key.second, " was gathered");
  });
}

}  // namespace

int main() {
  const std::vector<std::pair<std::string, Field>> fields = {
      {"laplacian", [](const Tensor& u) { return laplacian(u); }},
      {"flux", [](const Tensor& u) { return flux(u, 0.8); }},
      {"power spectrum", [](const Tensor& u) { return torch::view_as_real(torch::fft_fft2(u)); }},
  };
  try {
    for (const auto& [name, field] : fields) {
      for (const std::vector<int64_t>& shape :
           std::vector<std::vector<int64_t>>{{1}, {2}, {3}, {4}, {2, 2}})
        compare(name, field, shape);
      std::cout << name << ": as on one device, both derivatives too\n";
    }
  } catch (const std::exception& error) {
    std::cerr << "extending: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
