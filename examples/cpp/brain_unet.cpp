// The U-Net of examples/python/brain over torch::nn: the same network, loss, data and first
// weights, the ranks as threads of this process.
//
//   brain_unet DATA.pt OUT.json STEPS
//
// DATA.pt holds the volume, the labels and the first weights (examples/python/brain_unet.py writes
// it). The losses of every run go to OUT.json; the Python demo compares them with its own.

#include <algorithm>
#include <chrono>
#include <exception>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <shardfield/shardfield.h>

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using torch::Tensor;

namespace {

// ---- The model; nothing here knows about several ranks.
// ------------------------------------------

/// Two 3x3x3 convolutions, each followed by an instance norm and a GELU.
struct BlockImpl : nn::Module {
  BlockImpl(int64_t inputs, int64_t outputs) {
    const auto conv = [](int64_t in, int64_t out) {
      return nn::Conv3d(nn::Conv3dOptions(in, out, 3).padding(1).bias(false));
    };
    const auto norm = [](int64_t channels) {
      return nn::InstanceNorm3d(nn::InstanceNorm3dOptions(channels).affine(true));
    };
    conv1 = register_module("conv1", conv(inputs, outputs));
    norm1 = register_module("norm1", norm(outputs));
    conv2 = register_module("conv2", conv(outputs, outputs));
    norm2 = register_module("norm2", norm(outputs));
  }

  Tensor forward(Tensor x) {
    x = F::gelu(norm1(conv1(x)));
    return F::gelu(norm2(conv2(x)));
  }

  nn::Conv3d conv1{nullptr}, conv2{nullptr};
  nn::InstanceNorm3d norm1{nullptr}, norm2{nullptr};
};
TORCH_MODULE(Block);

/// Resizes to the skip's size, so that odd sizes work too, and joins both along the channels.
Tensor up(Tensor x, const Tensor& skip) {
  const auto size = skip.sizes().slice(2).vec();
  x = F::interpolate(
      x, F::InterpolateFuncOptions().size(size).mode(torch::kTrilinear).align_corners(false));
  return torch::cat({skip, x}, 1);
}

/// Three resolutions, strided convolutions down, trilinear interpolation up, skips by `cat`.
struct UNetImpl : nn::Module {
  explicit UNetImpl(int64_t classes = 3, int64_t width = 8) {
    const auto conv = [](int64_t in, int64_t out, int64_t kernel, int64_t stride) {
      return nn::Conv3d(nn::Conv3dOptions(in, out, kernel).stride(stride).padding(kernel / 2));
    };
    enter = register_module("enter", Block(1, width));
    down1 = register_module("down1", conv(width, 2 * width, 3, 2));
    mid1 = register_module("mid1", Block(2 * width, 2 * width));
    down2 = register_module("down2", conv(2 * width, 4 * width, 3, 2));
    bottom = register_module("bottom", Block(4 * width, 4 * width));
    thin2 = register_module("thin2", conv(4 * width, 2 * width, 1, 1));
    mid2 = register_module("mid2", Block(4 * width, 2 * width));
    thin1 = register_module("thin1", conv(2 * width, width, 1, 1));
    leave = register_module("leave", Block(2 * width, width));
    head = register_module("head", conv(width, classes, 1, 1));
  }

  Tensor forward(const Tensor& x) {
    auto a = enter(x);
    auto b = mid1(down1(a));
    auto c = bottom(down2(b));
    b = mid2(up(thin2(c), b));
    a = leave(up(thin1(b), a));
    return head(a);
  }

  Block enter{nullptr}, mid1{nullptr}, bottom{nullptr}, mid2{nullptr}, leave{nullptr};
  nn::Conv3d down1{nullptr}, down2{nullptr}, thin2{nullptr}, thin1{nullptr}, head{nullptr};
};
TORCH_MODULE(UNet);

/// Mean of the soft Dice loss over the classes and the cross-entropy, a scalar.
Tensor dice_and_cross_entropy(const Tensor& logits, const Tensor& labels) {
  const auto classes = torch::arange(logits.size(1)).view({1, -1, 1, 1, 1});
  const auto truth = (labels.unsqueeze(1) == classes).to(logits.scalar_type());
  const auto guess = logits.softmax(1);
  const auto overlap = (guess * truth).sum({0, 2, 3, 4});
  const auto total = (guess + truth).sum({0, 2, 3, 4});
  const auto dice = 1.0 - ((2.0 * overlap + 1.0) / (total + 1.0)).mean();
  return dice + F::cross_entropy(logits, labels);
}

// ---- Training: one loop for the serial run and for every rank.
// -----------------------------------

struct Data {
  Tensor scan, labels;
  std::vector<double> rates;  // of every step
  std::map<std::string, Tensor> weights;
};

struct Run {
  std::vector<double> losses, seconds;
};

Data load(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "brain_unet: cannot read ", path, "; examples/python/brain_unet.py writes it");
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  Data data;
  const std::string prefix = "model.";
  for (const auto& item : torch::pickle_load(bytes).toGenericDict()) {
    const auto& name = item.key().toStringRef();
    const auto tensor = item.value().toTensor();
    if (name == "scan") data.scan = tensor;
    if (name == "labels") data.labels = tensor;
    if (name == "rates")
      data.rates.assign(tensor.data_ptr<double>(), tensor.data_ptr<double>() + tensor.numel());
    if (name.starts_with(prefix)) data.weights[name.substr(prefix.size())] = tensor;
  }
  TORCH_CHECK(data.scan.defined() && data.labels.defined(), path, " lacks the scan or the labels");
  return data;
}

