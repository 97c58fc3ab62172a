// Not installed; only files of this folder include it.
#pragma once

#include <string>

namespace shardfield::graph {

/// Compares a file with what its own header says of its length, for the formats whose VTK reader
/// does not: binary STL (of which it reads what is there), PLY (where it reads on behind the end),
/// netCDF under Exodus (which reads zeros there), legacy files that end before their points. Takes
/// no data from the file. Local.
///
/// @param ending  of the path, in small letters; other formats pass unseen
/// @throws std::runtime_error for a file that is too short, or a header that does not say
void check_length(const std::string& path, const std::string& ending);

}  // namespace shardfield::graph
