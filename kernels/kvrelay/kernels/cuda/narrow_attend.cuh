// The warpgroup that scores and weighs; see narrow.cu.
//
// Lane l of a warp: g = l / 4, t = l % 4. Of a product's 64 rows a thread has g and g + 8 of its warp's 16, and of its 16
// heads 2 t and 2 t + 1 of either eight, as the fragments of wgmma have it: number i is of row g + 8 (i / 2 % 2) and of
// the thread's head mine(i).

#pragma once

#include "narrow_parts.cuh"
#include "wgmma.cuh"

struct Attend {
  const Args& args;
  Shared& shared;
  const int warp, lane, g, t;
  float out[LATENT / 64][8];  // by 64 latent numbers
  float top[4], sum[4];       // of the thread's heads
  bool add;                   // to what `out` has

  __device__ static constexpr int mine(int i) { return i / 4 * 2 + i % 2; }
  // Which of the block's heads the thread's is.
  __device__ int head(int own) const { return own / 2 * 8 + 2 * t + own % 2; }

  __device__ __forceinline__ void score(float (&s)[8], Turn turn) {
    hold(s);
#pragma unroll
    for (int i = 0; i < THIRDS; i++) {
      const int slot = turn.slot(i);
      wait(&shared.full[slot], turn.parity(i));
      products_begin();
#pragma unroll
      for (int j = 0; j < THIRD * 4; j++)
        multiply_rows(s, further(along_rows(shared.rows[slot][j / 4]), j % 4 * 32),
                      further(along_rows(shared.queries[THIRD * i + j / 4]), j % 4 * 32), i > 0 || j > 0);
    }
    products_commit();
    products_wait<0>();
    hold(s);
  }

  // Stores a page's weights head by head. Lanes of neighbouring tokens swap, so that each stores two tokens of one head.
  __device__ __forceinline__ void store_weights(u8* to, const float (&w)[8]) {
    const int odd = g % 2;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const u32 own = bf16_pair(w[i], w[i + 1]), other = __shfl_xor_sync(~0u, own, 4);
      const u32 pair = odd ? other >> 16 | (own & 0xffff0000u) : (own & 0xffffu) | other << 16;
      const int token = 16 * warp + g - odd + 8 * (i / 2 % 2);
      *(u32*)(to + cell_at(head(mine(i)) + odd, token / 8) + token % 8 * 2) = pair;
    }
    stores_before_copies();
  }

  // Takes larger tops where scores need them.
  __device__ __forceinline__ void raise(const float (&s)[8]) {
#pragma unroll
    for (int own = 0; own < 4; own++) {
      const int first = own / 2 * 4 + own % 2;
      float best = fmaxf(s[first], s[first + 2]);
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, distance));
      if (g == 0) shared.tops[warp][head(own)] = best;
    }
    barrier_sync(ALL_WARPS, GROUP);
    float shrink[4];
#pragma unroll
    for (int own = 0; own < 4; own++) {
      float now = top[own];
#pragma unroll
      for (int i = 0; i < WARPS; i++) now = fmaxf(now, shared.tops[i][head(own)]);
      shrink[own] = exp2_of(top[own] - now);
      top[own] = now;
      sum[own] *= shrink[own];
    }
#pragma unroll
    for (int c = 0; c < LATENT / 64; c++)
