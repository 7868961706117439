"""Which passages of Python's own documentation taught a small GPT the answer to a question?"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor, nn
from torch.nn import functional as F

import inrun
from inrun.console import excerpt, safe
from inrun.demo import stage
from inrun.gpt import GPT

EPOCHS = 7
BATCH = 16
LR = 3e-3
WARMUP = 50  # steps; Adam's first steps are nearly sign steps, in which credit means little
CONTEXT = 64  # words of a passage
SHORTEST = 16
WIDTH, LAYERS, HEADS = 64, 2, 4
SHOWN = 3  # passages per question
BY_WORD = 100  # the step whose passages the report shows word by word; after the warm-up
PAD, RARE = 0, 1

QUESTIONS = {  # in words of our own: none of these sentences is in the documentation
    "with": 'What does "with" do? It enters a context manager and calls its "__exit__()" method '
    "when the block ends, even if an exception was raised.",
    "slice": "What is a slice? It selects the items of a sequence from a lower bound up to an "
    "upper bound, with a step.",
    "lambda": 'What is "lambda"? An expression that makes an anonymous function.',
    "global": 'What does "global" do? It makes a name in a function refer to the global variable '
    "of the module.",
    "format": "What is a format string? Literal text with replacement fields in curly braces, "
    "which are replaced by values.",
}


def words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


def spaced(text: str) -> list[str]:
    """The same, each with the space before it."""
    return re.findall(r"\s*(?:\w+|[^\w\s])", text)


def passages() -> dict[str, str]:
    """Paragraphs packed up to ``CONTEXT`` words, by topic and part; what is repeated comes once."""
    from pydoc_data.topics import topics

    found: dict[str, str] = {}
    seen: set[str] = set()
    for topic, text in sorted(topics.items(), key=lambda item: len(item[1])):
        parts: list[list[str]] = [[]]
        size = 0
        for paragraph in (p.strip("\n") for p in re.split(r"\n\s*\n", text)):
            n = len(words(paragraph))
            if not n or paragraph.strip() in seen:
                continue
            seen.add(paragraph.strip())
            if parts[-1] and size + n > CONTEXT:
                parts.append([])
                size = 0
            parts[-1].append(paragraph)
            size += n
        long = ["\n\n".join(p) for p in parts if len(words(" ".join(p))) >= SHORTEST]
        found |= {f"{topic}/{i}": passage for i, passage in enumerate(long)}
    return found


class Vocabulary:
    """Words that occur at least three times; the others share one number."""

    def __init__(self, texts: Sequence[str]) -> None:
        counts = Counter(w for text in texts for w in words(text))
        common = [w for w, n in counts.most_common() if n > 2]
        self.number = {w: i for i, w in enumerate(common, start=RARE + 1)}
        self.size = len(self.number) + RARE + 1

    def encode(self, texts: Sequence[str]) -> Tensor:
        """One row per text, padded at the end."""
        rows = [[self.number.get(w, RARE) for w in words(t)[: CONTEXT + 1]] for t in texts]
        longest = max(map(len, rows))
        return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


def language_model(vocabulary: int) -> GPT:
    """A GPT whose embeddings are drawn small, since its head shares one of them."""
    model = GPT(vocabulary, WIDTH, LAYERS, HEADS, CONTEXT)
    for embedding in (model.token, model.position):
        nn.init.normal_(embedding.weight, std=0.02)
    return model


def next_word(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean loss of the next word, padding left out."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], ignore_index=PAD)


def batches(n: int, epochs: int) -> Iterator[list[int]]:
    for _ in range(epochs):
        yield from (rows.tolist() for rows in torch.randperm(n).split(BATCH))


@torch.no_grad()
def losses(model: nn.Module, questions: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(next_word(model, tokens)) for name, tokens in questions.items()}


def demo(out: Path, seed: int, epochs: int, console: Console) -> dict[str, Any]:
    """Train, then show for each question the passages with the highest values."""
    folder = stage.fresh(out)
    texts = passages()
    vocabulary = Vocabulary(list(texts.values()))
    console.print(
        f"[bold]inrun demo: text[/]\nA small GPT reads {len(texts):,} passages of Python's "
        "documentation. Who taught it what?\n"
    )
    torch.manual_seed(seed)
    model = language_model(vocabulary.size)
    questions = {name: vocabulary.encode([q]) for name, q in QUESTIONS.items()}
    before = losses(model, questions)
    run = train(model, texts, vocabulary, questions, folder, seed, epochs, console)
    result = summary(run, len(texts), epochs, before, losses(model, questions))
    examples = write_examples(folder, texts)
    show(result, texts, console)
    stage.finish(folder, examples, result, console, "--target lambda")
    return result


def train(
    model: GPT, texts: dict[str, str], vocabulary: Vocabulary, questions: dict[str, Tensor],
    folder: Path, seed: int, epochs: int, console: Console,
) -> inrun.Run:  # fmt: skip
    """Train on all passages, watched; each question is a target."""
    ids, n = list(texts), len(texts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / WARMUP))
    run = inrun.watch(
        model, optimizer, targets={k: [x] for k, x in questions.items()}, loss=next_word,
        out=folder, audit_every=10, seed=seed, estimator="secant",  # warm-up: small first steps
    )  # fmt: skip
    steps = epochs * -(-n // BATCH)
    with (
        stage.threads(1),
        run,
        stage.progress(console, "Training, watched", steps, run) as advance,
    ):
        for step, rows in enumerate(batches(n, epochs)):
            tokens = vocabulary.encode([texts[ids[i]] for i in rows])
            by_word = step == min(BY_WORD, steps - 1)
            with run.batch([ids[i] for i in rows], tokens=by_word):
                next_word(model, tokens).backward()
            optimizer.step()
            warmup.step()
            optimizer.zero_grad()
            advance()
    return run


def summary(
    run: inrun.Run, n: int, epochs: int, before: dict[str, float], after: dict[str, float]
) -> dict[str, Any]:
    """What was found: the losses of each question and the passages with the highest values."""
    values = run.values().set_index("id")
    return {
        "task": "text",
        "epochs": epochs,
        "passages": n,
        "steps": run.step,
        "explained": run.tally.explained,
        "questions": {
            name: {
                "text": text,
                "loss": [before[name], after[name]],
                "taught_by": values[name].nlargest(SHOWN).to_dict(),
            }
            for name, text in QUESTIONS.items()
        },
        "machine": stage.machine(),
    }


def write_examples(folder: Path, texts: dict[str, str]) -> Path:
    """The passages as the report reads them."""
    examples = folder / "examples.jsonl"
    with examples.open("w", encoding="utf-8") as file:
        for key, text in texts.items():
            row = {"id": key, "text": text, "group": key.rsplit("/", 1)[0], "tokens": spaced(text)}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return examples


def show(result: dict[str, Any], texts: dict[str, str], console: Console) -> None:
    """Each question with its passages, as wide as the terminal."""
    for question in result["questions"].values():
        first, last = question["loss"]
        body = stage.table("value", "passage", "", words=(1, 2))
        for key, value in question["taught_by"].items():
            start = excerpt(texts[key], max(console.width - 36, 1))
            body.add_row(f"{value:.3f}", Text(safe(key, 22), "bold"), Text(start))
        note = f"loss of this text: {first:.2f} before, {last:.2f} after"
        stage.say(console, question["text"], body, note)
    spread = np.array([list(q["taught_by"].values()) for q in result["questions"].values()])
    console.print(
        f"\nA value is a passage's credit for the drop in a question's loss, in nats: "
        f"{spread.min():.2f} to {spread.max():.2f} here.\nThe values explain "
        f"{result['explained']:.1%} of what the batches did.",
    )
