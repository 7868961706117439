"""``run.batch(ids, owner=...)`` end to end: documents of packed rows and of padding-free batches,
graphs and pairs have the values that they have alone."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import inrun
from helpers.captures import gradients_of
from inrun.capture import provenance
from inrun.capture.capture import Capture
from inrun.exact import reference

V, D, ROW = 20, 8, 16
# Documents of each step, in rows of at most 16 tokens: the last row of the last step ends early.
LENGTHS = [[[5, 3, 8], [4, 6, 6]], [[8, 3, 5], [2, 7, 7]], [[9, 7], [6, 4, 3]]]


def documents(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randint(0, V, (n,), generator=generator) for n in row] for row in lengths]


class Packed:
    """The documents of a step as a packed batch: token ids, positions, labels, mask, owner."""

    def __init__(self, rows, size=ROW):
        self.count = sum(map(len, rows))
        shape = len(rows), size
        self.ids, self.positions = torch.zeros(shape).long(), torch.zeros(shape).long()
        self.labels, self.owner = torch.full(shape, -100), torch.full(shape, -1)
        k = 0
        for r, row in enumerate(rows):
            start = 0
            for document in row:
                here = slice(start, start + len(document))
                self.ids[r, here], self.labels[r, here] = document, document
                self.labels[r, start] = -100  # no token before it
                self.positions[r, here] = torch.arange(len(document))
                self.owner[r, here] = k
                start, k = start + len(document), k + 1
        same = self.owner[:, :, None] == self.owner[:, None, :]
        self.mask = (same & torch.ones(size, size, dtype=torch.bool).tril())[:, None]

    @property
    def batch(self):
        return self.ids, self.positions, self.mask, self.labels


def packed(rows):
    return Packed(rows)


def padding_free(rows):
    flat = [[document for row in rows for document in row]]
    return Packed(flat, sum(map(len, flat[0])))


def unpacked(rows):
    """One row for each document, padded."""
    found = Packed([[document] for row in rows for document in row], ROW)
    found.owner = None
    return found


LAYOUTS = {"packed": packed, "padding-free": padding_free, "unpacked": unpacked}


class Reader(nn.Module):
    """One layer of attention: the smallest model whose tokens meet those of their document."""

    def __init__(self, wrap=lambda f, x: f(x)):
        super().__init__()
        self.embed, self.place = nn.Embedding(V, D), nn.Embedding(ROW, D)
        self.qkv, self.out, self.head = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, V)
        self.wrap = wrap

    def attend(self, x, mask):
        q, k, v = (t.unsqueeze(-3) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).squeeze(-3)
        return x + torch.tanh(self.out(y))

    def forward(self, ids, positions, mask):
        x = self.embed(ids) + self.place(positions)
        return self.head(self.wrap(lambda x: self.attend(x, mask), x))


def next_token(model, batch):
    """A sum over tokens, so that a document counts the same in any batch."""
    *inputs, labels = batch
    logits = model(*inputs)
    return (
        F.cross_entropy(
            logits[..., :-1, :].reshape(-1, V), labels[..., 1:].reshape(-1), reduction="sum"
        )
        / 20
    )


def ids_of(step, count):
    return [f"{step}-{k}" for k in range(count)]


def mean_over_rows(model, batch):
    return next_token(model, batch) / len(batch[0])


def trained(model, layout, *, call=None, parts=1, max_norm=None, **options):
    """History of three steps: values by step and document."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if "targets" not in options:
        options["validation"] = [unpacked(documents([[6], [4]], 9)).batch]
    with inrun.watch(model, optimizer, loss=mean_over_rows, **options) as run:
        for step, lengths in enumerate(LENGTHS):
            rows, names = documents(lengths, step), iter(ids_of(step, 9))
            for part in rows if parts > 1 else [rows]:
                given = LAYOUTS[layout]([part] if parts > 1 else part)
                here = [next(names) for _ in range(given.count)]
                with run.batch(here, owner=given.owner):
                    next_token(model if call is None else call, given.batch).backward()
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
        assert run.steps()["void"].isna().all()
        return run.history().sort_values(["step", "id"]).reset_index(drop=True)


def same(got, expected, tolerance=1e-9):
    assert got["id"].tolist() == expected["id"].tolist()
    columns = [c for c in expected if c not in ("step", "id")]
    assert columns
    for column in columns:
        x, y = got[column].to_numpy(), expected[column].to_numpy()
        assert np.abs(y).min() > 0
        assert np.allclose(x, y, rtol=tolerance, atol=tolerance * np.abs(y).max()), column


