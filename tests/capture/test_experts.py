"""Mixtures of experts of transformers: tokens are sent to experts and come back in another order.

Batch = tokens = experts = 4, so that no size tells which is which. Without the auxiliary loss the
examples do not meet, and each has the gradient of its row alone. The auxiliary loss is made of all
examples at once; each is credited what goes through its own tokens, and all together are ``.grad``.
"""

import copy

import numpy as np
import pytest
import torch

import inrun
from helpers.captures import close, gradients_of, trainable
from inrun.capture.capture import Capture

tf = pytest.importorskip("transformers", reason="needs the extra inrun[hf]")

V, B = 20, 4
SMALL = {
    "vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2,
    "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
AUX = {"output_router_logits": True}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 4,
}  # fmt: skip
MODELS = {
    "Mixtral": dict(num_local_experts=B, **AUX),
    "Qwen2Moe": dict(
        num_experts=B, moe_intermediate_size=12, shared_expert_intermediate_size=20,
        decoder_sparse_step=1, **AUX,
    ),
    "Qwen3Moe": dict(num_experts=B, moe_intermediate_size=12, head_dim=4, **AUX),
    "Olmoe": dict(num_experts=B, **AUX),
    "GptOss": dict(num_local_experts=B, head_dim=4, sliding_window=3, **AUX),
    "DeepseekV3": dict(
        n_routed_experts=B, moe_intermediate_size=12, first_k_dense_replace=1, n_group=2,
        topk_group=1, n_shared_experts=1, **LATENT,
    ),
}  # fmt: skip
IMPLEMENTATIONS = ["eager", "batched_mm", "grouped_mm"]


def made(name, implementation, auxiliary):
    if not hasattr(tf, f"{name}ForCausalLM"):
        pytest.skip(f"this transformers has no {name}")
    torch.manual_seed(0)
    config = getattr(tf, f"{name}Config")(**SMALL | MODELS[name])
    model = getattr(tf, f"{name}ForCausalLM")(config).train()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation(implementation)
    elif implementation != "eager":
        pytest.skip("this transformers has one implementation of experts")
    if not auxiliary:
        config.router_aux_loss_coef = 0.0
        if hasattr(model, "router_aux_loss_coef"):
            model.router_aux_loss_coef = 0.0
    for p in model.parameters():  # routers that differ, biases that are not 0
        torch.nn.init.normal_(p, std=0.3)
    return model.to(torch.float32 if implementation == "grouped_mm" else torch.float64)


def tolerance(name, implementation):
    if implementation == "grouped_mm":  # in float32
        return 1e-4
    return 1e-6 if name == "DeepseekV3" else 1e-9  # its router is in float32


def loss(model, ids):
    return model(input_ids=ids, labels=ids).loss


def gradients(model, ids, **options):
    model.zero_grad()
    with Capture(model, trainable(model), **options).batch(len(ids)) as micro:
        loss(model, ids).backward()
    return gradients_of(micro)


def of_rows_alone(model, ids):
    found = []
    for row in ids:
        model.zero_grad()
        (loss(model, row[None]) / len(ids)).backward()
        found.append({
            k: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for k, p in trainable(model).items()
        })  # fmt: skip
    return {k: torch.stack([g[k] for g in found]) for k in found[0]}


def data(rows=B):
    return torch.randint(0, V, (rows, B), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_each_example_has_the_gradient_of_its_row_alone(name, implementation):
    model, ids = made(name, implementation, auxiliary=False), data()
    expected = of_rows_alone(model, ids)
    rows = gradients(model, ids)
    for k, g in expected.items():  # an expert that no token chose has no gradient
        got = rows.get(k, torch.zeros_like(g))
        assert close(got[:B], g, tolerance(name, implementation)), k
        assert len(got) == B or close(got[B:], 0 * got[B:], 1e-9), k  # nobody has a part


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", [n for n in MODELS if n != "DeepseekV3"])  # it has no such loss
def test_with_the_auxiliary_loss_gradients_add_up(name, implementation):
    model, ids = made(name, implementation, auxiliary=True), data()
    loss(model, ids).backward()
    alone = {k: None if p.grad is None else p.grad.clone() for k, p in trainable(model).items()}
    rows = gradients(model, ids)
    plain = gradients(made(name, implementation, auxiliary=False), ids)
    routers = [k for k in rows if "router.weight" in k or k.endswith("mlp.gate.weight")]
    assert len(routers) == 2 and all((rows[k] - plain[k]).norm() > 1e-6 for k in routers)
    for k, p in trainable(model).items():
        if alone[k] is None:
            assert p.grad is None
            continue
        assert torch.equal(p.grad, alone[k]), k
        assert close(rows[k].sum(0), p.grad, tolerance(name, implementation)), k


@pytest.mark.parametrize("training", ["bitwise", "fast"])
@pytest.mark.parametrize("form", ["ghost", "materialise"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_both_forms_and_trainings(implementation, form, training):
    model, ids = made("Mixtral", implementation, auxiliary=False), data()
    expected = of_rows_alone(model, ids)
    rows = gradients(model, ids, form=form, fast=training == "fast")
    for k, g in expected.items():
        near = tolerance("Mixtral", implementation)
        assert close(rows[k][:B], g, near), k
        assert close(model.get_parameter(k).grad, g.sum(0), near), k


@pytest.mark.parametrize("training", ["bitwise", "fast"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_run_covers_every_parameter(implementation, training):
    """Other tokens go to other experts in each step; all of it is scored."""
    model = made("Mixtral", implementation, auxiliary=True)
    twin = copy.deepcopy(model)
    ids = torch.randint(0, V, (3, B, 5), generator=torch.Generator().manual_seed(4))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, twin)]
    options = {"validation": [ids[0]], "loss": loss, "training": training, "audit_every": 1}
    with inrun.watch(model, optimizers[0], **options) as run:
        for step, batch in enumerate(ids):
            with run.batch(range(step, step + B)):
                loss(model, batch).backward()
            loss(twin, batch).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        steps, coverage = run.steps(), run.coverage()
    assert steps["void"].isna().all() and np.isfinite(steps["sum"]).all()
    assert steps["explained"].between(0.8, 1.2).all()
    assert (coverage["status"] == "scored").all() and len(coverage) == len(trainable(model))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0 if training == "bitwise" else 1e-4, atol=1e-5)
        assert training == "fast" or torch.equal(p, q)


def test_a_run_has_the_values_of_rows_alone():
    """The same training, of one micro-batch per row: nothing is routed together."""
    ids, tables = data(), []
    for parts in (1, B):
        model = made("Qwen3Moe", "batched_mm", auxiliary=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with inrun.watch(model, optimizer, validation=[ids], loss=loss) as run:
            for _ in range(3):
                for k in torch.arange(B).chunk(parts):
                    with run.batch(k):
                        (loss(model, ids[k]) / parts).backward()
                optimizer.step()
                optimizer.zero_grad()
            tables.append(run.history().sort_values(["step", "id"])["value"].to_numpy())
    assert np.allclose(*tables, rtol=1e-8, atol=1e-12)
