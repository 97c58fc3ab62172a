#include "shardfield/comm/rank_alignment.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <random>

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

#include <unistd.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/collectives.h"
#include "shardfield/comm/group_mesh.h"
#include "shardfield/comm/vector_collectives.h"

namespace shardfield::comm {

namespace {

constexpr const char* kOp = "align_communicators";
constexpr int64_t kCardBytes = 512;

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

std::vector<RankCard> align_communicators(int solver_rank, int solver_size,
                                          const DistributedManager& manager,
                                          const std::string& group) {
  const spec::Mesh* mesh = make_mesh(manager.group(group));
  // Also when this throws: the group holds the job's store, and with it its port.
  const auto released = c10::make_scope_exit([mesh] { release_groups(*mesh); });
  std::vector<RankCard> cards = exchange_cards(own_card(solver_rank, solver_size, manager), *mesh);
  const std::string fault = alignment_fault(cards);
  SHARDFIELD_CHECK(fault.empty(), kOp, fault, ". The ranks:", alignment_table(cards));
  check_ring(cards, *mesh);
  return cards;
}

}  // namespace shardfield::comm
