// The warp that keeps copies of pages going; see heads.cu.

#pragma once

#include "heads_parts.cuh"

// One thread runs it.
__device__ void run_loader(const Args& args, Shared& shared, Walk walk) {
  for (int turn = 0; walk.tile < walk.end; turn++) {
    if (turn == 0 || walk.tile == walk.stop) walk.open(args);
    const int buffer = turn % 2, row = args.table[(u64)walk.seq * args.table_stride + walk.page()] * PAGE;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int half = i ^ buffer;  // first the half of the group whose page this is
      u64* full = &shared.full[buffer][half];
      if (turn >= 2) wait(&shared.empty[buffer][half], (turn / 2 - 1) & 1);
      expect(full, (HALF + i) * BLOCK);
#pragma unroll
      for (int j = 0; j < HALF + i; j++) {
        const int column = j == HALF ? ROPE : half * HALF + j;
        if (gridDim.x == 1)
          copy_box_once(shared.rows[buffer][column], args.rows, column * 64, row, full);
        else  // blocks of other heads read them at about the same time
          copy_box(shared.rows[buffer][column], args.rows, column * 64, row, full);
      }
    }
    walk.next();
  }
}
