"""Random programs, and an oracle that says which examples each number in them depends on.

A program is a list of lines of Python over an input with B examples, parameters and buffers, run
inside a module's ``forward``. Sizes coincide on purpose. ``str(program)`` is code that runs.

The oracle runs the program B more times, line by line beside the first run, each time with the
input of one example changed by a little (``STEP``, too little to change any comparison, sorting or
routing), and compares exactly: a number depends on the examples whose change changes it. It knows
no layouts, no owners and no rule of inrun.

* Integers and booleans (masks, orders, token ids) do not change by a little. Each has a *shadow*
  beside it, a float tensor that says what it was computed from (``g3`` is the shadow of ``v3``); it
  moves with it, and is added to what an embedding makes of it. Where integers route other numbers,
  only these count, not what the route was computed from.
* A tensor may be assigned to an example by its place although the number in it does not depend on
  this example: padding that meets a mean over the batch. The run ``EXCUSE`` changes only such
  numbers; whatever depends on them is not judged. The same goes for what depends on its own
  example so weakly (a normalised pair of numbers is ±1) that rounding may hide it.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEP, WEAK = 1e-7, 1e-4
LARGEST, DEEPEST, HIGHEST = 400, 5, 30.0  # entries, dimensions and numbers of a tensor
OPERANDS = re.compile(r"\b[XYZ]\b")


class ImpossibleError(Exception):
    """The line does not fit these shapes or numbers."""


FAILED = (ImpossibleError, RuntimeError, IndexError, ValueError)


@dataclass
class Line:
    """``outs = template``, with operands for X, Y and Z.

    ``kind``: what it does to numbers. *move*: puts them elsewhere; *slot*: combines operands place
    by place; *scan*: combines an operand along dimensions and keeps its shape; *reduce*: combines
    it along ``dims``; *contract*: products, summed over ``dims``; of each operand in both.

    ``shadow``: a template for the shadow of an integer output. ``lift``: what to add to the output
    for the shadow of an integer operand.
    """

    outs: tuple[str, ...]
    template: str
    operands: tuple[str, ...]
    kind: str
    dims: tuple[tuple[int, ...], ...] = ()
    shadow: str | None = None
    lift: str | None = None
    writes: bool = False  # into an operand

    def code(self, names, template=None, outs=None):
        at = dict(zip("XYZ", names, strict=False))
        filled = OPERANDS.sub(lambda m: at[m[0]], template or self.template)
        return f"{', '.join(outs or self.outs)} = {filled}"

    def __str__(self):
        return self.code(self.operands)

    def compiled(self):
        if not hasattr(self, "_code"):
            self._code = compile(str(self), "program", "exec")
        return self._code


@dataclass
class Program:
    B: int
    batch_dim: int
    inputs: list[Tensor]  # of several batches
    params: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)

    def __str__(self):
        shapes = {k: tuple(t.shape) for k, t in (self.params | self.buffers).items()}
        head = f"# B = {self.B}, batch_dim = {self.batch_dim}, v0: {tuple(self.inputs[0].shape)}"
        return "\n".join([f"{head}, {shapes}", *map(str, self.lines)])


class Module(nn.Module):
    """Runs a program; ``see(number of the line, names and tensors)`` after each line."""

    def __init__(self, program):
        super().__init__()
        self.program = program
        for k, p in program.params.items():
            self.register_parameter(k, nn.Parameter(p.clone()))
        for k, b in program.buffers.items():
            self.register_buffer(k, b.clone())

    def forward(self, v0, weights=None, see=lambda i, env: None):
        env = {"torch": torch, "F": F, "v0": v0, **self._parameters, **self._buffers}
        for i, line in enumerate(self.program.lines):
            exec(line.compiled(), env)
            see(i, env)
        return env if weights is None else sum((env[k] * w).sum() for k, w in weights.items())


# The oracle


@dataclass
class Truth:
    """Of the outputs of one line: the examples of each number as the bits of an integer, and where
    no single example may be named although the number depends on it (``joined``)."""

    bits: dict[str, Tensor]
    joined: dict[str, Tensor]
    after: dict[str, Tensor]  # bits of all tensors so far, where the line writes to one


class Oracle:
    """Runs the lines of a program for an input, and for the same with each example changed."""

    def __init__(self, program, x, seed=0):
        self.B, self.input, self.random = program.B, x, torch.Generator().manual_seed(seed)
        self.excuse = 1 << self.B
        self.bits = {}
        consts = {"torch": torch, "F": F, **program.params, **program.buffers}
        self.envs = []
        for run in range(self.B + 2):
            mark = torch.zeros(x.shape)
            if 1 <= run <= self.B:
                row = mark.select(program.batch_dim, run - 1)
                row += STEP * self._noise(row.shape)
            same = x.is_floating_point()
            self.envs.append(dict(consts, v0=x + mark if same else x.clone()))
            self.envs[-1]["g0"] = self.envs[-1]["v0"] if same else mark
        self._note("v0")

    def _noise(self, shape):
        """No number near 0."""
        signs = torch.randint(0, 2, shape, generator=self.random) * 2 - 1
        return signs * (0.5 + torch.rand(shape, generator=self.random))

    def add(self, name, tensor):
        for env in self.envs:
            env[name] = tensor

    def _note(self, name):
        """Which runs differ from the first in each number?"""
        first = self.envs[0]["g" + name[1:]]
        bits = torch.zeros(first.shape, dtype=torch.long)
        for run, env in enumerate(self.envs[1:]):
            bits |= (env["g" + name[1:]] != first).long() << run
        self.bits[name] = bits

    def alive(self, name):
        return self.bits[name] & (self.excuse - 1)

    def run(self, line) -> Truth:
        several = line.kind == "slot" and len(line.operands) > 1
        through = self._through(line) if several else None
        before = {k: self.bits[k] for k in line.operands}
        for env in self.envs:
            exec(line.compiled(), env)
        for k in line.outs:
            self._accept([env[k] for env in self.envs])
        self._shadows(line)
        for k in line.outs:
            self._note(k)
        for k in line.outs:
            if self.envs[0][k].is_floating_point():
                self._excuse(k, line, before, through)
        if line.writes:
            for k in self.bits:
                self._note(k)
        joined = {k: self._joined(self.bits[k], line, before, through) for k in line.outs}
        after = dict(self.bits) if line.writes else {}
        return Truth({k: self.bits[k] for k in line.outs}, joined, after)

    def _accept(self, tensors):
        t, *others = tensors
        if not 0 < t.numel() <= LARGEST or t.ndim > DEEPEST:
            raise ImpossibleError
        if t.is_floating_point() and not (t.abs() < HIGHEST).all():
            raise ImpossibleError
        if t.dtype.is_complex or any(o.shape != t.shape for o in others):
            raise ImpossibleError
        if not t.is_floating_point() and any((o != t).any() for o in others):
            raise ImpossibleError  # the change was not small enough

    def _shadows(self, line):
        first = self.envs[0]
        names = ["g" + k[1:] for k in line.operands]
        outs = ["g" + k[1:] for k in line.outs]
        kept = {}
        for env in self.envs:
            if line.lift is not None:
                exec(line.code(names, line.lift, ["lift"]), env)
                env[line.outs[0]] = env[line.outs[0]] + env["lift"]
            discrete = [not first[k].is_floating_point() for k in line.outs]
            if any(discrete):
                exec(line.code(names, line.shadow, [f"s{k}" for k in outs]), env)
            for k, g, integer in zip(line.outs, outs, discrete, strict=True):
                if integer:
                    kept.setdefault(g, env["s" + g])
                    env[g] = env["s" + g] - kept[g]
                else:
                    env[g] = env[k]

    def _through(self, line):
        """The examples on which the output depends through each operand."""
        names = [f"a{i}" for i in range(len(line.operands))]
        code = compile(line.code(names, outs=["out"]), "program", "exec")

        def result(changed, other):
            env = dict(self.envs[0])
            for i, k in enumerate(line.operands):
                env[f"a{i}"] = (other if i == changed else self.envs[0])[k].clone()
            exec(code, env)
            return env["out"]

        first, found = result(None, None), []
        for i in range(len(line.operands)):
            bits = torch.zeros(first.shape, dtype=torch.long)
            for run, env in enumerate(self.envs[1:]):
                bits |= (result(i, env) != first).long() << run
            found.append(bits)
        return found

    def _excuse(self, name, line, before, through):
        """Numbers that stand in an example's place and are made of others only."""
        depends = self.alive(name) != 0
        where = torch.zeros_like(depends)
        if through is not None:
            for k, bits in zip(line.operands, through, strict=True):
                if (before[k] & (self.excuse - 1)).any():
                    where |= (bits & (self.excuse - 1)) == 0
        if line.kind == "scan":
            where |= (before[line.operands[0]] & ~self.bits[name] & (self.excuse - 1)) != 0
            where |= (before[line.operands[0]] & (self.excuse - 1)) == 0
        for env in self.envs[1:-1]:  # so little that it may be lost in rounding later
            change = (env[name] - self.envs[0][name]).abs()
            where |= (change > 0) & (change < WEAK * STEP)
        if line.kind in ("reduce", "contract") and self._varied(line, before):
            where |= True
        where &= depends
        if where.any():
            change = where * STEP * self._noise(where.shape)
            out = self.envs[-1][name]
            if line.writes:
                out += change
            else:
                out = out + change
            self.envs[-1][name] = self.envs[-1]["g" + name[1:]] = out
            self._note(name)

    def _varied(self, line, before):
        """Do the numbers that are summed depend on different examples?"""
        for k, dims in zip(line.operands, line.dims, strict=False):
            bits = before[k] & (self.excuse - 1)
            for d in dims:
                highest = bits.amax(d)
                lowest = bits.masked_fill(bits == 0, self.excuse).amin(d)
                if (lowest < highest).any() or (line.kind == "reduce" and bits.shape[d] == 1):
                    return True
        return False

    def _joined(self, bits, line, before, through):
        """Numbers of several examples that this line has joined, where it gives none of them a
        place of its own."""
        alone = (bits & self.excuse) == 0
        if through is not None:
            differ = torch.zeros_like(alone)
            for i, a in enumerate(through):
                for b in through[:i]:
                    differ |= (popcount(a) == 1) & (popcount(b) == 1) & (a != b)
            return differ & alone
        if line.kind == "move":
            known = torch.cat([b.flatten() for b in before.values()]).unique()
            return (popcount(bits) > 1) & ~torch.isin(bits, known) & alone
        if line.kind == "reduce":
            return torch.full_like(alone, self._varied_for_certain(line, before)) & (
                popcount(bits & (self.excuse - 1)) > 1
            )
        return torch.zeros_like(alone)

    def _varied_for_certain(self, line, before):
        return any(
            (lambda b: (popcount(b) == 1).all() and (b.amax(d) != b.amin(d)).any())(before[k])
            for k, dims in zip(line.operands, line.dims, strict=False)
            for d in dims
        )


