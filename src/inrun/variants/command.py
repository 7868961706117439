"""``inrun variants``: its options, what was found, how it looks, the exit code."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.table import Table

from inrun.console import Json, safe, say
from inrun.output import check_output
from inrun.variants import show
from inrun.variants.check import check
from inrun.variants.client import Endpoint
from inrun.variants.files import Source, VariantsError, read_sources
from inrun.variants.filters import draw, parse_windows
from inrun.variants.generate import Settings, generate
from inrun.variants.tokens import find_names


class Found(NamedTuple):
    facts: dict[str, Any]
    shown: Table
    code: int  # 1: some sources are short, had no reply or hold variants that do not pass


Sources = Annotated[
    Path, typer.Argument(help=".txt (one per line, id = line from 0) or .jsonl (id, text).")
]
Output = Annotated[
    Path, typer.Option("-o", "--output", help="Grows by one line per source; resumes.")
]
BaseUrl = Annotated[
    str | None,
    typer.Option(envvar="OPENAI_BASE_URL", help="OpenAI-compatible endpoint; OpenAI if none."),
]
Entities = Annotated[
    str, typer.Option(help="auto (spaCy if installed), capitals, or a spaCy pipeline.")
]
KeepShort = Annotated[
    bool, typer.Option("--keep-short", help="Write sources that lack variants, too.")
]
Window = Annotated[
    list[str] | None,
    typer.Option(metavar="CATEGORY=LOW:HIGH", help="Jaccard overlap with the source."),
]
Rounds = Annotated[
    int, typer.Option(min=1, help="Most requests per source, while too few variants pass.")
]
Retries = Annotated[int, typer.Option(min=0, help="After rate limits, timeouts and server errors.")]


def variants(
    sources: Sources,
    output: Output = Path("variants.jsonl"),
    model: Annotated[str | None, typer.Option(help="As the endpoint calls it.")] = None,
    base_url: BaseUrl = None,
    key_env: Annotated[
        str, typer.Option(help="Environment variable that holds the key.")
    ] = "OPENAI_API_KEY",
    k: Annotated[int, typer.Option("-k", min=1, help="Variants per category.")] = 3,
    sample: Annotated[
        int | None, typer.Option(min=1, help="Only so many sources, drawn by --seed.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of every draw, and sent with the requests.")] = 0,
    entities: Entities = "auto",
    window: Window = None,
    rounds: Rounds = 5,
    workers: Annotated[int, typer.Option(min=1, help="Requests under way at once.")] = 4,
    timeout: Annotated[
        float, typer.Option(min=0.01, help="Seconds per request, reply included.")
    ] = 120,
    retries: Retries = 5,
    request: Annotated[
        str, typer.Option(metavar="JSON", help="More request fields; null leaves one out.")
    ] = "{}",
    cache: Annotated[
        Path | None, typer.Option(help="Every reply; OUTPUT with .cache.jsonl by default.")
    ] = None,
    keep_short: KeepShort = False,
    check: Annotated[
        bool, typer.Option("--check", help="SOURCES holds variants: which pass the filter?")
    ] = False,
    as_json: Json = False,
) -> None:
    """Ask a language model for variants of your examples: the queries of the paper's Table 2.

    For each source: a partial copy, paraphrases, substantial rewritings and sentences on a similar
    topic, by the paper's prompts, kept if they pass its lexical filter. Safe to stop and to run
    again: nothing is asked twice. Exit code 1: some sources are short or had no reply.
    """
    if check:
        found = check_variants(sources, entities, window or (), k)
    else:
        if model is None:
            raise ValueError("--model is missing: the name of a model that the endpoint serves")
        try:
            found = make_variants(
                sources, output, Endpoint(model, base_url, key_env, timeout, retries),
                k=k, seed=seed, sample=sample, entities=entities, window=window or (),
                request=request, cache=cache, rounds=rounds, workers=workers, keep_short=keep_short,
            )  # fmt: skip
        except KeyboardInterrupt as stop:
            typer.echo(f"inrun: stopped. {safe(stop)}", err=True)
            raise typer.Exit(130) from None
    say(as_json, found.facts, found.shown)
    raise typer.Exit(found.code)


def check_variants(file: Path, entities: str, window: Iterable[str], k: int) -> Found:
    report = check(file, find_names(entities), parse_windows(window), k)
    return Found(
        report, show.checked(report, file), int(bool(report["dropped"] or report["short"]))
    )


def make_variants(
    sources: Path,
    output: Path,
    endpoint: Endpoint,
    *,
    k: int,
    seed: int,
    sample: int | None,
    entities: str,
    window: Iterable[str],
    request: str,
    **how: Any,
) -> Found:
    """``how``: the keyword arguments of ``generate``."""
    settings = Settings(k, seed, parse_windows(window), _object(request))
    _check_files(sources, output, how.get("cache"))
    texts = _sample(read_sources(sources), sample, seed)
    names = find_names(entities)
    with show.progress(endpoint.model) as watch:
        outcome = generate(texts, output, endpoint, names, settings, watch=watch, **how)
    facts = vars(outcome) | {"output": str(output), "entities": names.label}
    shown = show.summary(outcome, output, k, names.label)
    return Found(facts, shown, int(bool(outcome.short or outcome.failed)))


def _check_files(sources: Path, output: Path, cache: Path | None) -> None:
    """No file is used twice, none of a ledger is touched; that they are ours is seen on opening."""
    named = {"-o": output, "--cache": cache or output.with_suffix(".cache.jsonl")}
    for option, file in named.items():
        others = [sources, *(other for name, other in named.items() if name != option)]
        others += [output.with_suffix(".settings.json")]
        check_output(file, inputs=others, force=True, option=option)
    check_output(output.with_suffix(".settings.json"), inputs=[sources], force=True)


def _sample(sources: list[Source], n: int | None, seed: int) -> list[Source]:
    if n is None:
        return sources
    drawn = {*draw((repr(s.id) for s in sources), n, seed)}
    return [s for s in sources if repr(s.id) in drawn]


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise VariantsError(f"--request {text}: write a JSON object, as '{{\"temperature\": 0.7}}'")
    return found
