// Runs kernels of kernels/cuda on the host: threads are coroutines, special instructions the functions below. Warps run
// in random order, one of them slowly, and copies end at once or late and in any order, so what a barrier forgets to
// order shows in the result; a barrier that is used wrongly is a failure, and so are accesses to shared memory that no
// barrier orders, whatever their order was (shared_races.h). Compiled by cuda_on_host.py.

#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <vector>

#include "shared_races.h"

#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(...)

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using std::max, std::min;
struct uint4 { u32 x, y, z, w; };
struct int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct Index { int x, y; } blockIdx, gridDim, threadIdx;

constexpr int THREADS = BLOCK_THREADS, LANES = 32, STACK_BYTES = 1 << 17;
alignas(1024) u8 memory[227 << 10];
std::mt19937 chance(1);

const char* failure = nullptr;
void fail(const char* why) { failure = failure ? failure : why; }

bool numbers = true;  // whether products are worked out
int left_out = 0;     // what the kernel is run without: a named barrier, by its number, or one of these
enum { WARP_SYNC = 16, WAIT_FULL, WAIT_EMPTY, WAIT_EMPTY_LONG_ENOUGH, FENCE };

template <class To, class From>
To bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  memcpy(&out, &x, sizeof out);
  return out;
}

// Threads. One that waits gives way until what it waits for has come.

using Condition = std::function<bool()>;
struct Thread { ucontext_t context; bool ended; const Condition* waits_for; std::vector<char> stack; } threads[THREADS];
ucontext_t scheduler;

void give_way() {
  Index me = threadIdx;
  swapcontext(&threads[me.x].context, &scheduler);
  threadIdx = me;
}

void wait_for(const Condition& condition) {
  if (condition()) return;
  threads[threadIdx.x].waits_for = &condition;
  give_way();
  threads[threadIdx.x].waits_for = nullptr;
}

struct Meeting {  // of `wanted` threads, again and again
  int wanted = 0, here = 0;
  u64 number = 0;
  Clock arrived, met;  // of those who are here, and of those of the last time
  void join(int threads_wanted, bool stay) {
    if (here && wanted != threads_wanted) fail("threads disagree about a barrier");
    wanted = threads_wanted;
    u64 mine = number;
    if (++here == wanted) here = 0, number++;
    if (stay) wait_for([=, this] { return number != mine; });
  }
  void order(int threads_wanted, bool stay) {
    release(arrived);
    if (here + 1 == threads_wanted) met = arrived, arrived = {};
    join(threads_wanted, stay);
    if (stay) acquire(met);
  }
};

Meeting barriers[16], warps[THREADS / LANES];
u32 offered[THREADS][6];  // by each thread to its warp

// Every thread of a warp offers some words and makes something of all of them, which orders no memory.
template <class Result>
Result together(std::initializer_list<u32> words, std::function<Result(u32 (*lanes)[6])> make) {
  int warp = threadIdx.x / LANES;
  std::copy(words.begin(), words.end(), offered[threadIdx.x]);
  warps[warp].join(LANES, true);
  Result result = make(offered + warp * LANES);
  warps[warp].join(LANES, true);
  return result;
}

// Given by who includes this, as report_race is.
bool is_left_out(int named_barrier);
bool says_full(u64* barrier);
void barrier_sync(int id, int wanted) {
  if (!is_left_out(id)) barriers[id].order(wanted, true);
}
bool barrier_any(int id, int wanted, bool mine) {
  static bool any[16][2];  // of this time, and of the last, which some may not have read yet
  Meeting& barrier = barriers[id];
  if (is_left_out(id)) return mine;
  bool& said = any[id][barrier.number % 2];
  if (!barrier.here) said = false;
  said |= mine;
  barrier.order(wanted, true);
  return said;
}
void barrier_arrive(int id, int wanted) {
  if (!is_left_out(id)) barriers[id].order(wanted, false);
}
void __syncthreads() { barriers[0].order(THREADS, true); }
void __syncwarp() {
  if (left_out != WARP_SYNC) warps[threadIdx.x / LANES].order(LANES, true);
}

template <class T>
T __shfl_xor_sync(u32, T x, int distance) {
  int other = threadIdx.x % LANES ^ distance;
  return together<T>({bits<u32>(x)}, [=](auto lanes) { return bits<T>(lanes[other][0]); });
}
int __reduce_add_sync(u32, int x) {
  return together<int>({(u32)x}, [](auto lanes) {
    int sum = 0;
    for (int i = 0; i < LANES; i++) sum += lanes[i][0];
    return sum;
  });
}
bool __any_sync(u32, bool x) { return __reduce_add_sync(~0u, x) > 0; }

// Copies, and the barriers that count their bytes.

