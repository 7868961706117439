"""pytorch/examples' ``word_language_model``, watched: an LSTM over columns of text, its state
carried from one stretch to the next, gradients clipped by norm, SGD.

    python examples/word_language_model.py                 Python's own documentation
    python examples/word_language_model.py --data FOLDER   FOLDER/wiki.{train,valid}.tokens

Batches are [time, columns]: the columns are the examples, so ``batch_dim=1``. A stretch of a
column is an example with an id of its own. What it did is what it did in this step: the state that
it leaves to the next stretch is data there. A learning rate of 20 makes long steps, so the
validation gradient is taken at two points of each (``point="gauss2"``).

Recorded (torch 2.13, one core, 29 s of CPU time): training perplexity 304, 182, 148, 125; 1,560
stretches; the values add up to 100.0 % of what the batch did in the median audited step. The most
helpful stretch is a row of dashes, of which the documentation has many.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from pathlib import Path

import torch
from small_data import documentation, show
from torch import nn
from torch.nn import functional as F

import inrun


class RNNModel(nn.Module):
    """Embedding, LSTM layers with dropout between them, and a head that shares the embedding."""

    def __init__(self, words: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.drop, self.encoder = nn.Dropout(dropout), nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width) for _ in range(layers))
        self.decoder = nn.Linear(width, words)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, input, hidden):
        """``input`` [T, B], ``hidden`` one pair [1, B, D] for each layer: log probabilities
        [T, B, V] and the new state."""
        x, states = self.drop(self.encoder(input)), []
        for layer, state in zip(self.layers, hidden, strict=True):
            x, state = layer(x, state)
            x = self.drop(x)
            states.append(state)
        return F.log_softmax(self.decoder(x), dim=-1), states

    def init_hidden(self, B: int):
        def zeros():
            return self.encoder.weight.new_zeros(1, B, self.encoder.embedding_dim)

        return [(zeros(), zeros()) for _ in self.layers]


def load(args):
    """The words of the training and the validation text."""
    if args.data is None:
        words = re.findall(r"\w+|[^\w\s]", "\n".join(documentation().values()))[: args.words]
        cut = len(words) * 9 // 10
        return words[:cut], words[cut:]
    files = [Path(args.data) / f"wiki.{part}.tokens" for part in ("train", "valid")]
    return [file.read_text("utf-8").replace("\n", " <eos> ").split() for file in files]


def batchify(numbers, B):
    """The text in B columns, [T, B]."""
    n = len(numbers) // B
    return numbers[: n * B].view(B, n).t().contiguous()


def get_batch(source, i, bptt):
    n = min(bptt, len(source) - 1 - i)
    return source[i : i + n], source[i + 1 : i + 1 + n]


def repackage_hidden(hidden):
    """Detach the state from its history."""
    return [(h.detach(), c.detach()) for h, c in hidden]


def nll(output, targets):
    return F.nll_loss(output.flatten(0, 1), targets.flatten())


def validation_loss(model, batch):
    data, targets = batch
    output, _ = model(data, model.init_hidden(data.shape[1]))
    return nll(output, targets)


def train(args, model, optimizer, source, epoch, run):
    model.train()
    B, stretches = source.shape[1], -(-(len(source) - 1) // args.bptt)
    total, hidden = 0.0, model.init_hidden(B)
    for k, i in enumerate(range(0, len(source) - 1, args.bptt)):
        data, targets = get_batch(source, i, args.bptt)
        optimizer.zero_grad()
        hidden = repackage_hidden(hidden)
        with run.batch(torch.arange(B) * stretches + k):
            output, hidden = model(data, hidden)
            loss = nll(output, targets)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch} training perplexity {math.exp(total / stretches):.1f}")


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="WikiText-2's folder; without it: Python's documentation")
    parser.add_argument("--words", type=int, default=60_000, help="of the documentation")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--lr", type=float, default=20.0)
    parser.add_argument("--clip", type=float, default=0.25)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--bptt", type=int, default=35)
    parser.add_argument("--seed", type=int, default=1111)
    parser.add_argument("--out")
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text, held_out = load(args)
    counts = Counter(text)
    vocabulary = {w: i for i, w in enumerate(["<unk>", *(w for w in counts if counts[w] > 1)])}
    numbers, held = (
        torch.tensor([vocabulary.get(w, 0) for w in part], device=device)
        for part in (text, held_out)
    )
    source, held = batchify(numbers, args.batch_size), batchify(held, 10)
    validation = [get_batch(held, i, args.bptt) for i in range(0, len(held) - 1, args.bptt)]
    model = RNNModel(len(vocabulary), args.width, args.layers, args.dropout).to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr)
    with inrun.watch(
        model, optimizer, validation=validation, loss=validation_loss, batch_dim=1,
        max_norm=args.clip, point="gauss2", out=args.out, audit_every=10,
    ) as run:  # fmt: skip
        for epoch in range(1, args.epochs + 1):
            train(args, model, optimizer, source, epoch, run)
            optimizer.param_groups[0]["lr"] /= 2
    show(run)
    n = -(-(len(source) - 1) // args.bptt)
    best = run.values().nlargest(1, "value")["id"].item()
    words = text[best // n * len(source) + best % n * args.bptt :][: args.bptt]
    print(f"most helpful: {' '.join(words)}")
    return run


if __name__ == "__main__":
    main()
