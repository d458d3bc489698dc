// Scattered pieces of one memory written to scattered places of another; see cuda_write.py.
//
// A unit of a piece goes through shared memory in two bulk copies, so one warp keeps a whole multiprocessor's share of a
// link busy. All its lanes look up the units to come, long before they are needed, as the table is in host memory; its
// first lane starts the copies.
//
// Given by the compiler's command line: UNIT bytes of a unit at most, STAGES units in shared memory, AHEAD of which are
// being read.

#include "ptx.cuh"

struct Piece {
  u64 source, target, bytes;  // the first two count from where each memory begins
};

struct Args {
  const u8* source;
  u8* target;
  const Piece* pieces;
  u32 num_units;  // of all pieces, each of which has as many as the longest
  u32 units_each, unit_bytes;
};

struct Unit {
  const u8* source;
  u8* target;
  u32 bytes;
};

constexpr int WARP = 32;
constexpr int UNREAD = STAGES - 1 - AHEAD;  // units whose way out of shared memory may not have begun

struct Shared {
  u8 stages[STAGES][UNIT];
  u64 full[STAGES];
  Unit units[2][WARP];
};

__device__ __forceinline__ Unit look_up(const Args& args, u32 turn) {
  const u32 number = turn * gridDim.x + blockIdx.x;
  if (number >= args.num_units) return {nullptr, nullptr, 0};
  const Piece piece = args.pieces[number / args.units_each];
  const u32 skip = number % args.units_each * args.unit_bytes;
  const u32 left = piece.bytes > skip ? (u32)piece.bytes - skip : 0;
  return {args.source + piece.source + skip, args.target + piece.target + skip, min(left, args.unit_bytes)};
}

extern "C" __global__ void __launch_bounds__(WARP) write_pieces(const __grid_constant__ Args args) {
  extern __shared__ u8 memory[];
  Shared& shared = *(Shared*)memory;
  const int lane = threadIdx.x;
  Unit next = look_up(args, lane);
  if (lane == 0) {
    for (int i = 0; i < STAGES; i++) init(&shared.full[i], 1);
    publish_barriers();
  }
  const u32 turns = (args.num_units - blockIdx.x + gridDim.x - 1) / gridDim.x;  // of this block
  for (u32 turn = 0; turn < turns + AHEAD; turn++) {
    if (turn % WARP == 0) {
      __syncwarp();  // the first lane needs what is overwritten no more
      shared.units[turn / WARP % 2][lane] = next;
      __syncwarp();
      next = look_up(args, turn + WARP + lane);
    }
    if (lane) continue;
    if (turn < turns) {
      const Unit& unit = shared.units[turn / WARP % 2][turn % WARP];
      wait_read<UNREAD>();
      expect(&shared.full[turn % STAGES], unit.bytes);
      if (unit.bytes) copy(shared.stages[turn % STAGES], unit.source, unit.bytes, &shared.full[turn % STAGES]);
    }
    if (turn >= AHEAD) {
      const u32 then = turn - AHEAD;
      const Unit& unit = shared.units[then / WARP % 2][then % WARP];
      wait(&shared.full[then % STAGES], then / STAGES % 2);
      if (unit.bytes) copy_out(unit.target, shared.stages[then % STAGES], unit.bytes);
      commit_copies();
    }
  }
  if (lane == 0) wait_written();
}
