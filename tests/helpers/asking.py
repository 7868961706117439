"""A small language model that was trained, watched for influence, and questions to it."""

import json

import torch
import torch.nn.functional as F
from torch import nn

import inrun

N, T, V = 10, 4, 7


class Words(nn.Module):
    """Tied table and head."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.inner = nn.Embedding(V, 6), nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, ids):
        return torch.tanh(self.inner(self.norm(self.table(ids)))) @ self.table.weight.t()


def next_word(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())


def asked_model(out=None, steps=12):
    """The run, the model, its data [N, T] and the questions."""
    model = Words().double()
    torch.manual_seed(0)
    for p in model.parameters():  # the same whatever the default type is
        p.data = 0.5 * torch.randn(p.shape, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.randint(0, V, (N, T))
    run = inrun.watch(
        model, optimizer, validation=[data[:3]], loss=next_word, out=out, estimator="influence"
    )
    for _ in range(steps):
        ids = torch.randperm(N)[:5]
        with run.batch(ids):
            next_word(model, data[ids]).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    queries = {"one": torch.randint(0, V, (1, T)), "two & <b>": torch.randint(0, V, (2, T))}
    return run, model, data, queries


def batches(data, size=3, rows=None):
    """Pairs of ids and batches."""
    rows = torch.arange(len(data)) if rows is None else torch.as_tensor(rows)
    return [(part.tolist(), data[part]) for part in rows.split(size)]


def answered(folder):
    """A run with answers in its folder, their table, the questions, what its ids stand for, and the
    data."""
    _, model, data, queries = asked_model(folder)
    options = {"run": folder, "loss": next_word, "out": folder / "answers"}
    scores = inrun.ask(model, batches(data), queries, **options)
    inrun.ask(model, batches(data), queries, tokens=True, **options)
    examples = folder.parent / "examples.jsonl"
    with examples.open("w") as file:
        for i in range(N):
            tokens = [f"<{t}> " for t in data[i].tolist()]
            text = f"</script><script>alert({i})</script>"
            file.write(json.dumps({"id": i, "text": text, "tokens": tokens}) + "\n")
    return folder, scores, list(queries), examples, data