def popcount(bits):
    return sum((bits >> i) & 1 for i in range(8))


# The generator


class Generator:
    """Adds random lines to a program for as long as they fit."""

    def __init__(self, seed):
        self.r, self.numbers = random.Random(seed), torch.Generator().manual_seed(seed)
        r, self.seed = self.r, seed
        B = self.like = r.choice([1, 2, 2, 3, 3, 3, 4, 4])
        shape = [B, *(self.size() for _ in range(r.randint(1, 3)))]
        dim = 1 if r.random() < 0.1 else 0
        shape[0], shape[dim] = shape[dim], shape[0]
        self.ids = r.random() < 0.2
        inputs = [self._input(shape[:3] if self.ids else shape) for _ in range(2)]
        self.program = Program(B, dim, inputs)
        self.oracle = Oracle(self.program, inputs[0], seed)
        self.truths, self.count = [], 1

    def _input(self, shape):
        if self.ids:
            return torch.randint(0, 6, shape, generator=self.numbers)
        return torch.randn(shape, generator=self.numbers)

    def size(self):
        """Mostly the batch's."""
        return self.like if self.r.random() < 0.6 else self.r.choice([1, 2, 3, 4, 5])

    def value(self, name):
        return self.oracle.envs[0][name]

    def names(self, wanted):
        return [k for k in self.oracle.bits if wanted(self.value(k))]

    def pick(self, wanted=torch.is_floating_point):
        """One of the values, mostly the newest."""
        names = self.names(wanted)
        if not names:
            raise ImpossibleError
        return names[-1] if self.r.random() < 0.6 else self.r.choice(names)

    def param(self, *shape):
        return self._tensor("p", self.program.params, shape)

    def buffer(self, *shape):
        return self._tensor("b", self.program.buffers, shape)

    def _tensor(self, letter, kept, shape):
        name = f"{letter}{len(kept)}"
        kept[name] = torch.randn(shape, generator=self.numbers) * 0.8
        self.oracle.add(name, kept[name])
        return name

    def line(self, template, operands, kind, outs=1, **options):
        names = tuple(f"v{self.count + i}" for i in range(outs))
        if options.get("shadow") is None and kind == "move":
            options["shadow"] = template
        line = Line(names, template, tuple(operands), kind, **options)
        try:
            truth = self.oracle.run(line)
        except (*FAILED, TypeError, NotImplementedError) as e:
            self._forget(names, line.writes)
            raise ImpossibleError(str(line)) from e
        self.count += outs
        self.program.lines.append(line)
        self.truths.append(truth)
        return names if outs > 1 else names[0]

    def _forget(self, names, written):
        for k in names:
            self.oracle.bits.pop(k, None)
        if written:  # perhaps in some of the runs
            _, self.oracle = truths_for(self.program, self.program.inputs[0], self.seed)

    def permutation(self, n):
        order = list(range(n))
        self.r.shuffle(order)
        return order

    def indices(self, n, count=None):
        return [self.r.randrange(n) for _ in range(count or n)]

    def scrambled(self, shape, d):
        """A permutation of its own along each line of numbers in dimension d."""
        order = torch.rand(shape, generator=self.numbers).argsort(d)
        return f"torch.tensor({order.tolist()})"

    def factored(self, count):
        """A shape with so many entries."""
        primes = []
        while count > 1:
            primes.append(next(p for p in range(2, count + 1) if count % p == 0))
            count //= primes[-1]
        self.r.shuffle(primes)
        sizes = [1]
        for p in primes:
            if self.r.random() < 0.5:
                sizes.append(p)
            else:
                sizes[-1] *= p
        return tuple(sizes[1:] if sizes[0] == 1 and len(sizes) > 1 else sizes)


