// LSTM, GRU and plain recurrent layers. Sequences of a batch do not meet: where the batch is cut
// each rank runs PyTorch's own layer on its sequences. A cut on time or features moves to the batch
// first.

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/cut_rows.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using spec::Cut;
using spec::Layout;
using tensor::is_sharded;
using tensor::layout_of;
using Tensors = std::vector<Tensor>;

struct Options {
  bool has_biases;
  int64_t num_layers;
  double dropout;
  bool train;
  bool bidirectional;
  bool batch_first;
};

/// Runs one layer: (input, states, weights) to the output followed by the new states.
using Layer = std::function<Tensors(const Tensor&, at::TensorList, at::TensorList)>;

/// The cut of the batch as seen from another tensor, where it is dim `batch`.
const Layout* batch_layout(const Layout& layout, int batch) {
  std::vector<Cut> cuts = layout.cuts();
  for (Cut& cut : cuts) cut.dim = batch;
  return spec::intern_layout(layout.mesh(), std::move(cuts));
}

Tensor sized(const Tensor& piece, int64_t batch, int64_t num_sequences) {
  if (piece.size(batch) == num_sequences) return piece;
  auto none = piece.sizes().vec();
  none[batch] = num_sequences;
  return empty_result_like(piece, none);
}

/// One layer on the pieces of a batch that is cut. Ranks without sequences run it on a dummy.
Tensors sharded_layer(const Tensor& x, const Tensors& states, const Tensors& weights,
                      const Layer& layer, int batch) {
  const Layout& layout = layout_of(x);
  const Layout* of_states = batch_layout(layout, 1);
  const Tensor own = tensor::local(x);
  const int64_t num_sequences = own.size(batch);
  Tensors own_states, own_weights;
  for (const Tensor& s : states) {
    const Tensor piece = tensor::local(tensor::redistribute(s, of_states));
    own_states.push_back(grown_to(piece, {piece.size(0), 1, piece.size(2)}));
  }
  for (const Tensor& w : weights) own_weights.push_back(tensor::enter(tensor::gather(w), layout));
  auto least = own.sizes().vec();
  least[batch] = 1;
  Tensors results = layer(grown_to(own, least), own_states, own_weights);
  for (size_t i = 0; i < results.size(); ++i) {
    const int dim = i == 0 ? batch : 1;
    const Tensor piece = sized(results[i], dim, num_sequences);
    auto sizes = piece.sizes().vec();
    sizes[dim] = x.size(batch);
    results[i] = tensor::wrap(piece, i == 0 ? &layout : of_states, sizes);
  }
  return results;
}

/// All layers, with dropout on sharded tensors in between, so that masks do not depend on the
/// ranks.
Tensors all_layers(const char* op, const Tensor& input, const Tensors& states,
                   const Tensors& weights, const Options& options, const Layer& layer) {
  Tensor x = with_simple_cuts(input);
  const int batch = x.dim() < 3 ? -1 : options.batch_first ? 0 : 1;
  std::vector<int64_t> busy;
  for (int64_t d = 0; d < x.dim(); ++d)
    if (d != batch) busy.push_back(d);
  for (int64_t d : busy) x = with_whole_dim(op, x, d, busy);
  const int64_t directions = options.bidirectional ? 2 : 1;
  const auto per_layer = static_cast<int64_t>(weights.size()) / options.num_layers;
  std::vector<Tensors> last(states.size());
  for (int64_t n = 0; n < options.num_layers; ++n) {
    Tensors own_states, results;
    for (const Tensor& s : states) own_states.push_back(s.narrow(0, n * directions, directions));
    const Tensors own_weights(weights.begin() + n * per_layer,
                              weights.begin() + (n + 1) * per_layer);
    if (is_sharded(x)) {
      results = sharded_layer(x, own_states, own_weights, layer, batch);
    } else {
      for (Tensor& s : own_states) s = tensor::gather(s);
      Tensors plain;
      for (const Tensor& w : own_weights) plain.push_back(tensor::gather(w));
      results = layer(x, own_states, plain);
    }
    x = results[0];
    if (options.dropout > 0 && options.train && n + 1 < options.num_layers)
      x = at::dropout(x, options.dropout, true);
    for (size_t i = 0; i < states.size(); ++i) last[i].push_back(results[i + 1]);
  }
  Tensors out{x};
  for (const Tensors& s : last) out.push_back(s.size() == 1 ? s[0] : at::cat(s, 0));
  return out;
}

std::tuple<Tensor, Tensor, Tensor> lstm(const Tensor& x, at::TensorList states,
                                        at::TensorList weights, bool has_biases, int64_t num_layers,
                                        double dropout, bool train, bool bidirectional,
                                        bool batch_first) {
  SHARDFIELD_CHECK(states.size() == 2, "lstm", "expects two hidden states, got ", states.size());
  const Layer layer = [=](const Tensor& t, at::TensorList s, at::TensorList w) {
    auto [y, h, c] = at::lstm(t, s, w, has_biases, 1, 0.0, train, bidirectional, batch_first);
    return Tensors{y, h, c};
  };
  const auto out =
      all_layers("lstm", x, states.vec(), weights.vec(),
                 {has_biases, num_layers, dropout, train, bidirectional, batch_first}, layer);
  return {out[0], out[1], out[2]};
}

template <auto function>
std::tuple<Tensor, Tensor> recurrent(const Tensor& x, const Tensor& state, at::TensorList weights,
                                     bool has_biases, int64_t num_layers, double dropout,
                                     bool train, bool bidirectional, bool batch_first) {
  const Layer layer = [=](const Tensor& t, at::TensorList s, at::TensorList w) {
    auto [y, h] = function(t, s[0], w, has_biases, 1, 0.0, train, bidirectional, batch_first);
    return Tensors{y, h};
  };
  const auto out =
      all_layers("rnn", x, {state}, weights.vec(),
                 {has_biases, num_layers, dropout, train, bidirectional, batch_first}, layer);
  return {out[0], out[1]};
}

}  // namespace

SHARDFIELD_OPS(recurrent) {
  table.composed("aten::lstm.input", TORCH_FN(lstm));
  table.composed("aten::gru.input", TORCH_FN(recurrent<&at::_ops::gru_input::call>));
  table.composed("aten::rnn_tanh.input", TORCH_FN(recurrent<&at::_ops::rnn_tanh_input::call>));
  table.composed("aten::rnn_relu.input", TORCH_FN(recurrent<&at::_ops::rnn_relu_input::call>));
}

}  // namespace shardfield::ops
