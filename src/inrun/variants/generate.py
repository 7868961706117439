"""Asks for variants of each source until K per category pass the filter.

Every reply is in the cache before it is looked at, and every finished source in the output. The
output is a function of cache and settings: asked again, it comes out the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inrun import __version__
from inrun.variants.client import Endpoint, NoReplyError, Reply
from inrun.variants.files import Source, VariantsError
from inrun.variants.filters import WINDOWS, Window, select, sift
from inrun.variants.prompts import CATEGORIES, SYSTEM, USER, user_prompt, wanted
from inrun.variants.store import Output, Replies
from inrun.variants.tokens import Names, forbidden_tokens

if TYPE_CHECKING:
    import openai

GIVE_UP = 3  # sources in a row without a reply: it is the endpoint, not the source
RESERVED = ("model", "messages", "stream", "n")


@dataclass(frozen=True)
class Settings:
    """What the variants depend on besides the replies."""

    k: int = 3  # the paper's K_each
    seed: int = 0
    windows: Mapping[str, Window] = field(default_factory=lambda: dict(WINDOWS))
    request: Mapping[str, Any] = field(default_factory=dict)  # more fields; None leaves one out

    def __post_init__(self) -> None:
        if taken := sorted({*self.request} & {*RESERVED}):
            raise VariantsError(f"--request must not set {', '.join(taken)}: inrun does")

    def fields(self, turn: int) -> dict[str, Any]:
        """The request besides model and messages; each turn has a seed of its own."""
        ours = {"response_format": {"type": "json_object"}, "seed": self.seed + turn}
        return {name: x for name, x in {**ours, **self.request}.items() if x is not None}

    def record(self, model: str, names: Names) -> dict[str, Any]:
        """For the file beside the output."""
        return {
            "inrun": __version__,
            "model": model,
            "k": self.k,
            "seed": self.seed,
            "windows": self.windows,
            "request": self.request,
            "entities": names.label,
            "prompt": _digest([SYSTEM, USER]),
        }


@dataclass
class Outcome:
    """What became of the sources."""

    sources: int = 0
    there: int = 0  # complete in the output before
    complete: int = 0  # now
    short: list[dict[str, Any]] = field(default_factory=list)  # id, lacks: category → how many
    failed: list[dict[str, Any]] = field(default_factory=list)  # id, why no reply came
    asked: int = 0
    cached: int = 0
    problems: Counter[str] = field(default_factory=Counter)  # of replies
    dropped: Counter[str] = field(default_factory=Counter)  # candidates, by reason

    @property
    def done(self) -> int:
        return self.there + self.complete + len(self.short) + len(self.failed)


def generate(
    sources: Sequence[Source],
    output: Path,
    endpoint: Endpoint,
    names: Names,
    settings: Settings | None = None,
    *,
    cache: Path | None = None,
    rounds: int = 5,
    workers: int = 4,
    keep_short: bool = False,
    watch: Callable[[Outcome], object] | None = None,
) -> Outcome:
    """Write K variants per category of each source to ``output``; complete sources are skipped.

    While too few candidates of a source pass the filter it is asked about again, ``rounds`` times
    at most. Then it is short, and left out of the output unless ``keep_short``. ``watch`` is called
    at the start and after each source.
    """
    settings = settings or Settings()
    known = settings.record(endpoint.model, names)
    cache = cache or output.with_suffix(".cache.jsonl")
    outcome = Outcome(len(sources))
    with closing(Output(output, known)) as written, closing(Replies(cache)) as replies:
        written.belongs(sources)
        todo = [s for s in sources if not _complete(written.rows.get(s.id), settings.k)]
        outcome.there = len(sources) - len(todo)
        if watch:
            watch(outcome)
        job = _Job(endpoint, names, settings, rounds, keep_short, written, replies, outcome, watch)
        safe = (
            f"What is complete is in {output}, every reply in {cache}: run the same command again "
            "and it goes on from there"
        )
        try:
            asyncio.run(job.run(todo, workers))
        except VariantsError as error:
            raise VariantsError(f"{error}. {safe}") from error
        except KeyboardInterrupt:
            raise KeyboardInterrupt(safe) from None
        place = {s.id: i for i, s in enumerate(sources)}
        for found in (outcome.short, outcome.failed):
            found.sort(key=lambda x: place[x["id"]])
        written.sort(sources)
    return outcome


def _complete(row: Mapping[str, Any] | None, k: int) -> bool:
    return row is not None and all(len(row[c]) == wanted(c, k) for c in CATEGORIES)


def _digest(x: Any) -> str:
    return hashlib.sha256(json.dumps(x, sort_keys=True).encode()).hexdigest()


@dataclass
class _Job:
    endpoint: Endpoint
    names: Names
    settings: Settings
    rounds: int
    keep_short: bool
    output: Output
    replies: Replies
    outcome: Outcome
    watch: Callable[[Outcome], object] | None
    failed_in_a_row: int = 0

    async def run(self, todo: Sequence[Source], workers: int) -> None:
        if not todo:
            return
        waiting = iter(todo)

        async def work() -> None:
            for source in waiting:  # shared: each worker takes the next one
                await self.source(client, source)
                if self.watch:
                    self.watch(self.outcome)

        async with self.endpoint.connect() as client:
            tasks = [asyncio.create_task(work()) for _ in range(workers)]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def source(self, client: openai.AsyncOpenAI, source: Source) -> None:
        k, outcome = self.settings.k, self.outcome
        forbidden = forbidden_tokens(source.z_star, self.names)
        prompt = user_prompt(source.z_star, forbidden.values(), k)
        candidates: dict[str, list[Any]] = {c: [] for c in CATEGORIES}
        for turn in range(self.rounds):
            try:
                reply = await self.reply(client, source, prompt, turn)
            except NoReplyError as why:
                self.no_reply(source, str(why))
                return
            found, problem = reply.read()
            if problem:
                outcome.problems[problem] += 1
            for category, texts in found.items():
                candidates[category] += texts
            sifted = sift(source.z_star, candidates, forbidden, self.settings.windows)
            if not sifted.missing(k):
                break
        outcome.dropped.update(d.reason for d in sifted.dropped)
        missing = sifted.missing(k)
        if missing:
            outcome.short.append({"id": source.id, "lacks": missing})
        else:
            outcome.complete += 1
        if not missing or self.keep_short:
            self.output.add(source._asdict() | select(sifted, k, self.settings.seed))

    async def reply(
        self, client: openai.AsyncOpenAI, source: Source, prompt: str, turn: int
    ) -> Reply:
        """From the cache, or asked and put there."""
        model, fields = self.endpoint.model, self.settings.fields(turn)
        key = _digest([source.z_star, SYSTEM, prompt, model, fields, turn])
        reply = self.replies.get(key)
        if reply is not None:
            self.outcome.cached += 1
            return reply
        self.outcome.asked += 1
        reply = await self.endpoint.ask(client, prompt, fields)
        self.failed_in_a_row = 0
        return self.replies.add(key, reply, model=model, turn=turn, z_star=source.z_star)

    def no_reply(self, source: Source, why: str) -> None:
        self.outcome.failed.append({"id": source.id, "why": why})
        self.failed_in_a_row += 1
        if self.failed_in_a_row == GIVE_UP:
            raise VariantsError(f"no reply for {GIVE_UP} sources in a row: {why}")
