// What the warps of narrow.cu share: sizes and shared memory.

#pragma once

#include "pages.cuh"

constexpr int HEADS = 16, WARPS = GROUP / 32;
constexpr int THIRD = 3, THIRDS = COLUMNS / THIRD;  // columns of a third of a page, which are copied and let go together
constexpr int SLOTS = 8;                            // of the ring of thirds: as many as fit

struct Shared {
  u8 rows[SLOTS][THIRD][BLOCK];
  u8 queries[COLUMNS][HEADS * 128];
  u8 weights[2][HEADS * 128];  // of a page and the next
  float tops[WARPS][HEADS], sums[WARPS][HEADS];
  u64 full[SLOTS], empty[SLOTS], queries_full, queries_empty;
};

enum Barrier { ALL_WARPS = 1 };  // of the group

// A place in the ring, third by third.
struct Turn {
  u32 number = 0;

  __device__ int slot(int ahead) const { return (number + ahead) % SLOTS; }
  __device__ u32 parity(int ahead) const { return (number + ahead) / SLOTS & 1; }
  __device__ bool first(int ahead) const { return number + ahead < SLOTS; }
};
