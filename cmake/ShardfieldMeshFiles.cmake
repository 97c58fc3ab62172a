# Mesh files in C++: shardfield::vtk over VTK and shardfield::hdf5 over HDF5. Both targets are there
# in every build; without the library every call says what to install. The core links neither.
option(SHARDFIELD_WITH_VTK "Mesh files in C++ where VTK is found" ON)
option(SHARDFIELD_WITH_HDF5 "HDF5 files in C++ where HDF5 is found" ON)

if(SHARDFIELD_WITH_VTK OR SHARDFIELD_WITH_HDF5)
  # Both packages look for their own parts with the C compiler.
  include(CheckLanguage)
  check_language(C)
  if(CMAKE_C_COMPILER)
    enable_language(C)
  endif()
endif()

set(SHARDFIELD_HAS_VTK FALSE)
set(SHARDFIELD_VTK_LIBRARIES "")
set(SHARDFIELD_VTK_FILES "${PROJECT_SOURCE_DIR}/shardfield/graph/vtk/no_vtk.cpp")
if(SHARDFIELD_WITH_VTK AND CMAKE_C_COMPILER)
  set(
    SHARDFIELD_VTK_MODULES
    CommonCore
    CommonDataModel
    CommonExecutionModel
    FiltersCore
    IOExodus
    IOGeometry
    IOLegacy
    IOParallelXML
    IOPLY
    IOXML
  )
  find_package(VTK 9.1 QUIET COMPONENTS ${SHARDFIELD_VTK_MODULES})
  if(VTK_FOUND)
    set(SHARDFIELD_HAS_VTK TRUE)
    set(
      SHARDFIELD_VTK_FILES
      "${PROJECT_SOURCE_DIR}/shardfield/graph/vtk/convert.cpp"
      "${PROJECT_SOURCE_DIR}/shardfield/graph/vtk/convert.h"
      "${PROJECT_SOURCE_DIR}/shardfield/graph/vtk/file_length.cpp"
      "${PROJECT_SOURCE_DIR}/shardfield/graph/vtk/mesh_files.cpp"
    )
    list(TRANSFORM SHARDFIELD_VTK_MODULES PREPEND "VTK::" OUTPUT_VARIABLE SHARDFIELD_VTK_LIBRARIES)
  endif()
endif()

set(SHARDFIELD_HAS_HDF5 FALSE)
set(SHARDFIELD_HDF5_FILES "${PROJECT_SOURCE_DIR}/shardfield/graph/hdf5/no_hdf5.cpp")
if(SHARDFIELD_WITH_HDF5 AND CMAKE_C_COMPILER)
  find_package(HDF5 1.10 QUIET COMPONENTS C)
  if(HDF5_FOUND)
    set(SHARDFIELD_HAS_HDF5 TRUE)
    set(SHARDFIELD_HDF5_FILES "${PROJECT_SOURCE_DIR}/shardfield/graph/hdf5/piece_file.cpp")
  endif()
endif()

# A library of its own beside the core: shardfield_add_component(NAME FILES...)
function(shardfield_add_component name)
  set(target shardfield_${name})
  add_library(${target} SHARED ${ARGN})
  add_library(shardfield::${name} ALIAS ${target})
  shardfield_target_defaults(${target})
  target_link_libraries(${target} PUBLIC shardfield)
  shardfield_set_rpath(${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name} DEFINE_SYMBOL "")
  if(NOT SKBUILD)
    set_target_properties(
      ${target}
      PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}
    )
  endif()
endfunction()

shardfield_add_component(vtk ${SHARDFIELD_VTK_FILES})
if(SHARDFIELD_HAS_VTK)
  target_link_libraries(shardfield_vtk PRIVATE ${SHARDFIELD_VTK_LIBRARIES})
  set_property(
    TARGET shardfield_vtk
    APPEND
    PROPERTY INSTALL_RPATH "$<TARGET_FILE_DIR:VTK::CommonCore>"
  )
endif()
shardfield_add_component(hdf5 ${SHARDFIELD_HDF5_FILES})
if(SHARDFIELD_HAS_HDF5)
  target_include_directories(shardfield_hdf5 SYSTEM PRIVATE ${HDF5_INCLUDE_DIRS})
  target_link_libraries(shardfield_hdf5 PRIVATE ${HDF5_LIBRARIES})
endif()
foreach(library VTK HDF5)
  if(SHARDFIELD_HAS_${library})
    message(STATUS "Shardfield: mesh files in C++ by ${library} ${${library}_VERSION}")
  else()
    message(STATUS "Shardfield: no mesh files in C++ by ${library}")
  endif()
endforeach()
