// Runs one launch of kernels/cuda/narrow.cu on the host; compiled by test_pages_decode.py, beside an empty ptx.cuh and
// wgmma.cuh.

#include "wgmma_on_host.h"

void multiply_rows(float (&d)[8], u64 a, u64 b, bool add) { queue_products(d, a, true, b, true, add); }
void multiply_turned(float (&d)[8], u64 a, u64 b, bool add) { queue_products(d, a, false, b, true, add); }

#include "narrow.cu"

bool says_full(u64* barrier) {
  Shared& shared = *(Shared*)memory;
  return barrier < shared.empty || barrier == &shared.queries_full;
}

#include "pages_on_host.h"
