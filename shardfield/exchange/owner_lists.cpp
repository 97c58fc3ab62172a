#include "shardfield/exchange/owner_lists.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "shardfield/comm/collectives.h"
#include "shardfield/exchange/cut_ranks.h"

namespace shardfield::exchange {

using at::Tensor;

OwnerList list_at_owners(const spec::Layout& layout, size_t c, const Tensor& named,
                         int64_t first_entry) {
  const at::NoGradGuard no_grad;
  const spec::Mesh& mesh = layout.mesh();
  const spec::Cut& cut = layout.cuts()[c];
  const std::vector<int> ranks = ranks_along(layout, c);
  const auto mine = static_cast<size_t>(layout.piece(c));
  std::vector<Tensor> entries, rows;
  std::vector<int64_t> counts;
  for (size_t p = 0; p < ranks.size(); ++p) {
    const int64_t begin = cut.offset(static_cast<int>(p));
    const Tensor places = named.ge(begin).logical_and(named.lt(begin + cut.sizes[p])).nonzero();
    entries.push_back(places.flatten());
    rows.push_back(named.index_select(0, entries[p]) - begin);
    entries[p] += first_entry;
    counts.push_back(rows[p].numel());
  }
  const auto all = comm::all_gather_ints(counts, mesh, named.device());
  std::vector<comm::Message> sends, recvs;
  for (size_t p = 0; p < ranks.size(); ++p) {
    if (p == mine) continue;
    sends.push_back({ranks[p], entries[p]});
    sends.push_back({ranks[p], rows[p]});
    entries[p] = at::empty({all[ranks[p]][mine]}, named.options());
    rows[p] = at::empty({all[ranks[p]][mine]}, named.options());
    recvs.push_back({ranks[p], entries[p]});
    recvs.push_back({ranks[p], rows[p]});
  }
  comm::start_exchange(mesh, std::move(sends), std::move(recvs)).wait();
  return {at::cat(entries), at::cat(rows)};
}

}  // namespace shardfield::exchange
