# What every target of this build shares. Nothing here is global: all flags are private to a target.

# Warnings, optimisation and sanitizers of one target.
function(shardfield_target_defaults target)
  target_compile_options(
    ${target}
    PRIVATE -Wall -Wextra $<$<CONFIG:Release>:-O2> $<$<BOOL:${SHARDFIELD_WERROR}>:-Werror>
  )
  # Torch's headers compare signed with unsigned and leave parameters unused inside macros.
  target_compile_options(${target} PRIVATE -Wno-unused-parameter)
  if(SHARDFIELD_SANITIZE)
    target_compile_options(
      ${target}
      PRIVATE -fsanitize=${SHARDFIELD_SANITIZE} -fno-omit-frame-pointer
    )
    target_link_options(${target} PRIVATE -fsanitize=${SHARDFIELD_SANITIZE})
  endif()
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF)
endfunction()

# Run-time search path of one target, in the build tree and installed alike: its own folder, the
# folders given, then libtorch's. (CMake's own choice would add MKL folders that do not exist.)
function(shardfield_set_rpath target)
  set(rpath "$ORIGIN" ${ARGN})
  if(SKBUILD)
    # A wheel: torch is a sibling package, <site-packages>/torch/lib.
    list(APPEND rpath "$ORIGIN/../torch/lib" "$ORIGIN/../../torch/lib")
  endif()
  list(APPEND rpath "${SHARDFIELD_TORCH_LIB_DIR}")
  set_target_properties(${target} PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "${rpath}")
endfunction()

# An executable of this build tree that uses the core: shardfield_add_program(NAME SOURCES...)
function(shardfield_add_program name)
  add_executable(${name} ${ARGN})
  shardfield_target_defaults(${name})
  target_link_libraries(${name} PRIVATE shardfield::shardfield)
  shardfield_set_rpath(${name} "${PROJECT_BINARY_DIR}")
endfunction()
