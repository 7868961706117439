"""The records of a batch for optimizers that step one after the other (``step_together=False``).

Each optimizer scores the records of its own parameters, at its own step. By then another may have
moved weights that records depend on (an operation that is replayed, a tensor made of parameters of
both), so such records are formed before anything moves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from inrun.capture.micro_batch import OWN_NUMBERS, MicroBatch
from inrun.gradients import Dense, Record
from inrun.gradients.nodes import Node, pull_back
from inrun.gradients.owned import Owned


def part(micro: MicroBatch, names: Collection[str]) -> MicroBatch:
    """The micro-batch with the records of these parameters alone."""
    own = {n: list(r) for n, r in micro.records.items() if not n.roots.isdisjoint(names)}
    return replace(micro, _records=own, uses=[], _awaited=[], _by_root=None, _counted=0)


@torch.no_grad()
def frozen(micro: MicroBatch, params: Mapping[str, Tensor]) -> MicroBatch:
    """The micro-batch with records of ``params`` that do not depend on weights, which are still as
    they were in the forward pass: where they do, the gradients of the examples are formed."""
    found: dict[Node, list[Record]] = {}
    own = {n.name: n for n in micro.records if n.param is not None}
    device = next(iter(params.values())).device  # records may be offloaded
    formed: dict[str, Tensor] = {}
    for node, records in micro.nodes(params.keys()):
        for record in records:
            if node.param is not None and _holds_its_numbers(record):
                found.setdefault(node, []).append(record)
                continue
            for k, rows in pull_back(node, record.to(device).rows()).items():
                if k in params:
                    formed[k] = _added(formed.get(k), rows)
    for k, rows in formed.items():
        node = own.get(k) or Node.parameter(k, params[k])
        found.setdefault(node, []).append(Dense(rows))
    return replace(micro, _records=found, uses=[], _awaited=[], fixed=[], _by_root=None, _counted=0)


def _holds_its_numbers(record: Record) -> bool:
    inner = record.record if isinstance(record, Owned) else record
    return isinstance(inner, OWN_NUMBERS)


def _added(a: Tensor | None, b: Tensor) -> Tensor:
    """The sum of gradients [rows, *W]; one of them may have a row more, for nobody's part."""
    if a is None:
        return b
    short, long = sorted((a, b), key=len)
    total = long.clone()
    total[: len(short)] += short
    return total
