"""What an optimizer does with a gradient, as a pure function, and two derivatives that credit it.

For one parameter with weights ``w``, state ``s`` (as `torch.optim` keeps it, *before* the step)
and options ``o`` (its parameter group), a step is

    w  ←  decay(o) · w  −  update(g, w, s, o)

``update`` is ηΨ_t of the paper (equation of Section 4.2, learning rate included): the amount the
step subtracts when the optimizer receives the gradient ``g`` and its state is held fixed. It is
pure: it changes none of its arguments. Only decoupled decay is in ``decay``; L2 decay is part of
``update`` (also at g = 0), as in the optimizer itself.

Two linear maps carry a validation gradient v back through the update to the batch gradient:

* ``tangent``:  u = Jᵀv,  J = ∂update/∂g at ḡ                          (Theorem 4.2 of the paper)
* ``secant``:   u = K⊙v,  K = (update(ḡ) − update(0)) / ḡ per coordinate       (values add up)

For an update that is not coordinate-wise the secant is the path integral u = ∫₀¹ J(αḡ)ᵀv dα.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from inrun.optimizers.common import Options, Scalar, State, no_decay, widest
from inrun.optimizers.momentum import Momentum
from inrun.tensors.derivative import jvp
from inrun.torch_compat import unflatten_dense_tensors

UpdateMap: TypeAlias = Callable[[Tensor, Tensor, State, Options], Tensor]
LinearMap: TypeAlias = Callable[[Tensor], Tensor]


class WholeModel(Protocol):
    """One step of all parameters of a model, for a GPU kernel that computes them in one launch."""

    @property
    def maps(self) -> Collection[str]:
        """The names of the maps (scoring/estimators.py) whose factors the kernel computes."""

    @property
    def bad(self) -> Tensor | None:
        """Of each parameter: not 0 if its gradient is not finite. None before the kernel ran."""

    def again(self, g: list[Tensor]) -> WholeModel | None:
        """The next step, with other gradients and with options and numbers of the state as they are
        now; None if the kernel cannot compute that."""

    def weights_and_factors(
        self, x: float | None, kind: str | None, into: list[Tensor] | None
    ) -> tuple[list[Tensor] | None, list[Tensor] | None]:
        """The weights at ``x`` on the path w_∅ → w_B, written to the tensors ``into`` where these
        are given, and the factors K of the map ``kind``. None for what was not asked for."""

    def sampled(self, table: Tensor, entries: int) -> Tensor:
        """The weights now, w_∅ and w_B at some entries of each parameter [3, parameters, entries].
        ``table`` says where (``kernels.entry``)."""


# (g, w, state, options, x) -> K of a map, and the weights at the point x of the path w_∅ → w_B;
# None where the function does not apply.
OnePass: TypeAlias = Callable[[Tensor, Tensor, State, Options, float], tuple[Tensor, Tensor] | None]
# Gradients, weights, states and options of all parameters -> one step of them all; None where the
# kernel does not apply.
ToWholeModel: TypeAlias = Callable[
    [Sequence[Tensor], Sequence[Tensor], Sequence[State], Sequence[Options]], WholeModel | None
]


@dataclass(frozen=True)
class Rule:
    """How one optimizer class updates a parameter.

    The state may be empty (`torch.optim` fills it inside the first step): a missing entry means
    its initial value. Secant and tangent hand ``update`` a gradient and a state that can be more
    precise than the weights, never less than float32; ``w`` keeps its own dtype, which some
    optimizers look at (Adafactor's eps).

    Args:
        update: ηΨ(g), a pure function ``(g, w, state, options) -> tensor``.
        decay: the factor on the weights, a function of the options.
        coordinatewise: each coordinate of the update depends on that coordinate of g alone (or is
            well enough described so: see Adafactor). False: the secant is a path integral.
        elementwise: coordinate-wise, and nothing but the coordinate's own gradient, weight and
            state counts, not the parameter's shape: several parameters can be concatenated.
        adaptive: the update is scaled by the gradients' own size, so that tiny gradients count.
        factor: a closed form of K without cancellation, where there is one.
        derivative: a closed form of the diagonal of J, where there is one.
        twin: a function equal to ``update`` up to its low-precision rounding, to differentiate
            instead of it (Muon computes in bfloat16).
        nodes: Gauss–Legendre nodes of the path integral.
        secant_map: instead of the path integral, for an update that is not coordinate-wise: an
            exact secant, ``(g, w, state, options) -> map``.
        unsupported: of an optimizer of this class, why its options cannot be watched, or None.
        one_pass: by name of a map (scoring/estimators.py): a function that computes the map's K and
            the weights at a point of the path together, faster than one after the other.
        whole_model: makes of all parameters one step for a GPU kernel (adam_kernel.py).
        gained: what the update gains when examples join in sampled orders, by a GPU kernel
            (adam_orders.py); None where that does not apply.
        momentum: how its steps depend on past gradients, where that is one average of them.
        squares: the running mean of the squared gradient, after the step, by whose root steps are
            divided, ``(g, w, state, options) -> tensor``, where there is one.
    """

    update: UpdateMap
    decay: Callable[[Options], Scalar] = no_decay
    coordinatewise: bool = True
    elementwise: bool = False
    adaptive: bool = True
    factor: UpdateMap | None = None
    derivative: UpdateMap | None = None
    twin: UpdateMap | None = None
    nodes: int = 8
    secant_map: Callable[[Tensor, Tensor, State, Options], LinearMap] | None = None
    unsupported: Callable[[Optimizer], str | None] | None = None
    one_pass: Mapping[str, OnePass] = field(default_factory=dict, hash=False)
    whole_model: ToWholeModel | None = None
    momentum: Momentum | None = None
    squares: UpdateMap | None = None
    gained: Callable[..., Tensor | None] | None = None

    @torch.no_grad()
    def tangent(self, g: Tensor, w: Tensor, s: State, o: Options) -> LinearMap:
        """The map v ↦ Jᵀv at g."""
        g, s = widen(g, s, torch.float32)
        if self.derivative is not None:
            return Scale(self.derivative(g, w, s, o).expand_as(g))
        return _pullback(self.twin or self.update, g, w, s, o)[1]

    @torch.no_grad()
    def secant(self, g: Tensor, w: Tensor, s: State, o: Options) -> LinearMap:
        """The map v ↦ K⊙v (or the path integral), for which ⟨u, g⟩ = ⟨v, update(g) − update(0)⟩."""
        g, s = widen(g, s, torch.float32)
        if self.factor is not None:
            return Scale(self.factor(g, w, s, o).expand_as(g))
        if self.secant_map is not None:
            return self.secant_map(g, w, s, o)
        if self.coordinatewise:
            return Scale(divided_difference(self.update, g, w, s, o))

        function = self.twin or self.update

        def integral(v: Tensor) -> Tensor:
            u = torch.zeros_like(g)
            for alpha, weight in self._quadrature():
                u += weight * _pullback(function, alpha * g, w, s, o)[1](v.to(g.dtype))
            return u.to(v.dtype)

        return integral

    @torch.no_grad()
    def carried(self, g: Tensor, w: Tensor, s: State, o: Options) -> LinearMap:
        """The map v ↦ σPᵀv of the whole step, which is P of an average of gradients."""
        if self.momentum is None:
            raise TypeError("this rule has no momentum to carry")
        g, s = widen(g, s, torch.float32)
        return self.momentum.map(g, w, s, o)

    @torch.no_grad()
    def completeness(self, g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
        """‖Δ − ∫J(αg)g dα‖ / ‖Δ‖, Δ = Ψ(g) − Ψ(0): the part of Δ that the secant leaves uncredited.

        0 for a coordinate-wise rule, whose secant adds up by construction. For a path integral it
        is the error of the quadrature, and 1 where the update ignores the size of g (Muon without
        momentum, as at its first step). A ``twin`` stands for Ψ: the rounding of a low-precision
        update is no fault of the secant, and would drown its error where Δ is small beside Ψ.
        """
        if self.coordinatewise or self.factor is not None or self.secant_map is not None:
            return torch.zeros((), device=g.device)
        g, s = widen(g, s, torch.float32)
        function = self.twin or self.update
        change = function(g, w, s, o) - function(torch.zeros_like(g), w, s, o)
        missed = change.clone()
        for alpha, weight in self._quadrature():
            missed -= weight * jvp(lambda x: function(x, w, s, o), [alpha * g], [g])
        return torch.where(change.norm() > 0, missed.norm() / change.norm(), 0.0)

    def _quadrature(self) -> list[tuple[float, float]]:
        """Nodes α and weights of ∫₀¹ · dα."""
        x, weights = np.polynomial.legendre.leggauss(self.nodes)
        return [(float(a + 1) / 2, float(b) / 2) for a, b in zip(x, weights, strict=True)]


def divided_difference(update: UpdateMap, g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """K = (update(g) − update(0)) / g in float64, and its limit, the derivative, where g = 0.

    The limit counts as 0 where it is not finite, and where the coordinate was never touched (g
    and the whole state are 0): there an adaptive update is a step of width eps, whose slope 1/eps
    says nothing about the credit of an example.
    """
    g64, s64 = widen(g, s, widest(g.device))
    out, pullback = _pullback(update, g64, w, s64, o)
    K = (out - update(torch.zeros_like(g64), w, s64, o)) / torch.where(g64 == 0, 1.0, g64)
    limit = torch.where(_untouched(s64, g64), 0.0, pullback(torch.ones_like(g64)))
    return torch.where(g64 == 0, limit, K).to(g.dtype)


def _pullback(
    function: UpdateMap, g: Tensor, w: Tensor, s: State, o: Options
) -> tuple[Tensor, LinearMap]:
    """The function's value at g, and v ↦ Jᵀv there by automatic differentiation."""
    with torch.enable_grad():
        x = g.detach().requires_grad_()
        out = function(x, w.detach(), s, o)
    if not out.requires_grad:  # the update ignores g
        return out, torch.zeros_like

    def pull(v: Tensor) -> Tensor:
        (u,) = torch.autograd.grad(out, x, v.to(out.dtype), retain_graph=True)
        # √ at 0 has no derivative: such a coordinate carries nothing. A bad g stays visible.
        return torch.where(g.isfinite() & ~u.isfinite(), 0.0, u).to(v.dtype)

    return out.detach(), pull


class Scale:
    """The map v ↦ K⊙v, which most rules give: K can then be used on its own."""

    __slots__ = ("_K",)

    def __init__(self, K: Tensor) -> None:
        self._K = K

    @property
    def K(self) -> Tensor:  # noqa: N802
        return self._K

    def __call__(self, v: Tensor) -> Tensor:
        return (self.K * v).to(v.dtype)


class Factors:
    """K of several parameters that are computed together, one after the other: flat.

    ``members`` are their gradients, ``g`` all of these, flat, where that is at hand. K of a single
    member is a view that is made when somebody asks for it. ``place`` splits a flat tensor by
    copying it into memory that the next one is copied into as well.
    """

    def __init__(
        self, K: Tensor, members: Sequence[Tensor], g: Tensor | None = None,
        place: Callable[[Tensor], Sequence[Tensor]] | None = None,
    ) -> None:  # fmt: skip
        self.K, self.g, self.members = K, g, members
        self._parts: Sequence[Tensor] = ()
        self.place = place or self.split

    def split(self, flat: Tensor) -> Sequence[Tensor]:
        """The part of each member, in its shape."""
        found: Sequence[Tensor] = unflatten_dense_tensors(flat, self.members)
        return found

    def scales(self) -> list[Part]:
        """The map of each member."""
        return [Part(self, i) for i in range(len(self.members))]

    def part(self, place: int) -> Tensor:
        self._parts = self._parts or self.split(self.K)
        return self._parts[place]


class Part(Scale):
    """The map of one member."""

    __slots__ = ("factors", "place")

    def __init__(self, factors: Factors, place: int) -> None:
        self.factors, self.place = factors, place

    @property
    def K(self) -> Tensor:  # noqa: N802
        return self.factors.part(self.place)


# 0-dim numbers in the state whose own precision is part of what the optimizer computes (NAdam's
# mu_product is a float32 product), and which say nothing about single coordinates.
_NUMBERS = {"step", "mu_product", "eta", "mu"}


def widen(g: Tensor, s: State, dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
    """The gradient and the state in at least this precision."""
    wide = torch.promote_types(g.dtype, dtype)

    def convert(name: str, x: Any) -> Any:
        if name in _NUMBERS or not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return x.to(torch.promote_types(x.dtype, wide))

    return g.to(wide), {name: convert(name, x) for name, x in s.items()}


def _untouched(s: State, g: Tensor) -> Tensor:
    """Where every state entry of the parameter's shape is 0 (all of it before the first step)."""
    still = torch.ones_like(g, dtype=torch.bool)
    for name, x in s.items():
        if name not in _NUMBERS and isinstance(x, Tensor) and x.shape == g.shape:
            still &= x == 0
    return still


# By class, or by package and name of a class of another library, which need not be installed.
Which: TypeAlias = type[Optimizer] | str
_REGISTERED: dict[Which, Rule] = {}
_REFUSED: dict[Which, str] = {}


def register_optimizer(cls: Which, **options: Any) -> Callable[[UpdateMap], UpdateMap]:
    """Decorator: the function below is the update map of the optimizer class ``cls``, or of the
    class of this name in a package, ``"lion_pytorch.Lion"``.

    ``options`` are the other fields of :class:`Rule`. Subclasses of ``cls`` use the same rule
    unless they have one of their own.
    """

    def decorate(update: UpdateMap) -> UpdateMap:
        _REGISTERED[cls] = Rule(update, **options)
        return update

    return decorate


def refuse_optimizer(cls: Which, why: str) -> None:
    """Declare that ``cls`` cannot have a rule, with the reason users are told."""
    _REFUSED[cls] = why


def rule_for(optimizer: Optimizer) -> Rule:
    """The rule of this optimizer's class or of its nearest base class that has one."""
    name = type(optimizer).__name__
    for key in (key for cls in type(optimizer).__mro__ for key in (cls, _by_name(cls))):
        if key in _REFUSED:
            raise TypeError(f"inrun cannot watch {name}: {_REFUSED[key]}")
        if key in _REGISTERED:
            rule = _REGISTERED[key]
            if rule.unsupported is not None and (why := rule.unsupported(optimizer)):
                raise TypeError(f"inrun cannot watch this {_by_name(type(optimizer))}: {why}")
            return rule
    known = sorted(map(_qualified, _REGISTERED))
    twins = "".join(
        f" {c} is another class, whose update may differ." for c in known
        if c.rpartition(".")[2] == name
    )  # fmt: skip
    raise TypeError(
        f"inrun has no rule for the optimizer {_qualified(type(optimizer))}.{twins} Rules exist "
        f"for {', '.join(known)}. Add one with @inrun.register_optimizer({name}), on a "
        "pure function (g, w, state, options) that returns what a step subtracts from the weights "
        "(docs/optimizers.md shows Lion)."
    )


def momentum_rules() -> list[str]:
    """The optimizers whose rules know their momentum."""
    return sorted(_qualified(k) for k, rule in _REGISTERED.items() if rule.momentum is not None)


def has_own_rule(cls: type) -> bool:
    """Is there a rule of this very class, not of a base class?"""
    return cls in _REGISTERED or _by_name(cls) in _REGISTERED


def _by_name(cls: type) -> str:
    """``lion_pytorch.Lion``: package and name, wherever in the package the class is."""
    return f"{cls.__module__.partition('.')[0]}.{cls.__name__}"


def _qualified(cls: Which) -> str:
    """``torch.optim.AdamW``: torch's own by the name they are imported under."""
    if isinstance(cls, str):
        return cls
    module = "torch.optim" if cls.__module__.startswith("torch.optim.") else cls.__module__
    return f"{module}.{cls.__qualname__}"
