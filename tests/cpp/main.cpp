// Entry of the C++ tests. Ranks are threads here, so one thread each for ATen's own loops keeps a
// small machine honest and the sums in one order.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  at::set_num_threads(1);
  return RUN_ALL_TESTS();
}
