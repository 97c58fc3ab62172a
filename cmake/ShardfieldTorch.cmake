# Finding libtorch, for this build and (installed beside the package config) for its consumers.

# Where the Python interpreter keeps torch, without importing it; empty when it has none.
function(shardfield_torch_of_python out)
  set(found "")
  if(Python_EXECUTABLE)
    execute_process(
      COMMAND
        "${Python_EXECUTABLE}" -c
        "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE found
      OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

# Finds the Torch package: CMAKE_PREFIX_PATH and Torch_DIR first, then the interpreter's own torch.
# Sets SHARDFIELD_TORCH_LIB_DIR, the folder that holds libtorch.
macro(shardfield_find_torch)
  if(NOT TARGET torch)
    shardfield_torch_of_python(_shardfield_torch)
    find_package(Torch REQUIRED HINTS "${_shardfield_torch}")
    unset(_shardfield_torch)
  endif()
  if(TORCH_LIBRARY)
    get_filename_component(SHARDFIELD_TORCH_LIB_DIR "${TORCH_LIBRARY}" DIRECTORY)
  else()
    get_target_property(_shardfield_includes torch INTERFACE_INCLUDE_DIRECTORIES)
    list(GET _shardfield_includes 0 _shardfield_includes)
    get_filename_component(SHARDFIELD_TORCH_LIB_DIR "${_shardfield_includes}/../lib" ABSOLUTE)
    unset(_shardfield_includes)
  endif()
  message(STATUS "Shardfield: libtorch ${Torch_VERSION} in ${SHARDFIELD_TORCH_LIB_DIR}")
endmacro()
