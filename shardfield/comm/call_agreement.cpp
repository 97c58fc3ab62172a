#include "shardfield/comm/call_agreement.h"

#include <atomic>
#include <sstream>

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/backward_scope.h"
#include "shardfield/comm/collectives.h"

namespace shardfield::comm {

namespace {

constexpr int kMaxDims = 16;

/// Positions of the numbers that travel.
enum Field : uint8_t {
  kOpHash,
  kHasProblem,
  kRecords,
  kDtype,
  kNumDims,
  kDim,
  kRoot,
  kSizesHash,
  kOwnRows,
  kExpectedRows,
  kFirstSize,
  kNumFields = kFirstSize + kMaxDims
};
using Row = std::vector<int64_t>;

std::atomic<bool> checks_on{true};

int64_t hash_step(int64_t hash, int64_t value) {
  return static_cast<int64_t>((static_cast<uint64_t>(hash) ^ static_cast<uint64_t>(value)) *
                              1099511628211ULL);
}

int64_t hash_of(const char* text) {
  int64_t hash = 1469598103;
  for (; *text; ++text) hash = hash_step(hash, *text);
  return hash;
}

Row row_of(const CollectiveCall& call) {
  Row row(kNumFields, 0);
  row[kOpHash] = hash_of(call.op);
  row[kHasProblem] = !call.problem.empty();
  row[kDtype] = -1;
  row[kRoot] = call.root;
  row[kSizesHash] = static_cast<int64_t>(call.sizes.size());
  for (const int64_t size : call.sizes) row[kSizesHash] = hash_step(row[kSizesHash], size);
  row[kOwnRows] = call.own_rows;
  row[kExpectedRows] = call.expected_rows;
  row[kDim] = call.dim;
  if (!call.tensor) return row;
  const at::Tensor& t = *call.tensor;
  row[kRecords] = call.records_grad || records_grad(t);
  row[kDtype] = static_cast<int64_t>(t.scalar_type());
  row[kNumDims] = t.dim();
  for (int d = 0; d < t.dim() && d < kMaxDims; ++d)
    row[kFirstSize + d] = d == call.dim ? 0 : t.size(d);
  return row;
}

bool same(const Row& a, const Row& b) {
  for (const int field : {kOpHash, kRoot, kSizesHash})
    if (a[field] != b[field]) return false;
  if (a[kDtype] < 0 || b[kDtype] < 0) return true;  // one of them only receives
  for (const int field : {kDtype, kNumDims, kDim})
    if (a[field] != b[field]) return false;
  return std::equal(a.begin() + kFirstSize, a.end(), b.begin() + kFirstSize);
}

std::string describe_row(const CollectiveCall& call, const Row& row, const Row& mine) {
  std::ostringstream out;
  if (row[kOpHash] != mine[kOpHash]) {
    out << "another op than " << call.op;
    return out.str();
  }
  if (row[kDtype] < 0) return row[kHasProblem] ? "no tensor to move (refused there)" : "no tensor";
  out << at::ScalarType(row[kDtype]) << " [";
  for (int64_t d = 0; d < std::min<int64_t>(row[kNumDims], kMaxDims); ++d) {
    out << (d ? ", " : "")
        << (d == row[kDim] && row[kOwnRows] >= 0 ? row[kOwnRows] : row[kFirstSize + d]);
  }
  out << "] along dim " << row[kDim];
  if (row[kOwnRows] != row[kExpectedRows]) out << " where its sizes say " << row[kExpectedRows];
  if (row[kRoot] >= 0) out << ", root " << row[kRoot];
  if (row[kSizesHash] != mine[kSizesHash]) out << ", other sizes than here";
  if (row[kHasProblem]) out << " (refused there)";
  return out.str();
}

[[noreturn]] void refuse(const CollectiveCall& call, const spec::Mesh& group,
                         const std::vector<Row>& rows) {
  std::string table;
  for (size_t r = 0; r < rows.size(); ++r)
    table += "\n  rank " + std::to_string(r) + ": " +
             describe_row(call, rows[r], rows[static_cast<size_t>(group.rank)]);
  SHARDFIELD_CHECK(false, call.op, "the ranks of the group do not agree, on rank ", group.rank,
                   " of ", group.size(),
                   "; pass the same op, dtype, sizes and other dims on every rank. Got:", table);
}

Agreement agreed(const Row& row, bool records) {
  Agreement out;
  out.records_grad = records;
  out.dtype = at::ScalarType(row[kDtype]);
  for (int64_t d = 0; d < std::min<int64_t>(row[kNumDims], kMaxDims); ++d)
    out.other_sizes.push_back(row[kFirstSize + d]);
  return out;
}

}  // namespace

std::string memory_problem(const at::Tensor& x) {
  if (x.is_nested() || x.is_quantized() || x.layout() != at::kStrided || !x.has_storage())
    return "expected a dense tensor with memory of its own, got a sparse, nested, quantized or "
           "wrapped one";
  if (x.dim() <= kMaxDims) return {};
  return "expected at most " + std::to_string(kMaxDims) + " dims, got " + std::to_string(x.dim()) +
         "; flatten some";
}

Agreement agree_on_call(const CollectiveCall& call, const spec::Mesh& group) {
  // There even the small tensors of the comparison are wrapped, and have no memory to send from.
  SHARDFIELD_CHECK(
      !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode),
      call.op, "expected a call outside of torch.func's transforms, on rank ", group.rank, " of ",
      group.size(), "; take derivatives by torch.autograd.grad (create_graph=True for more)");
  const Row mine = row_of(call);
  const auto fail_here = [&] {
    SHARDFIELD_CHECK(call.problem.empty(), call.op, call.problem, ", on rank ", group.rank, " of ",
                     group.size());
  };
  // A root's metadata must travel; everything else can be taken on trust.
  if (group.size() == 1 || (!checks_on && call.root < 0)) {
    fail_here();
    return agreed(mine, mine[kRecords] != 0);
  }
  const std::vector<Row> rows = all_gather_ints(mine, group, call.device);
  fail_here();
  bool fits = true;
  bool records = false;
  const Row* reference = &mine;
  for (const Row& row : rows) {
    if (row[kDtype] >= 0) reference = &row;
    records |= row[kRecords] != 0;
  }
  for (const Row& row : rows) fits &= same(row, *reference) && !row[kHasProblem];
  if (!fits) refuse(call, group, rows);
  return agreed(*reference, records);
}

at::Tensor with_common_grad(const at::Tensor& value, const spec::Mesh& group) {
  if (!at::GradMode::is_enabled() || group.size() == 1) return value;
  bool any = false;
  for (const Row& row : all_gather_ints({records_grad(value)}, group, value.device()))
    any |= row[0] != 0;
  return any && !value.requires_grad() ? value.detach().requires_grad_() : value;
}

void set_call_checks(bool on) {
  checks_on = on;
}

bool call_checks() {
  return checks_on;
}

}  // namespace shardfield::comm
