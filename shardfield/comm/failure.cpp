#include "shardfield/comm/failure.h"

#include <mutex>

#include <c10/util/Exception.h>

namespace shardfield::comm {

namespace {

std::mutex& mutex() {
  static auto* m = new std::mutex();
  return *m;
}
FailureNotes& asked() {
  static auto* notes = new FailureNotes();
  return *notes;
}

std::string notes_on(const std::string& call, const std::string& cause) {
  FailureNotes notes;
  {
    const std::lock_guard<std::mutex> lock(mutex());
    notes = asked();
  }
  return notes ? notes(call, cause) : std::string();
}

}  // namespace

void set_failure_notes(FailureNotes notes) {
  const std::lock_guard<std::mutex> lock(mutex());
  asked() = std::move(notes);
}

void throw_failed(const std::string& call, const std::string& cause) {
  const std::string notes = notes_on(call, cause);
  TORCH_CHECK(false, call, ": a peer failed, left, or made another call (", cause,
              "); see the other ranks' errors for the cause", notes.empty() ? "" : ". ", notes);
}

void wait_for(const c10::intrusive_ptr<c10d::Work>& work, const std::string& call) {
  bool done = false;
  try {
    done = work->wait();
  } catch (const std::exception& error) {
    throw_failed(call, error.what());
  }
  if (!done) throw_failed(call, "aborted");
}

}  // namespace shardfield::comm