#pragma unroll
      for (int i = 0; i < 8; i++) out[c][i] *= shrink[mine(i)];
  }

  // Rows behind the end may hold anything, and a weight of 0 would let not-a-number through.
  __device__ __forceinline__ void clear_rows(Turn turn, int first) {
    for (int i = warp * 32 + lane; i < (PAGE - first) * (LATENT / 8); i += GROUP) {
      const int row = first + i / (LATENT / 8), part = i % (LATENT / 8), column = part / 8;
      *(uint4*)(shared.rows[turn.slot(column / THIRD)][column % THIRD] + row * 128 + part % 8 * 16) = uint4{0, 0, 0, 0};
    }
  }

  __device__ __forceinline__ void release(u64* barrier) {
    __syncwarp();
    if (lane == 0) arrive(barrier);
  }

  // Begins the products of a third's values.
  __device__ __forceinline__ void weigh(Turn turn, int third, const u8* weights) {
    const int slot = turn.slot(third);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int j = 0; j < THIRD; j++)
        if (THIRD * third + j < ROPE)
          multiply_turned(out[THIRD * third + j], further(across_rows(shared.rows[slot][j]), 2048 * k),
                          further(along_rows(weights), 32 * k), add || k > 0);
    products_commit();
  }

  // Returns whether a score is further above its head's top than it may be.
  __device__ __forceinline__ bool make_weights(const float (&s)[8], float (&w)[8]) {
    bool above = false;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      above |= s[i] > top[mine(i)] + SLACK;
      w[i] = exp2_of(s[i] - top[mine(i)]);
    }
    return above;
  }

  __device__ __forceinline__ void page(Turn turn, int low, int high, bool last) {
    float s[8], w[8];
    score(s, turn);
    if (last) release(&shared.queries_empty);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int row = 16 * warp + g + 8 * (i / 2 % 2);
      s[i] = row < low || row >= high ? -infinite() : s[i] * args.scale_log2;
    }
    u8* weights = shared.weights[turn.number / THIRDS % 2];
    if (high < PAGE) clear_rows(turn, high);
    const bool above = make_weights(s, w);
    store_weights(weights, w);
    if (barrier_any(ALL_WARPS, GROUP, above)) {
      raise(s);
      make_weights(s, w);
      store_weights(weights, w);
      barrier_sync(ALL_WARPS, GROUP);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) sum[mine(i)] += w[i];
#pragma unroll
    for (int c = 0; c < LATENT / 64; c++) hold(out[c]);
#pragma unroll
    for (int i = 0; i < THIRDS; i++) weigh(turn, i, weights);
    add = true;
    products_wait<2>();
    release(&shared.empty[turn.slot(0)]);
    products_wait<1>();
    release(&shared.empty[turn.slot(1)]);
    products_wait<0>();
    release(&shared.empty[turn.slot(2)]);
#pragma unroll
    for (int c = 0; c < LATENT / 64; c++) hold(out[c]);
  }

  __device__ void store(const Walk& walk, int first_head, int part) {
#pragma unroll
    for (int own = 0; own < 4; own++) {
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) sum[own] += __shfl_xor_sync(~0u, sum[own], distance);
      if (g == 0) shared.sums[warp][head(own)] = sum[own];
    }
    barrier_sync(ALL_WARPS, GROUP);
#pragma unroll
    for (int own = 0; own < 4; own++) {
      const int of_all = first_head + head(own);
      if (of_all >= args.num_heads) continue;
      float total = 0;
#pragma unroll
      for (int i = 0; i < WARPS; i++) total += shared.sums[i][head(own)];
      const u64 row = (u64)(walk.whole ? walk.seq : part + walk.seq) * args.num_heads + of_all;
      const u64 at = row * LATENT + 16 * warp + g;
      const float down = 1.0f / total;
      if (!walk.whole && warp == 0 && g == 0) args.lse[row] = top[own] + __log2f(total);
#pragma unroll
      for (int c = 0; c < LATENT / 64; c++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const float x = out[c][own / 2 * 4 + 2 * r + own % 2] * down;
          if (walk.whole)
            args.out[at + 64 * c + 8 * r] = (u16)bf16_pair(x, 0);
          else
            args.pieces[at + 64 * c + 8 * r] = x;
        }
    }
  }
};

__device__ __forceinline__ void run_attend(const Args& args, Shared& shared, Walk walk, int first_head, int part,
                                           int warp, int lane) {
  Attend attend{args, shared, warp, lane, lane / 4, lane % 4};
  Turn turn;
  wait_for_previous();  // it may still read what results go over
  for (int sequences = 0; walk.tile < walk.end; sequences++) {
    walk.open(args);
#pragma unroll
    for (int own = 0; own < 4; own++) attend.top[own] = -infinite(), attend.sum[own] = 0;
    attend.add = false;
    wait(&shared.queries_full, sequences & 1);
#pragma unroll 1
    for (; walk.tile < walk.stop; turn.number += THIRDS) {
      const int low = walk.low(), high = walk.high();
      walk.next();
      attend.page(turn, low, high, walk.tile == walk.stop);
    }
    if (args.starts_early && walk.tile == walk.end) let_next_begin();
    attend.store(walk, first_head, part);
  }
}
