"""The kernel that copies parts of a peer's pool into the local one, and its compilation by Triton.

    python -m quartet.transfer.cuda.pull_kernel ARCHITECTURE    # 90: the machine code for sm_90, as a line of JSON

A worker does not import this: it has a process of its own compile (``kernel_copies``), because that takes seconds of
the interpreter, and a compiler may crash. It needs no GPU.
"""
# No `from __future__ import annotations`: Triton's interpreter would not know the constants any more.

import base64
import json
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

#: What the line begins with that holds the compiled kernel; Triton prints lines of its own.
MARK = "QUARTET-KERNEL "

#: Numbers of 64 bits that a program has on their way at a time: 32 KiB, so that 32 programs fill NVLink.
_CHUNK = 4096
_NUM_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def pull(source, target, parts, num_parts, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy parts of the memory at ``source`` to ``target``; any number of programs share them.

    Args:
        source: 16-byte aligned, like ``target``.
        target: in memory that nothing else writes meanwhile.
        parts: ``[num_parts, 3]`` int64: where each begins in source and target, and its size, in words of 16 bytes.
        num_parts: int64.
        CHUNK: numbers of 64 bits a turn.
    """
    for part in range(tl.program_id(0).to(tl.int64), num_parts, tl.num_programs(0)):
        begin = tl.load(parts + part * 3)
        end = tl.load(parts + part * 3 + 1)
        size = tl.load(parts + part * 3 + 2)
        # Twice a number of words: the compiler sees that 16 bytes can be moved at a time.
        for first in range(0, size * 2, CHUNK):
            index = first + tl.arange(0, CHUNK)
            is_inside = index < size * 2
            numbers = tl.load(source + begin * 2 + index, mask=is_inside)
            tl.store(target + end * 2 + index, numbers, mask=is_inside)


def compile_pull(architecture: int) -> dict[str, str | int]:
    """The kernel for GPUs of this architecture, such as 90 for sm_90.

    Returns:
        ``version`` of Triton; ``name`` of the function; ``num_threads`` of a program; ``code``: machine code (cubin) in
        base64. Its parameters are those of ``pull``, of 64 bits each, and then pointers to scratch memory, which it
        does not use.

    Raises:
        Exception: any; Triton can't compile it here.
    """
    compiled = compiled_pull(architecture)
    found = compiled.metadata
    scratch = (found.shared, found.global_scratch_size, found.profile_scratch_size)
    if any(scratch):
        raise ValueError(f"the kernel needs memory that it is not given: {scratch}")
    code = base64.b64encode(compiled.asm["cubin"]).decode("ascii")
    return {"version": triton.__version__, "name": found.name, "num_threads": 32 * found.num_warps, "code": code}


def compiled_pull(architecture: int) -> CompiledKernel:
    """What ``compile_pull`` returns, as Triton gives it; raises as that does."""
    aligned = [["tt.divisibility", 16]]
    source = ASTSource(
        pull,
        signature={"source": "*i64", "target": "*i64", "parts": "*i64", "num_parts": "i64", "CHUNK": "constexpr"},
        constexprs={(4,): _CHUNK},
        attrs={(0,): aligned, (1,): aligned, (2,): aligned},
    )
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=target, options={"num_warps": _NUM_WARPS, "enable_fp_fusion": False})


if __name__ == "__main__":
    print(MARK + json.dumps(compile_pull(int(sys.argv[1]))), flush=True)
