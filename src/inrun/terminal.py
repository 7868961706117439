"""What a command says: JSON for machines or text for people."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def say(as_json: bool, data: Any, shown: Any) -> None:
    """Print for machines or for people."""
    if as_json:
        typer.echo(json.dumps(clean(data), ensure_ascii=False, indent=1))
    else:
        Console().print(shown, highlight=False, markup=False, soft_wrap=isinstance(shown, str))


def clean(x: Any) -> Any:
    """JSON has no NaN: null instead."""
    if isinstance(x, dict):
        return {k: clean(v) for k, v in x.items()}
    if isinstance(x, list):
        return [clean(v) for v in x]
    if isinstance(x, np.generic):
        return clean(x.item())
    return None if isinstance(x, float) and not math.isfinite(x) else x
