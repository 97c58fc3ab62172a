#include "shardfield/comm/rank_alignment.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <random>
#include <sstream>

#include <ATen/ATen.h>

#include <unistd.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/collectives.h"
#include "shardfield/comm/group_mesh.h"
#include "shardfield/comm/vector_collectives.h"

namespace shardfield::comm {

namespace {

constexpr const char* kOp = "align_communicators";
constexpr int64_t kCardBytes = 512;

std::string clean(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c == '\t' || c == '\n' || c == '\0'; }, ' ');
  return text.substr(0, 96);
}

std::vector<const RankCard*> by_solver_rank(const std::vector<RankCard>& cards) {
  std::vector<const RankCard*> sorted;
  for (const RankCard& card : cards) sorted.push_back(&card);
  std::stable_sort(sorted.begin(), sorted.end(), [](const RankCard* a, const RankCard* b) {
    return a->solver_rank < b->solver_rank;
  });
  return sorted;
}

std::string order_fault(const std::vector<const RankCard*>& sorted, bool whole) {
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (whole && sorted[i]->torch_rank != sorted[i]->solver_rank)
      return "solver rank " + std::to_string(sorted[i]->solver_rank) + " is torch rank " +
             std::to_string(sorted[i]->torch_rank) +
             "; start torch with the solver's ranks (call align_communicators before "
             "init_process_group, or set RANK from the solver's rank)";
    if (i > 0 && sorted[i]->torch_rank <= sorted[i - 1]->torch_rank)
      return "the solver numbers torch's ranks in another order (torch rank " +
             std::to_string(sorted[i - 1]->torch_rank) + " comes before " +
             std::to_string(sorted[i]->torch_rank) + "); split with a key that keeps the order";
  }
  return {};
}

std::string device_fault(const std::vector<const RankCard*>& sorted) {
  std::map<std::pair<std::string, std::string>, int> owner;
  for (const RankCard* card : sorted) {
    if (card->gpu.empty()) continue;
    const auto [it, fresh] = owner.try_emplace({card->host, card->gpu}, card->solver_rank);
    if (!fresh)
      return "ranks " + std::to_string(it->second) + " and " + std::to_string(card->solver_rank) +
             " use one accelerator (" + card->gpu + " on " + card->host +
             "); give each rank its own";
  }
  return {};
}

RankCard own_card(int solver_rank, int solver_size, const DistributedManager& manager) {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  std::random_device random;
  RankCard card;
  card.solver_rank = solver_rank;
  card.solver_size = solver_size;
  card.torch_rank = manager.rank();
  card.torch_size = manager.world_size();
  card.host = host.data();
  card.pid = ::getpid();
  card.device = manager.device().str();
  card.launcher = manager.launcher() + " " + std::to_string(manager.rank()) + "/" +
                  std::to_string(manager.world_size());
  card.token = static_cast<int64_t>((static_cast<uint64_t>(random()) << 31) ^ random());
  return card;
}

std::vector<RankCard> exchange_cards(const RankCard& mine, const spec::Mesh& mesh) {
  const std::string text = to_text(mine);
  at::Tensor bytes = at::zeros({kCardBytes}, at::kByte);
  std::copy(text.begin(), text.end(), bytes.mutable_data_ptr<uint8_t>());
  const at::Tensor all = all_gather(bytes, mesh, {0});
  std::vector<RankCard> cards;
  for (int r = 0; r < mesh.size(); ++r) {
    const auto* data = reinterpret_cast<const char*>(all[r].const_data_ptr<uint8_t>());
    cards.push_back(card_from_text(std::string(data, ::strnlen(data, kCardBytes))));
  }
  return cards;
}