def _any(t):
    return t.ndim > 0


def move(g):
    """One tensor, of any type: its numbers elsewhere, fewer of them or several times."""
    x = g.pick(_any)
    s, r = tuple(g.value(x).shape), g.r
    n, total = len(s), math.prod(s)
    d, e, few = r.randrange(n), r.randrange(n), r.randint(1, 3)
    size, pre = s[d], ":, " * d
    order, some = g.permutation(size), g.indices(size)
    at = r.randrange(size)
    dims = g.permutation(n)
    half = r.randint(1, size)
    ones = [1] * n
    ones[d] = 2
    grown = [r.randint(1, 3) if k == 1 else k for k in s]
    g.line(r.choice([
        f"X.reshape{g.factored(total)!r}", f"X.contiguous().view{g.factored(total)!r}",
        f"X.reshape{g.factored(total)!r}", f"X.flatten({min(d, e)}, {max(d, e)})",
        f"X.unflatten({d}, {g.factored(size)!r})", f"X.transpose({d}, {e})", f"X.permute({dims})",
        f"X.permute({dims})", f"torch.movedim(X, {d}, {e})", f"X.unsqueeze({d})",
        f"X[{pre}None]", f"X.squeeze({d})", "X.squeeze()", f"X.expand({grown})",
        f"X.expand({[few, *s]})", f"X.unsqueeze({d}).expand({[*s[:d], few + 1, *s[d:]]})",
        f"X.repeat({ones})", f"X.repeat({[few, *([1] * n)]})", f"torch.tile(X, {tuple(ones[d:])})",
        f"X.repeat_interleave({few}, {d})", f"X.repeat_interleave({few}, dim={d})",
        f"X.repeat_interleave(torch.tensor({g.indices(3, size)}), {d})",
        f"X.flip({d})", f"X.flip({d}, {e})" if d != e else f"X.flip(({d},))",
        f"X.roll({few}, {d})", f"X.roll({few})",
        f"torch.roll(X, shifts=({few}, 1), dims=({d}, {e}))",
        f"torch.rot90(X, {few}, ({d}, {e}))", "torch.fliplr(X)", "torch.flipud(X)",
        f"X[{pre}{at}:]", f"X[{pre}:{half}]", f"X[{pre}::{few}]", f"X[{pre}{at}]",
        f"X.select({d}, {at})", f"X.narrow({d}, {at}, {size - at})", "X[..., -1:]", "X[..., 0]",
        f"torch.stack(X.unbind({d})[::-1], {d})", f"torch.stack(X.unbind({d}), {e})",
        f"torch.stack([X.unbind({d})[i] for i in {order}], {e})",
        f"torch.stack([X[{pre}i] for i in {some}])",
        f"torch.cat([X[{pre}{half}:], X[{pre}:{half}]], {d})",
        f"torch.cat([X[{pre}:{half}], X[{pre}{half}:]], {d})",
        f"torch.cat(X.split(1, {d})[::-1], {d})", f"torch.cat(X.chunk(2, {d})[::-1], {e})",
        f"torch.cat(X.split({half}, {d})[::-1], {d})", f"torch.cat(X.unbind({d}), {max(e - 1, 0)})",
        f"torch.hstack(X.unbind({d}))", f"torch.vstack(X.unbind({d})[::-1])",
        f"torch.dstack(X.unbind({d}))", f"torch.cat([X, X.flip({d})], {e})",
        f"torch.stack([X, X.roll(1, {d})], {e})", f"torch.cat([X, X], {d})",
        f"X[{pre}torch.tensor({order})]", f"X[{pre}{order}]", f"X[{pre}torch.tensor({some})]",
        f"X[torch.tensor({g.indices(s[0], 3)}), torch.tensor({g.indices(s[min(1, n - 1)], 3)})]",
        f"X[torch.tensor({g.indices(s[0], 3)}), :, torch.tensor({g.indices(s[-1], 3)})]",
        f"X[{pre}torch.arange({size - 1}, -1, -1)]", f"X.index_select({d}, torch.tensor({order}))",
        f"X.index_select({d}, torch.tensor({some}))", f"torch.take_along_dim(X, "
        f"torch.tensor({order}).view({[-1 if k == d else 1 for k in range(n)]}), {d})",
        f"X.gather({d}, torch.tensor({g.indices(size, total)}).view({s}))",
        f"X[{pre}torch.tensor({[bool(i % 2) for i in order]})]", f"X.diagonal(0, {d}, {e})",
        f"X.unfold({d}, {half}, 1)", "X.mT", "X.t()", f"X.swapaxes({d}, {e}).contiguous()",
        "X.tril()", f"F.pad(X, {[r.randint(-1, 2) for _ in range(2 * r.randint(1, n))]})",
        f"torch.zeros({s}, dtype=X.dtype).index_add({d}, torch.tensor({some}), X)",
        f"torch.zeros({s}, dtype=X.dtype).index_copy({d}, torch.tensor({order}), X)",
        f"torch.zeros({s}, dtype=X.dtype).scatter({d}, {g.scrambled(s, d)}, X)",
        f"torch.zeros({s}, dtype=X.dtype).scatter_add({d}, "
        f"torch.tensor({g.indices(size, total)}).view({s}), X)",
        f"torch.zeros({s}, dtype=X.dtype).index_put((torch.tensor({g.permutation(s[0])}),), X)",
        f"torch.zeros({[size + 2 if k == d else m for k, m in enumerate(s)]}, dtype=X.dtype)"
        f".narrow({d}, 1, {size}).copy_(X)",
        f"torch.zeros({[size + 1 if k == d else m for k, m in enumerate(s)]}, dtype=X.dtype)"
        f".slice_scatter(X, {d}, 1)", f"X.broadcast_to({[few, *s]})", "torch.atleast_3d(X)",
        f"torch.block_diag(*X.unbind({d}))", f"torch.cat((X, torch.zeros{s!r}), {d})",
        f"torch.cat((torch.ones{s!r}, X), {d})", "torch.diag_embed(X)", "X.clone()", "X.detach()",
    ]), [x], "move")  # fmt: skip