@pytest.fixture(scope="module")
def llama():
    tf = pytest.importorskip("transformers", reason="needs the extra inrun[hf]")
    config = tf.LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa", bos_token_id=0,
        eos_token_id=1,
    )  # fmt: skip

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.model = tf.LlamaForCausalLM(config).double().train()

        def forward(self, ids, positions, mask):
            return self.model(input_ids=ids, position_ids=positions, attention_mask=mask).logits

    return Llama


@pytest.mark.parametrize("layout", ["packed", "padding-free"])
def test_documents_of_a_llama_have_the_values_of_unpacked_training(layout, llama):
    same(trained(llama(), layout), trained(llama(), "unpacked"))


def reader(**options):
    torch.manual_seed(0)
    return Reader(**options)


@pytest.fixture(scope="module")
def alone():
    """Values of unpacked training."""
    torch.set_default_dtype(torch.float64)
    return trained(reader(), "unpacked")


@pytest.mark.parametrize("training", ["bitwise", "fast"])
@pytest.mark.parametrize("form", ["ghost", "materialise", "auto"])
@pytest.mark.parametrize("layout", ["packed", "padding-free"])
def test_documents_have_the_values_of_unpacked_training(layout, form, training, alone):
    same(trained(reader(), layout, form=form, training=training), alone)


@pytest.mark.parametrize("form", ["ghost", "materialise"])
@pytest.mark.parametrize("estimator", ["tangent", "sgd"])
def test_other_estimators(estimator, form):
    expected = trained(reader(), "unpacked", estimator=estimator)
    same(trained(reader(), "packed", estimator=estimator, form=form), expected)


@pytest.mark.parametrize("training", ["bitwise", "fast"])
@pytest.mark.parametrize("form", ["ghost", "materialise"])
def test_several_targets(form, training):
    targets = {
        name: [unpacked(documents([[6], [4]], seed)).batch] for name, seed in (("a", 5), ("b", 6))
    }
    expected = trained(reader(), "unpacked", targets=targets)
    assert {"a", "b"} <= set(expected)
    same(trained(reader(), "packed", targets=targets, form=form, training=training), expected)


@pytest.mark.parametrize("training", ["bitwise", "fast"])
def test_accumulation(training, alone):
    """One micro-batch for each packed row: other shapes of owner, other numbers of documents."""
    same(trained(reader(), "packed", parts=2, training=training), alone)
    same(trained(reader(), "padding-free", parts=2, training=training), alone)


