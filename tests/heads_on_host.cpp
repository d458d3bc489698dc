// Runs one launch of kernels/cuda/heads.cu on the host; compiled by test_pages_decode.py, beside an empty ptx.cuh and
// wgmma.cuh.

#include "wgmma_on_host.h"

void multiply_keys(float (&d)[32], u64 a, u64 b, bool add) { queue_products(d, a, true, b, true, add); }
void multiply_values(float (&d)[128], u64 a, u64 b, bool add) { queue_products(d, a, true, b, false, add); }
void multiply_values(float (&d)[128], const u32* a, u64 b, bool add) {
  std::array<float, 32> left = together<std::array<float, 32>>({a[0], a[1], a[2], a[3]}, [](auto lanes) {
    std::array<float, 32> out;
    for (int i = 0; i < 32; i++) {
      int r = i / 16, depth = i % 16;
      out[i] = of_bf16(lanes[threadIdx.x % LANES / 4 * 4 + depth % 8 / 2][r + depth / 8 * 2] >> depth % 2 * 16);
    }
    return out;
  });
  put([=, &d] {
    sum_products(
        d, add, [=](int r, int depth) { return left[16 * r + depth]; },
        [=](int column, int depth) { return operand(b, false, column, depth); });
  });
}

// Blocks run one after the other here, so that none shares with another.
#define CLUSTER 1
void copy_box_to_both(void*, const TensorMap&, int, int, u64*) { fail("no clusters here"); }
void arrive_in(int, u64*) { fail("no clusters here"); }
int block_in_cluster() { return 0; }
void cluster_sync() { fail("no clusters here"); }

#include "heads.cu"

bool says_full(u64* barrier) {
  Shared& shared = *(Shared*)memory;
  return barrier < shared.empty[0] || barrier >= shared.weights && barrier != &shared.queries_empty;
}

#include "pages_on_host.h"
