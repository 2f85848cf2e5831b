"""Products with a model's weights, for layers that are run by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional

#: Rows of a step that a CPU takes through a layer's products at once: what they yield stays in its L2 cache.
ROWS_ON_CPU = 256


class Linear(Protocol):
    """``rows @ weight.T + bias``."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Of ``[N, num_in]``: ``[N, num_out]``, new memory."""
        ...

    def write_to(self, output: torch.Tensor, rows: torch.Tensor) -> None:
        """Put it in ``output``."""
        ...

    def add_to(self, sums: torch.Tensor, rows: torch.Tensor) -> None:
        """Add it to ``sums``, in place."""
        ...


@dataclass(frozen=True, eq=False)
class PlainLinear:
    """With the weight as the model has it, ``[num_out, num_in]``."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Of ``[N, num_in]``: ``[N, num_out]``, new memory."""
        return functional.linear(rows, self.weight, self.bias)

    def write_to(self, output: torch.Tensor, rows: torch.Tensor) -> None:
        """Put it in ``output``."""
        _multiply(output, rows, self.weight.t(), self.bias)

    def add_to(self, sums: torch.Tensor, rows: torch.Tensor) -> None:
        """Add it to ``sums``, in place."""
        sums.addmm_(rows, self.weight.t())
        if self.bias is not None:
            sums.add_(self.bias)


class TransposedLinear:
    """With the weight as ``[num_in, num_out]``, which lies in the order in which a product with few rows reads it.

    Measured on one core with AVX2 and no more, float32, the products of a whole layer: a single row takes 0.57 of
    ``PackedLinear``'s time, 8 to 32 rows 0.9, 256 rows as long; and what it yields goes where it is wanted.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Take a copy of ``weight``, ``[num_out, num_in]``, which is not needed any more."""
        self._weight = weight.t().contiguous()
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Of ``[N, num_in]``: ``[N, num_out]``, new memory."""
        output = rows.new_empty(rows.shape[0], self._weight.shape[1])
        self.write_to(output, rows)
        return output

    def write_to(self, output: torch.Tensor, rows: torch.Tensor) -> None:
        """Put it in ``output``."""
        _multiply(output, rows, self._weight, self._bias)

    def add_to(self, sums: torch.Tensor, rows: torch.Tensor) -> None:
        """Add it to ``sums``, in place."""
        sums.addmm_(rows, self._weight)
        if self._bias is not None:
            sums.add_(self._bias)


class PackedLinear:
    """With the weight in the order in which oneDNN's kernels read it, made once instead of at every product.

    The operators are those that ``torch.compile`` emits for frozen weights (``torch/_inductor/mkldnn_lowerings.py``).
    Measured on one core with AVX-512, float32, 32 rows: 1.5 times as fast as the plain one, 8 rows 1.8, 256 rows 1.2.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Take a copy of ``weight``, which is not needed any more."""
        self._ops: Any = torch.ops.mkldnn
        # Packed for the largest product: for fewer rows that order is as good, while one packed for a single row isn't.
        self._weight = self._ops._reorder_linear_weight(weight, ROWS_ON_CPU)
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Of ``[N, num_in]``: ``[N, num_out]``, new memory."""
        output: torch.Tensor = self._ops._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return output

    def write_to(self, output: torch.Tensor, rows: torch.Tensor) -> None:
        """Put it in ``output``."""
        output.copy_(self(rows))

    def add_to(self, sums: torch.Tensor, rows: torch.Tensor) -> None:
        """Add it to ``sums``, in place."""
        sums.copy_(self._ops._linear_pointwise.binary(rows, sums, self._weight, self._bias, "add"))


def best_order(weight: torch.Tensor) -> type[TransposedLinear] | type[PackedLinear] | None:
    """In which order a copy of ``weight`` is multiplied fastest here; ``None``: as it is, it is good enough."""
    if weight.device.type != "cpu":
        return None
    if weight.dtype == torch.float32 and torch.backends.cpu.get_cpu_capability() == "AVX2":
        return TransposedLinear
    return PackedLinear if _can_pack(weight.dtype) else None


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    ops: Any = torch.ops.mkldnn
    return dtype == torch.float32 or (dtype == torch.bfloat16 and ops._is_mkldnn_bf16_supported())


def _multiply(output: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if bias is None:
        torch.mm(rows, weight, out=output)
    else:
        torch.addmm(bias, rows, weight, out=output)
