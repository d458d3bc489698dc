// Split decode attention over 8-bit latent rows (quant.py), sixteen heads a block; see cuda_decode.py.
//
// Four warps score and four weigh, a tile of 64 rows apart. Numbers go from shared memory through registers, where they
// become f16 exactly, into the matrix unit; none goes back. Scales never touch the numbers: those of a key join its
// scores group by group, those of a value join its weight, over a power of two per group that only grows.
//
// compute-sanitizer's racecheck reports hazards here, all of them across one of two edges: from warps that arrive at a
// named barrier without waiting (WEIGHTS_FULL, WEIGHTS_EMPTY) to those that wait, and from the lanes of a warp, through
// __syncwarp, to the one that arrives at `empty` for them. tests/unit/test_cuda_decode.py follows these edges too, and
// finds every access to shared memory in order.
//
// Given by the compiler's command line: PAGE rows of a page, STAGES tiles in flight.
// Lane l of a warp: g = l / 4, t = l % 4, as in the fragments of mma.m16n8k16.

#include "decode_score.cuh"
#include "decode_weigh.cuh"

extern "C" __global__ void __launch_bounds__(64 * WARPS, 1) decode(const __grid_constant__ Args args) {
  extern __shared__ u8 memory[];
  Shared& shared = *(Shared*)memory;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = blockIdx.y;
  if (args.starts_early) let_next_begin();
  wait_for_previous();
  const int total = args.starts[args.num_sequences];
  const int per_part = max((total + (int)gridDim.y - 1) / (int)gridDim.y, MIN_TILES);
  Walk walk;
  walk.tile = part * per_part;
  walk.end = min(walk.tile + per_part, total);
  if (walk.tile >= walk.end) return;
  // As many sequences as end at or before a part's first tile come before it.
  int before = 0;
  for (int i = lane; i < args.num_sequences; i += 32) before += args.starts[i + 1] <= walk.tile;
  walk.seq = __reduce_add_sync(~0u, before);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      init(&shared.full[i], 1);
      init(&shared.empty[i], WARPS);
    }
    publish_barriers();
  }
  __syncthreads();
  if (warp < WARPS)
    run_scorer(args, shared, walk, blockIdx.x * HEADS, warp, lane);
  else
    run_weigher(args, shared, walk, blockIdx.x * HEADS, part, warp - WARPS, lane);
}
