#include "shardfield/graph/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace shardfield::graph {

namespace {

constexpr int64_t kLeastPerRange = 16384;  // less work than this is not worth a thread

}  // namespace

int thread_count(int wanted) {
  if (wanted > 0) return wanted;
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void parallel_items(int64_t count, int num_threads, const std::function<void(int64_t, int)>& work) {
  const int workers =
      static_cast<int>(std::min<int64_t>(count, static_cast<int64_t>(thread_count(num_threads))));
  if (workers <= 1) {
    for (int64_t i = 0; i < count; ++i) work(i, 0);
    return;
  }
  std::atomic<int64_t> next{0};
  std::exception_ptr first_error;
  std::mutex error_lock;
  const auto run = [&](int worker) {
    try {
      for (int64_t i = next++; i < count; i = next++) work(i, worker);
    } catch (...) {
      const std::lock_guard<std::mutex> guard(error_lock);
      if (!first_error) first_error = std::current_exception();
      next = count;
    }
  };
  std::vector<std::jthread> threads;
  threads.reserve(static_cast<size_t>(workers) - 1);
  for (int worker = 1; worker < workers; ++worker) threads.emplace_back(run, worker);
  run(0);
  threads.clear();  // joins
  if (first_error) std::rethrow_exception(first_error);
}

void parallel_ranges(int64_t count, int num_threads,
                     const std::function<void(int64_t, int64_t)>& work) {
  const int64_t ranges = std::clamp<int64_t>(count / kLeastPerRange, 1,
                                             static_cast<int64_t>(thread_count(num_threads)) * 4);
  if (ranges == 1 || thread_count(num_threads) == 1) {
    if (count > 0) work(0, count);
    return;
  }
  parallel_items(ranges, num_threads,
                 [&](int64_t i, int) { work(count * i / ranges, count * (i + 1) / ranges); });
}

}  // namespace shardfield::graph
