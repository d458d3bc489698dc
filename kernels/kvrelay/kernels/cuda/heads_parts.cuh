// What the warps of heads.cu share: sizes and shared memory.

#pragma once

#include "pages.cuh"

constexpr int HEADS = 64, HALF = COLUMNS / 2, GROUP_WARPS = GROUP / 32;

struct Shared {
  u8 q[COLUMNS][BLOCK];
  u8 rows[2][COLUMNS][BLOCK];  // of two pages; the rope columns' block becomes the page's weights
  float tops[2][HEADS];      // by group
  float sums[2][2][HEADS];   // of a sequence and the next, by group
  u64 full[2][2], empty[2][2], weights[2];  // by page and half of the columns
  u64 queries_full, queries_empty;
};

enum Barrier { BOTH_GROUPS = 1, ONE_GROUP = 2 };  // the last: one per group
