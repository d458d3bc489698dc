// Operands of matrix products in shared memory: blocks of 64 rows of 128 bytes, whose 16-byte cells are swizzled.
//
// A block begins at a multiple of 1024 bytes. Copies of boxes of 64 x 64 (TensorMap) write blocks of this kind.

#pragma once

#include "ptx.cuh"

constexpr int BLOCK = 64 * 128;  // bytes

// Where cell `cell` of a row is.
__device__ __forceinline__ int cell_at(int row, int cell) { return row * 128 + ((cell ^ row % 8) << 4); }

// Of the product's descriptors: 128-byte swizzle; the next eight rows are 1024 bytes further.
constexpr u64 SWIZZLED = (u64)1 << 62 | (u64)(1024 >> 4) << 32;

__device__ __forceinline__ u64 place(const void* p) { return (shared_address(p) & 0x3ffff) >> 4; }

// A block whose rows are multiplied number by number (K-major); a step of 16 numbers is 32 bytes further.
__device__ __forceinline__ u64 along_rows(const void* block) {
  return SWIZZLED | (u64)1 << 16 | place(block);
}

// Blocks side by side, each row one step of K (MN-major); a step of 16 rows is 2048 bytes further.
__device__ __forceinline__ u64 across_rows(const void* blocks) {
  return SWIZZLED | (u64)(BLOCK >> 4) << 16 | place(blocks);
}

__device__ __forceinline__ u64 further(u64 descriptor, int bytes) { return descriptor + (bytes >> 4); }
