// Finds accesses to a block's shared memory that nothing orders, for cuda_on_host.h: what happens before what is kept
// as vector clocks, so an access that no barrier separates from another thread's is found in whatever order they came.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

constexpr int COPY_BARRIERS = 20;  // and BLOCK_THREADS, on the command line

// What had happened at some point: of each thread a time of its own, of each barrier of copies a number of its phase.
struct Clock {
  std::array<uint32_t, BLOCK_THREADS + COPY_BARRIERS> times{};
  std::array<uint32_t, BLOCK_THREADS> fenced{};  // what copies that come after it are ordered behind

  void join(const Clock& other);
};

void watch_shared_memory(void* begin, size_t bytes);  // from a block's first instruction on

void release(Clock& into);       // what this thread has done and seen
void acquire(const Clock& from);
void fence_before_copies();      // by this thread: stores and copies are told apart by the hardware

// A copy is begun by this thread, and ends with phase `number` of a barrier of copies.
void begin_copy(void* to, size_t bytes, int copy_barrier, uint32_t number);

// Given by cuda_on_host.h, and by who includes that.
int this_thread();
void report_race(size_t offset, bool one_is_a_copy);
