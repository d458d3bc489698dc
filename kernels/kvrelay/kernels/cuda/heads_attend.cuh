// The two warpgroups that score and weigh; see heads.cu.
//
// Lane l of a warp: g = l / 4, t = l % 4; a thread has heads g and g + 8 of its warp's 16, and of every 8 columns the
// two at 2 t, as the fragments of wgmma have it.

#pragma once

#include "heads_parts.cuh"
#include "wgmma.cuh"

template <int group>
struct Attend {
  const Args& args;
  Shared& shared;
  const int warp, lane, g, t;
  float out[128];  // this group's 256 columns
  float top[2], sum[2];
  bool add;  // to what `out` has

  // Takes the powers that scores of heads g and g + 8 are weighed under from here on; says what sums shrink by.
  __device__ __forceinline__ void raise(const float (&now)[2], float (&shrink)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      shrink[r] = exp2_of(top[r] - now[r]);
      top[r] = now[r];
      sum[r] *= shrink[r];
    }
  }

  __device__ __forceinline__ void shrink_by(const float (&shrink)[2]) {
    if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < 128; i++) out[i] *= shrink[i / 2 % 2];
    }
  }

  // Rows behind the end may hold anything, and a weight of 0 would let not-a-number through.
  __device__ __forceinline__ void clear_rows(int buffer, int first) {
    for (int i = warp * 32 + lane; i < (PAGE - first) * HALF * 8; i += GROUP) {
      int row = first + i / (HALF * 8), part = i % (HALF * 8);
      *(uint4*)(shared.rows[buffer][group * HALF + part / 8] + row * 128 + part % 8 * 16) = uint4{0, 0, 0, 0};
    }
    stores_before_copies();
    barrier_sync(ONE_GROUP + group, GROUP);
  }

  __device__ __forceinline__ void release(int buffer) {
    __syncwarp();
    if constexpr (CLUSTER == 1) {
      if (lane == 0) arrive(&shared.empty[buffer][group]);
    } else {
      if (lane < CLUSTER) arrive_in(lane, &shared.empty[buffer][group]);
    }
  }

  // Starts the scores of a page of this group's.
  __device__ __forceinline__ void begin_scores(float (&s)[32], u32 parity) {
    const u64 q = along_rows(shared.q), keys = along_rows(shared.rows[group]);
    wait(&shared.full[group][group], parity);
    hold(s);
    products_begin();
#pragma unroll
    for (int i = 0; i < HALF * 4; i++) {
      int at = (group * HALF + i / 4) * BLOCK + i % 4 * 32;
      multiply_keys(s, further(q, at), further(keys, at), i > 0);
    }
    wait(&shared.full[group][1 - group], parity);
    products_begin();
#pragma unroll
    for (int i = 0; i < HALF * 4 + 4; i++) {
      int column = i / 4 == HALF ? ROPE : (1 - group) * HALF + i / 4, at = column * BLOCK + i % 4 * 32;
      multiply_keys(s, further(q, at), further(keys, at), true);
    }
    products_commit();
  }

  // Starts the products of a page that the other group has scored.
  __device__ __forceinline__ void begin_other(u32 parity, int high) {
    const int buffer = 1 - group;
    wait(&shared.weights[buffer], parity);
    wait(&shared.full[buffer][group], parity);  // have come, which makes them visible here too
    float now[2], shrink[2];
#pragma unroll
    for (int r = 0; r < 2; r++) now[r] = shared.tops[buffer][16 * warp + g + 8 * r];
    if (__any_sync(~0u, now[0] != top[0] || now[1] != top[1])) {
      raise(now, shrink);
      shrink_by(shrink);
    }
    if (high < PAGE) clear_rows(buffer, high);
    const u64 weights = along_rows(shared.rows[buffer][ROPE]), values = across_rows(shared.rows[buffer][group * HALF]);
    hold(out);
    products_begin();
#pragma unroll
    for (int i = 0; i < 4; i++)
      multiply_values(out, further(weights, 32 * i), further(values, 2048 * i), add || i > 0);
    products_commit();
    add = true;
  }

  __device__ __forceinline__ void end_other() {
    products_wait<0>();
    hold(out);
    release(1 - group);
  }

  // A page of this group's; with `behind`, the other group's page before it has not been multiplied yet.
  template <bool behind>
  __device__ __forceinline__ void own_page(u32 parity, int low, int high, u32 other_parity) {
    float s[32];
    begin_scores(s, parity);
    if (behind) {
      begin_other(other_parity, PAGE);
      products_wait<1>();
    } else {
      products_wait<0>();
    }
    hold(s);
    if (low > 0 || high < PAGE) {
#pragma unroll
      for (int i = 0; i < 32; i++) {
        int row = i / 4 * 8 + 2 * t + i % 2;
        if (row < low || row >= high) s[i] = -infinite();
      }
    }
    float now[2], shrink[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float best = s[2 * r];
#pragma unroll
      for (int i = 0; i < 32; i++)
        if (i / 2 % 2 == r) best = fmaxf(best, s[i]);
      best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
      best = fmaxf(best, __shfl_xor_sync(~0u, best, 2)) * args.scale_log2;
      now[r] = best > top[r] + SLACK ? best : top[r];
      if (t == 0) shared.tops[group][16 * warp + g + 8 * r] = now[r];
    }
    raise(now, shrink);
    u32 weights[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
      float even = exp2_of(s[2 * i] * args.scale_log2 - top[i % 2]);
      float odd = exp2_of(s[2 * i + 1] * args.scale_log2 - top[i % 2]);
      sum[i % 2] += even + odd;
      weights[i] = bf16_pair(even, odd);
    }
    barrier_sync(ONE_GROUP + group, GROUP);  // all warps have read the rope columns
    u8* to = shared.rows[group][ROPE] + 4 * t;
#pragma unroll
    for (int i = 0; i < 16; i++) *(u32*)(to + cell_at(16 * warp + g + 8 * (i % 2), i / 2)) = weights[i];
    stores_before_copies();
    arrive(&shared.weights[group]);
    if (behind) end_other();
    shrink_by(shrink);
    if (high < PAGE) clear_rows(group, high);
    const u64 values = across_rows(shared.rows[group][group * HALF]);
    hold(weights);
    hold(out);
    products_begin();
#pragma unroll
    for (int i = 0; i < 4; i++) multiply_values(out, weights + 4 * i, further(values, 2048 * i), add || i > 0);
    products_commit();
    products_wait<0>();
    hold(out);
    release(group);
    add = true;
  }

  __device__ void store(const Walk& walk, int first_head, int part, int sequence) {
    float(&sums)[2][HEADS] = shared.sums[sequence % 2];
    float total[2];  // of both groups' pages
#pragma unroll
    for (int r = 0; r < 2; r++) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
      if (t == 0) sums[group][16 * warp + g + 8 * r] = sum[r];
    }
    barrier_sync(BOTH_GROUPS, 2 * GROUP);
