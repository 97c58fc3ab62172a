#pragma once

#include <array>
#include <cstdint>
#include <span>

/// One function per place where the library reads what others wrote: files, the environment, other
/// ranks' texts. It hands any bytes to the parser and uses what comes out. A parser refuses by
/// c10::Error or std::invalid_argument; another exception, a crash or a sanitizer's report is a
/// fault.
namespace shardfield::fuzz {

using Bytes = std::span<const uint8_t>;

/// Each returns true when the parser took the bytes, false when it refused them. Local.
bool safetensors_file(Bytes bytes);  ///< the bytes are a .safetensors file
bool checkpoint_index(Bytes bytes);  ///< the bytes are "index" of a folder's index, rightly hashed
bool launch_variables(Bytes bytes);  ///< lines "NAME=value"
bool rank_card(Bytes bytes);         ///< what another rank sent to align_communicators
bool mesh_arrays(Bytes bytes);       ///< points, cells and offsets that a mesh file held
bool piece_rows(Bytes bytes);        ///< row numbers and owners that the files of a partition held

struct Target {
  const char* name;  ///< of the fuzzer and of its folder in corpus/
  bool (*run)(Bytes);
};

inline constexpr std::array<Target, 6> kTargets = {{{"safetensors_file", &safetensors_file},
                                                    {"checkpoint_index", &checkpoint_index},
                                                    {"launch_variables", &launch_variables},
                                                    {"rank_card", &rank_card},
                                                    {"mesh_arrays", &mesh_arrays},
                                                    {"piece_rows", &piece_rows}}};

}  // namespace shardfield::fuzz
