"""Optimizers of other libraries, written out plainly, under the library's own name.

Each class does, for one parameter at a time, what the published package does in the versions that
docs/optimizers.md names. ``PUBLISHED`` says where the real ones are, for tests that have them.
"""
# ruff: noqa: C408

import math
from typing import ClassVar

import torch
from torch.optim import Optimizer


class Plain(Optimizer):
    """One parameter at a time: ``update(p, g, state, group)`` changes p and the state."""

    def __init__(self, params, **options):
        super().__init__(params, {**self.default, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad.clone(), self.state[p], group)

    def begin(self, group):
        group["step"] = group.get("step", 0) + 1


def decayed(p, g, group):
    """pytorch_optimizer's weight decay, decoupled or not; returns the gradient."""
    if group["weight_decouple"]:
        p.mul_(1 - group["weight_decay"] * (1 if group["fixed_decay"] else group["lr"]))
        return g
    return g + group["weight_decay"] * p


class LionPytorch(Plain):
    default: ClassVar = dict(lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0)

    def begin(self, group):
        pass

    def update(self, p, g, s, group):
        beta1, beta2 = group["betas"]
        m = s.setdefault("exp_avg", torch.zeros_like(p))
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(group["lr"] * torch.sign(beta1 * m + (1 - beta1) * g))
        m.copy_(beta2 * m + (1 - beta2) * g)


DECAY = dict(weight_decay=0.0, weight_decouple=True, fixed_decay=False)


class Lion(Plain):
    default: ClassVar = dict(lr=1e-2, betas=(0.9, 0.99), **DECAY)

    def update(self, p, g, s, group):
        beta1, beta2 = group["betas"]
        m = s.setdefault("exp_avg", torch.zeros_like(p))
        g = decayed(p, g, group)
        p.sub_(group["lr"] * torch.sign(beta1 * m + (1 - beta1) * g))
        m.copy_(beta2 * m + (1 - beta2) * g)


class AdEMAMix(Plain):
    default: ClassVar = dict(
        lr=1e-2, betas=(0.9, 0.999, 0.9999), alpha=5.0, t_alpha_beta3=None, eps=1e-8, **DECAY
    )

    def update(self, p, g, s, group):
        (beta1, beta2, beta3), t, alpha = group["betas"], group["step"], group["alpha"]
        if group["t_alpha_beta3"] is not None:
            x = t / group["t_alpha_beta3"]
            a, b = math.log(beta1), math.log(beta3)
            alpha, beta3 = (
                min(x * alpha, alpha),
                min(math.exp(a * b / ((1 - x) * b + x * a)), beta3),
            )
        for name in ("exp_avg", "exp_avg_sq", "exp_avg_slow"):
            s.setdefault(name, torch.zeros_like(p))
        g = decayed(p, g, group)
        s["exp_avg"].mul_(beta1).add_((1 - beta1) * g)
        s["exp_avg_slow"].mul_(beta3).add_((1 - beta3) * g)
        s["exp_avg_sq"].mul_(beta2).add_((1 - beta2) * g * g)
        bottom = s["exp_avg_sq"].sqrt() / math.sqrt(1 - beta2**t) + group["eps"]
        top = s["exp_avg"] / (1 - beta1**t) + alpha * s["exp_avg_slow"]
        p.sub_(group["lr"] * top / bottom)


class Lamb(Plain):
    default: ClassVar = dict(
        lr=1e-2, betas=(0.9, 0.999), eps=1e-6, grad_averaging=True, adam=False, rectify=False,
        **DECAY,
    )  # fmt: skip

    def update(self, p, g, s, group):
        (beta1, beta2), eps = group["betas"], group["eps"]
        for name in ("exp_avg", "exp_avg_sq"):
            s.setdefault(name, torch.zeros_like(p))
        if group["weight_decouple"]:
            decayed(p, g, group)
        s["exp_avg"].mul_(beta1).add_((1 - beta1 if group["grad_averaging"] else 1) * g)
        s["exp_avg_sq"].mul_(beta2).add_((1 - beta2) * g * g)
        r = s["exp_avg"] / (s["exp_avg_sq"].sqrt() + eps)
        if not group["weight_decouple"]:
            r = r + group["weight_decay"] * p
        W, n = float(p.norm().clamp(max=10)), float(r.norm())
        trust = 1.0 if W == 0 or n == 0 or group["adam"] else W / (n + eps)
        p.sub_(group["lr"] / (1 - beta1 ** group["step"]) * trust * r)


class SOAP(Plain):
    """For matrices and vectors (which have no basis)."""

    default: ClassVar = dict(
        lr=1e-2, betas=(0.95, 0.95), weight_decay=1e-2, precondition_frequency=3, eps=1e-8,
        correct_bias=True, merge_dims=False, normalize_gradient=False, precondition_1d=False,
    )  # fmt: skip

    def update(self, p, g, s, group):
        (beta1, beta2), t = group["betas"], group["step"] - 1
        if not s:
            s["exp_avg"], s["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            sides = [torch.zeros(n, n, dtype=p.dtype) for n in p.shape] if p.ndim == 2 else [[]]
            s["GG"], s["Q"] = sides, None
            self.remember(g, s, group, 0)
        if t == 0:
            return
        size = group["lr"]
        if group["correct_bias"]:
            size *= math.sqrt(1 - beta2**t) / (1 - beta1**t)
        to, back = (lambda x: x), (lambda x: x)
        if p.ndim == 2:
            left, right = s["Q"]
            to, back = (lambda x: left.T @ x @ right), (lambda x: left @ x @ right.T)
        s["exp_avg"].mul_(beta1).add_((1 - beta1) * g)
        s["exp_avg_sq"].mul_(beta2).add_((1 - beta2) * to(g) ** 2)
        p.sub_(size * back(to(s["exp_avg"]) / (s["exp_avg_sq"].sqrt() + group["eps"])))
        p.mul_(1 - group["lr"] * group["weight_decay"])
        self.remember(g, s, group, t)

    def remember(self, g, s, group, t):
        if g.ndim != 2:
            s["Q"] = [[]]
            return
        beta = group["betas"][1]
        for side, new in zip(s["GG"], (g @ g.T, g.T @ g), strict=True):
            side.mul_(beta).add_((1 - beta) * new)
        if s["Q"] is None or (t and t % group["precondition_frequency"] == 0):
            s["Q"] = [torch.linalg.eigh(side)[1].flip(1) for side in s["GG"]]


class Prodigy(Plain):
    """``d`` is estimated before the parameters move, from all of them."""

    default: ClassVar = dict(
        lr=1.0, betas=(0.9, 0.999), beta3=None, eps=1e-8, weight_decay=0.0, decouple=True,
        use_bias_correction=False, d=1e-2, d0=1e-2, d_max=1e-2, d_numerator=0.0, k=0,
    )  # fmt: skip

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        (beta1, beta2), d, k = group["betas"], group["d"], group["k"]
        beta3 = math.sqrt(beta2)
        size = d * group["lr"]
        if group["use_bias_correction"]:
            size *= math.sqrt(1 - beta2 ** (k + 1)) / (1 - beta1 ** (k + 1))
        top, bottom = group["d_numerator"] * beta3, 0.0
        params = [p for p in group["params"] if p.grad is not None]
        for p in params:
            g, s = p.grad.clone(), self.state[p]
            if group["weight_decay"] and not group["decouple"]:
                g += group["weight_decay"] * p
            if not s:
                s.update(p0=p.clone(), s=torch.zeros_like(p))
                s.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            top += d / group["d0"] * size * float((g * (s["p0"] - p)).sum())
            s["exp_avg"].mul_(beta1).add_(d * (1 - beta1) * g)
            s["exp_avg_sq"].mul_(beta2).add_(d * d * (1 - beta2) * g * g)
            s["s"].mul_(beta3).add_(d / group["d0"] * size * g)
            bottom += float(s["s"].abs().sum())
        if bottom:
            found = top / bottom
            new = max(d, found) if d == group["d0"] else d
            group["d_max"] = max(group["d_max"], found)
            group["d"], group["d_numerator"] = min(group["d_max"], math.inf) if new else new, top
        for p in params:
            s = self.state[p]
            if group["decouple"]:
                p.mul_(1 - group["weight_decay"] * size)
            p.sub_(size * s["exp_avg"] / (s["exp_avg_sq"].sqrt() + group["d"] * group["eps"]))
        group["k"] = k + 1


class AdamWScheduleFree(Plain):
    default: ClassVar = dict(
        lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, warmup_steps=0, r=0.0,
        weight_lr_power=2.0, k=0, weight_sum=0.0, lr_max=-1.0,
    )  # fmt: skip

    def begin(self, group):
        k, warmup = group["k"], group["warmup_steps"]
        self.now = group["lr"] * ((k + 1) / warmup if k < warmup else 1.0)
        group["lr_max"] = max(self.now, group["lr_max"])
        weight = (k + 1) ** group["r"] * group["lr_max"] ** group["weight_lr_power"]
        group["weight_sum"] += weight
        self.c = weight / group["weight_sum"] if group["weight_sum"] else 0.0
        group["k"] = k + 1

    def update(self, y, g, s, group):
        (beta1, beta2), lr, c = group["betas"], self.now, self.c
        z = s.setdefault("z", y.clone())
        v = s.setdefault("exp_avg_sq", torch.zeros_like(y))
        x = (y - (1 - beta1) * z) / beta1  # the average, which eval() puts into the model
        v.mul_(beta2).add_((1 - beta2) * g * g)
        ghat = (
            g / ((v / (1 - beta2 ** group["k"])).sqrt() + group["eps"]) + group["weight_decay"] * y
        )
        z.sub_(lr * ghat)
        x = (1 - c) * x + c * z
        y.copy_((1 - beta1) * z + beta1 * x)


class Quantised:
    """Stands in for torchao's ``OptimState8bit``: a tensor rounded to some levels."""

    def __init__(self, x):
        self.scale = x.abs().max() / 10_000
        self.codes = (x / self.scale).round() if self.scale > 0 else torch.zeros_like(x)
        self.shape = x.shape

    def dequantize(self):
        return self.codes * self.scale


OptimState8bit = type("OptimState8bit", (Quantised,), {})


class AdamW8bit(Plain):
    default: ClassVar = dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False)
    decoupled = True

    def begin(self, group):
        pass

    def update(self, p, g, s, group):
        (beta1, beta2), lr = group["betas"], group["lr"]
        s["step"] = t = s.get("step", torch.zeros((), dtype=torch.float64)) + 1
        zero = torch.zeros_like(p)
        m, v = (s[k].dequantize() if k in s else zero for k in ("exp_avg", "exp_avg_sq"))
        if self.decoupled:
            p.mul_(1 - lr * group["weight_decay"])
        else:
            g = g + group["weight_decay"] * p
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        p.sub_(lr * m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + group["eps"]))
        s["exp_avg"], s["exp_avg_sq"] = OptimState8bit(m), OptimState8bit(v)