def write(g):
    """In-place operations, also through views."""
    x = g.line("X.clone()", [g.pick()], "move")
    s, r = tuple(g.value(x).shape), g.r
    n = len(s)
    d = r.randrange(n)
    pre, order = ":, " * d, g.permutation(s[d])
    at = r.randrange(s[d])
    y = r.choice(["X.tanh()", f"X.flip({d})", f"X.roll(1, {d})", "X * 0.5"])
    y = g.line(y, [x], "slot" if y in ("X.tanh()", "X * 0.5") else "move")
    if r.random() < 0.5:
        g.line(r.choice([
            "X.add_(Y)", "X.mul_(Y)", "X.sub_(Y)", "X.copy_(Y)", "X.tanh_()", "X.mul_(0.7)",
            "X.add_(1.0)", "X.zero_()", "X.masked_fill_(Y > 0, 0.5)",
        ]), [x, y], "slot", writes=True)  # fmt: skip
        return
    target = x
    if r.random() < 0.5:
        target = g.line(f"X[{pre}{at}:]", [x], "move")
        y = g.line(f"X[{pre}{at}:]", [y], "move")
        order = g.permutation(s[d] - at)
    t = tuple(g.value(target).shape)
    last = r.randrange(t[d])
    g.line(r.choice([
        f"X.index_copy_({d}, torch.tensor({order}), Y)",
        f"X.index_add_({d}, torch.tensor({order}), Y)",
        f"X.scatter_({d}, {g.scrambled(t, d)}, Y)",
        f"(X.__setitem__(({pre}torch.tensor({order}),), Y), X)[1]".replace(":,", "slice(None),"),
        f"(X.__setitem__(({pre}{last},), Y[{pre}{last}]), X)[1]".replace("(:,", "(slice(None),")
        if d == 0 else "X.copy_(Y)",
        f"X.index_fill_({d}, torch.tensor({order[:1]}), 0.5)", "X.copy_(Y)",
        f"X.select({d}, {last}).copy_(Y.select({d}, {t[d] - 1 - last}))",
    ]), [target, y], "move", writes=True)  # fmt: skip


