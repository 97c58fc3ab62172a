#include <atomic>
#include <mutex>
#include <set>

#include "shardfield/base/error.h"
#include "shardfield/comm/traffic.h"
#include "shardfield/dispatch/boxed.h"
#include "shardfield/tensor/shard_tensor_impl.h"

namespace shardfield::dispatch {

namespace {
std::atomic<bool> strict{false};
}

void set_strict(bool on) {
  strict = on;
}
bool is_strict() {
  return strict;
}

void report_fallback(const std::string& op, const at::Tensor& example, const char* reason) {
  const spec::Layout& layout = tensor::layout_of(example);
  SHARDFIELD_CHECK(!strict, op, "would gather ", tensor::describe(example), " on rank ",
                   layout.mesh().rank, " because ", reason,
                   ", and strict mode forbids it; redistribute the input or set_strict(False)");
  comm::count_fallback(layout.mesh().context, op.c_str());
  static auto* mutex = new std::mutex();
  static auto* seen = new std::set<std::string>();
  const std::lock_guard<std::mutex> lock(*mutex);
  if (layout.mesh().rank == 0 && seen->insert(op).second) {
    TORCH_WARN("shardfield: ", op, " gathers ", tensor::describe(example), " (",
               example.numel() * example.itemsize(), " bytes) because ", reason,
               "; shown once per op, see shardfield.report()");
  }
}

}  // namespace shardfield::dispatch