class Adam8bit(AdamW8bit):
    decoupled = False


class BlockwiseAdamW8bit(Plain):
    """bitsandbytes': codes of a table of numbers, and a scale for each block of 256."""

    default: ClassVar = dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)

    def begin(self, group):
        pass

    def update(self, p, g, s, group):
        (beta1, beta2), lr = group["betas"], group["lr"]
        s["step"] = t = s.get("step", 0) + 1
        if p.numel() < 8:
            m, v = s.get("state1", torch.zeros_like(p)), s.get("state2", torch.zeros_like(p))
        else:
            m, v = (self.read(s, i, p) for i in (1, 2))
        p.mul_(1 - lr * group["weight_decay"])
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        p.sub_(lr * m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + group["eps"]))
        for i, x in ((1, m), (2, v)):
            if p.numel() < 8:
                s[f"state{i}"] = x
            else:
                self.write(s, i, x)

    def read(self, s, i, p):
        if f"state{i}" not in s:
            return torch.zeros_like(p)
        blocks = s[f"state{i}"].flatten().split(256)
        parts = [s[f"qmap{i}"][b.long()] * a for b, a in zip(blocks, s[f"absmax{i}"], strict=True)]
        return torch.cat(parts).view(p.shape)

    def write(self, s, i, x):
        above = torch.logspace(-8, 0, 255 if i == 2 else 127, dtype=x.dtype)
        below = above[:0] if i == 2 else -above.flip(0)
        table = torch.cat([below, above.new_zeros(1), above])
        blocks = x.flatten().split(256)
        scales = torch.stack([b.abs().max() for b in blocks])
        near = [((b / a.clamp(min=1e-30))[:, None] - table).abs().argmin(1)
                for b, a in zip(blocks, scales, strict=True)]  # fmt: skip
        s[f"state{i}"] = torch.cat(near).to(torch.uint8).view(x.shape)
        s[f"qmap{i}"], s[f"absmax{i}"] = table, scales


def named(cls, name):
    """The class under a library's name."""
    module, _, own = name.rpartition(".")
    return type(own, (cls,), {"__module__": f"{module}.somewhere.inside"})


PLAIN = {
    name: named(cls, name)
    for name, cls in {
        "lion_pytorch.Lion": LionPytorch,
        "pytorch_optimizer.Lion": Lion,
        "pytorch_optimizer.AdEMAMix": AdEMAMix,
        "pytorch_optimizer.Lamb": Lamb,
        "pytorch_optimizer.SOAP": SOAP,
        "prodigyopt.Prodigy": Prodigy,
        "schedulefree.AdamWScheduleFree": AdamWScheduleFree,
        "torchao.AdamW8bit": AdamW8bit,
        "torchao.Adam8bit": Adam8bit,
        "bitsandbytes.AdamW8bit": BlockwiseAdamW8bit,
    }.items()
}