def unary(g):
    x = g.pick()
    s, r = tuple(g.value(x).shape), g.r
    d = r.randrange(max(len(s), 1))
    along = [s[k] if k == d else 1 for k in range(len(s))]
    g.line(r.choice([
        "X.tanh()", "X.sigmoid()", "F.softplus(X)", "F.gelu(X)", "X * 0.5", "1 - X", "X.relu()",
        "X.clamp(-1.0, 1.0)", f"X + torch.arange({math.prod(along)}).view({along})",
        f"X * torch.linspace(0.5, 1.0, {math.prod(along)}).view({along})",
        f"X * {g.buffer(*along)}",
        f"X + {g.buffer(*along)}", f"X * {g.buffer(*s)}", f"X - {g.buffer(*s[d:])}",
        f"torch.addcmul({g.buffer(*s)}, X, X)", "F.leaky_relu(X)", "X.abs()", "X.double()",
    ]), [x], "slot")  # fmt: skip


def binary(g):
    x = g.pick()
    s, r = g.value(x).shape, g.r
    if r.random() < 0.25 and len(s):
        d, e = r.randrange(len(s)), r.randrange(len(s))
        n = s[d]
        y = g.line(r.choice([
            f"X.flip({d})", f"X.transpose({d}, {e})", f"X.roll(1, {d})", f"X.unsqueeze({d})",
            f"X.narrow({d}, {r.randrange(n)}, 1)", f"X[{r.randrange(s[0])}]", f"X.select({d}, 0)",
            f"X.index_select({d}, torch.tensor({g.permutation(n)}))",
        ]), [x], "move")  # fmt: skip
    else:

        def fits(t):
            if not t.is_floating_point():
                return False
            pairs = list(zip(t.shape[::-1], s[::-1], strict=False))
            return all(a == b or 1 in (a, b) for a, b in pairs)

        y = r.choice(g.names(fits))
    g.line(r.choice([
        "X + Y", "Y + X", "X * Y", "X - 0.5 * Y", "torch.where(Y > 0, X, Y)", "torch.maximum(X, Y)",
        "torch.where(X > Y, X, Y)", "torch.lerp(X, Y, 0.3)", "torch.add(X, Y, alpha=0.5)",
        "torch.hypot(X, Y)", "torch.atan2(X, Y)",
    ]), [x, y], "slot")  # fmt: skip


def scan(g):
    x = g.pick()
    s, r = g.value(x).shape, g.r
    d = r.randrange(max(len(s), 1))
    g.line(r.choice([
        f"X.softmax({d})", f"X.cumsum({d})", f"F.log_softmax(X, {d})", f"F.normalize(X, dim={d})",
        f"F.layer_norm(X, {tuple(s[d:])})", f"F.softmax(X, dim={d - len(s)})",
        f"X - X.mean({d}, keepdim=True)", f"X.logcumsumexp({d})",
        "X / X.norm(dim=-1, keepdim=True)",
    ]), [x], "scan")  # fmt: skip


def reduce(g):
    x = g.pick()
    n, r = g.value(x).ndim, g.r
    d, e = r.randrange(max(n, 1)), r.randrange(max(n, 1))
    keep = r.random() < 0.5
    one, two = f"({d}, {keep})", f"(({d}, {e}), {keep})"
    if r.random() < 0.15 and d != e:
        g.line(f"X.{r.choice(['sum', 'mean', 'amax'])}{two}", [x], "reduce", dims=((d, e),))
        return
    g.line(r.choice([
        f"X.sum{one}", f"X.mean{one}", f"X.amax{one}", f"X.amin{one}", f"X.logsumexp{one}",
        f"X.norm(dim={d}, keepdim={keep})", f"X.max({d}).values", f"X.median({d})[0]",
        f"X.prod{one}",
    ]), [x], "reduce", dims=((d,),))  # fmt: skip