def test_micro_batches_with_and_without_owner(alone):
    model = reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    validation = [unpacked(documents([[6], [4]], 9)).batch]
    with inrun.watch(model, optimizer, loss=mean_over_rows, validation=validation) as run:
        for step, lengths in enumerate(LENGTHS):
            first, second = documents(lengths, step)
            names = ids_of(step, len(first) + len(second))
            for rows, layout, here in (
                ([first], unpacked, names[: len(first)]), ([second], packed, names[len(first) :])
            ):  # fmt: skip
                given = layout(rows)
                with run.batch(here, owner=given.owner):
                    next_token(model, given.batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        got = run.history().sort_values(["step", "id"]).reset_index(drop=True)
    same(got, alone)


@pytest.mark.parametrize("training", ["bitwise", "fast"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant, training, alone):
    def wrap(f, x):
        return checkpoint(f, x, use_reentrant=reentrant) if x.requires_grad else f(x)

    same(trained(reader(wrap=wrap), "packed", training=training), alone)


def test_clipping():
    """(In ghost form Σ‖g_i‖², on which the factor depends, is an estimate.)"""
    how = {"max_norm": 0.5, "form": "materialise", "estimator": "secant"}
    expected = trained(reader(), "unpacked", **how)
    got = trained(reader(), "packed", **how)
    same(got, expected)
    assert not np.allclose(got["value"], trained(reader(), "packed")["value"], rtol=1e-3)


def test_training_is_bit_for_bit_the_same():
    models = [reader(), reader()]
    trained(models[0], "packed")
    optimizer = torch.optim.AdamW(models[1].parameters(), lr=1e-2)
    for step, lengths in enumerate(LENGTHS):
        next_token(models[1], packed(documents(lengths, step)).batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(a, b)


class Flat(Reader):
    """Tokens [N] without a dimension of rows."""

    def attend(self, x, mask):
        return super().attend(x[None], mask)[0]


def flat(rows):
    given = padding_free(rows)
    given.ids, given.positions = given.ids[0], given.positions[0]
    given.mask, given.labels, given.owner = given.mask[0], given.labels[0], given.owner[0]
    return given


LAYOUTS["flat"] = flat


class EitherWay(Flat):
    """For validation batches with rows."""

    def attend(self, x, mask):
        return super().attend(x, mask) if x.ndim == 2 else Reader.attend(self, x, mask)


def either_way():
    torch.manual_seed(0)
    return EitherWay()


@pytest.mark.parametrize("form", ["ghost", "materialise"])
def test_flattened_tokens(form, alone):
    same(trained(either_way(), "flat", form=form), alone)


@pytest.mark.parametrize(("layout", "make"), [("flat", either_way), ("packed", reader)])
def test_a_graph_that_cannot_follow_owners_runs_eagerly(layout, make, alone):
    torch._dynamo.reset()
    model = make()
    with pytest.warns(UserWarning, match="cannot score inside this compiled graph"):
        got = trained(model, layout, call=torch.compile(model, backend="aot_eager"))
    same(got, alone)


# Nobody


@pytest.mark.parametrize("form", ["ghost", "materialise"])
def test_what_is_nobodys_leaves_the_others_as_they_are(form):
    """The last document has no id. The training is the same, and so are the others' values."""
    given = packed(documents(LENGTHS[0], 0))
    tables = []
    for count in (given.count, given.count - 1):
        model = reader()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        validation = [unpacked(documents([[6], [4]], 9)).batch]
        owner = given.owner.masked_fill(given.owner >= count, -1)
        with inrun.watch(
            model, optimizer, loss=next_token, validation=validation, form=form, audit_every=1
        ) as run:
            for _ in range(2):
                with run.batch(range(count), owner=owner):
                    next_token(model, given.batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            tables.append((run.history().pivot(index="step", columns="id", values="value"),
                           run.steps()))  # fmt: skip
    (whole, steps), (some, fewer) = tables
    left = given.count - 1
    assert np.allclose(whole[range(left)], some, rtol=1e-9, atol=1e-14)
    assert np.allclose(fewer["sum"], steps["sum"] - whole[left].to_numpy(), rtol=1e-9)
    assert np.allclose(fewer["batch_share"], steps["batch_share"], rtol=1e-9)
    assert fewer["void"].isna().all() and (whole[left].abs() > 1e-6).all()


def test_a_step_that_is_all_nobodys_has_values_of_zero():
    given, model = packed(documents(LENGTHS[0], 0)), reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with inrun.watch(model, optimizer, loss=next_token, validation=[given.batch]) as run:
        with run.batch([7], owner=torch.full_like(given.owner, -1)):
            next_token(model, given.batch).backward()
        optimizer.step()
        assert run.values()["value"].tolist() == [0.0]


# Graphs


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 5)
        self.own, self.head = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x, source, end, graph, count):
        h = torch.tanh(self.a(x))
        for _ in range(2):
            h = torch.zeros_like(h).index_add_(0, end, self.b(h)[source]).tanh() + self.own(x)
        sizes = torch.bincount(graph, minlength=count)
        pooled = torch.zeros(count, 5).index_add(0, graph, h) / sizes[:, None]
        return self.head(pooled)


def graphs(sizes, edges):
    """Nodes of all graphs in one table; edges stay inside a graph."""
    starts = np.cumsum([0, *sizes])
    pairs = [
        torch.randint(0, n, (2, e)) + int(start)
        for n, e, start in zip(sizes, edges, starts, strict=False)
    ]
    source, end = torch.cat(pairs, 1)
    graph = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return torch.randn(int(starts[-1]), 4), source, end, graph, len(sizes)


def of_graphs(model, batch):
    return (model(*batch) - 1).pow(2).sum() / 4


@pytest.mark.parametrize("training", ["bitwise", "fast"])
@pytest.mark.parametrize("form", ["ghost", "materialise"])
@pytest.mark.parametrize("edges", [[4, 7, 3, 6], [3, 4, 2, 3]], ids=["edges", "as-many-as-nodes"])
def test_graphs_have_the_values_of_graphs_alone(edges, form, training):
    sizes = [3, 4, 2, 3]
    batch = x, source, end, graph, _ = graphs(sizes, edges)
    model = GraphNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    validation = graphs([3, 3], [4, 4])
    own = []
    for k, n in enumerate(sizes):
        nodes, at = graph == k, (graph[source] == k)
        first = int(nodes.nonzero()[0])
        single = x[nodes], source[at] - first, end[at] - first, torch.zeros(n).long(), 1
        own.append(torch.autograd.grad(of_graphs(model, single), list(model.parameters())))
    rows = [torch.stack(g) for g in zip(*own, strict=True)]
    expected = reference.values(
        model, optimizer, rows, lambda m: of_graphs(m, validation), "shapley"
    )
    options = {"validation": [validation], "loss": of_graphs, "form": form, "training": training}
    with inrun.watch(model, optimizer, **options) as run:
        with run.batch(range(len(sizes)), owner=graph):
            of_graphs(model, batch).backward()
        optimizer.step()
        assert np.allclose(run.values()["value"], expected, rtol=1e-9, atol=1e-12)


# Pairs


class Judge(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 1)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))[..., 0]


