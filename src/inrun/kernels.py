"""What the Triton kernels share. They work on all parameters of a model in one launch.

The kernels themselves stand beside the formulas that they compute: `optimizers/adam_kernel.py` and
`scoring/contraction_kernel.py`. They find their tensors through a table of addresses, one row per
tensor; a program of the grid works on one chunk of one tensor. Both are bound by memory, so each
number is read once. Where Triton is missing or a tensor is of another kind, the torch code beside
them serves: see ``usable``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from inrun.torch_compat import unflatten_dense_tensors

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

AVAILABLE = triton is not None
# types that a kernel can read single numbers of
READABLE = (
    {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16,
     torch.float64: tl.float64}
    if AVAILABLE
    else {}
)  # fmt: skip
TYPES = (torch.float32, torch.bfloat16, torch.float16)
CHUNK = 4096  # numbers of a tensor per program
_is_cuda, _dtype = attrgetter("is_cuda"), attrgetter("dtype")


def reachable(t: Tensor) -> bool:
    """Is it where kernels can run?"""
    return AVAILABLE and t.is_cuda


def usable(tensors: Sequence[Tensor]) -> bool:
    """Can the kernels work on these: on one GPU, dense, aligned, of a type they know?"""
    return (
        AVAILABLE
        and all(map(_is_cuda, tensors))
        and all(map(Tensor.is_contiguous, tensors))
        and not any(address % 16 for address in map(Tensor.data_ptr, tensors))
        and {*map(_dtype, tensors)} <= {*TYPES}
    )


class Trust:
    """Whether a kernel is used: on each device, and for each ``kind`` of what it gets, once it has
    given what torch's operations give. One that is compiled wrongly costs time, not right values.

    Args:
        what: the kernel is for.
        limit: relative; how far its numbers may be off.
        otherwise: what users notice where it is not used.
    """

    def __init__(self, what: str, limit: float, otherwise: str) -> None:
        self.what, self.limit, self.otherwise = what, limit, otherwise
        self.works: dict[Hashable, bool] = {}

    def result(
        self, device: torch.device, kernel: Callable[[], Tensor | None],
        plain: Callable[[], Tensor], kind: Hashable = None,
    ) -> Tensor:  # fmt: skip
        """The kernel's numbers; those of ``plain`` where it gives None or is not used."""
        key = device, kind
        found, works = None, self.works.get(key)
        if works is not False:
            try:
                found = kernel()
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:
                if works:
                    raise
                self._doubt(key, f"{type(error).__name__}: {error}")
        if found is not None and works:
            return found
        expected = plain()
        if found is not None:
            off = float((found - expected).norm()) / (float(expected.norm()) or 1.0)
            if off <= self.limit:
                self.works[key] = True
            else:  # NaN is off
                self._doubt(key, f"its values are off by {off:.1e}")
        return expected

    def _doubt(self, key: tuple[torch.device, Hashable], why: str) -> None:
        self.works[key] = False
        warnings.warn(
            f"the kernel for {self.what} does not work on {key[0]} and is not used "
            f"({why[:200]}): values are right without it, and {self.otherwise}",
            stacklevel=3,
        )


def alike(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """New tensors of these shapes, in one piece of memory."""
    sizes = [-(-t.numel() // 8) * 8 for t in tensors]  # each aligned
    flat = torch.empty(sum(sizes), dtype=dtype, device=tensors[0].device)
    if all(n == t.numel() for n, t in zip(sizes, tensors, strict=True)):
        return list(unflatten_dense_tensors(flat, tensors))  # in one call
    parts = zip(flat.split(sizes), sizes, tensors, strict=True)
    return [(x if n == t.numel() else x[: t.numel()]).view(t.shape) for x, n, t in parts]


def addresses(columns: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
    """The address of each tensor, [tensors, columns]; 0 where a column is empty."""
    n = max(len(c) for c in columns)
    table = [[c[i].data_ptr() if c else 0 for c in columns] for i in range(n)]
    return upload(torch.tensor(table, dtype=torch.int64, device="cpu"), device)


def readable(tensors: Sequence[Tensor]) -> bool:
    """Can a kernel read these by their addresses: all of one type it knows, dense, on one GPU?"""
    if not AVAILABLE or not tensors[0].is_cuda or tensors[0].dtype not in READABLE:
        return False
    kinds = {(t.dtype, t.device) for t in tensors}
    return len(kinds) == 1 and all(map(Tensor.is_contiguous, tensors))


def pointers(tensors: Sequence[Tensor]) -> Tensor:
    """The address of each tensor, on their device. Allocators hand out the same memory in every
    step, so that an earlier table usually serves."""
    return uploaded(tuple([t.data_ptr() for t in tensors]), torch.int64, tensors[0].device)


def uploaded(numbers: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """These numbers on the device. Kept for kernels on the same stream: others would not wait."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _uploaded(numbers, dtype, device, stream)


@lru_cache(maxsize=64)
def _uploaded(
    numbers: tuple[Any, ...], dtype: torch.dtype, device: torch.device, stream: int
) -> Tensor:
    return upload(torch.tensor(numbers, dtype=dtype, device="cpu"), device)


def upload(t: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for it."""
    return (t.pin_memory() if device.type == "cuda" else t).to(device, non_blocking=True)


@lru_cache(maxsize=64)
def integers(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """These numbers on the device; the same from step to step, so they are copied there once."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)


@lru_cache(maxsize=64)
def chunks(
    sizes: tuple[int, ...], device: torch.device, *strides: tuple[int, ...]
) -> list[tuple[bool, Tensor, Tensor]]:
    """The chunks of all tensors, one per program: which tensor, and where in it the chunk begins.

    They come in one or two lists: first those of tensors all of whose sizes and strides are
    multiples of 16 (True), which need not be read number by number, then the others.
    """
    counts = torch.tensor([-(-n // CHUNK) for n in sizes], device="cpu")
    tensors = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), counts)
    first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    starts = (torch.arange(len(tensors), device="cpu") - first) * CHUNK
    uneven = (torch.tensor([sizes, *strides], device="cpu") % 16).sum(0)
    found = []
    for even in (True, False):
        own = (uneven[tensors] == 0) == even
        if bool(own.any()):
            found.append((even, tensors[own].int().to(device), starts[own].to(device)))
    return found


def type_of(t: Tensor) -> Any:
    """The Triton type of its numbers."""
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[
        t.dtype
    ]


if AVAILABLE:

    @triton.jit  # type: ignore[untyped-decorator]
    def tensor_at(  # type: ignore[no-untyped-def]
        table, row, column, columns: tl.constexpr, dtype: tl.constexpr
    ):
        """The pointer to a tensor, read from the table of addresses."""
        address = tl.load(table + row * columns + column)
        return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)

    @triton.jit  # type: ignore[untyped-decorator]
    def read_length(at, even: tl.constexpr):  # type: ignore[no-untyped-def]
        """Reads a size or a stride. Told that it is a multiple of 16, the compiler reads and writes
        16 bytes at once, otherwise number by number."""
        n = tl.load(at)
        if even:
            n = tl.multiple_of(n, 16)
        return n

    @triton.jit
    def entry(table, t, i):  # type: ignore[no-untyped-def]
        """Where the sampled entries i of tensor t are (scoring/samples.py): ``table`` has how many
        there are, their stride and the first; the last one is repeated."""
        count, stride = tl.load(table + t * 3), tl.load(table + t * 3 + 1)
        return tl.load(table + t * 3 + 2) + tl.minimum(i, count - 1) * stride
