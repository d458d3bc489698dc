// The warp that keeps copies of pages going; see heads.cu.

#pragma once

#include "heads_parts.cuh"

// One thread runs it.
__device__ void run_loader(const Args& args, Shared& shared, Walk walk, int first_head) {
  const int rank = block_in_cluster();
  int turn = 0;
  for (int sequences = 0; walk.tile < walk.end; sequences++) {
    walk.open(args);
    for (bool first = true; walk.tile < walk.stop; first = false, turn++) {
      const int buffer = turn % 2, row = args.table[(u64)walk.seq * args.table_stride + walk.page()] * PAGE;
      walk.next();
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int half = i ^ buffer;  // first the half of the group whose page this is
        u64* full = &shared.full[buffer][half];
        if (turn >= 2) wait(&shared.empty[buffer][half], (turn / 2 - 1) & 1);
        expect(full, (HALF + i) * BLOCK);
#pragma unroll
        for (int j = 0; j < HALF + i; j++) {
          const int column = j == HALF ? ROPE : half * HALF + j;
          u8* to = shared.rows[buffer][column];
          if (CLUSTER > 1) {  // each block of a pair copies what the other does not
            if (j % 2 == rank) copy_box_to_both(to, args.rows, column * 64, row, full);
          } else if (gridDim.x == 1) {
            copy_box_once(to, args.rows, column * 64, row, full);
          } else {  // blocks of other heads read them at about the same time
            copy_box(to, args.rows, column * 64, row, full);
          }
        }
      }
      if (!first) continue;
      if (sequences > 0) wait(&shared.queries_empty, (sequences - 1) & 1);
      expect(&shared.queries_full, COLUMNS * BLOCK);
      for (int column = 0; column < COLUMNS; column++)  // rows of the next sequence's heads may come, too
        copy_box(shared.q[column], args.queries, column * 64, walk.seq * args.num_heads + first_head,
                 &shared.queries_full);
    }
  }
}
