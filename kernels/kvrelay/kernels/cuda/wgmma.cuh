// Matrix products of a warpgroup (blocks.cuh has the operands), and how it shares out registers.

#pragma once

#include "ptx.cuh"

// Registers before it, products after it.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Registers of products in flight: what is computed before or after stays there.
template <int N>
__device__ __forceinline__ void hold(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

template <int N>
__device__ __forceinline__ void hold(u32 (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(d[i])::"memory");
}

template <int N>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)
#define F64(d, i) F16(d, i), F16(d, i + 16), F16(d, i + 32), F16(d, i + 48)
#define NAMES_32                                                                                                   \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
  "%30,%31"
#define NAMES_128                                                                                                     \
  NAMES_32                                                                                                            \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
  "%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,"  \
  "%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112," \
  "%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// d = a b^T (+ d): 64 x 64, both along their rows.
__device__ __forceinline__ void multiply_keys(float (&d)[32], u64 a, u64 b, bool add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32
               "}, %32, %33, p, 1, 1, 0, 0;\n}"
               : F16(d, 0), F16(d, 16)
               : "l"(a), "l"(b), "r"((int)add));
}

// d = a b (+ d): 64 x 256, b across its rows.
__device__ __forceinline__ void multiply_values(float (&d)[128], u64 a, u64 b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" NAMES_128
      "}, %128, %129, p, 1, 1, 0, 1;\n}"
      : F64(d, 0), F64(d, 64)
      : "l"(a), "l"(b), "r"((int)add));
}

// The same with a in registers.
__device__ __forceinline__ void multiply_values(float (&d)[128], const u32* a, u64 b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" NAMES_128
      "}, {%128,%129,%130,%131}, %132, p, 1, 1, 1;\n}"
      : F64(d, 0), F64(d, 64)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}

// The narrow ones, whose 64 rows are tokens or latent numbers and whose 16 columns are heads.

// d = a b^T (+ d): 64 x 16, both along their rows.
__device__ __forceinline__ void multiply_rows(float (&d)[8], u64 a, u64 b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\nwgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1, 0, 0;\n}"
      : F4(d, 0), F4(d, 4)
      : "l"(a), "l"(b), "r"((int)add));
}

// d = a^T b^T (+ d): 64 x 16, a across its rows.
__device__ __forceinline__ void multiply_turned(float (&d)[8], u64 a, u64 b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\nwgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1, 1, 0;\n}"
      : F4(d, 0), F4(d, 4)
      : "l"(a), "l"(b), "r"((int)add));
}

#undef F4
#undef F16
#undef F64
#undef NAMES_32
#undef NAMES_128
