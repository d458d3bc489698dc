// The warps that keep copies of pages going and put queries where products read them; see narrow.cu.

#pragma once

#include "narrow_parts.cuh"

// One thread runs it.
__device__ void run_loader(const Args& args, Shared& shared, Walk walk) {
  Turn turn;
  while (walk.tile < walk.end) {
    walk.open(args);
    for (; walk.tile < walk.stop; turn.number += THIRDS) {
      const int row = args.table[(u64)walk.seq * args.table_stride + walk.page()] * PAGE;
      walk.next();
      if (walk.tile == walk.stop) wait_for_previous();  // it may have written the newest row
#pragma unroll
      for (int i = 0; i < THIRDS; i++) {
        const int slot = turn.slot(i);
        u64* full = &shared.full[slot];
        if (!turn.first(i)) wait(&shared.empty[slot], turn.parity(i) ^ 1);
        expect(full, THIRD * BLOCK);
#pragma unroll
        for (int j = 0; j < THIRD; j++)
          copy_box_once(shared.rows[slot][j], args.rows, (THIRD * i + j) * 64, row, full);
      }
    }
  }
}

// One warp runs it: the next sequence's queries are on their way while the last one's are in use.
__device__ void run_queries(const Args& args, Shared& shared, Walk walk, int first_head, int lane) {
  constexpr int CELLS = WIDTH / 8, MINE = HEADS * CELLS / 32;  // of 16 bytes
  wait_for_previous();
  for (int sequences = 0; walk.tile < walk.end; sequences++) {
    walk.open(args);
    const u16* from = args.q + ((u64)walk.seq * args.num_heads + first_head) * WIDTH;
    uint4 x[MINE];
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      int cell = lane + 32 * i;
      x[i] = first_head + cell / CELLS < args.num_heads ? *(const uint4*)(from + 8 * cell) : uint4{0, 0, 0, 0};
    }
    if (sequences > 0) wait(&shared.queries_empty, (sequences - 1) & 1);
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      int cell = lane + 32 * i, head = cell / CELLS, part = cell % CELLS;
      *(uint4*)(shared.queries[part / 8] + cell_at(head, part % 8)) = x[i];
    }
    stores_before_copies();
    arrive(&shared.queries_full);
    walk.tile = walk.stop;
  }
}
