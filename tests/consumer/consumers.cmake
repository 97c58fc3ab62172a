# Four tiny projects use Shardfield as strangers would. Included by tests/cpp/CMakeLists.txt.
set(SHARDFIELD_CONSUMER_PREFIX "${PROJECT_BINARY_DIR}/consumer/prefix")
get_filename_component(SHARDFIELD_TORCH_FOLDER "${SHARDFIELD_TORCH_LIB_DIR}" DIRECTORY)

add_test(
  NAME consumer_prefix
  COMMAND
    ${CMAKE_COMMAND} --install "${PROJECT_BINARY_DIR}" --prefix "${SHARDFIELD_CONSUMER_PREFIX}"
)
set_tests_properties(consumer_prefix PROPERTIES FIXTURES_SETUP consumer_prefix TIMEOUT 120)

# shardfield_add_consumer(NAME [RUN program] [OPTIONS ...]): configures, builds and runs one project.
function(shardfield_add_consumer name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "RUN" "OPTIONS")
  set(run "")
  if(arg_RUN)
    set(run --test-command "${PROJECT_BINARY_DIR}/consumer/${name}/${arg_RUN}")
  endif()
  add_test(
    NAME consumer_${name}
    COMMAND
      ${CMAKE_CTEST_COMMAND} --build-and-test "${PROJECT_SOURCE_DIR}/tests/consumer/${name}"
      "${PROJECT_BINARY_DIR}/consumer/${name}" --build-generator "${CMAKE_GENERATOR}" --build-target
      consumer --build-options "-DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}"
      "-DCMAKE_BUILD_TYPE=Release" "-DCMAKE_MAKE_PROGRAM=${CMAKE_MAKE_PROGRAM}" ${arg_OPTIONS}
      ${run}
  )
  set_tests_properties(
    consumer_${name}
    PROPERTIES TIMEOUT 600 FIXTURES_REQUIRED consumer_prefix ENVIRONMENT "GLOO_SOCKET_IFNAME=lo"
  )
endfunction()

# Without a torch of their own, the first two rely on what the package knows.
shardfield_add_consumer(
  installed
  RUN consumer
  OPTIONS "-DCMAKE_PREFIX_PATH=${SHARDFIELD_CONSUMER_PREFIX}"
)
shardfield_add_consumer(subdirectory OPTIONS "-DCMAKE_PREFIX_PATH=${SHARDFIELD_TORCH_FOLDER}")
shardfield_add_consumer(
  no_python
  RUN consumer
  OPTIONS
    "-DCMAKE_PREFIX_PATH=${SHARDFIELD_TORCH_FOLDER}"
    "-Dshardfield_ROOT=${SHARDFIELD_CONSUMER_PREFIX}"
)
shardfield_add_consumer(
  mesh_files
  RUN consumer
  OPTIONS "-DCMAKE_PREFIX_PATH=${SHARDFIELD_CONSUMER_PREFIX}"
)
