// Recurrent layers in reproducible mode, step by step out of products and elementwise ops: a
// layer's own kernel multiplies the sequences of a piece together, in an order that depends on how
// many they are. Formulas as in torch.nn.LSTM, GRU and RNN.

#include <ATen/ATen.h>

#include "shardfield/ops/reproducible_form.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

namespace op = at::_ops;
using at::Tensor;
using spec::Cut;
using tensor::is_sharded;
using tensor::layout_of;
using Tensors = std::vector<Tensor>;

/// The weights of one direction of one layer.
struct Weights {
  Tensor input, hidden, input_bias, hidden_bias, projection;
};

/// One step: products of the input with the input weights, and the states, to the new states.
using Cell = Tensors (*)(const Tensor& from_input, const Tensors& states, const Weights& w);

Tensor from_hidden(const Tensors& states, const Weights& w) {
  return at::linear(states[0], w.hidden, w.hidden_bias);
}
Tensors lstm_cell(const Tensor& from_input, const Tensors& states, const Weights& w) {
  const Tensors gates = (from_input + from_hidden(states, w)).chunk(4, -1);
  const Tensor memory = gates[1].sigmoid() * states[1] + gates[0].sigmoid() * gates[2].tanh();
  const Tensor out = gates[3].sigmoid() * memory.tanh();
  return {w.projection.defined() ? at::linear(out, w.projection) : out, memory};
}
Tensors gru_cell(const Tensor& from_input, const Tensors& states, const Weights& w) {
  const Tensors x = from_input.chunk(3, -1), h = from_hidden(states, w).chunk(3, -1);
  const Tensor reset = (x[0] + h[0]).sigmoid(), update = (x[1] + h[1]).sigmoid();
  const Tensor fresh = (x[2] + reset * h[2]).tanh();
  return {(states[0] - fresh) * update + fresh};
}
Tensors tanh_cell(const Tensor& from_input, const Tensors& states, const Weights& w) {
  return {(from_input + from_hidden(states, w)).tanh()};
}
Tensors relu_cell(const Tensor& from_input, const Tensors& states, const Weights& w) {
  return {(from_input + from_hidden(states, w)).relu()};
}

struct Options {
  bool has_biases;
  int64_t num_layers;
  double dropout;
  bool train;
  bool bidirectional;
};

/// The input cut by its batch alone, evenly where it was cut elsewhere; empty pieces do no harm.
Tensor cut_by_batch(const Tensor& input, int batch) {
  Tensor x = with_simple_cuts(input);
  if (is_sharded(x) &&
      std::ranges::all_of(layout_of(x).cuts(), [&](const Cut& cut) { return cut.dim == batch; }))
    return x;
  return tensor::redistribute(x, cut_over_all_axes(layout_of(input), batch, x.size(batch)));
}

/// Output and last states of one direction. x is (steps, batch, features).
std::pair<Tensor, Tensors> run_direction(const Tensor& x, Tensors states, const Weights& w,
                                         bool reverse, Cell cell) {
  const Tensors steps = at::linear(x, w.input, w.input_bias).unbind(0);
  Tensors out(steps.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    const size_t t = reverse ? steps.size() - 1 - i : i;
    states = cell(steps[t], states, w);
    out[t] = states[0];
  }
  return {at::stack(out, 0), states};
}

/// All layers: the output followed by the last states.
Tensors run_layers(Tensor x, const Tensors& first_states, at::TensorList weights,
                   const Options& options, Cell cell) {
  const size_t directions = options.bidirectional ? 2 : 1;
  const size_t chains = directions * options.num_layers, each = weights.size() / chains;
  std::vector<Tensors> last(first_states.size());
  for (size_t chain = 0; chain < chains; chain += directions) {
    Tensors outs;
    for (size_t i = chain; i < chain + directions; ++i) {
      const auto own = weights.slice(i * each, each);
      Weights w{own[0], own[1], {}, {}, {}};
      if (options.has_biases) w.input_bias = own[2], w.hidden_bias = own[3];
      if (each > (options.has_biases ? 4 : 2)) w.projection = own[each - 1];
      Tensors states;
      for (const Tensor& s : first_states) states.push_back(s.select(0, static_cast<int64_t>(i)));
      auto [out, reached] = run_direction(x, states, w, i > chain, cell);
      outs.push_back(out);
      for (size_t s = 0; s < reached.size(); ++s) last[s].push_back(reached[s]);
    }
    x = outs.size() == 1 ? outs[0] : at::cat(outs, -1);
    if (options.dropout > 0 && options.train && chain + directions < chains)
      x = at::dropout(x, options.dropout, true);
  }
  Tensors results{x};
  for (const Tensors& states : last) results.push_back(at::stack(states, 0));
  return results;
}

/// The output followed by the last states; nothing where only states or weights are sharded.
std::optional<Tensors> by_steps(const Tensor& input, at::TensorList states, at::TensorList weights,
                                const Options& options, bool batch_first, Cell cell) {
  if (!is_sharded(input) || input.dim() != 3) return std::nullopt;
  const Tensor x = cut_by_batch(batch_first ? input.transpose(0, 1) : input, 1);
  Tensors beside;
  for (const Tensor& s : states) beside.push_back(tensor::redistribute(s, &layout_of(x)));
  Tensors results = run_layers(x, beside, weights, options, cell);
  if (batch_first) results[0] = results[0].transpose(0, 1);
  return results;
}

std::tuple<Tensor, Tensor, Tensor> lstm(const Tensor& x, at::TensorList states,
                                        at::TensorList weights, bool has_biases, int64_t num_layers,
                                        double dropout, bool train, bool bidirectional,
                                        bool batch_first) {
  if (const auto out =
          by_steps(x, states, weights, {has_biases, num_layers, dropout, train, bidirectional},
                   batch_first, lstm_cell))
    return {(*out)[0], (*out)[1], (*out)[2]};
  const dispatch::OrdinaryArithmetic ordinary;
  return at::lstm(x, states, weights, has_biases, num_layers, dropout, train, bidirectional,
                  batch_first);
}
template <class Op, Cell cell>
std::tuple<Tensor, Tensor> recurrent(const Tensor& x, const Tensor& state, at::TensorList weights,
                                     bool has_biases, int64_t num_layers, double dropout,
                                     bool train, bool bidirectional, bool batch_first) {
  if (const auto out =
          by_steps(x, {state}, weights, {has_biases, num_layers, dropout, train, bidirectional},
                   batch_first, cell))
    return {(*out)[0], (*out)[1]};
  const dispatch::OrdinaryArithmetic ordinary;
  return Op::call(x, state, weights, has_biases, num_layers, dropout, train, bidirectional,
                  batch_first);
}

}  // namespace

SHARDFIELD_OPS(reproducible_recurrent) {
  table.reproducible_composed("aten::lstm.input", TORCH_FN(lstm));
  table.reproducible_composed("aten::gru.input", TORCH_FN((recurrent<op::gru_input, gru_cell>)));
  table.reproducible_composed("aten::rnn_tanh.input",
                              TORCH_FN((recurrent<op::rnn_tanh_input, tanh_cell>)));
  table.reproducible_composed("aten::rnn_relu.input",
                              TORCH_FN((recurrent<op::rnn_relu_input, relu_cell>)));
}

}  // namespace shardfield::ops
