# Install and export: headers, library, package config. In a wheel the prefix is the Python package
# itself, so that `find_package(shardfield)` works on what pip installed.
include(CMakePackageConfigHelpers)

if(SKBUILD)
  set(SHARDFIELD_LIBDIR lib)
  set(SHARDFIELD_INCLUDEDIR include)
else()
  set(SHARDFIELD_LIBDIR "${CMAKE_INSTALL_LIBDIR}")
  set(SHARDFIELD_INCLUDEDIR "${CMAKE_INSTALL_INCLUDEDIR}")
endif()
set(SHARDFIELD_CMAKEDIR "${SHARDFIELD_LIBDIR}/cmake/shardfield")

install(
  TARGETS shardfield shardfield_vtk shardfield_hdf5
  EXPORT shardfieldTargets
  LIBRARY DESTINATION "${SHARDFIELD_LIBDIR}"
  INCLUDES DESTINATION "${SHARDFIELD_INCLUDEDIR}"
)
install(
  DIRECTORY "${PROJECT_SOURCE_DIR}/shardfield"
  DESTINATION "${SHARDFIELD_INCLUDEDIR}"
  FILES_MATCHING
  PATTERN "*.h"
  PATTERN "precompiled.h" EXCLUDE
  PATTERN "vtk/convert.h" EXCLUDE
)
install(EXPORT shardfieldTargets NAMESPACE shardfield:: DESTINATION "${SHARDFIELD_CMAKEDIR}")
configure_package_config_file(
  "${PROJECT_SOURCE_DIR}/cmake/shardfieldConfig.cmake.in"
  "${PROJECT_BINARY_DIR}/shardfieldConfig.cmake"
  INSTALL_DESTINATION "${SHARDFIELD_CMAKEDIR}"
)
write_basic_package_version_file(
  "${PROJECT_BINARY_DIR}/shardfieldConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion
)
install(
  FILES
    "${PROJECT_BINARY_DIR}/shardfieldConfig.cmake"
    "${PROJECT_BINARY_DIR}/shardfieldConfigVersion.cmake"
    "${PROJECT_SOURCE_DIR}/cmake/ShardfieldTorch.cmake"
  DESTINATION "${SHARDFIELD_CMAKEDIR}"
)
