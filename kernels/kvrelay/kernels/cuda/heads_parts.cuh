// What the warps of heads.cu share: sizes, shared memory, and the walk over a part's pages.

#pragma once

#include "blocks.cuh"
#include "walk.cuh"

constexpr int LATENT = 512, WIDTH = 576, COLUMNS = WIDTH / 64, HALF = COLUMNS / 2, ROPE = COLUMNS - 1;
constexpr int PAGE = 64, HEADS = 64, ROW = 2 * WIDTH;
constexpr int PART_TILES = 2;  // what the tiles of a part are a multiple of: whole pages
constexpr int GROUP = 128;     // threads of a warpgroup

struct Args {
  TensorMap rows;  // the layer as [rows, WIDTH], in boxes of 64 x 64
  const u16* q;
  const u8* pool;
  const int* table;
  const int* lengths;
  const int* starts;
  u16* out;
  float* pieces;
  float* lse;
  int num_sequences, table_stride, num_heads, starts_early;
  float scale_log2;
};

struct Shared {
  u8 q[COLUMNS][BLOCK];
  u8 rows[2][COLUMNS][BLOCK];  // of two pages; the rope columns' block becomes the page's weights
  float tops[2][HEADS], sums[2][HEADS];
  u64 full[2][2], empty[2][2], weights[2];  // by page and half of the columns
};

enum Barrier { BOTH_GROUPS = 1, ONE_GROUP = 2 };  // the last: one per group

// Page by page; a part may begin in the middle of one.
struct Walk : Line {
  __device__ int page() const { return (tile - start) * PLAN_TILE / PAGE; }
  // Rows of the page that are this part's to read.
  __device__ int low() const { return (tile - start) * PLAN_TILE % PAGE; }
  __device__ int high() const { return min(min((stop - start) * PLAN_TILE, length) - page() * PAGE, PAGE); }
  __device__ void next() { tile = min(start + (page() + 1) * (PAGE / PLAN_TILE), stop); }
};
