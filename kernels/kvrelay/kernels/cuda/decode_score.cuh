// The warps that make weights of scores; see decode.cu.

#pragma once

#include "decode_parts.cuh"
#include "decode_queries.cuh"

__device__ __forceinline__ float infinite() { return __int_as_float(0x7f800000); }

// 2 ** n for n <= 0, and 0 where that is too small.
__device__ __forceinline__ float power_down(int n) { return __int_as_float(max(n + 127, 0) << 23); }

// What a sequence has come to: of heads g and g + 8, a power of two (its log) that no score exceeds and the sum of this
// thread's weights under it; of each group, the exponent of the largest scale.
struct Running {
  float top[2] = {-infinite(), -infinite()}, sum[2] = {0, 0};
  int exponent[GROUPS] = {LEAST_EXPONENT, LEAST_EXPONENT, LEAST_EXPONENT, LEAST_EXPONENT};
};

// What a tile changes in it: factors for earlier sums, and one that brings a group's scales to at most 2 ** HEADROOM.
struct Change {
  float shrink[2], group_shrink[GROUPS], up[GROUPS];
};

// Rows behind the end may hold anything, and a weight of 0 would let not-a-number through.
__device__ __forceinline__ void clear_rows(u8* rows, int first, int lane) {
  for (int row = max(first, 0); row < WARP_ROWS; row++)
    for (int i = lane; i < ROW / 16; i += 32) *(uint4*)(rows + row * ROW + 16 * i) = uint4{0, 0, 0, 0};
  stores_before_copies();  // the next copy writes there too
  __syncwarp();
}

// scale[n][c]: of row 8 n + 2 t + c.
__device__ __forceinline__ void load_scales(const u8* rows, int t, float (&scale)[2][2][GROUPS]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float4 x = *(const float4*)(rows + (8 * (i / 2) + 2 * t + i % 2) * ROW + SCALES_AT);
    scale[i / 2][i % 2][0] = x.x, scale[i / 2][i % 2][1] = x.y;
    scale[i / 2][i % 2][2] = x.z, scale[i / 2][i % 2][3] = x.w;
  }
}

// Tells the other warps this one's highest score of each head and largest scale of each group.
__device__ __forceinline__ void offer(Shared& shared, int buffer, const float (&s)[2][4],
                                      const float (&scale)[2][2][GROUPS], int warp, int lane) {
  const int g = lane / 4, t = lane % 4;
  u32 found[2];  // exponents of two groups each
#pragma unroll
  for (int i = 0; i < 2; i++) {
    u32 bits[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      int group = 2 * i + j;
      bits[j] = __float_as_uint(
          fmaxf(fmaxf(scale[0][0][group], scale[0][1][group]), fmaxf(scale[1][0][group], scale[1][1][group])));
    }
    found[i] = bits[0] >> 23 | bits[1] >> 23 << 16;
    found[i] = __vmaxu2(found[i], __shfl_xor_sync(~0u, found[i], 1));
    found[i] = __vmaxu2(found[i], __shfl_xor_sync(~0u, found[i], 2));
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float high = fmaxf(fmaxf(s[0][2 * r], s[0][2 * r + 1]), fmaxf(s[1][2 * r], s[1][2 * r + 1]));
    high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
    high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
    if (t == 0) shared.tops[buffer][g + 8 * r][warp] = high;
  }
  if (lane == 0) {
    shared.exponents[buffer][0][warp] = found[0];
    shared.exponents[buffer][1][warp] = found[1];
  }
}

// Takes what all four warps offered.
__device__ __forceinline__ Change rise(const Shared& shared, int buffer, Running& running, int g) {
  Change change;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float4 x = *(const float4*)shared.tops[buffer][g + 8 * r];
    float high = fmaxf(running.top[r], ceilf(fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w))));
    change.shrink[r] = power_down(max(__float2int_rz(running.top[r] - high), -1000));
    running.top[r] = high;
    running.sum[r] *= change.shrink[r];
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    uint4 x = *(const uint4*)shared.exponents[buffer][i];
    u32 most = __vmaxu2(__vmaxu2(x.x, x.y), __vmaxu2(x.z, x.w));
#pragma unroll
    for (int j = 0; j < 2; j++) {
      int group = 2 * i + j, now = max(running.exponent[group], (int)(j ? most >> 16 : most & 0xffffu));
      change.up[group] = __int_as_float((254 + HEADROOM - now) << 23);
      change.group_shrink[group] = power_down(running.exponent[group] - now);
      running.exponent[group] = now;
    }
  }
  return change;
}

