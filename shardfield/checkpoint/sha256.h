#pragma once

#include <cstddef>
#include <string>

namespace shardfield::checkpoint {

/// SHA-256 (FIPS 180-4) of a run of bytes, as 64 lower-case hex digits. Local.
std::string sha256(const void* data, size_t size);

}  // namespace shardfield::checkpoint
