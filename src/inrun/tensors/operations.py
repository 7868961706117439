"""What torch's operations are known to do with the dimensions of a tensor, by name."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def is_pointwise(name: str) -> bool:
    """Does torch itself say that each number of the output depends on one of each input?"""
    packet = getattr(torch.ops.aten, name, None)
    overloads = () if packet is None else packet.overloads()
    return any(torch.Tag.pointwise in getattr(packet, o).tags for o in overloads)


# Element-wise operations of which torch does not say so itself, and other spellings.
ELEMENTWISE = (
    "floor_divide", "subtract", "multiply", "rdiv", "divide", "true_divide", "floordiv",
    "rfloordiv", "mod", "rmod", "rpow", "float_power", "arctan2", "and", "or", "xor", "rand",
    "ror", "rxor", "iand", "ior",
    "isclose", "clip", "copy", "complex", "polar", "threshold", "hardtanh", "mse_loss", "l1_loss",
    "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "kl_div", "gaussian_nll_loss", "poisson_nll_loss", "soft_margin_loss", "masked_fill",
    "hardswish", "tanhshrink", "softsign", "logsigmoid", "log_sigmoid", "exponential", "bernoulli",
    "normal", "uniform", "random", "fill", "zero", "negative", "absolute", "conj", "real", "imag",
    "resolve_conj", "resolve_neg", "invert", "pos", "bool", "int", "long", "short", "byte",
    "float", "double", "half", "bfloat16", "cfloat", "cdouble", "data", "tril", "triu",
    "special_expit", "softmin", "gumbel_softmax", "rrelu", "cpu", "cuda", "isreal", "not",
    "pin_memory", "ne", "eq", "ge", "gt", "le", "lt",
)  # fmt: skip

REDUCTIONS = (
    "sum", "nansum", "mean", "nanmean", "prod", "amax", "amin", "aminmax", "max", "min", "argmax",
    "argmin", "all", "any", "std", "var", "std_mean", "var_mean", "norm", "vector_norm",
    "logsumexp", "linalg_norm", "linalg_vector_norm", "median", "nanmedian", "mode",
    "count_nonzero", "kthvalue", "quantile", "nanquantile",
)  # fmt: skip

REARRANGED = (
    "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "T", "mT", "H",
    "mH", "adjoint", "unbind", "split", "split_with_sizes", "chunk", "unsafe_chunk", "unsafe_split",
    "tensor_split", "narrow", "select", "diagonal", "diag_embed", "view_as_real", "view_as_complex",
    "glu", "multinomial",
)  # fmt: skip

# Operations of which an output without dimensions may be one number of a tensor, not of all of it.
PICKS = frozenset((
    "getitem", "select", "unbind", "split", "chunk", "squeeze", "view", "reshape", "view_as",
    "reshape_as", "clone", "detach", "contiguous", "to", "type_as", "float", "double", "half",
    "bfloat16",
))  # fmt: skip

# The argument that names the dimensions, and what holds without it (None: all of them).
ALONG: dict[str, tuple[int, Any]] = {
    "flip": (1, None), "roll": (2, None), "sort": (1, -1), "argsort": (1, -1), "topk": (2, -1),
    "diff": (2, -1), "cummax": (1, None), "cummin": (1, None), "fft_fftshift": (1, None),
    "fft_ifftshift": (1, None),
    **dict.fromkeys(("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft"),
                    (2, -1)),
    **dict.fromkeys(("fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2"), (2, (-2, -1))),
    **dict.fromkeys(("fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn"), (2, None)),
}  # fmt: skip