// Weights times scales as fragments of A: their columns are this warp's 16 rows.
__device__ __forceinline__ void make_weights(const float (&s)[2][4], const float (&scale)[2][2][GROUPS],
                                             const Change& change, Running& running, uint4 (&weights)[GROUPS]) {
  float p[2][4];
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int c = 0; c < 4; c++) {
      p[n][c] = exp2_of(s[n][c] - running.top[c / 2]);
      running.sum[c / 2] += p[n][c];
    }
#pragma unroll
  for (int i = 0; i < GROUPS; i++) {
    float a0 = scale[0][0][i] * change.up[i], a1 = scale[0][1][i] * change.up[i];
    float b0 = scale[1][0][i] * change.up[i], b1 = scale[1][1][i] * change.up[i];
    weights[i] = uint4{f16_pair(p[0][0] * a0, p[0][1] * a1), f16_pair(p[0][2] * a0, p[0][3] * a1),
                       f16_pair(p[1][0] * b0, p[1][1] * b1), f16_pair(p[1][2] * b0, p[1][3] * b1)};
  }
}

// What the weighers need besides weights: after each tile what shrinks, after the last one what the sums stand under.
__device__ __forceinline__ void hand_over(Shared& shared, int buffer, const Change& change, const Running& running,
                                          bool last, int warp, int lane) {
  const int g = lane / 4, t = lane % 4;
  if (warp == 0 && t == 0) {
    shared.shrink[buffer][g] = change.shrink[0], shared.shrink[buffer][g + 8] = change.shrink[1];
    if (lane == 0)
#pragma unroll
      for (int i = 0; i < GROUPS; i++) shared.group_shrink[buffer][i] = change.group_shrink[i];
  }
  if (!last) return;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float total = running.sum[r] + __shfl_xor_sync(~0u, running.sum[r], 1);
    total += __shfl_xor_sync(~0u, total, 2);
    if (t == 0) {
      shared.sums[buffer][warp][g + 8 * r] = total;
      if (warp == 0) shared.top[buffer][g + 8 * r] = running.top[r];
    }
  }
  if (warp == 0 && lane == 0)
#pragma unroll
    for (int i = 0; i < GROUPS; i++) shared.exponent[buffer][i] = running.exponent[i];
}

__device__ void run_scorer(const Args& args, Shared& shared, Walk walk, int first_head, int warp, int lane) {
  const int g = lane / 4, t = lane % 4, first_row = warp * WARP_ROWS;
  int turn = 0, stage = 0;
  u32 parity = 0;
  while (walk.tile < walk.end) {
    walk.open(args);
    Queries q;
    q.load(args, walk.seq, first_head, g, t);
    Running running;
    for (; walk.tile < walk.stop; walk.next(), turn++) {
      const int buffer = turn % 2, num_rows = walk.rows();
      const bool last = walk.last();
      u8* rows = shared.rows[stage] + first_row * ROW;
      wait(&shared.full[stage], parity);
      if (num_rows < ROWS) clear_rows(rows, num_rows - first_row, lane);
      float scale[2][2][GROUPS], s[2][4];
      load_scales(rows, t, scale);
      score(q, rows, scale, g, t, args.scale_log2, s);
      if (num_rows < ROWS) {
#pragma unroll
        for (int i = 0; i < 8; i++)
          if (first_row + 8 * (i / 4) + 2 * t + i % 2 >= num_rows) s[i / 4][i % 4] = -infinite();
      }
      offer(shared, buffer, s, scale, warp, lane);
      barrier_sync(SCORERS, 32 * WARPS);
      const Change change = rise(shared, buffer, running, g);
      uint4 weights[GROUPS];
      make_weights(s, scale, change, running, weights);
      if (turn >= 2) barrier_sync(WEIGHTS_EMPTY + buffer, 64 * WARPS);
#pragma unroll
      for (int i = 0; i < GROUPS; i++) shared.weights[buffer][warp][i][lane] = weights[i];
      hand_over(shared, buffer, change, running, last, warp, lane);
      barrier_arrive(WEIGHTS_FULL + buffer, 64 * WARPS);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
  }
  for (int left = max(turn - 2, 0); left < turn; left++) barrier_sync(WEIGHTS_EMPTY + left % 2, 64 * WARPS);
}
