// One launch of kernels/cuda/write.cu on the host; see cuda_on_host.h. Compiled by test_cuda_write.py, beside an empty
// ptx.cuh.

#include <deque>

#include "cuda_on_host.h"

// Copies out of shared memory, in groups that end in their order, early or as late as may be.

struct Out { u8* to; const u8* from; u32 bytes; };
std::vector<Out> open_group;
std::deque<std::vector<Out>> groups;

void end_a_group() {
  for (const Out& out : groups.front()) memcpy(out.to, out.from, out.bytes);
  groups.pop_front();
}
void copy_out(u8* to, const void* from, u32 bytes) {
  if (((u64)to | (u64)from | bytes) % 16 || !bytes) return fail("a copy of odd bytes");
  open_group.push_back({to, (const u8*)from, bytes});
}
void commit_copies() {
  groups.push_back(std::move(open_group));
  open_group.clear();
  while (!groups.empty() && chance() % 3 == 0) end_a_group();
}
template <int GROUPS>
void wait_read() {
  while (groups.size() > GROUPS) end_a_group();
  if (chance() % 4 == 0) give_way();
}
void wait_written() { wait_read<0>(); }

#include "write.cu"

bool is_left_out(int) { return false; }
bool says_full(u64*) { return false; }
void report_race(size_t, bool) { fail("a race"); }

// Returns what went wrong, or null.
extern "C" const char* launch(const Args* args, int blocks, int height, u64 source_bytes) {
  pool_begin = args->source, pool_end = args->source + source_bytes;
  return run_grid(blocks, height, [=] {
    write_pieces(*args);
    if (threadIdx.x == 0 && !(groups.empty() && open_group.empty())) fail("a block ends before its copies");
  });
}