struct Phase { int wanted, index, here = 0; long bytes = 0; u32 number = 0; Clock arrived, met; };
std::map<u64*, Phase> phases;
struct Copy { std::function<void()> move; u32 bytes; u64* barrier; };
std::vector<Copy> copies;
const u8 *pool_begin, *pool_end;

void settle(Phase& phase) {
  if (phase.here > phase.wanted) fail("too many arrivals at a barrier of copies");
  if (phase.here < phase.wanted || phase.bytes) return;
  phase.here = 0, phase.number++;
  phase.met = phase.arrived, phase.arrived = {};
  phase.met.times[THREADS + phase.index] = phase.number;  // its copies
}
void init(u64* barrier, u32 wanted) { phases[barrier] = {(int)wanted, (int)phases.size()}; }
void arrive(u64* barrier) {
  Phase& phase = phases.at(barrier);
  release(phase.arrived);
  phase.here++, settle(phase);
}
void expect(u64* barrier, u32 bytes) { phases.at(barrier).bytes += bytes, arrive(barrier); }
void wait(u64* barrier, u32 parity) {
  if (left_out == (says_full(barrier) ? WAIT_FULL : WAIT_EMPTY)) return;
  parity ^= left_out == WAIT_EMPTY_LONG_ENOUGH && !says_full(barrier);
  Phase& phase = phases.at(barrier);
  wait_for([&] { return phase.number % 2 != parity; });
  acquire(phase.met);
}
void end_a_copy() {
  std::swap(copies[chance() % copies.size()], copies.back());
  Copy done = copies.back();
  copies.pop_back();
  done.move();
  phases.at(done.barrier).bytes -= done.bytes, settle(phases.at(done.barrier));
}
void queue_copy(void* to, u32 bytes, u64* barrier, std::function<void()> move) {
  begin_copy(to, bytes, phases.at(barrier).index, phases.at(barrier).number + 1);
  copies.push_back({move, bytes, barrier});
  if (chance() % 2) end_a_copy();
}
void copy(void* to, const u8* from, u32 bytes, u64* barrier) {
  if (((u64)to | (u64)from | bytes) % 16 || !bytes) return fail("a copy of odd bytes");
  if (from < pool_begin || from + bytes > pool_end) return fail("a copy from outside the pool");
  queue_copy(to, bytes, barrier, [=] { memcpy(to, from, bytes); });
}
void copy_once(void* to, const u8* from, u32 bytes, u64* barrier) { copy(to, from, bytes, barrier); }
void publish_barriers() {}
void stores_before_copies() {
  if (left_out != FENCE) fence_before_copies();
}
void let_next_begin() {}
void wait_for_previous() {}

// Numbers.

float __int_as_float(u32 x) { return bits<float>(x); }
u32 __float_as_uint(float x) { return bits<u32>(x); }
float __log2f(float x) { return log2f(x); }
float exp2_of(float x) { return exp2f(x); }

// Blocks.

int this_thread() { return threadIdx.x; }

std::function<void()> kernel;

void run_thread() {
  kernel();
  threads[threadIdx.x].ended = true;
  give_way();
}

void run_block() {
  memset(memory, 0xff, sizeof memory);  // not-a-number
  phases.clear(), copies.clear();
  std::fill(std::begin(barriers), std::end(barriers), Meeting{});
  std::fill(std::begin(warps), std::end(warps), Meeting{});
  watch_shared_memory(memory, sizeof memory);
  for (Thread& thread : threads) {
    thread.ended = false, thread.waits_for = nullptr;
    thread.stack.resize(STACK_BYTES);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&thread.context, run_thread, 0);
  }
  for (int round = 0, left = THREADS, slow = 0; left; round++) {
    if (round == 1'000'000) fail("the kernel hangs");
    if (failure) return;
    if (round % 1024 == 0) slow = chance() % (THREADS / LANES);
    int warp = chance() % (THREADS / LANES);
    if (warp == slow && THREADS > LANES && chance() % 64) continue;
    for (int i = warp * LANES; i < (warp + 1) * LANES; i++) {
      if (threads[i].ended || threads[i].waits_for && !(*threads[i].waits_for)()) continue;
      threadIdx = {i, 0};
      swapcontext(&scheduler, &threads[i].context);
      left -= threads[i].ended;
    }
    if (!copies.empty() && chance() % 64 == 0) end_a_copy();
  }
  if (!copies.empty()) fail("a copy that nobody waited for");
  for (Meeting& barrier : barriers)
    if (barrier.here) fail("a barrier is left with arrivals");
}

// Returns what went wrong, or null.
const char* run_grid(int width, int height, std::function<void()> run) {
  kernel = run, gridDim = {width, height}, failure = nullptr;
  for (blockIdx.y = 0; blockIdx.y < height; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < width && !failure; blockIdx.x++) run_block();
  return failure;
}
