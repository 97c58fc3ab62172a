#pragma once

#include <functional>
#include <string>

#include <torch/csrc/distributed/c10d/Work.hpp>

/// What a rank says when a transfer fails: which op of which layer it was in, and what the program
/// around it knows about the cause.
namespace shardfield::comm {

/// More about a failure: `call` is "op on rank r of n", `cause` the transport's text. Called on the
/// thread that fails; may wait a second or two for what other ranks report; must not throw.
using FailureNotes = std::function<std::string(const std::string& call, const std::string& cause)>;

/// Sets (or with an empty function clears) who is asked. Per process.
void set_failure_notes(FailureNotes notes);

/// @throws c10::Error  always: the call, the transport's text, the notes.
[[noreturn]] void throw_failed(const std::string& call, const std::string& cause);

/// Blocks until a transfer is done. @throws c10::Error  when a peer failed, left or timed out.
void wait_for(const c10::intrusive_ptr<c10d::Work>& work, const std::string& call);

/// " in layer 'decoder.conv'" while a layer is named on this thread, ", in backward" in backward.
std::string in_current_layer();

}  // namespace shardfield::comm
