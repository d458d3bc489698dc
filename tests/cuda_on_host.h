// Runs kernels of kernels/cuda on the host: threads are coroutines, special instructions the functions below. Warps run
// in random order, one of them slowly, and copies end at once or late and in any order, so what a barrier forgets to
// order shows; a barrier that is used wrongly is a failure. Who includes it says how many THREADS a block has.

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

constexpr int LANES = 32, STACK_BYTES = 1 << 17;
alignas(1024) u8 memory[227 << 10];
std::mt19937 chance(1);

const char* failure = nullptr;
void fail(const char* why) { failure = failure ? failure : why; }

template <class To, class From>
To bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  memcpy(&out, &x, sizeof out);
  return out;
}

// Threads. One that waits gives way until what it waits for has come.

struct Thread { ucontext_t context; bool ended; std::vector<char> stack; } threads[THREADS];
ucontext_t scheduler;

void give_way() {
  Index me = threadIdx;
  swapcontext(&threads[me.x].context, &scheduler);
  threadIdx = me;
}

struct Meeting {  // of `wanted` threads, again and again
  int wanted = 0, here = 0;
  u64 number = 0;
  void join(int threads_wanted, bool stay) {
    if (here && wanted != threads_wanted) fail("threads disagree about a barrier");
    wanted = threads_wanted;
    u64 mine = number;
    if (++here == wanted) here = 0, number++;
    while (stay && number == mine) give_way();
  }
};

Meeting barriers[16], warps[THREADS / LANES];
u32 offered[THREADS][6];  // by each thread to its warp

// Every thread of a warp offers some words and makes something of all of them.
template <class Result>
Result together(std::initializer_list<u32> words, std::function<Result(u32 (*lanes)[6])> make) {
  int warp = threadIdx.x / LANES;
  std::copy(words.begin(), words.end(), offered[threadIdx.x]);
  warps[warp].join(LANES, true);
  Result result = make(offered + warp * LANES);
  warps[warp].join(LANES, true);
  return result;
}

void barrier_sync(int id, int wanted) { barriers[id].join(wanted, true); }
void barrier_arrive(int id, int wanted) { barriers[id].join(wanted, false); }
void __syncthreads() { barrier_sync(0, THREADS); }
void __syncwarp() { warps[threadIdx.x / LANES].join(LANES, true); }

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

struct Phase { int wanted, here; long bytes; u32 number; };
std::map<u64*, Phase> phases;
struct Copy { std::function<void()> move; u32 bytes; u64* barrier; };
std::vector<Copy> copies;
const u8 *pool_begin, *pool_end;

void settle(Phase& phase) {
  if (phase.here > phase.wanted) fail("too many arrivals at a barrier of copies");
  if (phase.here == phase.wanted && !phase.bytes) phase.here = 0, phase.number++;
}
void init(u64* barrier, u32 wanted) { phases[barrier] = {(int)wanted, 0, 0, 0}; }
void arrive(u64* barrier) { phases.at(barrier).here++, settle(phases.at(barrier)); }
void expect(u64* barrier, u32 bytes) { phases.at(barrier).bytes += bytes, arrive(barrier); }
void wait(u64* barrier, u32 parity) {
  while (phases.at(barrier).number % 2 == parity) give_way();
}
void end_a_copy() {
  std::swap(copies[chance() % copies.size()], copies.back());
  Copy done = copies.back();
  copies.pop_back();
  done.move();
  phases.at(done.barrier).bytes -= done.bytes, settle(phases.at(done.barrier));
}
void begin_copy(Copy copy) {
  copies.push_back(copy);
  if (chance() % 2) end_a_copy();
}
void copy(void* to, const u8* from, u32 bytes, u64* barrier) {
  if (((u64)to | (u64)from | bytes) % 16 || !bytes) return fail("a copy of odd bytes");
  if (from < pool_begin || from + bytes > pool_end) return fail("a copy from outside the pool");
  begin_copy({[=] { memcpy(to, from, bytes); }, bytes, barrier});
}
void copy_once(void* to, const u8* from, u32 bytes, u64* barrier) { copy(to, from, bytes, barrier); }
void publish_barriers() {}
void stores_before_copies() {}
void let_next_begin() {}
void wait_for_previous() {}

// Numbers.

float __int_as_float(u32 x) { return bits<float>(x); }
u32 __float_as_uint(float x) { return bits<u32>(x); }
float __log2f(float x) { return log2f(x); }
float exp2_of(float x) { return exp2f(x); }

// Blocks.

std::function<void()> kernel;

void run_thread() {
  kernel();
  threads[threadIdx.x].ended = true;
  give_way();
}

void run_block() {
  memset(memory, 0xff, sizeof memory);  // not-a-number
  phases.clear();
  for (Thread& thread : threads) {
    thread.ended = false;
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
      if (threads[i].ended) continue;
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
const char* run_grid(int head_blocks, int parts, std::function<void()> run) {
  kernel = run, gridDim = {head_blocks, parts}, failure = nullptr;
  for (blockIdx.y = 0; blockIdx.y < parts; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < head_blocks && !failure; blockIdx.x++) run_block();
  return failure;
}