PAIRS = {  # rows of the model's input from [B, 2, D], owner, and the pairs of its outputs
    "halves": (lambda x: torch.cat([x[:, 0], x[:, 1]]), lambda B: torch.arange(B).repeat(2),
               lambda out: out.chunk(2)),
    "interleaved": (lambda x: x.flatten(0, 1), lambda B: torch.arange(B).repeat_interleave(2),
                    lambda out: (out[::2], out[1::2])),
}  # fmt: skip


@pytest.mark.parametrize("training", ["bitwise", "fast"])
@pytest.mark.parametrize("form", ["ghost", "materialise"])
@pytest.mark.parametrize("name", PAIRS)
def test_chosen_and_rejected_rows_are_one_example(name, form, training):
    B = 4
    rows, owner, halves = PAIRS[name]
    x, valid = torch.randn(2, B, 2, 5)

    def plain(model, x):
        good, bad = model(x).unbind(1)
        return -F.logsigmoid(good - bad).mean()

    def doubled(model, x):
        good, bad = halves(model(rows(x)))
        return -F.logsigmoid(good - bad).mean()

    first = Judge()
    tables = []
    for model, loss, given in (
        (copy.deepcopy(first), plain, None), (first, doubled, owner(B))
    ):  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        options = {} if given is None else {"form": form, "training": training}
        with inrun.watch(model, optimizer, validation=[valid], loss=loss, **options) as run:
            for _ in range(2):
                with run.batch(range(B), owner=given):
                    loss(model, x).backward()
                optimizer.step()
                optimizer.zero_grad()
            tables.append(run.history()["value"].to_numpy())
    assert np.allclose(*tables, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", ["ghost", "materialise"])
def test_rows_with_an_owner_are_scored_inside_compiled_graphs(form):
    """[N] rows: the graph is the usual one, what leaves it is added up by owner. (A fall-back to
    eager code would warn.)"""
    torch._dynamo.reset()
    x, owner, first = torch.randn(7, 5), torch.tensor([1, 0, 2, 2, -1, 1, 0]), Judge()
    tables = []
    for model in (copy.deepcopy(first), first):
        call = torch.compile(model, backend="aot_eager") if model is first else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loss = lambda m, x: m(x).pow(3).mean()  # noqa: E731
        with inrun.watch(model, optimizer, validation=[x], loss=loss, form=form) as run:
            for step in range(3):
                with run.batch(range(3), owner=owner.roll(step)):
                    loss(call, x).backward()
                optimizer.step()
                optimizer.zero_grad()
            tables.append(run.history()["value"].to_numpy())
    assert np.abs(tables[0]).min() > 0
    assert np.allclose(*tables, rtol=1e-9, atol=1e-14)


def test_owner_in_another_order_of_rows():
    """ids[owner[k]] is whose row k is."""
    model = Judge()
    x, order = torch.randn(4, 5), torch.tensor([2, 0, 3, 1])
    tables = []
    for ids, owner in (([10, 11, 12, 13], order), ([12, 10, 13, 11], None)):
        m = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
        loss = lambda m, x: m(x).pow(3).mean()  # noqa: E731
        with inrun.watch(m, optimizer, validation=[x], loss=loss) as run:
            with run.batch(ids, owner=owner):
                loss(m, x).backward()
            optimizer.step()
            tables.append(run.values().sort_values("id")["value"].to_numpy())
    assert np.allclose(*tables, rtol=1e-12, atol=0)


# Bad input


def watched():
    model = Judge()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(6, 5)
    return (
        model,
        x,
        inrun.watch(model, optimizer, validation=[x], loss=lambda m, x: m(x).pow(3).mean()),
    )


@pytest.mark.parametrize(
    ("owner", "message"),
    [
        (
            torch.zeros(6, dtype=torch.float32),
            r"must hold integers .*float32 of shape \(6,\).*inrun\.packing",
        ),
        (torch.zeros(6, dtype=torch.complex128), "must hold integers"),
        (torch.tensor(0), r"of shape \(\)"),
        (torch.zeros(0, dtype=torch.long), r"of shape \(0,\)"),
        ([0, 1, 2, 3, 0, 1], r"from 0 to 3, but there are 3 ids"),
        ([0, 1, 2, -2, 0, 1], r"from -2 to 2, .*-1 for nobody"),
    ],
    ids=["float", "complex", "number", "empty", "too-large", "too-small"],
)
def test_an_owner_that_cannot_be_is_refused_before_the_batch(owner, message):
    model, x, run = watched()
    with pytest.raises(inrun.BatchError, match=message), run.batch(range(3), owner=owner):
        pytest.fail("the block must not run")
    with run.batch(range(3), owner=[0, 0, 1, 1, 2, 2]):  # the run goes on
        model(x).sum().backward()


@pytest.mark.parametrize(
    "owner", [[0, 1, 2, 0, 1], torch.zeros(5, 6).long(), torch.zeros(6, 4).long()],
    ids=["too-short", "transposed", "other-second-dimension"],
)  # fmt: skip
def test_an_owner_of_another_shape_than_the_inputs_is_refused(owner):
    model, x, run = watched()
    with pytest.raises(inrun.BatchError) as caught, run.batch(range(3), owner=owner):
        model(x).sum().backward()
    message, shape = str(caught.value), tuple(torch.as_tensor(owner).shape)
    assert "owner" in message and str(shape) in message and "(6, 5)" in message


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, torch.IntTensor])
def test_owner_may_be_a_list_or_an_array(kind):
    model, x, run = watched()
    with run.batch(range(3), owner=kind([0, 0, 1, 1, 2, 2])):
        model(x).pow(2).sum().backward()
    run.optimizer.step()
    assert len(run.values()) == 3