def contract(g):
    x = g.pick(lambda t: t.is_floating_point() and t.ndim > 1)
    s, r = g.value(x).shape, g.r
    n = len(s)
    other = [k for k in g.names(torch.is_floating_point) if g.value(k).shape == s] or [x]
    y = r.choice(other)
    kinds = [
        ("X @ Y.mT", ((-1,), (-1,))), ("X.mT @ Y", ((-2,), (-2,))),
        (f"{g.buffer(g.size(), s[-2])} @ X", ((-2,),)),
        (f"X @ {g.buffer(s[-1], g.size())}", ((-1,),)),
        ("F.scaled_dot_product_attention(X, Y, Y)", ((-1,), (-1, -2))),
        ("(X @ Y.mT).softmax(-1) @ Y", ((-1,), (-1, -2))),
        ("torch.einsum('i...,i...->...', X, Y)", ((0,), (0,))),
        ("torch.einsum('...i,...i->...', X, Y)", ((-1,), (-1,))),
        ("torch.einsum('ij...,kj...->ik...', X, Y)", ((1,), (1,))),
    ]  # fmt: skip
    if n == 3:
        kinds.append(("torch.bmm(X, Y.transpose(1, 2))", ((-1,), (-1,))))
        kinds.append(("torch.einsum('btd,sed->bste', X, Y)", ((-1,), (-1,))))
    template, dims = r.choice(kinds)
    operands = [x, y] if "Y" in template else [x]
    g.line(template, operands, "contract", dims=dims)


def param(g):
    """Operations with parameters."""
    x = g.pick()
    s, r, P = tuple(g.value(x).shape), g.r, g.param
    n, c, o = len(s), s[-1] if s else 1, g.size()
    d = r.randrange(max(n, 1))
    along = [s[k] if k == d else 1 for k in range(n)]
    last = {"dims": ((-1,),)}
    kinds = [
        lambda: (f"F.linear(X, {P(o, c)}, {P(o)})", "contract", last),
        lambda: (f"F.linear(X, {P(o, c)}, {P(o)})", "contract", last),
        lambda: (f"F.linear(X, {P(o, c)})", "contract", last),
        lambda: (f"X @ {P(c, o)}", "contract", last),
        lambda: (f"torch.einsum('...i,oi->...o', X, {P(o, c)})", "contract", last),
        lambda: (f"X * {P(c)}", "slot", {}), lambda: (f"X + {P(c)}", "slot", {}),
        lambda: (f"X * {P(*along)}", "slot", {}), lambda: (f"X + {P(*s)}", "slot", {}),
        lambda: (f"X * {P()}", "slot", {}), lambda: (f"F.prelu(X, {P(1)})", "slot", {}),
        lambda: (f"F.layer_norm(X, ({c},), {P(c)}, {P(c)})", "scan", {}),
        lambda: (f"F.rms_norm(X, ({c},), {P(c)})", "scan", {}),
    ]  # fmt: skip
    if n > 1:
        E = g.size()
        kinds += [
            lambda: (f"{P(o, s[-2])} @ X", "contract", {"dims": ((-2,),)}),
            lambda: (f"torch.einsum('...i,eio->...eo', X, {P(E, c, o)})", "contract", last),
            lambda: (f"torch.einsum('...i,eio->e...o', X, {P(E, c, o)})", "contract", last),
            lambda: ("torch.stack([" + ", ".join(f"F.linear(X, {P(o, c)})" for _ in range(E))
                     + f"], {d})", "contract", last),
            lambda: (f"F.group_norm(X, 1, {P(s[1])}, {P(s[1])})", "scan", {}),
            lambda: (f"F.batch_norm(X, None, None, {P(s[1])}, {P(s[1])}, True)", "scan", {}),
        ]  # fmt: skip
    if n == 3:
        kinds += [
            lambda: (f"F.conv1d(X, {P(o, s[1], 3)}, {P(o)}, padding=1)", "contract",
                     {"dims": ((1, 2),)}),
            lambda: (f"torch.bmm(X, {P(s[0], c, o)})", "contract", last),
        ]  # fmt: skip
    template, kind, options = r.choice(kinds)()
    g.line(template, [x], kind, **options)


def integers(g):
    """Masks, orders and token ids made of numbers."""
    x = g.pick()
    n, r = g.value(x).ndim, g.r
    d = r.randrange(max(n, 1))
    mean, spread = f"X.mean({d})", f"X.mean({d}, keepdim=True).expand(X.shape)"
    template, shadow = r.choice([
        ("X > 0", "X + 0"), ("X <= 0.2", "X + 0"), (f"X.argmax({d})", mean),
        (f"X.argsort({d})", spread), (f"X.argsort({d}, descending=True)", spread),
        (f"X.select({d}, 0) > 0", f"X.select({d}, 0)"), (f"X.argmin({d})", mean),
    ])  # fmt: skip
    g.line(template, [x], "scan" if "argsort" in template else "slot", shadow=shadow)


def _is_index(t):
    return t.dtype == torch.long


def _is_mask(t):
    return t.dtype == torch.bool


def looked_up(g):
    """Numbers made of integers."""
    i = g.pick(_is_index)
    if int(g.value(i).min()) < 0:
        raise ImpossibleError
    V, o = max(int(g.value(i).max()) + 1, 6), g.size()
    template, lift = g.r.choice([
        (f"F.embedding(X, {g.param(V, o)})", "X.unsqueeze(-1)"),
        (f"F.embedding(X, {g.param(V, o)})", "X.unsqueeze(-1)"),
        (f"{g.param(V, o)}[X]", "X.unsqueeze(-1)"), (f"{g.buffer(V)}[X]", "X"),
        ("X.double()", "X"), (f"F.one_hot(X, {V}).double()", "X.unsqueeze(-1)"),
    ])  # fmt: skip
    g.line(template, [i], "slot", lift=lift)


def _differ(index, d):
    return index.ndim > d and bool((index.sort(d).values.diff(dim=d) != 0).all())


