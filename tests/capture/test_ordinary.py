"""Ordinary ways of writing a model or a loop: each is scored right, or refused by name."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import inrun
from helpers.captures import captured, close, gradients_of, reference_rows
from helpers.small_models import Model, square, watched
from helpers.zoo import LAYERS, Problem, adapted, bert
from helpers.zoo import T as TOKENS
from inrun.exact import reference
from inrun.gradients.nodes import directions

B, T, D = 3, 5, 4


def cubes(out, batch):
    """A loss whose examples count differently."""
    return (out.reshape(len(out), -1).pow(3).sum(1) * torch.arange(1.0, len(out) + 1)).mean()


def sequence_first(out, batch):
    return cubes(out.transpose(0, 1), batch)


def problem(model, x, loss=cubes, batch_dim=0):
    return Problem(model, (x,), x.shape[batch_dim], lambda m, b: m(b[0]), loss, batch_dim)


def assert_right(p, **options):
    expected = reference_rows(p)
    for fast in (False, True):
        for form in ("ghost", "materialise"):
            _, micro = captured(p, form=form, fast=fast, **options)
            rows = gradients_of(micro)
            assert rows.keys() == expected.keys()
            for k, g in expected.items():
                assert close(rows[k], g, 1e-9), (k, form, fast)
                assert close(p.model.get_parameter(k).grad, g.sum(0), 1e-9), (k, form, fast)


# A batch of one

ONE = {
    "attention": lambda: Model(
        lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(D, 2, batch_first=True)
    ),
    "attention-without-weights": lambda: Model(
        lambda m, x: m.a(x, x, x, need_weights=False)[0],
        a=nn.MultiheadAttention(D, 2, batch_first=True),
    ),
    "attention-of-other-widths": lambda: Model(
        lambda m, x: m.a(x, x[..., :3], x[..., :2])[0],
        a=nn.MultiheadAttention(D, 2, kdim=3, vdim=2, add_bias_kv=True, batch_first=True),
    ),
    "encoder": lambda: nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True),
    "encoder-evaluating": lambda: nn.TransformerEncoderLayer(
        D, 2, 8, dropout=0.0, batch_first=True
    ).eval(),
    "encoder-norm-first": lambda: nn.TransformerEncoderLayer(
        D, 2, 8, dropout=0.0, batch_first=True, norm_first=True
    ),
    "decoder": lambda: Model(
        lambda m, x: m.l(x, x[:, :3]),
        l=nn.TransformerDecoderLayer(D, 2, 8, dropout=0.0, batch_first=True),
    ),
    "squeezed": lambda: Model(lambda m, x: (m.l(x).mean(1).squeeze() * m.w)[None, None],
                              l=nn.Linear(D, 1), w=()),
    "written": lambda: Model(written, l=nn.Linear(D, D), c=nn.Linear(D, 2)),
}  # fmt: skip


def written(m, x):
    out = torch.zeros(len(x), x.shape[1], 1, D)
    for t in range(x.shape[1]):
        out[:, t, 0] = m.l(x[:, t])
    return m.c(out)


@pytest.mark.parametrize("length", [5, 1])
@pytest.mark.parametrize("name", ONE)
def test_a_batch_of_one(name, length):
    assert_right(problem(ONE[name](), torch.randn(1, length, D)))


@pytest.mark.parametrize("size", [1, B])
def test_attention_of_sequence_first_batches_is_scored(size):
    model = Model(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(D, 2))
    assert_right(problem(model, torch.randn(T, size, D), sequence_first, 1))


def test_a_smaller_last_batch_is_scored():
    model = nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True)
    x = torch.randn(4, T, D)
    run, optimizer = watched(model, square, x[:2])
    for ids in torch.arange(4).split(3):
        with run.batch(ids):
            square(model, x[ids]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert run.steps()["void"].isna().all() and len(run.values()) == 4


# Norms of sequence-first tensors

NORMS = {
    "layer_norm": lambda: Model(lambda m, x: m.n(m.l(x)), n=nn.LayerNorm(D), l=nn.Linear(D, D)),
    "rms_norm": lambda: Model(lambda m, x: m.n(m.l(x)), n=nn.RMSNorm(D), l=nn.Linear(D, D)),
    "batch_norm": lambda: Model(
        lambda m, x: m.l(m.n(x.permute(0, 2, 1)).permute(0, 2, 1)), n=nn.BatchNorm1d(D),
        l=nn.Linear(D, D),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_sequence_first_batches_are_scored(name):
    assert_right(problem(NORMS[name](), torch.randn(T, B, D), sequence_first, 1))


# Activation checkpoints around functions, not modules


class LayerScale(nn.Module):
    """Raw parameters in a function that is recomputed; no module is called in it."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.reentrant = nn.Linear(D, D), reentrant
        self.scale, self.weight = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(D, D))

    def block(self, x):
        return x + self.scale * torch.tanh(x @ self.weight)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.first(x)


