"""The files that ``inrun variants`` keeps: all replies, and the variants of finished sources."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from inrun.output import write_output
from inrun.variants.client import Reply
from inrun.variants.files import Journal, Source, VariantsError
from inrun.variants.prompts import CATEGORIES


class Replies:
    """The cache: replies by the hash of what was asked, in a file that only grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, Reply] = {}
        self._journal = Journal(path, self._read)

    def _read(self, rows: list[dict[str, Any]]) -> None:
        try:
            for row in rows:
                self._known.setdefault(row["key"], Reply(*(row[name] for name in Reply._fields)))
        except (KeyError, TypeError) as error:
            why = f"a line has no {error}" if isinstance(error, KeyError) else str(error)
            raise VariantsError(
                f"{self.path} is not a cache of inrun variants ({why}): name another file with "
                "--cache"
            ) from None

    def get(self, key: str) -> Reply | None:
        return self._known.get(key)

    def add(self, key: str, reply: Reply, **about: Any) -> Reply:
        """The first reply to a question is the one that counts, now and when it is read again."""
        if key not in self._known:
            self._journal.append({"key": key, **about, **reply._asdict()})
            self._known[key] = reply
        return self._known[key]

    def close(self) -> None:
        self._journal.close()


class Output:
    """The file of variants, by source. The settings that it was made with lie beside it."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        if path.suffix != ".jsonl":
            raise VariantsError(f"{path}: variants are written as .jsonl")
        self.rows: dict[int | str, dict[str, Any]] = {}
        self._settings = path.with_suffix(".settings.json")
        self._ours = json.loads(json.dumps(settings))
        self._journal = Journal(path, self._read)
        try:
            if not self.rows:
                write_output(self._settings, json.dumps(self._ours, indent=1).encode())
        except BaseException:
            self.close()
            raise

    def _read(self, rows: list[dict[str, Any]]) -> None:
        """The rows of an earlier run with these settings; nothing of anybody else is touched."""
        self._same_settings(bool(rows))
        for row in rows:
            key = row.get("id")
            if not {"id", "z_star", *CATEGORIES} <= {*row} or not isinstance(key, int | str):
                raise VariantsError(
                    f"{self.path}: a line lacks id, z_star or a category: remove it"
                )
            self.rows[key] = row  # the last one counts

    def _same_settings(self, made: bool) -> None:
        """``made``: the output holds variants, so their settings must be known and the same."""
        known, ours, file = _object(self._settings), self._ours, self._settings
        if known is None and file.exists():
            raise VariantsError(
                f"{file} is not a settings file of inrun variants: choose another file with -o"
            )
        if known is None and self.path.exists() and self.path.stat().st_size:
            raise VariantsError(
                f"{self.path} was not written by inrun variants ({file.name} is missing): choose "
                "another file with -o"
            )
        if made and known is not None:
            names = sorted(n for n in {*known, *ours} if known.get(n) != ours.get(n))
            if other := [n for n in names if n != "inrun"]:  # another version may go on
                then = "; ".join(f"{n} was {known.get(n)}, is {ours.get(n)}" for n in other)
                raise VariantsError(
                    f"{self.path} holds variants made with other settings ({then}): choose "
                    "another file with -o, or use those settings"
                )

    def belongs(self, sources: Iterable[Source]) -> None:
        for source in sources:
            row = self.rows.get(source.id)
            if row is not None and row["z_star"] != source.z_star:
                raise VariantsError(
                    f"{self.path} has variants of another text under the id {source.id!r}: choose "
                    "another file with -o"
                )

    def add(self, row: dict[str, Any]) -> None:
        if self.rows.get(row["id"]) != row:
            self._journal.append(row)
            self.rows[row["id"]] = row

    def sort(self, sources: Iterable[Source]) -> None:
        """One line per source, in their order; sources of earlier runs after them."""
        keys = dict.fromkeys([*(s.id for s in sources), *self.rows])
        self._journal.rewrite(self.rows[key] for key in keys if key in self.rows)

    def close(self) -> None:
        self._journal.close()


def _object(file: Path) -> dict[str, Any] | None:
    """The settings in a file that we wrote, None if there are none."""
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and "prompt" in found and "inrun" in found else None
