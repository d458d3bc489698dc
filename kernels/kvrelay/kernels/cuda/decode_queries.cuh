// Queries in registers, and their products with the keys of a tile; see decode.cu.

#pragma once

#include "decode_parts.cuh"

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
__device__ __forceinline__ void score(const Queries& q, const u8* rows, const float (&scale)[2][2][GROUPS], int g,
                                      int t, float scale_log2, float (&s)[2][4]) {
  float sum[GROUPS][2][4] = {};  // eight chains of products: one alone would wait for the matrix unit
#pragma unroll
  for (int half = 0; half < 2; half++) {
    uint4 x[GROUPS][2];
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
#pragma unroll
      for (int n = 0; n < 2; n++)
        x[i][n] = *(const uint4*)(rows + (8 * n + g) * ROW + i * GROUP + 32 * t + 16 * half);
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