class Handed(nn.Module):
    """Parameters, what is made of them, constants of B × B and ids as arguments, one checkpoint in
    another."""

    def __init__(self, reentrant):
        super().__init__()
        self.embed, self.reentrant = nn.Embedding(7, D), reentrant
        self.scale, self.weight = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(D, D))

    def inner(self, x, weight):
        return torch.tanh(x @ weight)

    def outer(self, x, scale, mask, ids):
        x = mask @ x * scale
        x = checkpoint(self.inner, x, self.weight * 2, use_reentrant=self.reentrant)
        return x + self.embed(ids)

    def forward(self, ids):
        x, mask = self.embed(ids), torch.ones(B, B).tril()
        for _ in range(2):
            x = checkpoint(self.outer, x, self.scale, mask, ids, use_reentrant=self.reentrant)
        return x @ self.weight


CHECKPOINTED = {
    "layer-scale": lambda r: (LayerScale(r), torch.randn(B, T, D)),
    "handed": lambda r: (Handed(r), torch.randint(0, 7, (B, B))),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_checkpointed_functions_with_raw_parameters_are_scored(name, reentrant):
    assert_right(problem(*CHECKPOINTED[name](reentrant)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_functions_train_bit_for_bit(reentrant):
    x, states = torch.randn(B, T, D), []
    for watching in (False, True):
        torch.manual_seed(0)
        model = LayerScale(reentrant)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run = watched(model, square, x[:2], optimizer)[0] if watching else None
        for _ in range(3):
            with run.batch(range(B)) if run else torch.enable_grad():
                square(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(model.state_dict())
    assert all(torch.equal(v, states[1][k]) for k, v in states[0].items())


# Complex parameters


@pytest.mark.parametrize("ignore", [(), ("w",)])
def test_complex_parameters_are_refused_by_name(ignore):
    model = Model(lambda m, x: (x * m.w).abs() + m.l(x), l=nn.Linear(D, D))
    model.w = nn.Parameter(torch.randn(D, dtype=torch.complex128))
    with pytest.raises(inrun.CaptureError, match=r"parameter w is complex.*view_as_real"):
        watched(model, square, torch.randn(B, D), ignore=ignore)
    model.w.requires_grad_(False)
    watched(model, square, torch.randn(B, D))[0].close()


def test_complex_numbers_made_of_real_parameters():
    """FNet's kind of model: values of whole steps."""
    model = Model(lambda m, x: torch.fft.irfft(torch.fft.rfft(m.l(x)) *
                  torch.view_as_complex(m.w), n=6), w=(4, 2), l=nn.Linear(6, 6))  # fmt: skip
    x = torch.randn(B, T, 6)
    run, optimizer = watched(model, square, x[:2])
    check = run.check()
    with run.batch(range(B)):
        square(model, x).backward()
    optimizer.step()
    assert check.done and run.steps()["void"].isna().all()
    assert_right(problem(model, x))


# Conversions that change nothing


def converted(how):
    """What is asked of the second layer's weight is its type or shape, no more."""

    def function(m, x):
        h = torch.sin(m.l(x))
        other = torch.cos(h)  # has saved h: nobody may write to it
        return m.o(how(h, m)) + m.o(other)

    return lambda: Model(function, l=nn.Linear(D, D), o=nn.Linear(D, 2), w=(1, 1, D))


CONVERTED = {
    "type_as": converted(lambda h, m: h.type_as(m.o.weight)),
    "to": converted(lambda h, m: h.to(m.o.weight)),
    "expand_as": converted(lambda h, m: h.expand_as(m.w.expand_as(h))),
    "view_as": converted(lambda h, m: h.view_as(m.w.expand(*h.shape))),
    "parameter-type_as": converted(lambda h, m: h * m.w.type_as(h)),
    "parameter-to": converted(lambda h, m: h * m.w.exp().to(h)),
    "parameter-of-another-type": converted(lambda h, m: h * m.w.to(torch.complex128).type_as(h)),
}


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("name", CONVERTED)
def test_conversions_of_type_are_followed(name):
    model = CONVERTED[name]()
    if "parameter" not in name:
        model.w.requires_grad_(False)
    assert_right(problem(model, torch.randn(B, T, D)))


# Tensors that are filled anew in place for each micro-batch


class Redrawn(nn.Module):
    """Masks of its own on weights and activations, a buffer and a plain attribute."""

    def __init__(self, in_place):
        super().__init__()
        self.l, self.o, self.w = nn.Linear(D, D), nn.Linear(D, 2), nn.Parameter(torch.randn(D))
        self.register_buffer("mask", torch.ones(D, D))
        self.chosen, self.in_place, self.draws = torch.ones(D), in_place, 0

    def forward(self, x):
        if self.training:
            self.draws += 1
            drawn = torch.rand(D, D, generator=torch.Generator().manual_seed(self.draws))
            if self.in_place:
                self.mask.data.copy_(drawn)
                self.chosen.copy_(drawn[0])
            else:
                self.mask, self.chosen = drawn, drawn[0].clone()
        h = F.linear(x, self.l.weight * self.mask, self.l.bias)
        return self.o(torch.tanh(torch.lerp(h, self.w, self.chosen)))


@pytest.mark.parametrize("form", ["ghost", "materialise"])
def test_masks_and_data_refilled_in_place_do_not_change_earlier_batches(form):
    x, values = torch.randn(6, T, D), []
    for in_place in (False, True):
        torch.manual_seed(0)
        model, static = Redrawn(in_place), torch.empty(B, T, D)
        run, optimizer = watched(model, square, x[:2], form=form)
        for _ in range(2):
            for ids in torch.arange(6).split(B):
                batch = static.copy_(x[ids]) if in_place else x[ids]
                with run.batch(ids):
                    square(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        values.append(torch.tensor(run.history()["value"].to_numpy()))
        run.close()
    assert close(values[1], values[0], 1e-12)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(D, D)
        self.register_buffer("mask", torch.ones(D, D))

    def forward(self, x):
        return F.linear(x, self.l.weight * self.mask, self.l.bias)


@pytest.mark.parametrize("redrawn", [False, True])
def test_compiled_masks_and_data_may_be_refilled_in_place(redrawn):
    torch.compiler.reset()
    x, values = torch.randn(6, T, D), []
    for backend in ("eager", "aot_eager"):
        torch.manual_seed(0)
        model, static = Masked(), torch.empty(B, T, D)
        run, optimizer = watched(model, square, x[:2], form="ghost")
        compiled = torch.compile(model, backend=backend)
        for ids in torch.arange(6).split(B):
            if redrawn:
                model.mask.copy_(torch.rand(D, D).round())
            with run.batch(ids):
                square(compiled if backend != "eager" else model, static.copy_(x[ids])).backward()
        if redrawn and backend != "eager":
            with pytest.raises(inrun.CaptureError, match="written to in place"):
                optimizer.step()
        else:
            optimizer.step()
            values.append(torch.tensor(run.values()["value"].to_numpy()))
        run.close()
    assert redrawn or close(values[1], values[0], 1e-9)


# Copies of the model, and the model in other hands


@pytest.mark.filterwarnings("ignore:the loss inside run.batch also trains")  # the teacher
@pytest.mark.parametrize("reentrant", [False, True])
def test_copying_the_model_inside_the_block_changes_no_value(reentrant):
    """For a moving average, or as its own teacher, whose widths are B."""
    x, values = torch.randn(D, T, D), []
    for early in (True, False):
        torch.manual_seed(0)
        model = LayerScale(reentrant)
        run, optimizer = watched(model, square, x)
        teacher = copy.deepcopy(model) if early else None
        with run.batch(range(D)):
            out = model(x)
            teacher = teacher or copy.deepcopy(model)
            loss = (out - teacher(2 * x)).pow(2).mean()
            loss.backward()
        optimizer.step()
        values.append(torch.tensor(run.values()["value"].to_numpy()))
        run.close()
    assert close(values[1], values[0], 1e-12)


def test_weights_of_another_model_are_no_examples():
    """They have B rows."""
    other = nn.Parameter(torch.randn(B, 1, D))
    model = Model(lambda m, x: m.l(torch.einsum("btd,kod->btdk", x, other)), l=nn.Linear(B, 2))
    assert_right(problem(model, torch.randn(B, T, D)))


def test_functional_call_is_scored_with_the_models_parameters_only():
    x = torch.randn(B, T, D)
    for change in (lambda p: p, lambda p: 2 * p.exp()):
        model = Model(lambda m, x: torch.func.functional_call(
            m.l, {k: change(p) for k, p in m.l.named_parameters()}, (x,)),  # noqa: B023
            l=nn.Linear(D, 2))  # fmt: skip
        assert_right(problem(model, x))
    run, _ = watched(model, square, x)
    copies = {f"l.{k}": p.detach().clone().requires_grad_() for k, p in model.l.named_parameters()}
    with pytest.raises(inrun.BatchError, match="functional_call"), run.batch(range(B)):
        torch.func.functional_call(model, copies, (x,)).pow(2).mean().backward()
    run.close()


TRANSFORMED = {
    "vmap": lambda m, x: torch.func.vmap(m)(x),
    "vmap-of-a-weight": lambda m, x: torch.func.vmap(
        lambda w: x @ w, out_dims=1
    )(m.weight),
    "grad": lambda m, x: torch.func.grad(lambda x: m(x).pow(2).sum())(x),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations_of_torch_func_are_refused_by_name(name):
    model = nn.Linear(D, D)
    x = torch.randn(B, D)
    run, _ = watched(model, square, x)
    refused = pytest.raises(inrun.CaptureError, match=r"weight is used inside .* torch\.func")
    with refused, run.batch(range(B)):
        TRANSFORMED[name](model, x).pow(2).mean().backward()
    run.close()


def test_transformations_of_data_are_not_refused():
    model = nn.Linear(D, 2)
    x = torch.randn(B, T, D)
    run, optimizer = watched(model, square, x)
    with run.batch(range(B)):
        mask = torch.func.vmap(lambda i: torch.arange(T) <= i)(torch.arange(T))
        square(model, mask.to(x.dtype) @ x).backward()
        with torch.no_grad():
            torch.func.vmap(model)(x)
    optimizer.step()
    assert run.steps()["void"].isna().all()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_refused_by_name(layout):
    model = nn.Linear(D, 2)
    rows = [torch.randn(n, D) for n in (2, 5, 3)]
    run, _ = watched(model, square, torch.randn(B, D))
    nested = torch.nested.nested_tensor(rows, layout=layout)
    for inside in (False, True):
        with pytest.raises(inrun.CaptureError, match="nested tensor"), run.batch(range(B)):
            x = torch.nested.as_nested_tensor(rows, layout=layout) if inside else nested
            torch.nested.to_padded_tensor(model(x), 0.0).pow(2).mean().backward()
    run.close()


# transformers and peft

ADAPTERS = {
    "prompt": lambda: adapted(
        "PromptTuningConfig", task_type="CAUSAL_LM", num_virtual_tokens=TOKENS
    ),  # as many tokens as examples
    "p-tuning": lambda: adapted(
        "PromptEncoderConfig", task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=6
    ),
    "prefix": lambda: adapted("PrefixTuningConfig", task_type="CAUSAL_LM", num_virtual_tokens=3),
    "oft": lambda: adapted("OFTConfig", r=0, oft_block_size=4, init_weights=False, **LAYERS),
    "oft-constrained": lambda: adapted(
        "OFTConfig", r=0, oft_block_size=4, init_weights=False, coft=True, eps=1e-2,
        use_cayley_neumann=False, **LAYERS,
    ),
    "boft": lambda: adapted("BOFTConfig", boft_block_size=4, init_weights=False, **LAYERS),
    "hra": lambda: adapted("HRAConfig", r=2, init_weights=False, **LAYERS),
    "xlm-roberta": lambda: bert("xlm-roberta"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Failed to load the CUDA extension", "ignore:Setting boft")
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_of_peft_are_scored(name):
    if name == "boft" and torch.cuda.is_available():
        pytest.skip("peft compiles an extension for it")
    p = ADAPTERS[name]()
    expected = reference_rows(p)
    _, micro = captured(p)
    rows = gradients_of(micro)
    assert rows.keys() == expected.keys()
    for k, g in expected.items():
        assert close(rows[k], g, 1e-9), k


def test_loha_is_refused_for_its_real_cause():
    p = adapted("LoHaConfig", r=2, init_weights=False, **LAYERS)
    with pytest.raises(inrun.CaptureError, match=r"hada_w1_a.*'HadaWeight'.*LoKr or LoRA"):
        captured(p)


def test_gathered_rows_belong_to_the_example_of_the_index():
    """As many columns as examples; rows belong to whom the index belongs to."""
    model = Model(lambda m, x: m.e(torch.arange(B * T).view(B, T).gather(1, x)), e=nn.Embedding(
        B * T, 2))  # fmt: skip
    p = problem(model, torch.randint(0, T, (B, 2)))
    rows = gradients_of(captured(p)[1])["e.weight"]
    used = torch.arange(B * T).view(B, T).gather(1, p.batch[0])
    assert all(set(rows[i].any(1).nonzero().flatten().tolist()) == set(used[i].tolist())
               for i in range(B))  # fmt: skip
    assert close(rows.sum(0), p.model.e.weight.grad, 1e-12)


@pytest.mark.parametrize("equation", ["...d,do->...o", "b...d,do->b...o", "...td,do->...to"])
def test_einsum_with_an_ellipsis_is_followed(equation):
    model = Model(lambda m, x: torch.einsum(equation, x, m.w), w=(D, 2))
    assert_right(problem(model, torch.randn(B, B, D)))


def test_a_parameter_clamped_in_the_forward_pass_is_scored():
    """Under no_grad it stays the parameter; nothing of it is done again when it is scored."""

    def function(m, x):
        with torch.no_grad():
            m.w.clamp_(max=0.5)
        return m.l(x) * m.w.exp()

    assert_right(problem(Model(function, w=(), l=nn.Linear(D, 2)), torch.randn(B, T, D)))


def test_arguments_by_keyword_are_found():
    model = Model(
        lambda m, x: torch.matmul(input=F.linear(input=x, weight=m.w, bias=m.b), other=m.v),
        w=(D, D), b=(D,), v=(D, 2),
    )  # fmt: skip
    assert_right(problem(model, torch.randn(B, T, D)))


# Similarities of every example with every other


def contrastive(kind, **options):
    tf = pytest.importorskip("transformers", reason="needs the extra inrun[hf]")
    sizes = {"hidden_size": D, "intermediate_size": 6, "num_hidden_layers": 1}
    vision = {**sizes, "num_attention_heads": 2, "image_size": 4, "patch_size": 2}
    text = {**sizes, "num_attention_heads": 2, "vocab_size": 9, "max_position_embeddings": T}
    config = getattr(tf, f"{kind}Config")(
        text_config={**text, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0},
        vision_config=vision, **options,
    )  # fmt: skip
    model = getattr(tf, f"{kind}Model")(config).to(torch.get_default_dtype())
    ids = torch.randint(3, 9, (B, T))
    ids[:, -1] = 2
    return model, {"input_ids": ids, "pixel_values": torch.randn(B, 3, 4, 4)}


@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_a_contrastive_temperature_is_credited_half_to_each_of_a_pair(kind):
    """Its gradient through the logit of a pair belongs to both, half each; all other parameters
    are used row by row."""
    model, batch = contrastive(kind, **({"projection_dim": D} if kind == "CLIP" else {}))
    weights = torch.randn(B, B)

    def forward(m, b):
        out = m(**b)
        return torch.stack([out.text_embeds, out.image_embeds], 1)

    scale, bias = (p.detach() if p is not None else torch.zeros(())
                   for p in (model.logit_scale, getattr(model, "logit_bias", None)))  # fmt: skip
    scales, biases = (x.expand(B, B).clone().requires_grad_() for x in (scale, bias))

    def loss(out, b):
        logits = out[:, 0] @ out[:, 1].t() * scales.exp() + biases
        return (weights * logits).pow(2).mean()

    expected = reference.per_example_gradients(model, batch, B, forward, loss)
    for name, single in (("logit_scale", scales), ("logit_bias", biases)):
        if name in expected:
            rows = (single.grad.sum(1) + single.grad.sum(0)) / 2
            expected[name] = rows.view(expected[name].shape)
    for fast in (False, True):
        p = Problem(model, batch, B, lambda m, b: m(**b).logits_per_text,
                    lambda out, b: (weights * out).pow(2).mean())  # fmt: skip
        _, micro = captured(p, fast=fast)
        rows = gradients_of(micro)
        assert rows.keys() == expected.keys()
        for k, g in expected.items():
            assert close(rows[k], g, 1e-9, floor=1e-3), k
            assert close(model.get_parameter(k).grad, g.sum(0), 1e-9, floor=1e-3), k
        u = {k: torch.randn(1, *g.shape[1:]) for k, g in expected.items()}
        dots = sum(r.dots(directions(n, u)) for n, rs in micro.records.items() for r in rs)
        sums = sum(u[k].reshape(1, -1) @ g.reshape(B, -1).T for k, g in expected.items())
        assert close(dots, sums, 1e-9)


SIMILARITIES = {
    "matmul": lambda a, b: a @ b.t(),
    "einsum": lambda a, b: torch.einsum("id,jd->ij", a, b),
    "einsum-turned": lambda a, b: torch.einsum("id,jd->ji", a, b),
    "linear": F.linear,
}


@pytest.mark.parametrize("size", [B, 1])
@pytest.mark.parametrize("name", SIMILARITIES)
def test_temperatures_in_place_transposed_and_divided_are_scored(name, size):
    """In place, turned and by division; over steps, where calls come back."""

    def function(m, x):
        logits = SIMILARITIES[name](m.a(x), m.c(x))
        logits = logits.t().mul(m.w.exp())
        logits /= m.v
        return logits.float().double()

    x = torch.randn(size, D)
    model = Model(function, a=nn.Linear(D, 2), c=nn.Linear(D, 2), w=(1,), v=())
    run, optimizer = watched(model, square, x)
    for _ in range(2):
        with run.batch(range(size)):
            square(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (run.coverage()["status"] == "scored").all() and run.steps()["void"].isna().all()


@pytest.mark.parametrize(
    "function",
    [lambda m, x: m.l(x @ x.t()), lambda m, x: m.l(F.linear(m.a(x)[:, None], m.a(x)))],
    ids=["matmul", "linear"],
)
def test_other_operations_on_similarities_are_refused(function):
    model = Model(function, l=nn.Linear(B, 2), a=nn.Linear(D, D))
    x = torch.randn(B, D)
    run, _ = watched(model, square, x)
    refused = pytest.raises(inrun.CaptureError, match=r"l.weight .* 'linear'.*cannot be told apart")
    with refused, run.batch(range(B)):
        square(model, x).backward()


def scaled_in_place(m, x):
    scale = torch.full((D,), 2.0)
    scale *= m.w
    return x * scale + m.v


def changed_after_use(m, x):
    a = m.w * 2
    b = a * 3
    a.add_(b).mul_(m.v)
    return x * a + b


@pytest.mark.parametrize("function", [scaled_in_place, changed_after_use])
def test_tensors_made_of_parameters_in_place(function):
    assert_right(problem(Model(function, w=(D,), v=(D,)), torch.randn(B, T, D)))