/// Each rank's token to its right, then to its left neighbour.
void check_ring(const std::vector<RankCard>& cards, const spec::Mesh& mesh) {
  const int n = mesh.size();
  for (const int step : {1, n - 1}) {
    if (n == 1) return;
    std::vector<std::vector<int64_t>> sizes(n, std::vector<int64_t>(n, 0));
    for (int r = 0; r < n; ++r) sizes[r][(r + step) % n] = 1;
    const at::Tensor sent = at::full({1}, cards[mesh.rank].token, at::kLong);
    const int64_t got = all_to_all_v(sent, mesh, sizes).item<int64_t>();
    const int from = (mesh.rank + n - step) % n;
    SHARDFIELD_CHECK(got == cards[from].token, kOp, "rank ", mesh.rank,
                     " got a token that is not rank ", from,
                     "'s; the group's order is not what it says");
  }
}

}  // namespace

std::string to_text(const RankCard& c) {
  std::ostringstream out;
  out << c.solver_rank << '\t' << c.solver_size << '\t' << c.torch_rank << '\t' << c.torch_size
      << '\t' << clean(c.host) << '\t' << c.pid << '\t' << clean(c.device) << '\t' << clean(c.gpu)
      << '\t' << clean(c.launcher) << '\t' << c.token;
  return out.str();
}

RankCard card_from_text(const std::string& text) {
  std::vector<std::string> fields(1);
  for (const char c : text) {
    if (c == '\t') {
      fields.emplace_back();
    } else {
      fields.back() += c;
    }
  }
  SHARDFIELD_CHECK(fields.size() == 10, kOp, "cannot read what a rank sent: '", text, "'");
  RankCard card;
  card.solver_rank = std::stoi(fields[0]);
  card.solver_size = std::stoi(fields[1]);
  card.torch_rank = std::stoi(fields[2]);
  card.torch_size = std::stoi(fields[3]);
  card.host = fields[4];
  card.pid = std::stoll(fields[5]);
  card.device = fields[6];
  card.gpu = fields[7];
  card.launcher = fields[8];
  card.token = std::stoll(fields[9]);
  return card;
}

std::string alignment_table(const std::vector<RankCard>& cards) {
  std::ostringstream out;
  for (const RankCard* c : by_solver_rank(cards))
    out << "\n  solver " << c->solver_rank << "/" << c->solver_size << ", torch " << c->torch_rank
        << "/" << c->torch_size << ", launcher " << (c->launcher.empty() ? "none" : c->launcher)
        << ", host " << c->host << ", pid " << c->pid << ", device " << c->device
        << (c->gpu.empty() ? "" : " " + c->gpu);
  return out.str();
}

std::string alignment_fault(const std::vector<RankCard>& cards) {
  const std::vector<const RankCard*> sorted = by_solver_rank(cards);
  const int n = static_cast<int>(sorted.size());
  for (int i = 0; i < n; ++i) {
    if (sorted[i]->solver_size != n)
      return "expected a solver of " + std::to_string(n) + " ranks, solver rank " +
             std::to_string(sorted[i]->solver_rank) + " says " +
             std::to_string(sorted[i]->solver_size) +
             "; pass the group that has the solver's ranks";
    if (sorted[i]->solver_rank != i)
      return "expected the solver's ranks to be 0 to " + std::to_string(n - 1) +
             ", each once; solver rank " + std::to_string(sorted[i]->solver_rank) + " is wrong";
  }
  const std::string order = order_fault(sorted, n > 0 && sorted[0]->torch_size == n);
  return order.empty() ? device_fault(sorted) : order;
}

std::vector<RankCard> align_communicators(int solver_rank, int solver_size,
                                          const DistributedManager& manager,
                                          const std::string& group) {
  const spec::Mesh* mesh = make_mesh(manager.group(group));
  std::vector<RankCard> cards = exchange_cards(own_card(solver_rank, solver_size, manager), *mesh);
  const std::string fault = alignment_fault(cards);
  SHARDFIELD_CHECK(fault.empty(), kOp, fault, ". The ranks:", alignment_table(cards));
  check_ring(cards, *mesh);
  release_groups(*mesh);
  return cards;
}

}  // namespace shardfield::comm
