// Split decode attention over bf16 latent rows, 64 heads a block; see pages_decode.py.
//
// Given by the compiler's command line: CLUSTER, 1 or 2.
//
// Two warpgroups have half of the 512 columns of the result each, and take pages in turns: one scores a page and makes
// its weights, both multiply them with their half of the page's values. So one's exponentials are made while the matrix
// unit works for the other. A block's memory has room for the queries and two pages; their halves are copied anew as soon
// as both groups let them go.

// With CLUSTER 2, pairs of blocks of the same part share its rows: each copies half of them into both memories.

#include "heads_attend.cuh"
#include "heads_load.cuh"

#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

extern "C" __global__ void CLUSTERED __launch_bounds__(3 * GROUP, 1) decode(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = *(Shared*)memory;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, part = blockIdx.y;
  if (args.starts_early) let_next_begin();
  wait_for_previous();
  Walk walk;
  if (!walk.begin(args, part, gridDim.y, lane)) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 4; i++) {
      init(&shared.full[i / 2][i % 2], 1);
      init(&shared.empty[i / 2][i % 2], GROUP_WARPS * CLUSTER);
    }
    for (int i = 0; i < 2; i++) init(&shared.weights[i], GROUP);
    init(&shared.queries_full, 1);
    init(&shared.queries_empty, 2 * GROUP_WARPS);
    publish_barriers();
  }
  if (CLUSTER > 1) cluster_sync();
  __syncthreads();
  if (warp >= 2 * GROUP_WARPS) {
    fewer_registers<40>();
    if (threadIdx.x == 2 * GROUP) run_loader(args, shared, walk, blockIdx.x * HEADS);
  } else {
    more_registers<232>();
    if (warp < GROUP_WARPS)
      run_attend<0>(args, shared, walk, blockIdx.x * HEADS, part, warp, lane);
    else
      run_attend<1>(args, shared, walk, blockIdx.x * HEADS, part, warp - GROUP_WARPS, lane);
    if (CLUSTER > 1) cluster_sync();  // or one block might arrive at barriers of another that has ended
  }
}
