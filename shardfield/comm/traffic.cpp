#include "shardfield/comm/traffic.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include <torch/csrc/autograd/function.h>

#include "shardfield/comm/failure.h"

namespace shardfield::comm {

namespace {

struct Active {
  int context;
  std::shared_ptr<Record> record;
};

std::mutex& mutex() {
  static auto* m = new std::mutex();
  return *m;
}
std::vector<Active>& active() {
  static auto* list = new std::vector<Active>();
  return *list;
}
std::vector<std::string>& layers() {
  static auto* names = new std::vector<std::string>{""};
  return *names;
}

std::atomic<int> num_active{0};
std::atomic<int> num_contexts{0};
thread_local int tls_context = 0;
thread_local const char* tls_op = nullptr;
thread_local int tls_layer = 0;

template <class F>
void charge(int context, const char* op, F&& update) {
  if (num_active.load(std::memory_order_relaxed) == 0) return;
  const std::lock_guard<std::mutex> lock(mutex());
  for (Active& a : active()) {
    if (a.context != context) continue;
    update(a.record->rows[{layers()[tls_layer], op ? op : "(direct)"}]);
  }
}

}  // namespace

std::shared_ptr<Record> start_recording() {
  const std::lock_guard<std::mutex> lock(mutex());
  auto record = std::make_shared<Record>();
  active().push_back({tls_context, record});
  ++num_active;
  return record;
}

void stop_recording(const std::shared_ptr<Record>& record) {
  const std::lock_guard<std::mutex> lock(mutex());
  auto& list = active();
  auto it =
      std::find_if(list.begin(), list.end(), [&](const Active& a) { return a.record == record; });
  if (it == list.end()) return;
  list.erase(it);
  --num_active;
}

bool is_recording() {
  return num_active.load(std::memory_order_relaxed) > 0;
}

int current_context() {
  return tls_context;
}
void set_current_context(int context) {
  tls_context = context;
}
int new_context() {
  return ++num_contexts;
}

OpScope::OpScope(const char* op) : saved_op_(tls_op), saved_layer_(tls_layer) {
  if (!tls_op) tls_op = op;
}
OpScope::OpScope(const char* op, int layer) : saved_op_(tls_op), saved_layer_(tls_layer) {
  tls_op = op;
  tls_layer = layer;
}
OpScope::~OpScope() {
  tls_op = saved_op_;
  tls_layer = saved_layer_;
}

int intern_layer(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex());
  auto& names = layers();
  auto it = std::find(names.begin(), names.end(), name);
  if (it != names.end()) return static_cast<int>(it - names.begin());
  names.push_back(name);
  return static_cast<int>(names.size()) - 1;
}
std::string in_current_layer() {
  std::string backward = torch::autograd::get_current_node() ? ", in backward" : "";
  if (tls_layer == 0) return backward;
  const std::lock_guard<std::mutex> lock(mutex());
  return " in layer '" + layers()[static_cast<size_t>(tls_layer)] + "'" + backward;
}
int current_layer() {
  return tls_layer;
}
void set_current_layer(int layer) {
  tls_layer = layer;
}
const char* current_op() {
  return tls_op;
}

void count_call(int context) {
  charge(context, tls_op, [](OpTraffic& t) { ++t.calls; });
}
void count_message(int context, int64_t bytes) {
  charge(context, tls_op, [&](OpTraffic& t) {
    t.bytes_sent += bytes;
    ++t.messages;
  });
}
void count_fallback(int context, const char* op) {
  charge(context, op, [](OpTraffic& t) { ++t.fallbacks; });
}

}  // namespace shardfield::comm
