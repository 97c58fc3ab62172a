#include "shardfield/comm/rank_card.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <sstream>

#include "shardfield/base/error.h"

namespace shardfield::comm {

namespace {

constexpr const char* kOp = "align_communicators";

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

/// The whole field as a number; `text` is the card it stands in.
template <typename T>
T number(const std::string& field, const std::string& text) {
  T value = 0;
  const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), value);
  SHARDFIELD_CHECK(error == std::errc() && end == field.data() + field.size(), kOp,
                   "cannot read what a rank sent: '", text, "'");
  return value;
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
  card.solver_rank = number<int>(fields[0], text);
  card.solver_size = number<int>(fields[1], text);
  card.torch_rank = number<int>(fields[2], text);
  card.torch_size = number<int>(fields[3], text);
  card.host = fields[4];
  card.pid = number<int64_t>(fields[5], text);
  card.device = fields[6];
  card.gpu = fields[7];
  card.launcher = fields[8];
  card.token = number<int64_t>(fields[9], text);
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

}  // namespace shardfield::comm
