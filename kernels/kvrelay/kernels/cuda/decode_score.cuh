// The warps that multiply queries with keys and make weights of the scores; see decode.cu.

#pragma once

#include "decode_parts.cuh"

// 2 ** n for n <= 0, and 0 where that is too small.
__device__ __forceinline__ float power_down(int n) { return __int_as_float(max(n + 127, 0) << 23); }

// Queries of 16 heads as fragments of A: thread t has the latent columns [32 t, 32 t + 32) of each group, and the rope
// columns [16 t, 16 t + 16), so that it reads 16 bytes of a row at a time without bank conflicts.
struct Queries {
  u32 latent[GROUPS][8][4];  // f16, times a power of two per head
  u32 rope[4][4];            // bf16
  float scale[2];            // of heads g and g + 8: undoes that power, times the scale of scores

  __device__ void load(const Args& args, int seq, int first_head, int g, int t) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int head = first_head + g + 8 * r;
      const u16* row = args.q + ((u64)seq * args.num_heads + head) * WIDTH;
      bool here = head < args.num_heads;
      const uint4 none = {0, 0, 0, 0};
#pragma unroll
      for (int i = 0; i < 16; i++) {
        int group = i / 4, part = i % 4;
        uint4 x = here ? *(const uint4*)(row + group * GROUP + 32 * t + 8 * part) : none;
        latent[group][2 * part][r] = x.x, latent[group][2 * part][r + 2] = x.y;
        latent[group][2 * part + 1][r] = x.z, latent[group][2 * part + 1][r + 2] = x.w;
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        uint4 x = here ? *(const uint4*)(row + LATENT + 16 * t + 8 * i) : none;
        rope[2 * i][r] = x.x, rope[2 * i][r + 2] = x.y;
        rope[2 * i + 1][r] = x.z, rope[2 * i + 1][r + 2] = x.w;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      u32 largest = 0;  // of the magnitudes' bits
#pragma unroll
      for (int i = 0; i < 64; i++) {
        u32 x = latent[i / 16][i / 2 % 8][r + 2 * (i % 2)];
        largest = max(largest, max(x & 0x7fff0000u, x << 16 & 0x7fff0000u));
      }
      largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
      int exponent = max((int)(largest >> 23), 20);
      float up = __int_as_float((268 - exponent) << 23);  // to [2 ** 14, 2 ** 15)
      scale[r] = __int_as_float((exponent - 14) << 23) * args.scale_log2;
#pragma unroll
      for (int i = 0; i < 64; i++) {
        u32& x = latent[i / 16][i / 2 % 8][r + 2 * (i % 2)];
        x = f16_pair(__int_as_float(x << 16) * up, __int_as_float(x & 0xffff0000u) * up);
      }
    }
  }
};

// Scores of 16 rows, in log2 units: s[n] are rows 8 n + 2 t and the next, for heads g and g + 8.
__device__ __forceinline__ void score(const Queries& q, const u8* rows, const float (&scale)[2][2][GROUPS], int g, int t,
                                      float scale_log2, float (&s)[2][4]) {
  float sum[GROUPS][2][4] = {};  // eight chains of products: one alone would wait for the matrix unit
#pragma unroll
  for (int half = 0; half < 2; half++) {
    uint4 x[GROUPS][2];
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
#pragma unroll
      for (int n = 0; n < 2; n++) x[i][n] = *(const uint4*)(rows + (8 * n + g) * ROW + i * GROUP + 32 * t + 16 * half);
#pragma unroll
    for (int step = 0; step < 4; step++)
#pragma unroll
      for (int i = 0; i < GROUPS; i++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
          u32 word = (&x[i][n].x)[step];
          multiply<false>(sum[i][n], q.latent[i][4 * half + step], low_pair(word), high_pair(word));
        }
  }
  float keys[2][4] = {};
#pragma unroll
  for (int i = 0; i < GROUPS; i++)
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int c = 0; c < 4; c++) keys[n][c] += sum[i][n][c] * scale[n][c % 2][i];
  float turned[2][4] = {};
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int n = 0; n < 2; n++) {
      uint4 x = *(const uint4*)(rows + (8 * n + g) * ROW + ROPE_AT + 32 * t + 16 * half);
      multiply<true>(turned[n], q.rope[2 * half], x.x, x.y);
      multiply<true>(turned[n], q.rope[2 * half + 1], x.z, x.w);
    }
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int c = 0; c < 4; c++) s[n][c] = keys[n][c] * q.scale[c / 2] + turned[n][c] * scale_log2;
}

