"""The whole-model kernels against the plain formulas, interpreted where there is no GPU.

The interpreter must be chosen before Triton is imported, so the comparisons run in a process of
their own (this file as a script) and their errors are asserted here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHUNK = 1024  # numbers per program: fewer than usual, the interpreter is slow
# odd sizes and multiples of 16, which are read in another way; some over a chunk
SHAPES = [(3,), (CHUNK + 1,), (32, 48), (17, 31), (1,), (16,), (10, 13), (8,), (CHUNK,)]
GROUPS = [
    {"lr": 1e-2, "weight_decay": 0.1},
    {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-4},
    {"lr": torch.tensor(1e-3, dtype=torch.float64), "weight_decay": 0.0},
]
SHIFTS = {
    f"{name}-{kind}-{x}": (dtypes, kind, x)
    for name, dtypes in {
        "single": (torch.float32, torch.float32),
        "half-gradients": (torch.float32, torch.bfloat16),
        "half": (torch.bfloat16, torch.bfloat16),
    }.items()
    for kind, x in (("secant", 0.5), ("tangent", None), (None, 0.2113), ("secant", None), (None, 1))
}
CONTRACTS = {
    "-".join(map(str, case)): case
    for case in [
        (1, 1, "float32", "dense"),
        (1, 2, "float32", "dense"),
        (2, 1, "float32", "gaps"),
        (7, 1, "bfloat16", "dense"),
        (7, 3, "bfloat16", "gaps"),
        (7, 17, "float32", "gaps"),
        (7, 5, "float32", "odd gaps"),
        (16, 16, "float32", "dense"),
        (17, 2, "float16", "dense"),
        (64, 1, "float32", "dense"),
        (65, 1, "float32", "gaps"),
        (65, 17, "float32", "dense"),
        (70, 1, "bfloat16", "gaps"),
        (70, 5, "bfloat16", "dense"),
        (70, 17, "bfloat16", "gaps"),
    ]
}
PLAIN = {
    f"{b}-{q}-{k}-{g}": (b, q, k, g) for b, q in ((5, 1), (5, 3)) for k in (0, 1) for g in (0, 1)
}


def shifted(dtypes, kind, x):
    """The largest relative errors of weights and factors."""
    from inrun import kernels
    from inrun.optimizers import rule_for
    from inrun.scoring.direction import Moved

    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s).to(dtypes[0])) for s in SHAPES]
    groups = [{"params": params[i::3], **g} for i, g in enumerate(GROUPS)]
    optimizer = torch.optim.AdamW(groups, foreach=False)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    rule, moved, exact = rule_for(optimizer), [], []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p]
            state["exp_avg_sq"].view(-1)[0] = 0.0  # never touched before
            state["exp_avg"].view(-1)[0] = 0.0
            g = torch.randn(p.shape).to(dtypes[1])
            g.view(-1)[0] = 0.0
            moved.append((p, g, state, group))
            wide = {k: v.double() if k != "step" else v for k, v in state.items()}
            exact.append(Moved.of(p.detach().double(), g.double(), rule, wide, group))
    known = {id(g): i for i, g in enumerate(optimizer.param_groups)}
    step = kernels.AdamStep(
        [p.detach() for p, *_ in moved], [g for _, g, *_ in moved],
        [s["exp_avg"] for *_, s, _ in moved], [s["exp_avg_sq"] for *_, s, _ in moved],
        [s["step"] for *_, s, _ in moved], [rule.fused(g) for g in optimizer.param_groups],
        tuple(known[id(g)] for *_, g in moved),
    )  # fmt: skip
    before = [t.clone() for t in (*step.p, *step.g, *step.m, *step.v)]
    weights, factors = kernels.shift(step, x, kind)
    same = all(
        torch.equal(a, b) for a, b in zip(before, (*step.p, *step.g, *step.m, *step.v), strict=True)
    )
    errors = {"untouched": 0.0 if same else 1.0, "weights": 0.0, "factors": 0.0}
    if (weights is None) != (x is None) or (factors is None) != (kind is None):
        errors["untouched"] = 2.0
    for i, e in enumerate(exact):
        if weights is not None:
            errors["weights"] = max(errors["weights"], _error(weights[i], e.at(x)))
        if factors is not None:
            own = e.map(kind)(torch.ones_like(e.g))
            errors["factors"] = max(errors["factors"], _error(factors[i], own))
    return errors


def apart(x, room):
    """With room after each row, as where it was cut out of something."""
    n = -(-x[0].numel() // 8) * 8 + room
    whole = torch.full((len(x), n), float("nan"), dtype=x.dtype)
    whole[:, : x[0].numel()] = x.reshape(len(x), -1)
    return whole.as_strided(x.shape, (n, *x[0].stride()))


def contracted(B, Q, dtype, layout, with_K=1, with_G=1):
    from inrun import kernels

    torch.manual_seed(0)
    rows = [torch.randn(B, *s).to(getattr(torch, dtype)) for s in SHAPES]
    K = [torch.randn(s) for s in SHAPES] if with_K else None
    v = [torch.randn(Q, *s) for s in SHAPES]
    if layout != "dense":
        room = 16 if layout == "gaps" else 8
        rows, v = [apart(r, room) for r in rows], [apart(x, room) for x in v]
    G = [r.float().sum(0) for r in rows] if with_G else None
    found = kernels.contract(rows, K, v, G)
    expected = torch.zeros(Q, B + 1, dtype=torch.float64)
    size = torch.zeros(Q, B + 1, dtype=torch.float64)
    for i, r in enumerate(rows):
        u = v[i].double() * (K[i].double() if K else 1.0)
        u, g = u.reshape(Q, -1), r.double().reshape(B, -1)
        own = G[i].double().reshape(1, -1) if G else torch.zeros(1, g.shape[1])
        both = torch.cat([g, own])
        expected += u @ both.T
        size += u.square() @ both.square().T
    if found.shape != expected.shape:
        return {"shape": 1.0}
    columns = slice(None) if with_G else slice(0, B)
    error = (found - expected).abs()[:, columns] / (size.sqrt() + 1e-12)[:, columns]
    return {"values": float(error.nan_to_num(nan=1e9).max())}


def whole_contraction():
    """From records to values, by kernels and without: weights in another memory order, a direction
    off its alignment, gradients of two types beside each other."""
    from inrun import kernels
    from inrun.capture.tap import MicroBatch
    from inrun.gradients import Dense
    from inrun.gradients.nodes import Node
    from inrun.scoring.contraction import Direction, contract

    torch.manual_seed(0)
    B, Q = 5, 2
    shapes = {"conv": (16, 4, 3, 3), "bias": (16,), "half": (32,), "odd": (7,)}
    micro, u, G = MicroBatch(B), {}, {}
    for name, shape in shapes.items():
        rows = torch.randn(B, *shape)
        micro.add(Node.parameter(name, torch.nn.Parameter(torch.zeros(shape))), Dense(rows))
        v = torch.randn(Q * rows[0].numel() + 1)[1:].view(Q, *shape)  # not aligned
        K = torch.randn(shape)
        if name == "conv":
            K = K.to(memory_format=torch.channels_last)
        G[name] = rows.sum(0).to(torch.bfloat16 if name == "half" else torch.float32)
        u[name] = Direction(v, K)
    found = []
    for kernel in (True, False):
        kernels.usable = lambda tensors, yes=kernel: yes
        kernels.usable_rows = lambda grads, yes=kernel: yes
        found.append(torch.cat([x.flatten() for x in contract(u, G, [micro])]))
    return {"values": float((found[0] - found[1]).abs().max() / found[1].abs().max())}


def other_default_device():
    """What the kernels are told is made on the host, whatever torch's default device is."""
    from inrun import kernels

    torch.manual_seed(0)
    rows = [torch.randn(3, *s) for s in SHAPES[1:]]  # sizes that are not cached yet
    p, m = [r[0].clone() for r in rows], [r[1].clone() for r in rows]
    step = kernels.AdamStep(
        p, m, m, [x.square() for x in m], [torch.tensor(3.0, device="cpu") for _ in p],
        [(0.9, 0.99, 1e-8, 1e-3, 1.0)], (0,) * len(p),
    )  # fmt: skip

    def everything():
        weights, factors = kernels.shift(step, 0.5, "secant")
        return [*weights, *factors, kernels.contract(rows, p, [r[:2] for r in rows], None)[:, :3]]

    with torch.device("meta"):
        found = everything()
    same = all(torch.equal(a, b) for a, b in zip(found, everything(), strict=True))
    return {"values": float(not same)}


