// Runs one launch of kernels/cuda/decode.cu on the host; compiled by test_cuda_decode.py, beside an empty ptx.cuh.

#include "cuda_on_host.h"

int __float2int_rz(float x) { return x <= -0x1p31f ? INT32_MIN : (int)x; }
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

void report_race(size_t offset, bool one_is_a_copy) {
  if (one_is_a_copy) return fail("a race of a copy");
  if (offset < offsetof(Shared, weights)) return fail("a race in the rows");
  if (offset < offsetof(Shared, tops)) return fail("a race in the weights");
  if (offset < offsetof(Shared, shrink)) return fail("a race in what scorers offer");
  fail(offset < offsetof(Shared, full) ? "a race in what is handed over" : "a race in the barriers");
}

// Returns what went wrong, or null.
extern "C" const char* launch(const Args* args, int head_blocks, int parts, u64 pool_bytes, int without, bool exact) {
  left_out = without, numbers = exact;
  pool_begin = args->pool, pool_end = args->pool + pool_bytes;
  return run_grid(head_blocks, parts, [=] { decode(*args); });
}