# run.check()


def test_check_measures_credit_or_says_that_it_does_not(capsys):
    """Rows alone are what a check repeats; where documents share rows it says so."""
    given, model = packed(documents(LENGTHS[0], 0)), reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with inrun.watch(model, optimizer, loss=next_token, validation=[given.batch]) as run:
        for step in range(6):
            check = run.check() if step == 5 else None
            with run.batch(range(given.count), owner=given.owner):
                next_token(model, given.batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert check.done and len(check.table) == given.count and check.exact
    assert "without a row of their own" in check.unverified
    assert check.verdict.startswith("not verified")
    assert check.pearson > 0.9


def test_a_sum_over_the_positions_of_several_documents_is_refused():
    """A gate of the first token times the sum of a row: as much the others' as the first's."""

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            h = torch.tanh(self.a(x))
            return self.b(torch.einsum("r,rtd->rd", h[:, 0, 0], h))

    model, x = Pooled(), torch.randn(2, 4, 3)
    capture = Capture(model, dict(model.named_parameters()))
    with (
        pytest.raises(inrun.CaptureError, match="since 'einsum'"),
        capture.batch(4, torch.tensor([[0, 0, 1, 1], [2, 2, 3, 3]])),
    ):
        model(x).sum().backward()


def test_owner_maps_of_ever_new_shapes_are_let_go(monkeypatch):
    monkeypatch.setattr(provenance, "_MOST_BYTES", 20_000)
    model = nn.Sequential(nn.Embedding(V, D), nn.Linear(D, V))
    capture = Capture(model, dict(model.named_parameters()))
    for n in range(10, 60):
        ids = torch.randint(0, V, (2, n))
        with capture.batch(2, torch.arange(2)[:, None].expand(2, n)) as micro:
            model(ids)[:, :-1].pow(2).sum().backward()
        rows = gradients_of(micro)["1.weight"]
        model.zero_grad()
        for k in range(2):
            model(ids[k : k + 1])[:, :-1].pow(2).sum().backward()
            assert torch.allclose(rows[k], model[1].weight.grad, rtol=1e-9)
            model.zero_grad()
        held = capture.provenance._layouts.values()
        assert sum(x.map.nbytes for x in held if hasattr(x, "map")) < 20_000
