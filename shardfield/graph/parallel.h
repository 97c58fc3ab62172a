#pragma once

#include <cstdint>
#include <functional>

namespace shardfield::graph {

/// Threads to use where the caller asks for `wanted` (0: one per core).
[[nodiscard]] int thread_count(int wanted);

/// Calls work(begin, end) for consecutive ranges that cover 0 .. count - 1, on up to `num_threads`
/// threads (0: one per core). Which range runs where is not defined: results must not depend on it.
/// The first exception is thrown again here.
void parallel_ranges(int64_t count, int num_threads,
                     const std::function<void(int64_t, int64_t)>& work);

/// Calls work(i, worker) for every i in 0 .. count - 1; worker < thread_count(num_threads) tells
/// which scratch memory to use. Items are handed out one by one, for items of unequal cost.
void parallel_items(int64_t count, int num_threads, const std::function<void(int64_t, int)>& work);

}  // namespace shardfield::graph