def routed(g):
    """Indexing with integers and masks that were computed."""
    r = g.r
    if r.random() < 0.5:
        return _routed_by_mask(g)
    i = g.pick(_is_index)
    index, x = g.value(i), g.pick()
    s = g.value(x).shape
    if int(index.min()) < 0:
        raise ImpossibleError
    fitting = [d for d, size in enumerate(s) if int(index.max()) < size]
    if not fitting:
        raise ImpossibleError
    d = r.choice(fitting)
    pre, total = ":, " * d, index.shape[0] if index.ndim else 1
    kinds = [f"X[{pre}{i}]", f"X[{pre}{i}.flip(0)]", f"X.gather({d}, {i})",
             f"torch.take_along_dim(X, {i}, {d})",
             f"torch.zeros({tuple(s)}).scatter_add({d}, {i}, X)"]  # fmt: skip
    if _differ(index, d):  # two numbers for one place: which stays is not defined
        kinds += [f"torch.zeros({tuple(s)}).scatter({d}, {i}, X)"]
    if index.ndim == 1:
        kinds += [f"X.index_select({d}, {i})", f"X[{pre}{i}]"]
        if s[d] == total:
            kinds += [f"torch.zeros({tuple(s)}).index_add({d}, {i}, X)", f"X[{pre}{i}.argsort()]"]
        if s[0] == total and _differ(index, 0):
            kinds += [f"torch.zeros({tuple(s)}).index_put(({i},), X)"]
    return g.line(r.choice(kinds), [x], "move")


def _routed_by_mask(g):
    m = g.pick(_is_mask)
    shape = g.value(m).shape
    fitting = g.names(lambda t: t.is_floating_point() and t.shape[: len(shape)] == shape)
    if not fitting:
        raise ImpossibleError
    x = g.r.choice(fitting)
    kinds = [f"X[{m}]", f"X[{m}]", f"X[torch.nonzero({m}, as_tuple=True)]"]
    if g.value(x).shape == shape:
        kinds += [f"X.masked_select({m})", f"X.masked_fill({m}, 0.0)", f"X * {m}",
                  f"torch.where({m}, X, 0.0)",
                  f"torch.zeros({tuple(shape)}).masked_scatter({m}, X)"]  # fmt: skip
    return g.line(g.r.choice(kinds), [x], "move")


def sort_rows(g):
    """Sorting by a column, perhaps a parameter, and back."""
    x = g.pick(lambda t: t.is_floating_point() and t.ndim > 1)
    d, r = g.r.choice([0, 0, 1]), g.r
    pre = ":, " * d
    column = g.line(f"X.transpose(0, {d}).flatten(1)[:, 0]", [x], "move")
    order = g.line(f"X.argsort(descending={r.random() < 0.5})", [column], "scan",
                   shadow="X.mean().expand(X.shape)")  # fmt: skip
    y = g.line(f"X[{pre}{order}]", [x], "move")
    if r.random() < 0.6:
        c, o = g.value(y).shape[-1], g.size()
        y = g.line(f"F.linear(X, {g.param(o, c)}, {g.param(o)})", [y], "contract", dims=((-1,),))
    if r.random() < 0.5:
        g.line(f"X[{pre}{order}.argsort()]", [y], "move")
    else:
        g.line(f"torch.zeros_like(X).index_copy({d}, {order}, X)", [y], "move")


def expert(g):
    """Rows that a mask chooses go through a layer of their own and back to their places."""
    x = g.pick(lambda t: t.is_floating_point() and t.ndim > 1)
    s, r = g.value(x).shape, g.r
    flat = g.line("X.reshape(-1, X.shape[-1])", [x], "move")
    score = g.line(f"X[:, {r.randrange(s[-1])}]", [flat], "move")
    mask = g.line("X > 0", [score], "slot", shadow="X + 0")
    rows = g.line(f"torch.nonzero({mask})[:, 0]", [score], "slot",
                  shadow=f"X[{mask}]")  # fmt: skip
    y = g.line(r.choice([f"X[{rows}]", f"X[{mask}]", f"X.index_select(0, {rows})"]), [flat], "move")
    y = g.line(f"F.linear(X, {g.param(s[-1], s[-1])}, {g.param(s[-1])})", [y], "contract",
               dims=((-1,),))  # fmt: skip
    g.line(r.choice([
        f"torch.zeros({tuple(g.value(flat).shape)}).index_add(0, {rows}, X)",
        f"torch.zeros({tuple(g.value(flat).shape)}).index_put(({rows},), X)",
        f"torch.zeros({tuple(g.value(flat).shape)}).masked_scatter({mask}[:, None], X)",
        f"Y.index_add(0, {rows}, X)", f"Y.index_copy(0, {rows}, X)",
    ]), [y, flat], "move")  # fmt: skip


def ordered(g):
    """sort and topk: the numbers, and where they were."""
    x = g.pick(lambda t: t.is_floating_point() and t.ndim > 0)
    s, r = g.value(x).shape, g.r
    d = r.randrange(len(s))
    k = r.randint(1, s[d])
    template = r.choice([f"X.sort({d})", f"torch.sort(X, dim={d}, descending=True)",
                         f"X.topk({k}, {d})", f"X.topk({k}, {d})"])  # fmt: skip
    mean = f"X.mean({d}, keepdim=True)"
    count = k if "topk" in template else s[d]
    shadow = f"X, {mean}.expand({[count if e == d else m for e, m in enumerate(s)]})"
    _, index = g.line(template, [x], "move", outs=2, shadow=shadow)
    if r.random() < 0.5:
        y = r.choice([y for y in g.names(torch.is_floating_point) if g.value(y).shape == s])
        g.line(f"X.gather({d}, {index})", [y], "move")


