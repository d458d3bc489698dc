// Split decode attention over bf16 latent rows, 16 heads a block; see pages_decode.py.
//
// The matrix unit takes 64 rows at a time. Here they are tokens, then latent numbers, and heads are its columns: scores
// are rows times queries, the result is values, turned, times weights. That takes a quarter of the memory's time, so one
// warpgroup does it, and rows fill nearly all of a block's memory: a ring of thirds of pages, on their way while others
// are multiplied.

#include "narrow_attend.cuh"
#include "narrow_load.cuh"

extern "C" __global__ void __launch_bounds__(GROUP + 64, 1) decode(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = *(Shared*)memory;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, part = blockIdx.y;
  const int first_head = blockIdx.x * HEADS;
  Walk walk;  // the plan was ready before the first kernel of this chain, as were all rows but the newest
  if (!walk.begin(args, part, gridDim.y, lane)) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; i++) init(&shared.full[i], 1), init(&shared.empty[i], WARPS);
    init(&shared.queries_full, 32);
    init(&shared.queries_empty, WARPS);
    publish_barriers();
  }
  __syncthreads();
  if (warp < WARPS)
    run_attend(args, shared, walk, first_head, part, warp, lane);
  else if (warp > WARPS)
    run_queries(args, shared, walk, first_head, lane);
  else if (lane == 0)
    run_loader(args, shared, walk);
}