#pragma unroll
    for (int r = 0; r < 2; r++) total[r] = sums[0][16 * warp + g + 8 * r] + sums[1][16 * warp + g + 8 * r];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int head = first_head + 16 * warp + g + 8 * r;
      if (head >= args.num_heads) continue;
      u64 row = (u64)(walk.whole ? walk.seq : part + walk.seq) * args.num_heads + head;
      float down = 1.0f / total[r];
      u64 at = row * LATENT + group * (LATENT / 2) + 2 * t;
      if (walk.whole) {
#pragma unroll
        for (int i = 0; i < 32; i++)
          *(u32*)(args.out + at + 8 * i) = bf16_pair(out[4 * i + 2 * r] * down, out[4 * i + 2 * r + 1] * down);
      } else {
        if (group == 0 && t == 0) args.lse[row] = top[r] + __log2f(total[r]);
#pragma unroll
        for (int i = 0; i < 32; i++)
          *(float2*)(args.pieces + at + 8 * i) = float2{out[4 * i + 2 * r] * down, out[4 * i + 2 * r + 1] * down};
      }
    }
  }
};

template <int group>
__device__ __forceinline__ void run_attend(const Args& args, Shared& shared, Walk walk, int first_head, int part,
                                           int warp, int lane) {
  Attend<group> attend{args, shared, warp, lane, lane / 4, lane % 4};
  int turn = 0;
  for (int sequence = 0; walk.tile < walk.end; sequence++) {
    walk.open(args);
#pragma unroll
    for (int r = 0; r < 2; r++) attend.top[r] = -infinite(), attend.sum[r] = 0;
    attend.add = false;
    bool behind = false;
    wait(&shared.queries_full, sequence & 1);
#pragma unroll 1
    for (; walk.tile < walk.stop; turn++) {
      const u32 parity = turn / 2 & 1;
      const int low = walk.low(), high = walk.high();
      walk.next();
      if (turn % 2 == group) {
        if (behind)
          attend.template own_page<true>(parity, low, high, (turn - 1) / 2 & 1);
        else
          attend.template own_page<false>(parity, low, high, 0);
        behind = false;
      } else if (group == 0 && walk.tile < walk.stop) {
        behind = true;  // not for both groups: pages would be let go too late
      } else {
        attend.begin_other(parity, high);
        attend.end_other();
      }
    }
    __syncwarp();
    if (lane == 0) arrive(&shared.queries_empty);
    attend.store(walk, first_head, part, sequence);
  }
}
