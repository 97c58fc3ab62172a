// A finite-difference MPI solver that trains a network while it runs, on its own decomposition:
// nothing is gathered, each rank's rows are its piece of the sample.
//
//   mpirun -np 3 mpi_heat [STEPS] [--check]
//
// The network learns what one time step of the heat equation adds to a field. With --check every
// rank also solves the whole plate alone and trains the same network on plain tensors; both must
// give the same losses.

#include <cmath>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <mpi.h>
#include <shardfield/comm/align_mpi.h>
#include <shardfield/shardfield.h>
#include <shardfield/spec/layout.h>

namespace {

constexpr int64_t kRows = 26, kColumns = 20;
constexpr double kDiffusion = 0.2;  // of one explicit step, grid spacing 1

// ---- The solver: a plain MPI program. --------------------------------------------------------

/// Rows of a plate with fixed edges, cut over the ranks of a communicator, one ghost row per side.
class HeatSolver {
 public:
  explicit HeatSolver(MPI_Comm comm) : comm_(comm) {
    MPI_Comm_rank(comm, &rank_);
    MPI_Comm_size(comm, &size_);
    for (int r = 0; r < size_; ++r)
      rows_per_rank_.push_back(kRows * (r + 1) / size_ - kRows * r / size_);
    first_ = kRows * rank_ / size_;
    now_.assign((rows() + 2) * kColumns, 0.0);
    for (int64_t i = 0; i < rows(); ++i)
      for (int64_t j = 0; j < kColumns; ++j)
        at(i, j) = std::sin(0.3 * static_cast<double>(first_ + i)) *
                   std::cos(0.5 * static_cast<double>(j));
  }

  int64_t rows() const { return rows_per_rank_[rank_]; }
  const std::vector<int64_t>& rows_per_rank() const { return rows_per_rank_; }
  double* field() { return &now_[kColumns]; }

  void step() {
    exchange_ghosts();
    std::vector<double> next = now_;
    for (int64_t i = 0; i < rows(); ++i) {
      if (first_ + i == 0 || first_ + i == kRows - 1) continue;
      for (int64_t j = 1; j + 1 < kColumns; ++j)
        next[(i + 1) * kColumns + j] +=
            kDiffusion * (at(i - 1, j) + at(i + 1, j) + at(i, j - 1) + at(i, j + 1) - 4 * at(i, j));
    }
    now_.swap(next);
  }

 private:
  double& at(int64_t row, int64_t column) { return now_[(row + 1) * kColumns + column]; }

  void exchange_ghosts() {
    const int up = rank_ > 0 ? rank_ - 1 : MPI_PROC_NULL;
    const int down = rank_ + 1 < size_ ? rank_ + 1 : MPI_PROC_NULL;
    MPI_Sendrecv(&at(0, 0), kColumns, MPI_DOUBLE, up, 0, &at(rows(), 0), kColumns, MPI_DOUBLE, down,
                 0, comm_, MPI_STATUS_IGNORE);
    MPI_Sendrecv(&at(rows() - 1, 0), kColumns, MPI_DOUBLE, down, 1, &at(-1, 0), kColumns,
                 MPI_DOUBLE, up, 1, comm_, MPI_STATUS_IGNORE);
  }

  MPI_Comm comm_;
  int rank_ = 0, size_ = 1;
  int64_t first_ = 0;
  std::vector<int64_t> rows_per_rank_;
  std::vector<double> now_;  // ghost row, own rows, ghost row
};

// ---- The network; it knows nothing of ranks. -------------------------------------------------

torch::nn::Sequential make_network() {
  torch::manual_seed(0);
  const auto conv = [](int64_t in, int64_t out) {
    return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).padding(1));
  };
  torch::nn::Sequential net(conv(1, 8), torch::nn::GELU(), conv(8, 1));
  net->to(torch::kDouble);
  return net;
}

/// Solves and trains side by side; the loss of every step.
/// @param mesh  the solver's ranks, or nullptr when it has the whole plate
std::vector<double> run(HeatSolver& solver, const shardfield::Mesh* mesh, int steps) {
  const auto as_sample = [&](const torch::Tensor& rows) {
    if (!mesh) return rows;
    const auto* layout = shardfield::spec::intern_layout(*mesh, {{2, {0}, solver.rows_per_rank()}});
    return shardfield::tensor::wrap(rows, layout, {1, 1, kRows, kColumns});
  };
  const auto field = [&] {
    return torch::from_blob(solver.field(), {1, 1, solver.rows(), kColumns}, torch::kDouble)
        .clone();
  };
  torch::nn::Sequential net = make_network();
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.01));
  std::vector<double> losses;
  for (int i = 0; i < steps; ++i) {
    const torch::Tensor before = as_sample(field());
    solver.step();
    const torch::Tensor after = as_sample(field());
    optimizer.zero_grad();
    const torch::Tensor loss = torch::mse_loss(before + net->forward(before), after);
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

int work(int steps, bool check) {
  const auto& manager = shardfield::comm::align_communicators(MPI_COMM_WORLD);
  const shardfield::Mesh* mesh =
      shardfield::comm::DistributedManager::instance().initialize_mesh({-1}, {"domain"});
  HeatSolver solver(MPI_COMM_WORLD);
  const std::vector<double> losses = run(solver, mesh, steps);
  if (manager.rank() == 0)
    std::cout << manager.world_size() << " ranks, loss " << losses.front() << " -> "
              << losses.back() << std::endl;
  if (!check) return 0;
  HeatSolver alone(MPI_COMM_SELF);
  const std::vector<double> serial = run(alone, nullptr, steps);
  double worst = 0;
  for (int i = 0; i < steps; ++i)
    worst = std::max(worst, std::abs(losses[i] - serial[i]) / std::abs(serial[i]));
  if (manager.rank() == 0)
    std::cout << "largest relative difference to one rank: " << worst << std::endl;
  return worst < 1e-9 && losses.back() < losses.front() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  torch::set_num_threads(1);
  int steps = 40;
  bool check = false;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--check") {
      check = true;
    } else {
      steps = std::max(std::atoi(argv[i]), 1);
    }
  }
  int result = 1;
  try {
    result = work(steps, check);
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  shardfield::comm::DistributedManager::cleanup(/*barrier=*/true);
  MPI_Finalize();
  return result;
}
