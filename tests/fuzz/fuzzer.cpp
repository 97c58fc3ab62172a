// Entry of one libFuzzer program; SHARDFIELD_FUZZ_TARGET is the target's name.
#include <cstddef>

#include "fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  (void)shardfield::fuzz::SHARDFIELD_FUZZ_TARGET({data, size});
  return 0;
}
