"""How commands print: JSON for machines or text for people.

Ids, names and texts come from a ledger or a dataset, perhaps somebody else's. A terminal shows them
and never obeys them: every command prints through ``safe``, ``as_json`` and ``console``.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from typing import Annotated, Any, ParamSpec

import numpy as np
import typer
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.segment import Segment

from inrun.ledger import LedgerError

P = ParamSpec("P")

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")]

# What a terminal obeys or hides instead of showing it: control characters (C0, DEL, C1), the marks
# that turn the direction of writing, line separators, invisible characters, halves of surrogates.
_STEERING = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def safe(text: object, limit: int | None = None) -> str:
    r"""Text on one line that a terminal shows as it is: ESC becomes the four characters \x1b."""
    cut = str(text) if limit is None else _cut(str(text), limit)
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), cut)


def excerpt(text: object, limit: int = 200) -> str:
    """The beginning of a longer text on one line, safe; line breaks become spaces."""
    return safe(" ".join(str(text)[: 10 * limit].split()), limit)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def as_json(data: Any) -> str:
    """JSON that a terminal does not obey either: what is escaped reads back as it was."""
    text = json.dumps(clean(data), ensure_ascii=False, indent=1)
    return _STEERING.sub(lambda c: "\n" if c[0] == "\n" else json.dumps(c[0])[1:-1], text)


def clean(x: Any) -> Any:
    """Returns a copy with null in the place of NaN, which JSON does not have."""
    if isinstance(x, dict):
        return {k: clean(v) for k, v in x.items()}
    if isinstance(x, list):
        return [clean(v) for v in x]
    if isinstance(x, np.generic):
        return clean(x.item())
    return None if isinstance(x, float) and not math.isfinite(x) else x


def say(json_wanted: bool, data: Any, shown: Any) -> None:
    """Print for machines or for people."""
    if json_wanted:
        typer.echo(as_json(data))
    else:
        console().print(shown, markup=False, soft_wrap=isinstance(shown, str))


def console(stderr: bool = False) -> Console:
    """Returns the console of commands; it escapes control characters even without ``safe``."""
    made = Console(stderr=stderr, highlight=False)
    made.push_render_hook(_Inert())
    return made


def plain_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Bad input is one line on stderr and exit code 2, never a traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except (LedgerError, ValueError, OSError) as error:
            typer.echo("inrun: " + safe(" ".join(str(error).split())), err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo("inrun: stopped", err=True)
            raise typer.Exit(130) from None

    return run


class _Inert(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_InertPart(part) for part in renderables]


class _InertPart:
    """Wraps something to print and makes its text safe. Colours are styles, not text: they stay."""

    def __init__(self, part: ConsoleRenderable) -> None:
        self.part = part

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.part, options):
            if segment.control:
                yield segment
            else:
                lines = segment.text.split("\n")
                yield Segment("\n".join(map(safe, lines)), segment.style)
