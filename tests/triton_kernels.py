"""Runs Triton kernels without a GPU: by Triton's interpreter, or as far as machine code for a Hopper."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

_KERNELS = "quartet.engine.torch.kernels."


def require_triton(*, interpreter: bool = True) -> None:
    """Skip the test where there is no Triton, or where its interpreter does not work."""
    pytest.importorskip("triton", reason="Triton is not installed")
    found = tuple(map(int, version("triton").split(".")[:2]))
    if interpreter and found < (3, 9) and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of this Triton works with NumPy below 2.4 only")


@contextmanager
def interpreted(*modules: ModuleType) -> Iterator[None]:
    """Within it, launches of kernels of ``modules`` run on the CPU, on tensors of the CPU.

    Their functions, and Triton's own that they call, are replaced in place by ones that the interpreter runs, and put
    back at the end: what compiles kernels before or after notices nothing. Without ``modules``: of all imported ones of
    ``quartet.engine.torch.kernels``.
    """
    require_triton()
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    class Interpreted(interpreter.InterpretedFunction):  # type: ignore[misc, unused-ignore]
        """Leaves Triton's language as it is: it is replaced once for all launches and all calls within them."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.rewrite()(*args, **kwargs)

    ours = modules or tuple(module for name, module in sys.modules.items() if name.startswith(_KERNELS))
    assert ours, "import the kernels first"
    made: dict[int, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # without it, a launch looks for a GPU
        builder = interpreter.interpreter_builder
        # A third of the time goes into checks of overflows, whose results are thrown away.
        patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        _remember_types(patch)
        for module in (*ours, tl, tl.standard, tl.core, tl.math, tl.random):
            for name, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    if id(value) not in made:
                        made[id(value)] = Interpreted(value.fn)
                    patch.setattr(module, name, made[id(value)])
        # As a kernel sees the language, and as Triton's own functions do.
        scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        patch.setattr(interpreter, "_patch_lang", lambda _: interpreter._LangPatchScope())
        try:
            yield
        finally:
            scope.restore()


def _remember_types(patch: pytest.MonkeyPatch) -> None:
    """Have types of blocks, and shapes of tensors, made once each: the interpreter makes them anew at every operation.

    They are never changed, and there are few. That, and comparing them as numbers, is half of the time.
    """
    from triton.language import core
    from triton.runtime import interpreter

    make_type, make_tensor, are_equal = core.block_type.__init__, core.tensor.__init__, core.tuple.__eq__
    unwrap, find_np_dtype = core._unwrap_if_constexpr, cache(interpreter._get_np_dtype)
    types: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}
    plain = {int, float, bool, core.tensor, core.dtype}

    def unwrap_if_constexpr(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (id(element_ty), *map(unwrap_if_constexpr, shape))  # which the entry keeps alive
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = vars(self).copy()
        vars(self).update(types[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = (self.numel, self.shape)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[key]

    def is_equal(self: Any, other: Any) -> Any:
        values = other.values if isinstance(other, core.tuple) else other
        if isinstance(values, list) and {*map(type, values), *map(type, self.values)} <= {int}:
            return core.constexpr(self.values == values)
        return are_equal(self, other)

    patch.setattr(core, "_unwrap_if_constexpr", unwrap_if_constexpr)
    patch.setattr(core.tuple, "__eq__", is_equal)
    patch.setattr(core.block_type, "__init__", block_type)
    patch.setattr(core.tensor, "__init__", tensor)
    patch.setattr(
        interpreter, "_get_np_dtype", lambda type: find_np_dtype(core.uint64 if type.scalar.is_ptr() else type.scalar)
    )


def compile_for_sm90(kernel: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any], **options: Any) -> Any:
    """What Triton compiles of ``kernel``, whose ``asm`` holds ``ptx`` and ``cubin`` and whose ``metadata`` its needs.

    Args:
        kernel: decorated with ``triton.jit``.
        signature: type of each argument that is no constant, such as ``*bf16`` or ``i32``. Pointers, and integers
            written as ``i32:16``, are taken for multiples of 16.
        constexprs: value of each constant.
        options: such as ``num_warps``.
    """
    require_triton(interpreter=False)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    assert [*signature, *constexprs] and set(signature) | set(constexprs) == set(kernel.arg_names)
    position = {name: index for index, name in enumerate(kernel.arg_names)}
    types = {name: kind.partition(":")[0] for name, kind in signature.items()}
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or kind.endswith(":16")]
    source = ASTSource(
        kernel,
        signature={name: types.get(name, "constexpr") for name in kernel.arg_names},
        constexprs={(position[name],): value for name, value in constexprs.items()},
        attrs={(position[name],): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True, **options})