__device__ void run_scorer(const Args& args, Shared& shared, Walk walk, int first_head, int warp, int lane) {
  const int g = lane / 4, t = lane % 4;
  int turn = 0, stage = 0;
  u32 parity = 0;
  while (walk.tile < walk.end) {
    walk.open(args);
    Queries q;
    q.load(args, walk.seq, first_head, g, t);
    float top[2] = {-__int_as_float(0x7f800000), -__int_as_float(0x7f800000)}, sum[2] = {0, 0};
    int exponent[GROUPS] = {LEAST_EXPONENT, LEAST_EXPONENT, LEAST_EXPONENT, LEAST_EXPONENT};
    for (; walk.tile < walk.stop; walk.next(), turn++) {
      const int buffer = turn % 2, num_rows = walk.rows();
      const bool last = walk.last();
      u8* rows = shared.rows[stage] + warp * WARP_ROWS * ROW;
      wait(&shared.full[stage], parity);
      if (num_rows < ROWS) {  // behind the end anything may be: a weight of 0 would let not-a-number through
        for (int row = max(num_rows - warp * WARP_ROWS, 0); row < WARP_ROWS; row++)
          for (int i = lane; i < ROW / 16; i += 32) *(uint4*)(rows + row * ROW + 16 * i) = uint4{0, 0, 0, 0};
        stores_before_copies();  // the next copy writes there too
        __syncwarp();
      }
      float scale[2][2][GROUPS], s[2][4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float4 x = *(const float4*)(rows + (8 * (i / 2) + 2 * t + i % 2) * ROW + SCALES_AT);
        scale[i / 2][i % 2][0] = x.x, scale[i / 2][i % 2][1] = x.y;
        scale[i / 2][i % 2][2] = x.z, scale[i / 2][i % 2][3] = x.w;
      }
      score(q, rows, scale, g, t, args.scale_log2, s);
      if (num_rows < ROWS) {
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
          for (int c = 0; c < 4; c++)
            if (warp * WARP_ROWS + 8 * n + 2 * t + c % 2 >= num_rows) s[n][c] = -__int_as_float(0x7f800000);
      }

      // The highest score of each head and the largest scale of each group, over all four warps.
      u32 found[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        u32 bits[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
          int group = 2 * i + j;
          bits[j] = __float_as_uint(fmaxf(fmaxf(scale[0][0][group], scale[0][1][group]),
                                          fmaxf(scale[1][0][group], scale[1][1][group])));
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
      barrier_sync(SCORERS, 32 * WARPS);
      float shrink[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float4 x = *(const float4*)shared.tops[buffer][g + 8 * r];
        float high = fmaxf(top[r], ceilf(fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w))));
        shrink[r] = power_down(max(__float2int_rz(top[r] - high), -1000));
        top[r] = high;
        sum[r] *= shrink[r];
      }
      float up[GROUPS], group_shrink[GROUPS];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        uint4 x = *(const uint4*)shared.exponents[buffer][i];
        u32 most = __vmaxu2(__vmaxu2(x.x, x.y), __vmaxu2(x.z, x.w));
#pragma unroll
        for (int j = 0; j < 2; j++) {
          int group = 2 * i + j, now = max(exponent[group], (int)(j ? most >> 16 : most & 0xffffu));
          up[group] = __int_as_float((254 + HEADROOM - now) << 23);
          group_shrink[group] = power_down(exponent[group] - now);
          exponent[group] = now;
        }
      }
      uint4 weights[GROUPS];
      {
        float p[2][4];
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
          for (int c = 0; c < 4; c++) {
            p[n][c] = exp2_of(s[n][c] - top[c / 2]);
            sum[c / 2] += p[n][c];
          }
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
          float a0 = scale[0][0][i] * up[i], a1 = scale[0][1][i] * up[i];
          float b0 = scale[1][0][i] * up[i], b1 = scale[1][1][i] * up[i];
          weights[i] = uint4{f16_pair(p[0][0] * a0, p[0][1] * a1), f16_pair(p[0][2] * a0, p[0][3] * a1),
                             f16_pair(p[1][0] * b0, p[1][1] * b1), f16_pair(p[1][2] * b0, p[1][3] * b1)};
        }
      }
      if (turn >= 2) barrier_sync(WEIGHTS_EMPTY + buffer, 64 * WARPS);
#pragma unroll
      for (int i = 0; i < GROUPS; i++) shared.weights[buffer][warp][i][lane] = weights[i];
      if (warp == 0 && t == 0) {
        shared.shrink[buffer][g] = shrink[0], shared.shrink[buffer][g + 8] = shrink[1];
        if (lane == 0) *(float4*)shared.group_shrink[buffer] = *(const float4*)group_shrink;
      }
      if (last) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          float total = sum[r] + __shfl_xor_sync(~0u, sum[r], 1);
          total += __shfl_xor_sync(~0u, total, 2);
          if (t == 0) {
            shared.sums[buffer][warp][g + 8 * r] = total;
            if (warp == 0) shared.top[buffer][g + 8 * r] = top[r];
          }
        }
        if (warp == 0 && lane == 0) *(int4*)shared.exponent[buffer] = *(const int4*)exponent;
      }
      barrier_arrive(WEIGHTS_FULL + buffer, 64 * WARPS);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
  }
  for (int left = max(turn - 2, 0); left < turn; left++) barrier_sync(WEIGHTS_EMPTY + left % 2, 64 * WARPS);
}