void set_weights(UNet& model, const std::map<std::string, Tensor>& weights) {
  torch::NoGradGuard no_grad;
  for (auto& parameter : model->named_parameters()) {
    parameter.value().copy_(weights.at(parameter.key()));
  }
}

Run train(UNet& model, const Tensor& scan, const Tensor& labels, const std::vector<double>& rates) {
  torch::optim::Adam optimizer(model->parameters(),
                               torch::optim::AdamOptions(0).betas({0.9, 0.95}));
  Run run;
  for (const double rate : rates) {
    optimizer.param_groups()[0].options().set_lr(rate);
    const auto start = std::chrono::steady_clock::now();
    optimizer.zero_grad();
    const auto loss = dice_and_cross_entropy(model->forward(scan), labels);
    loss.backward();
    optimizer.step();
    run.losses.push_back(loss.item<double>());
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    run.seconds.push_back(elapsed.count());
  }
  return run;
}

// ---- Runs: alone, or as threads that share the volume.
// -------------------------------------------

struct Result {
  std::string title;
  std::vector<int64_t> mesh;
  Run run;
  std::map<std::string, int64_t> fallbacks;
};

Result run_serial(const Data& data) {
  UNet model;
  model->to(data.scan.scalar_type());
  set_weights(model, data.weights);
  return {"serial", {}, train(model, data.scan, data.labels, data.rates), {}};
}

/// Splits the volume over a mesh, mesh axis i along spatial axis i, and trains on every rank.
Result run_sharded(const std::string& title, const std::vector<int64_t>& shape, const Data& data) {
  Result result{title, shape, {}, {}};
  std::mutex mutex;
  const auto body = [&](const shardfield::Mesh& mesh) {
    torch::set_num_threads(1);
    std::vector<int> scan_dims, label_dims;
    for (int axis = 0; axis < mesh.num_axes(); ++axis) {
      scan_dims.push_back(axis + 2);
      label_dims.push_back(axis + 1);
    }
    UNet model;
    model->to(data.scan.scalar_type());
    set_weights(model, data.weights);
    const auto scan = shardfield::shard_tensor(data.scan, mesh, scan_dims);
    const auto labels = shardfield::shard_tensor(data.labels, mesh, label_dims);
    const auto record = shardfield::comm::start_recording();
    const auto run = train(model, scan, labels, data.rates);
    shardfield::comm::stop_recording(record);

    const std::lock_guard<std::mutex> lock(mutex);
    for (const auto& [key, traffic] : record->rows) {
      if (traffic.fallbacks > 0) result.fallbacks[key.second] += traffic.fallbacks;
    }
    if (mesh.rank == 0) result.run = run;
  };
  shardfield::run_in_process(shape, body);
  return result;
}

// ---- Output.
// -------------------------------------------------------------------------------------

double median(std::vector<double> values) {
  if (values.empty()) return 0.0;
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void write_json(const std::string& path, const std::vector<Result>& results) {
  std::ofstream file(path);
  file << std::setprecision(17) << "{\"runs\": [";
  const char* next_run = "";
  for (const auto& result : results) {
    file << next_run << "\n  {\"title\": \"" << result.title << "\", \"mesh\": [";
    for (size_t i = 0; i < result.mesh.size(); ++i) file << (i ? ", " : "") << result.mesh[i];
    file << "], \"step_seconds\": " << median(result.run.seconds) << ", \"losses\": [";
    const auto& losses = result.run.losses;
    for (size_t i = 0; i < losses.size(); ++i) file << (i ? ", " : "") << losses[i];
    file << "], \"fallbacks\": {";
    const char* next_op = "";
    for (const auto& [op, count] : result.fallbacks) {
      file << next_op << '"' << op << "\": " << count;
      next_op = ", ";
    }
    file << "}}";
    next_run = ",";
  }
  file << "\n]}\n";
  TORCH_CHECK(file.good(), "brain_unet: cannot write ", path);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: brain_unet DATA.pt OUT.json STEPS\n";
    return 2;
  }
  try {
    auto data = load(argv[1]);
    data.rates.resize(std::min(data.rates.size(), std::stoul(argv[3])));
    TORCH_CHECK(!data.rates.empty(), "brain_unet: no steps to train");
    std::vector<Result> results;
    results.push_back(run_serial(data));
    results.push_back(run_sharded("4 threads", {2, 2}, data));
    results.push_back(run_sharded("3 threads", {3}, data));
    write_json(argv[2], results);
    for (const auto& result : results) {
      std::cout << std::left << std::setw(22) << result.title << " loss " << std::setprecision(9)
                << result.run.losses.front() << " -> " << result.run.losses.back() << '\n';
    }
  } catch (const std::exception& error) {
    std::cerr << "brain_unet: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
