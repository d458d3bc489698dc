// The walk over a part's tiles, sequence by sequence; every warp does it by itself.

#pragma once

#include "ptx.cuh"

constexpr int PLAN_TILE = 32;  // rows of a tile, as PagedPlan counts them

struct Line {
  int tile, end, seq, start, stop, length;
  bool whole;  // the part has all of the sequence

  template <class Args>
  __device__ void open(const Args& args) {
    int seq_end;
    for (;;) {
      start = args.starts[seq];
      seq_end = args.starts[seq + 1];
      if (seq_end > tile) break;
      seq++;
    }
    stop = min(end, seq_end);
    whole = tile == start && stop == seq_end;
    length = args.lengths[seq];
  }
};