def join(g):
    """Two tensors of one shape, into one."""
    x = g.pick(_any)
    s, r = tuple(g.value(x).shape), g.r
    same = [k for k in g.names(_any) if g.value(k).shape == s]
    same = [k for k in same if g.value(k).dtype == g.value(x).dtype]
    y, z = r.choice(same), r.choice(same)
    n = len(s)
    d, e = r.randrange(n), r.randrange(n)
    order, pre = g.permutation(s[d]), ":, " * d
    g.line(r.choice([
        f"torch.cat([X, Y], {d})", f"torch.stack([X, Y], {d})", f"torch.stack([X, Y, Z], {d})",
        "torch.hstack([X, Y])", "torch.vstack((X, Y))", "torch.dstack((X, Y))",
        f"torch.cat([X[{pre}1:], Y[{pre}:1]], {d})", "torch.column_stack([X, Y])",
        f"torch.stack([*X.unbind({d}), *Y.unbind({d})], {e})",
        f"X.index_copy({d}, torch.tensor({order}), Y)",
        f"X.index_add({d}, torch.tensor({order}), Y)",
        f"X.scatter({d}, {g.scrambled(s, d)}, Y)",
        f"X.index_put((torch.tensor({g.permutation(s[0])}),), Y)",
        f"X.masked_scatter(torch.tensor({[bool(i % 2) for i in range(s[-1])]}), Y)",
        "torch.block_diag(X, Y)", f"X.select_scatter(Y.select({d}, 0), {d}, {s[d] - 1})",
    ]), [x, y, z], "move")  # fmt: skip


PLAIN = [(move, 10), (param, 7), (unary, 2), (sort_rows, 1), (expert, 1), (ordered, 1),
         (integers, 1), (looked_up, 1), (routed, 2), (join, 1), (write, 1), (reduce, 1), (scan, 1),
         (binary, 1), (contract, 1)]  # fmt: skip
MIXING = [*PLAIN, (reduce, 2), (scan, 2), (binary, 4), (contract, 3), (join, 3), (write, 1)]


def generate(seed):
    """A program of 3 to 8 lines (some operations are several), and the truth about each line."""
    g = Generator(seed)
    kinds, weights = zip(*(PLAIN if seed % 3 else MIXING), strict=True)
    length, tries = g.r.randint(3, 8), 0
    while len(g.program.lines) < length and tries < 60:
        tries += 1
        first = g.ids and not g.program.lines
        try:
            (looked_up if first else g.r.choices(kinds, weights)[0])(g)
        except (ImpossibleError, ValueError, IndexError):
            continue
    while not any(re.search(r"\bp\d", str(line)) for line in g.program.lines) and tries < 80:
        tries += 1
        try:
            param(g)
        except (ImpossibleError, ValueError, IndexError):
            continue
    _drop_unused(g.program)
    return g


def _drop_unused(program):
    text = " ".join(map(str, program.lines))
    used = set(re.findall(r"\b[pb]\d+\b", text))
    for kept in (program.params, program.buffers):
        for k in set(kept) - used:
            del kept[k]


def truths_for(program, x, seed=0):
    """The truth about each line for another input, and the oracle; None where the program does not
    run with it."""
    oracle = Oracle(program, x, seed)
    try:
        truths = [oracle.run(line) for line in program.lines]
    except FAILED:
        return None, oracle
    return truths, oracle


# What the implementation says


def claimed_owner(capture, t, B):
    """The example that each entry of a tensor belongs to as the capture sees it: integers of its
    shape, -1 for nobody. None if it does not say."""
    info = capture.provenance.find(t)
    if hasattr(info, "map"):
        return info.map.detach().to("cpu", torch.long).expand(t.shape)
    if not hasattr(info, "outer") or info.data:
        return None
    if t.ndim == 0:
        return torch.zeros((), dtype=torch.long)
    owner = torch.arange(t.shape[info.dim]) // info.inner % B
    return owner.view([-1 if d == info.dim else 1 for d in range(t.ndim)]).expand(t.shape)


@dataclass
class Tally:
    """Counts of tensors and of their entries, and everything that is wrong."""

    count: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def judge(self, claim, bits, joined, B):
        """Why the claim is wrong, or None."""
        everyone = (1 << B) - 1
        excused, examples = bits >> B & 1 == 1, bits & everyone
        many = popcount(examples)
        named = claim >= 0
        holds = named & ((examples >> claim.clamp(min=0)) & 1 == 1)
        self.count["entries"] += claim.numel()
        self.count["entries right"] += int((holds & (many == 1)).sum())
        self.count["entries by place"] += int((holds & (many > 1)).sum())
        self.count["entries excused"] += int((excused & ~holds & (many > 0)).sum())
        self.count["mixed entries of nobody"] += int((~named & (many > 1)).sum())
        if (named & ~holds & (many > 0) & ~excused).any():
            return "the wrong example"
        if (~named & (many == 1) & ~excused).any():
            return "nobody, and it depends on one example"
        if (named & joined).any():
            return "one example, and it joins several"
        return None

    def __str__(self):
        c = self.count
        lines = [f"{k}: {c[k]}" for k in sorted(c)]
        for a, b in (("followed", "tensors"), ("plain followed", "plain tensors")):
            lines.append(f"share {a}: {c[a] / max(c[b], 1):.3f}")
        return "\n".join([*lines, *self.wrong[:5]])
