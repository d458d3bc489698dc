// What both kinds of warps of decode.cu share: sizes, shared memory, and the walk over a part's tiles.

#pragma once

#include "walk.cuh"

constexpr int LATENT = 512, ROPE = 64, GROUPS = 4, GROUP = 128, WIDTH = LATENT + ROPE;
constexpr int SCALES_AT = LATENT, ROPE_AT = LATENT + 4 * GROUPS, ROW = ROPE_AT + 2 * ROPE;
constexpr int ROWS = 64, HEADS = 16, WARPS = 4, WARP_ROWS = ROWS / WARPS;
constexpr int MIN_TILES = 2;  // of a part, as in triton_join.py
// Weights are at most 1 and f16 reaches 65504: so much of its range is used above them.
constexpr int HEADROOM = 15;
constexpr int LEAST_EXPONENT = 60;  // biased: groups whose scales stay below 2 ** -67 count as that small

struct Shared {
  alignas(128) u8 rows[STAGES][ROWS * ROW];
  uint4 weights[2][WARPS][GROUPS][32];  // the fragments of A, rows of 16 tokens times a group's scales
  float tops[2][HEADS][WARPS];
  u32 exponents[2][2][WARPS];
  float shrink[2][HEADS], group_shrink[2][GROUPS];
  float sums[2][WARPS][HEADS], top[2][HEADS];
  int exponent[2][GROUPS];
  u64 full[STAGES], empty[STAGES];
};

enum Barrier { SCORERS = 1, WEIGHTS_FULL = 2, WEIGHTS_EMPTY = 4 };  // the last two: one per buffer

struct Args {
  const u16* q;
  const u8* pool;
  const int* table;
  const int* lengths;
  const int* starts;
  float* out;
  float* pieces;
  float* lse;
  int num_sequences, table_stride, num_heads, starts_early;
  float scale_log2;
};

// Two tiles of the plan at a time.
struct Walk : Line {
  __device__ int first_row() const { return (tile - start) * PLAN_TILE; }
  __device__ int rows() const { return min(min((stop - tile) * PLAN_TILE, ROWS), length - first_row()); }
  __device__ bool last() const { return tile + ROWS / PLAN_TILE >= stop; }
  __device__ void next() { tile = min(tile + ROWS / PLAN_TILE, stop); }
};

// One warp keeps the copies going.
struct Loader {
  Walk walk;
  int page, next_page;  // of the tile's first row and of its last

  __device__ void look(const Args& args) {
    if (walk.tile >= walk.end) return;
    const int* pages = args.table + (u64)walk.seq * args.table_stride;
    int first = walk.first_row();
    page = pages[first / PAGE];
    next_page = pages[(first + walk.rows() - 1) / PAGE];
  }
  __device__ static void copy_rows(u8* to, const u8* from, int rows, u64* full) {
    if (gridDim.x == 1)
      copy_once(to, from, rows * ROW, full);
    else  // blocks of other heads read them at about the same time
      copy(to, from, rows * ROW, full);
  }
  __device__ void load(const Args& args, Shared& shared, int stage, int lane) {
    if (walk.tile >= walk.end) return;
    int first = walk.first_row(), rows = walk.rows(), head = min(rows, PAGE - first % PAGE);
    if (lane == 0) {
      u64* full = &shared.full[stage];
      u8* to = shared.rows[stage];
      expect(full, rows * ROW);
      copy_rows(to, args.pool + ((u64)page * PAGE + first % PAGE) * ROW, head, full);
      if (head < rows)  // tiles begin at any 32nd row
        copy_rows(to + head * ROW, args.pool + (u64)next_page * PAGE * ROW, rows - head, full);
    }
    walk.next();
    if (walk.tile == walk.stop && walk.tile < walk.end) walk.open(args);
    look(args);
  }
};
