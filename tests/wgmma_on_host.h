// Boxes that copies bring, and products of warpgroups, on the machine of cuda_on_host.h. Products read shared memory when
// they begin or not before somebody waits for them, by chance; what they read is not watched for races.

#pragma once

#include "cuda_on_host.h"

u32 shared_address(const void* p) { return (u32)((const u8*)p - memory); }
u32 bf16_bits(float x) {
  u32 word = bits<u32>(x);
  return (word + 0x7fff + (word >> 16 & 1)) >> 16;
}
u32 bf16_pair(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
float of_bf16(u16 x) { return bits<float>((u32)x << 16); }
int __shfl_sync(u32, int x, int lane) {
  return together<int>({(u32)x}, [=](auto lanes) { return (int)lanes[lane][0]; });
}

// The box's first number and the tensor's rows and width stand in the first words of this machine's maps.
struct alignas(64) TensorMap {
  u64 words[16];
};
__attribute__((no_sanitize("thread"))) void move_box(u32 at, const u16* from, u64 rows_left, u64 width) {
  for (u32 i = 0; i < 64 * 64; i++) {
    u32 byte = at + 2 * i;
    *(u16*)(memory + (byte ^ (byte >> 7 & 7) << 4)) = i / 64 < rows_left ? from[i / 64 * width + i % 64] : 0;
  }
}
void copy_box(void* to, const TensorMap& map, int column, int row, u64* barrier) {
  u64 rows = map.words[1], width = map.words[2];
  u32 at = shared_address(to);
  if (at % 1024 || row < 0 || (u64)row >= rows || column < 0 || column + 64 > width) return fail("a wrong box");
  const u16* from = (const u16*)map.words[0] + row * width + column;
  queue_copy(to, 64 * 64 * 2, barrier, [=] { move_box(at, from, rows - row, width); });
}
void copy_box_once(void* to, const TensorMap& map, int column, int row, u64* barrier) {
  copy_box(to, map, column, row, barrier);
}

// Products of warpgroups, queued by each thread for its own numbers.

std::vector<std::vector<std::function<void()>>> queued[THREADS];  // by group of products; the last is open

void forget_products() {
  for (auto& groups : queued) groups.clear();
}

template <int N> void hold(float (&)[N]) {}
template <int N> void hold(u32 (&)[N]) {}
template <int N> void more_registers() {}
template <int N> void fewer_registers() {}
void products_begin() {}
void products_commit() { queued[threadIdx.x].emplace_back(); }
template <int LEFT>
void products_wait() {
  auto& groups = queued[threadIdx.x];
  while (groups.size() > LEFT + 1) {
    for (auto& product : groups.front()) product();
    groups.erase(groups.begin());
  }
}
void put(std::function<void()> product) {
  if (!numbers) return;
  auto& groups = queued[threadIdx.x];
  if (groups.empty()) groups.emplace_back();
  if (groups.size() == 1 && groups[0].empty() && chance() % 2) return product();
  groups.back().push_back(product);
}

// A number of an operand in swizzled rows of 128 bytes.
__attribute__((no_sanitize("thread"))) float operand(u64 descriptor, bool along, int row, int depth) {
  if (descriptor >> 62 != 1 || descriptor >> 46 & 0xffff) fail("a descriptor of another kind");
  u32 start = (descriptor & 0x3fff) << 4, side = (descriptor >> 16 & 0x3fff) << 4, eight = (descriptor >> 32 & 0x3fff) << 4;
  u32 byte = along ? start + row / 8 * eight + row % 8 * 128 + 2 * depth
                   : start + row / 64 * side + depth / 8 * eight + depth % 8 * 128 + row % 64 * 2;
  return of_bf16(*(const u16*)(memory + (byte ^ (byte >> 7 & 7) << 4)));
}

// d[i] of a thread: head i / 2 % 2 of its two, column 8 (i / 4) + 2 (lane % 4) + i % 2.
template <int N>
void sum_products(float (&d)[N], bool add, std::function<float(int, int)> left, std::function<float(int, int)> right) {
  int lane = threadIdx.x % LANES;
  float a[2][16];
  for (int i = 0; i < 32; i++) a[i / 16][i % 16] = left(i / 16, i % 16);
  for (int i = 0; i < N; i++) {
    float sum = add ? d[i] : 0;
    for (int depth = 0; depth < 16; depth++)
      sum += a[i / 2 % 2][depth] * right(i / 4 * 8 + lane % 4 * 2 + i % 2, depth);
    d[i] = sum;
  }
}
template <int N>
void queue_products(float (&d)[N], u64 a, bool a_along, u64 b, bool b_along, bool add) {
  int first = threadIdx.x / LANES % 4 * 16 + threadIdx.x % LANES / 4;
  put([=, &d] {
    sum_products(
        d, add, [=](int r, int depth) { return operand(a, a_along, first + 8 * r, depth); },
        [=](int column, int depth) { return operand(b, b_along, column, depth); });
  });
}
