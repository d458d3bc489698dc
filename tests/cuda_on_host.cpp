// Runs one launch of kernels/cuda/decode.cu on the host: its threads are coroutines, its special instructions the
// functions below. Warps run in random order, one of them slowly, and copies end at once or late and in any order, so
// what a barrier forgets to order shows in the result; a barrier that is used wrongly is a failure, and so are accesses
// to shared memory that no barrier orders, whatever their order was (shared_races.h). Compiled by test_cuda_decode.py,
// beside an empty ptx.cuh.

#include <ucontext.h>

#include <algorithm>
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

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using std::max, std::min;
struct uint4 { u32 x, y, z, w; };
struct int4 { int x, y, z, w; };
struct float4 { float x, y, z, w; };
struct Index { int x, y; } blockIdx, gridDim, threadIdx;

constexpr int THREADS = BLOCK_THREADS, LANES = 32, STACK_BYTES = 1 << 17;
alignas(128) u8 memory[227 << 10];
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

bool is_left_out(int id);
void barrier_sync(int id, int wanted) {
  if (!is_left_out(id)) barriers[id].order(wanted, true);
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
struct Copy { void* to; const u8* from; u32 bytes; u64* barrier; };
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
bool says_full(u64* barrier);
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
  memcpy(done.to, done.from, done.bytes);
  phases.at(done.barrier).bytes -= done.bytes, settle(phases.at(done.barrier));
}
void copy(void* to, const u8* from, u32 bytes, u64* barrier) {
  if (((u64)to | (u64)from | bytes) % 16 || !bytes) return fail("a copy of odd bytes");
  if (from < pool_begin || from + bytes > pool_end) return fail("a copy from outside the pool");
  begin_copy(to, bytes, phases.at(barrier).index, phases.at(barrier).number + 1);
  copies.push_back({to, from, bytes, barrier});
  if (chance() % 2) end_a_copy();
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
int __float2int_rz(float x) { return x <= -0x1p31f ? INT32_MIN : (int)x; }
float __log2f(float x) { return log2f(x); }
float exp2_of(float x) { return exp2f(x); }
u32 __vmaxu2(u32 a, u32 b) { return max(a & 0xffff, b & 0xffff) | max(a >> 16, b >> 16) << 16; }
u32 __byte_perm(u32 a, u32 b, u32 which) {
  u64 both = (u64)b << 32 | a;
  u32 out = 0;
  for (int i = 0; i < 4; i++) out |= (u32)(both >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
  return out;
}
u32 f16_pair(float low, float high) { return bits<u16>((_Float16)low) | (u32)bits<u16>((_Float16)high) << 16; }
float of_e4m3(u8 x) {
  float size = (x & 0x7f) == 0x7f ? NAN : x >> 3 & 15 ? ldexpf(8 + (x & 7), (x >> 3 & 15) - 10) : ldexpf(x & 7, -9);
  return x & 0x80 ? -size : size;
}
u32 low_pair(u32 x) { return f16_pair(of_e4m3(x & 0xff), of_e4m3(x >> 8 & 0xff)); }
u32 high_pair(u32 x) { return low_pair(x >> 16); }

// mma.m16n8k16: lane 4 i + j has, of A, rows i and i + 8 at depths 2 j, 2 j + 1 and 8 more; of B the same of column i.
template <bool BF16>
void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if (!numbers) return;
  auto half = [](u32 word, int high) {
    u16 x = word >> 16 * high;
    return BF16 ? bits<float>((u32)x << 16) : (float)bits<_Float16>(x);
  };
  int lane = threadIdx.x % LANES;
  together<int>({a[0], a[1], a[2], a[3], b0, b1}, [&](auto lanes) {
    for (int c = 0; c < 4; c++)
      for (int depth = 0; depth < 16; depth++) {
        int row = lane / 4 + 8 * (c / 2), column = 2 * (lane % 4) + c % 2, from = depth % 8 / 2;
        d[c] += half(lanes[row % 8 * 4 + from][row / 8 + 2 * (depth / 8)], depth % 2) *
                half(lanes[column * 4 + from][4 + depth / 8], depth % 2);
      }
    return 0;
  });
}

#include "decode.cu"

bool is_left_out(int id) { return left_out == (id == SCORERS ? id : id & ~1); }  // one of each buffer, but for SCORERS
bool says_full(u64* barrier) { return barrier < ((Shared*)memory)->empty; }

int this_thread() { return threadIdx.x; }

void report_race(size_t offset, bool one_is_a_copy) {
  if (one_is_a_copy) return fail("a race of a copy");
  if (offset < offsetof(Shared, weights)) return fail("a race in the rows");
  if (offset < offsetof(Shared, tops)) return fail("a race in the weights");
  if (offset < offsetof(Shared, shrink)) return fail("a race in what scorers offer");
  fail(offset < offsetof(Shared, full) ? "a race in what is handed over" : "a race in the barriers");
}

const Args* arguments;

void run_thread() {
  decode(*arguments);
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
    if (warp == slow && chance() % 64) continue;
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
extern "C" const char* launch(const Args* args, int head_blocks, int parts, u64 pool_bytes, int without, bool exact) {
  left_out = without, numbers = exact;
  arguments = args, pool_begin = args->pool, pool_end = args->pool + pool_bytes;
  gridDim = {head_blocks, parts}, failure = nullptr;
  for (blockIdx.y = 0; blockIdx.y < parts; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < head_blocks && !failure; blockIdx.x++) run_block();
  return failure;
}
