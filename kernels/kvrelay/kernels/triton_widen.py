"""8-bit numbers of a row to bf16 in registers, four at a time, scales included."""

from __future__ import annotations

import triton
import triton.language as tl

# The bits of e4m3, moved to where bf16 has its exponent and fraction, are the number times 2 ** -120, subnormal ones
# included; the product with scale * 2 ** 120 is exact. Four instructions for two numbers and one that multiplies both.
_E4M3_TIMES_SCALE: tl.constexpr = tl.constexpr("""
{
.reg .b32 a, b, c, d;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
and.b32 c, a, 0x7f007f00;
and.b32 d, b, 0x7f007f00;
shr.u32 c, c, 4;
shr.u32 d, d, 4;
lop3.b32 a, a, 0x80008000, c, 0xEA;
lop3.b32 b, b, 0x80008000, d, 0xEA;
mul.rn.bf16x2 $0, a, $3;
mul.rn.bf16x2 $1, b, $4;
}
""")


@triton.jit
def widen(number_TGX, scale_TG):
    """Return number * scale in bf16; scales are powers of two below 2 ** 8.

    Said to be impure, so that it is done once, into the memory that both matrix products read: the compiler would else
    do it again for each, in layouts for which it fetches byte by byte.
    """
    return tl.inline_asm_elementwise(
        _E4M3_TIMES_SCALE,
        "=r,=r,r,r,r",
        [number_TGX.to(tl.uint8, bitcast=True), (scale_TG * 1.329227995784916e36).to(tl.bfloat16)[:, :, None]],
        dtype=tl.bfloat16,
        is_pure=False,
        pack=4,
    )
