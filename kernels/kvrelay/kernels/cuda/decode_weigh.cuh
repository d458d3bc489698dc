// The warps that sum weighted values, and the copies that feed all; see decode.cu.

#pragma once

#include "decode_parts.cuh"

__device__ void run_weigher(const Args& args, Shared& shared, Walk walk, int first_head, int part, int warp, int lane) {
  const int g = lane / 4, t = lane % 4;  // this warp has the columns of group `warp`
  Loader loader;
  if (warp == 0) {
    loader.walk = walk;
    loader.walk.open(args);
    loader.look(args);
#pragma unroll 1
    for (int i = 0; i < STAGES; i++) loader.load(args, shared, i, lane);
  }
  int turn = 0, stage = 0, before = STAGES - 1;
  u32 parity = 0, before_parity = 0;
  while (walk.tile < walk.end) {
    walk.open(args);
    float acc[16][4] = {};
    float sum[2] = {0, 0}, top[2] = {0, 0};
    int exponent = 0;
    for (; walk.tile < walk.stop; walk.next(), turn++) {
      const int buffer = turn % 2;
      if (warp == 0 && turn > 0) {
        if (loader.walk.tile < loader.walk.end) {
          wait(&shared.empty[before], before_parity);
          loader.load(args, shared, before, lane);
        }
      }
      barrier_sync(WEIGHTS_FULL + buffer, 64 * WARPS);
      wait(&shared.full[stage], parity);  // has come: the scorers waited for it; makes the copy's bytes visible here
      float shrink[2];
#pragma unroll
      for (int r = 0; r < 2; r++) shrink[r] = shared.shrink[buffer][g + 8 * r] * shared.group_shrink[buffer][warp];
      if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < 16; i++)
#pragma unroll
          for (int c = 0; c < 4; c++) acc[i][c] *= shrink[c / 2];
      }
      const u8* values = shared.rows[stage] + 2 * t * ROW + warp * GROUP + 16 * g;
#pragma unroll
      for (int block = 0; block < WARPS; block++) {
        uint4 x[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
          x[i] = *(const uint4*)(values + (WARP_ROWS * block + 8 * (i / 2) + i % 2) * ROW);
        uint4 weights = shared.weights[buffer][block][warp][lane];
        const u32 a[4] = {weights.x, weights.y, weights.z, weights.w};
#pragma unroll
        for (int word = 0; word < 4; word++) {
          u32 w0 = (&x[0].x)[word], w1 = (&x[1].x)[word], w2 = (&x[2].x)[word], w3 = (&x[3].x)[word];
          u32 low = __byte_perm(w0, w1, 0x5140), high = __byte_perm(w0, w1, 0x7362);  // two rows of a column
          u32 low8 = __byte_perm(w2, w3, 0x5140), high8 = __byte_perm(w2, w3, 0x7362);
          multiply<false>(acc[4 * word], a, low_pair(low), low_pair(low8));
          multiply<false>(acc[4 * word + 1], a, high_pair(low), high_pair(low8));
          multiply<false>(acc[4 * word + 2], a, low_pair(high), low_pair(high8));
          multiply<false>(acc[4 * word + 3], a, high_pair(high), high_pair(high8));
        }
      }
      if (walk.last()) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          top[r] = shared.top[buffer][g + 8 * r];
          sum[r] = 0;
#pragma unroll
          for (int i = 0; i < WARPS; i++) sum[r] += shared.sums[buffer][i][g + 8 * r];
        }
        exponent = shared.exponent[buffer][warp];
      }
      __syncwarp();
      if (lane == 0) arrive(&shared.empty[stage]);
      barrier_arrive(WEIGHTS_EMPTY + buffer, 64 * WARPS);
      if (++before == STAGES) before = 0;
      if (turn > 0 && before == 0) before_parity ^= 1;
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int head = first_head + g + 8 * r;
      if (head >= args.num_heads) continue;
      u64 row = (u64)(walk.whole ? walk.seq : part + walk.seq) * args.num_heads + head;
      if (!walk.whole && warp == 0 && t == 0) args.lse[row] = top[r] + __log2f(sum[r]);
      float down = __int_as_float((exponent - HEADROOM) << 23) / sum[r];
      float* to = (walk.whole ? args.out : args.pieces) + row * LATENT + warp * GROUP + 32 * t;
#pragma unroll
      for (int i = 0; i < 32; i += 4) {
        int n = i % 16, c = 2 * r + i / 16;
        *(float4*)(to + i) =
            float4{acc[n][c] * down, acc[n + 1][c] * down, acc[n + 2][c] * down, acc[n + 3][c] * down};
      }
    }
  }
}
