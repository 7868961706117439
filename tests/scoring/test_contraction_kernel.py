"""The contraction kernels against the plain formulas, interpreted where there is no GPU."""

import json

import pytest
import torch

from helpers.triton_script import DEVICE, SHAPES, errors_of, prepare

pytest.importorskip("triton", reason="needs Triton")

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
ROWS = {f"{B}-{dtype}": (B, dtype) for B, dtype in (
    (1, "float32"), (2, "bfloat16"), (5, "float32"), (7, "float16"), (64, "float32"),
    (65, "bfloat16"), (130, "float32"))}  # fmt: skip
PLAIN = {
    f"{b}-{q}-{k}-{g}": (b, q, k, g) for b, q in ((5, 1), (5, 3)) for k in (0, 1) for g in (0, 1)
}


def apart(x, room):
    """With room after each row, as where it was cut out of something."""
    n = -(-x[0].numel() // 8) * 8 + room
    whole = torch.full((len(x), n), float("nan"), dtype=x.dtype)
    whole[:, : x[0].numel()] = x.reshape(len(x), -1)
    return whole.as_strided(x.shape, (n, *x[0].stride()))


def contracted(B, Q, dtype, layout, with_K=1, with_G=1):
    from inrun.scoring import contraction_kernel

    torch.manual_seed(0)
    rows = [torch.randn(B, *s).to(getattr(torch, dtype)) for s in SHAPES]
    K = [torch.randn(s) for s in SHAPES] if with_K else None
    v = [torch.randn(Q, *s) for s in SHAPES]
    if layout != "dense":
        room = 16 if layout == "gaps" else 8
        rows, v = [apart(r, room) for r in rows], [apart(x, room) for x in v]
    G = [r.float().sum(0) for r in rows] if with_G else None
    found = contraction_kernel.contract(rows, K, v, G)
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


def rows_with_rows(B, dtype):
    """⟨y_i, δ_i⟩ of many tensors, by the kernel, by its twin and in float64."""
    from inrun.scoring import contraction_kernel
    from inrun.scoring.uses import joined_row_dots

    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    of_y = torch.float32 if kind == torch.float16 else kind
    made = [(torch.randn(B, *s).to(of_y), torch.randn(B, *s).to(kind)) for s in SHAPES]
    exact = [(y.double() * d.double()).reshape(B, -1) for y, d in made]
    expected, size = sum(x.sum(1) for x in exact), sum(x.square().sum(1) for x in exact).sqrt()
    found = contraction_kernel.row_dots(made, B)
    twin = joined_row_dots(made, B)
    if not found.shape == twin.shape == expected.shape:
        return {"shape": 1.0}
    off = [((x - expected).abs() / size).nan_to_num(nan=1e9).max() for x in (found, twin)]
    return {"kernel": float(off[0]), "twin": float(off[1])}


def whole_contraction():
    """From records to values, by kernels and without: weights in another memory order, a direction
    off its alignment, gradients of two types beside each other."""
    from inrun import kernels
    from inrun.capture.micro_batch import MicroBatch
    from inrun.gradients import Dense
    from inrun.gradients.nodes import Node
    from inrun.scoring import contraction_kernel
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
        contraction_kernel.usable_rows = lambda grads, yes=kernel: [yes] * len(grads)
        found.append(torch.cat([x.flatten() for x in contract(u, G, [micro])]))
    return {"values": float((found[0] - found[1]).abs().max() / found[1].abs().max())}


def remembered():
    """A model's uses, in two types and with rows that do not lie in order, by the kernel and
    without."""
    import torch.nn.functional as F

    from inrun import kernels
    from inrun.capture.capture import Capture
    from inrun.scoring import uses
    from inrun.scoring.contraction import Direction, contract

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 48), torch.nn.LayerNorm(48), torch.nn.ReLU(),
                                torch.nn.Linear(48, 7)).float()  # fmt: skip
    params = dict(model.named_parameters())
    capture = Capture(model, params, form="ghost")
    x = torch.randn(5, 6, 16, dtype=torch.float32)
    with capture.batch(5) as micro:
        F.log_softmax(model(x), -1).square().mean().backward()
    G = {k: p.grad for k, p in params.items()}
    u = {k: Direction(torch.randn(2, *g.shape, dtype=g.dtype)) for k, g in G.items()}
    found, before, calls = [], uses.contraction_kernel.row_dots, []
    uses.contraction_kernel.row_dots = lambda *a: calls.append(a) or before(*a)
    for kernel in (True, False):
        kernels.usable = lambda tensors, yes=kernel: yes
        with torch.no_grad():
            found.append(contract(u, G, [micro])[0])
    kernels.usable = lambda tensors: True
    uses.contraction_kernel.row_dots = before
    off = float((found[0] - found[1]).abs().max() / found[1].abs().max())
    return {"values": off, "uses": len(micro.uses), "launches": len(calls)}


def other_default_device():
    """What the kernel is told is made on the host, whatever torch's default device is."""
    from inrun.scoring import contraction_kernel

    torch.manual_seed(0)
    rows = [torch.randn(3, *s) for s in SHAPES[1:]]  # sizes that are not cached yet
    p = [r[0].clone() for r in rows]

    def everything():
        return contraction_kernel.contract(rows, p, [r[:2] for r in rows], None)[:, :3]

    with torch.device("meta"):
        found = everything()
    return {"values": float(not torch.equal(found, everything()))}


def main():
    from inrun import kernels

    prepare()
    found = {}
    for name, case in CONTRACTS.items():
        found[f"contract {name}"] = contracted(*case)
    for name, (B, Q, K, G) in PLAIN.items():
        found[f"plain {name}"] = contracted(B, Q, "float32", "dense", K, G)
    for name, case in ROWS.items():
        found[f"rows {name}"] = rows_with_rows(*case)
    found["remembered"] = remembered()
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
    return errors_of(__file__)


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


@pytest.mark.parametrize("name", ROWS)
def test_the_kernel_of_row_products_gives_the_same_as_its_twin(errors, name):
    assert errors[f"rows {name}"]["kernel"] < 1e-5
    assert errors[f"rows {name}"]["twin"] < 1e-5


def test_what_is_remembered_is_summed_in_one_launch_per_direction(errors):
    assert errors["remembered"]["values"] < 1e-5
    assert errors["remembered"]["uses"] == 3 and errors["remembered"]["launches"] == 2


def test_kernels_and_plain_code_agree_on_any_memory(errors):
    assert errors["whole contraction"]["values"] < 1e-5


def test_the_default_device_does_not_matter(errors):
    assert errors["other default device"]["values"] == 0.0


def test_tensors_made_in_one_piece_of_memory_are_aligned(errors):
    assert errors["alike"]["shapes"] == 0.0


if __name__ == "__main__":
    main()