def _error(got, expected):
    got = got.double()
    scale = expected.abs().max()
    each = (got - expected).abs() / (expected.abs() + 1e-3 * scale + 1e-30)
    return float(each.nan_to_num(nan=1e9).max())


def main():
    from inrun import kernels

    kernels._CHUNK = CHUNK
    torch.set_default_device(DEVICE)
    found = {}
    for name, case in SHIFTS.items():
        found[f"shift {name}"] = shifted(*case)
    for name, case in CONTRACTS.items():
        found[f"contract {name}"] = contracted(*case)
    for name, (B, Q, K, G) in PLAIN.items():
        found[f"plain {name}"] = contracted(B, Q, "float32", "dense", K, G)
    found["other default device"] = other_default_device()
    found["whole contraction"] = whole_contraction()
    tensors = [torch.zeros(s) for s in SHAPES]
    places = kernels.alike(tensors, torch.bfloat16)
    fits = all(a.shape == b.shape and a.data_ptr() % 16 == places[0].data_ptr() % 16
               for a, b in zip(places, tensors, strict=True))  # fmt: skip
    found["alike"] = {"shapes": float(not fits)}
    print(json.dumps(found))


@pytest.fixture(scope="module")
def errors():
    env = os.environ | ({"TRITON_INTERPRET": "1"} if DEVICE == "cpu" else {})
    done = subprocess.run(
        [sys.executable, str(Path(__file__))], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", SHIFTS)
def test_the_update_kernel_gives_the_weights_and_factors_of_the_formulas(errors, name):
    found = errors[f"shift {name}"]
    assert found["untouched"] == 0.0
    # bfloat16 weights are rounded when they are written, and so is Adam's state
    assert found["weights"] < (
        1e-2 if name.startswith("half-") and "gradients" not in name else 1e-5
    )
    assert found["factors"] < 1e-4


@pytest.mark.parametrize("name", CONTRACTS)
def test_the_contraction_kernel_gives_the_inner_products(errors, name):
    _, Q, dtype, _ = CONTRACTS[name]
    if dtype == "bfloat16" and Q > 1 and DEVICE == "cpu":
        pytest.skip("the interpreter multiplies the bits of bfloat16 matrices, not their numbers")
    half = dtype != "float32"
    assert errors[f"contract {name}"]["values"] < (1e-2 if half else 1e-5)


@pytest.mark.parametrize("name", PLAIN)
def test_the_contraction_kernel_works_without_factors_or_gradients(errors, name):
    assert errors[f"plain {name}"]["values"] < 1e-5


def test_kernels_and_plain_code_agree_on_any_memory(errors):
    assert errors["whole contraction"]["values"] < 1e-5


def test_the_default_device_does_not_matter(errors):
    assert errors["other default device"]["values"] == 0.0


def test_tensors_made_in_one_piece_of_memory_are_aligned(errors):
    assert errors["alike"]["shapes"] == 0.0


if __name__ == "__main__":
    main()
