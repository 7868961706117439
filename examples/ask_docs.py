"""Ask a small language model of Python's documentation who taught it an answer.

    python examples/ask_docs.py                          train, watched: about two minutes
    inrun ask runs/docs examples/ask_docs.py:questions --tokens \\
        --examples runs/docs/examples.jsonl -o answers.html

``questions`` is all that ``inrun ask`` needs of a script: the trained model, the training data
with an id for each example, the questions, the loss. docs/guide-ask.md tells the rest.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F

import inrun

LONGEST, WIDTH, BATCH = 64, 64, 16  # words of a passage; of the model; passages of a step
PAD, RARE = 0, 1

# Questions with their answers, in words that are not in the documentation
QUESTIONS = (
    "What is a slice? It selects items of a sequence from a lower bound up to an upper bound.",
    'What does "global" do? It makes a name in a function refer to the global variable.',
    "What is a format string? Text with replacement fields in curly braces.",
    'What does "with" do? It calls the "__exit__()" method when the block ends.',
)


def words(text):
    """Each with the space before it."""
    return re.findall(r"\s*(?:\w+|[^\w\s])", text)


def passages():
    """Paragraphs of Python's documentation, joined up to ``LONGEST`` words, by topic and number."""
    found, seen = {}, set()
    for topic, text in sorted(topics.items(), key=lambda item: len(item[1])):
        parts = [""]
        for paragraph in re.split(r"\n\s*\n", text):
            paragraph = paragraph.strip("\n")
            if paragraph.strip() in seen or not paragraph.strip():
                continue
            seen.add(paragraph.strip())
            longer = f"{parts[-1]}\n\n{paragraph}".strip("\n")
            fits = len(words(longer)) <= LONGEST
            parts = [*parts[:-1], longer] if fits else [*parts, paragraph]
        long = [p for p in parts if len(words(p)) >= 16]
        found |= {f"{topic}/{i}": part for i, part in enumerate(long)}
    return found


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(B, T, WIDTH))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.token = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Embedding(LONGEST, WIDTH)
        self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.LayerNorm(WIDTH)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids):
        x = self.token(ids) + self.position.weight[: ids.shape[1]]
        return self.norm(self.blocks(x)) @ self.token.weight.t()


def vocabulary(texts):
    counts = Counter(w.strip() for text in texts for w in words(text))
    return {w: i for i, w in enumerate((w for w, n in counts.items() if n > 2), start=RARE + 1)}


def encoded(texts, numbers):
    """Rows of word numbers, padded to one length."""
    rows = [[numbers.get(w.strip(), RARE) for w in words(t)][: LONGEST + 1] for t in texts]
    longest = max(map(len, rows))
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


def next_word(model, ids):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], ignore_index=PAD)


def train(out, epochs, texts):
    """Train on all passages, watched with ``estimator="influence"``; the ledger, the weights and
    what the ids stand for are in ``out``."""
    torch.manual_seed(0)
    ids, numbers = list(texts), vocabulary(texts.values())
    model = LanguageModel(len(numbers) + 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = epochs * -(-len(ids) // BATCH)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    held = [encoded([texts[i] for i in ids[::40]], numbers)]
    with inrun.watch(
        model, optimizer, validation=held, loss=next_word, out=out, overwrite=True,
        estimator="influence", audit_every=0,
    ) as run:  # fmt: skip
        for epoch in range(epochs):
            for rows in torch.randperm(len(ids)).split(BATCH):
                some = [ids[i] for i in rows]
                batch = encoded([texts[i] for i in some], numbers)
                with run.batch(some):
                    loss = next_word(model, batch)
                    loss.backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            print(f"epoch {epoch + 1}: loss {loss.item():.2f}", flush=True)
    torch.save({"weights": model.state_dict(), "numbers": numbers}, out / "model.pt")
    with (out / "examples.jsonl").open("w", encoding="utf-8") as file:
        for key, text in texts.items():
            row = {"id": key, "text": text, "tokens": words(text)}
            file.write(json.dumps(row) + "\n")


def questions(out: Path):
    """What ``inrun ask`` needs; ``out`` is the run's folder."""
    saved = torch.load(out / "model.pt", weights_only=True)
    numbers = saved["numbers"]
    model = LanguageModel(len(numbers) + 2)
    model.load_state_dict(saved["weights"])
    rows = [json.loads(x) for x in (out / "examples.jsonl").read_text("utf-8").splitlines()]
    parts = [rows[i : i + 50] for i in range(0, len(rows), 50)]
    return {
        "model": model,
        "data": [
            ([r["id"] for r in part], encoded([r["text"] for r in part], numbers)) for part in parts
        ],
        "queries": {question: encoded([question], numbers) for question in QUESTIONS},
        "loss": next_word,
    }


def main(given=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/docs"))
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--passages", type=int, help="only so many: a try at small size")
    args = parser.parse_args(given)
    texts = dict(list(passages().items())[-args.passages :] if args.passages else passages())
    print(f"{len(texts):,} passages", flush=True)
    train(args.out, args.epochs, texts)


if __name__ == "__main__":
    main()
