#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

namespace shardfield::comm {

/// What one op (in one layer) did while a recorder was active.
struct OpTraffic {
  int64_t calls = 0;
  int64_t bytes_sent = 0;
  int64_t messages = 0;
  int64_t fallbacks = 0;
};

/// Counts of one rank between start and stop, by (layer, op).
struct Record {
  std::map<std::pair<std::string, std::string>, OpTraffic> rows;
};

/// Starts and stops counting on this in-process rank. Local. Recorders may nest; each sees what
/// happens while it is active.
std::shared_ptr<Record> start_recording();
void stop_recording(const std::shared_ptr<Record>& record);
/// True while any recorder of any rank of this process is active.
bool is_recording();

/// Which in-process rank this thread works for: 0 when the process is one rank.
int current_context();
void set_current_context(int context);
int new_context();

/// Names the op that counters are charged to, for the length of a scope. `op` must outlive it.
/// A scope opened inside another one keeps the outer name: the user's op is what is charged.
class OpScope {
 public:
  explicit OpScope(const char* op);
  /// Also restores a layer captured earlier (backward nodes run outside the module's forward).
  OpScope(const char* op, int layer);
  ~OpScope();
  OpScope(const OpScope&) = delete;
  OpScope& operator=(const OpScope&) = delete;

 private:
  const char* saved_op_;
  int saved_layer_;
};

/// Layer labels are small interned numbers; 0 is "no layer".
int intern_layer(const std::string& name);
int current_layer();
void set_current_layer(int layer);
const char* current_op();

/// Charges the current op of `context`'s recorders.
void count_call(int context);
void count_message(int context, int64_t bytes);
void count_fallback(int context, const char* op);

}  // namespace shardfield::comm
