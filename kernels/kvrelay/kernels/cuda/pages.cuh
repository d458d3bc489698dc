// What the kernels over pages of bf16 rows share: sizes, arguments, and the walk over a part's pages.

#pragma once

#include "blocks.cuh"
#include "walk.cuh"

constexpr int LATENT = 512, WIDTH = 576, COLUMNS = WIDTH / 64, ROPE = COLUMNS - 1;
constexpr int PAGE = 64, ROW = 2 * WIDTH;
constexpr int PART_TILES = 2;  // what the tiles of a part are a multiple of: whole pages
constexpr int GROUP = 128;     // threads of a warpgroup

// Scores are weighed under a power that is raised only when one exceeds it by this much (of log2): weights stay below
// 2 ** 8, and sums are seldom scaled down.
constexpr float SLACK = 8;

struct Args {
  TensorMap rows;     // the layer as [rows, WIDTH], in boxes of 64 x 64
  TensorMap queries;  // the same of all sequences' heads
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

__device__ __forceinline__ float infinite() { return __int_as_float(0x7f800000); }

// Page by page; a part may begin in the middle of one.
struct Walk : Line {
  __device__ int page() const { return (tile - start) * PLAN_TILE / PAGE; }
  // Rows of the page that are this part's to read.
  __device__ int low() const { return (tile - start) * PLAN_TILE % PAGE; }
  __device__ int high() const { return min(min((stop - start) * PLAN_TILE, length) - page() * PAGE, PAGE); }
  __device__ void next() { tile = min(start + (page() + 1) * (PAGE / PLAN_TILE), stop); }

  // Goes to a part's first tile and says whether it has any; the same for all lanes of a warp.
  __device__ bool begin(const Args& args, int part, int parts, int lane) {
    const int total = args.starts[args.num_sequences];
    const int per_part = ((total + parts - 1) / parts + PART_TILES - 1) / PART_TILES * PART_TILES;
    tile = part * per_part;
    end = min(tile + per_part, total);
    if (tile >= end) return false;
    // As many sequences as end at or before a part's first tile come before it.
    int before = 0;
    for (int i = lane; i < args.num_sequences; i += 32) before += args.starts[i + 1] <= tile;
    seq = __reduce_add_sync(~0u, before);
    return true;
  }
};
