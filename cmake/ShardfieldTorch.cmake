# Finding libtorch, for this build and (installed beside the package config) for its consumers.

# The first folder that holds libtorch among CMAKE_PREFIX_PATH, the arguments and the Python
# interpreter's packages; empty when there is none. Torch is looked up, not imported: importing it
# takes seconds.
function(shardfield_torch_folder out)
  set(candidates "")
  foreach(prefix IN LISTS CMAKE_PREFIX_PATH)
    list(APPEND candidates "${prefix}" "${prefix}/../..") # <torch> or <torch>/share/cmake
  endforeach()
  list(APPEND candidates ${ARGN})
  if(Python_EXECUTABLE)
    execute_process(
      COMMAND
        "${Python_EXECUTABLE}" -c
        "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE of_python
      OUTPUT_STRIP_TRAILING_WHITESPACE
      ERROR_QUIET
    )
    list(APPEND candidates ${of_python})
  endif()
  set(${out} "" PARENT_SCOPE)
  foreach(folder IN LISTS candidates)
    if(EXISTS "${folder}/share/cmake/Torch/TorchConfig.cmake")
      set(${out} "${folder}" PARENT_SCOPE)
      break()
    endif()
  endforeach()
endfunction()

# Torch's own package asks for a matching CUDA toolkit when the wheel was built with CUDA. Shardfield
# compiles no device code, so the wheel's libraries are enough, with the driver alone beside them.
function(shardfield_import_torch_wheel folder)
  file(STRINGS "${folder}/include/torch/headeronly/version.h" lines REGEX "define TORCH_VERSION_M")
  string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*" "\\1.\\2" version "${lines}")
  add_library(torch INTERFACE IMPORTED GLOBAL)
  set(
    libraries
    "${folder}/lib/libtorch.so"
    "${folder}/lib/libtorch_cpu.so"
    "${folder}/lib/libc10.so"
  )
  set_target_properties(
    torch
    PROPERTIES
      INTERFACE_INCLUDE_DIRECTORIES "${folder}/include;${folder}/include/torch/csrc/api/include"
      INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO"
      INTERFACE_LINK_LIBRARIES "-Wl,--no-as-needed;${libraries};-Wl,--as-needed"
  )
  set(Torch_VERSION "${version}" PARENT_SCOPE)
endfunction()

# Defines the target `torch` and sets SHARDFIELD_TORCH_LIB_DIR, the folder that holds libtorch.
# Order: Torch_DIR, CMAKE_PREFIX_PATH, then the folders given, then the interpreter's own torch.
macro(shardfield_find_torch)
  shardfield_torch_folder(_shardfield_torch ${ARGN})
  if(NOT TARGET torch)
    if(NOT Torch_DIR AND EXISTS "${_shardfield_torch}/lib/libtorch_cuda.so")
      shardfield_import_torch_wheel("${_shardfield_torch}")
    else()
      find_package(Torch REQUIRED HINTS "${_shardfield_torch}")
    endif()
  endif()
  if(TORCH_LIBRARY)
    get_filename_component(SHARDFIELD_TORCH_LIB_DIR "${TORCH_LIBRARY}" DIRECTORY)
  else()
    get_target_property(_shardfield_includes torch INTERFACE_INCLUDE_DIRECTORIES)
    list(GET _shardfield_includes 0 _shardfield_includes)
    get_filename_component(SHARDFIELD_TORCH_LIB_DIR "${_shardfield_includes}/../lib" ABSOLUTE)
  endif()
endmacro()
