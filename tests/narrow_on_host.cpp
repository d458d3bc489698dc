// Runs one launch of kernels/cuda/narrow.cu on the host; compiled by test_narrow_decode.py, beside an empty ptx.cuh and
// wgmma.cuh.

#include "wgmma_on_host.h"

void multiply_rows(float (&d)[8], u64 a, u64 b, bool add) { queue_products(d, a, true, b, true, add); }
void multiply_turned(float (&d)[8], u64 a, u64 b, bool add) { queue_products(d, a, false, b, true, add); }

#include "narrow.cu"

bool is_left_out(int id) { return left_out == id; }
bool says_full(u64* barrier) {
  Shared& shared = *(Shared*)memory;
  return barrier < shared.empty || barrier == &shared.queries_full;
}
void report_race(size_t, bool one_is_a_copy) { fail(one_is_a_copy ? "a race of a copy" : "a race"); }

extern "C" int shared_bytes() { return sizeof(Shared); }

// Returns what went wrong, or null.
extern "C" const char* launch(const Args* args, int head_blocks, int parts, u64 pool_bytes, int without, bool exact) {
  left_out = without, numbers = exact;
  pool_begin = args->pool, pool_end = args->pool + pool_bytes;
  forget_products();
  return run_grid(head_blocks, parts, [=] { decode(*args); });
}
