"""The curvature of a run on disk, for questions that come later: curvature.npz in the ledger's
folder. Plain arrays and a JSON text; nothing in it is ever executed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from inrun.curvature.curvature import Curvature
from inrun.curvature.layer import KEPT, Layer
from inrun.curvature.places import Place
from inrun.ledger import LedgerError, files
from inrun.ledger.arrays import read_arrays

FILE = "curvature.npz"


def save(curvature: Curvature, folder: Path, run: str) -> None:
    """Write the file anew. ``run`` is the ledger's."""
    about: dict[str, Any] = {"run": run, "step": curvature.step, "layers": []}
    arrays: dict[str, np.ndarray] = {}
    for name, layer in curvature.layers.items():
        if curvature.known(name) is None:
            continue
        i = len(about["layers"])
        own = vars(layer.place) | {"shape": list(layer.shape), "seen": layer.seen}
        about["layers"].append(own)
        for key in KEPT:
            if (x := getattr(layer, key)) is not None:
                arrays[f"{i}.{key}"] = x.detach().cpu().numpy()
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)

    def write(file: IO[bytes]) -> None:
        np.savez(file, **arrays)  # type: ignore[arg-type]

    with files.disk(folder, "its curvature is not saved"):
        files.replace(folder / FILE, write)


def read(folder: Path, run: str | None) -> Curvature:
    """The curvature that the run of this ledger has saved."""
    file = folder / FILE
    files.stay_inside(file, folder)
    if not file.is_file():
        raise LedgerError(
            f"{folder} has no {FILE}: its run did not use estimator='influence', or was neither "
            "closed nor checkpointed (run.close(), run.state_dict())"
        )
    try:
        arrays = read_arrays(file)
        about = json.loads(arrays["about"].tobytes())
        found = Curvature(step=int(about["step"]))
        for i, entry in enumerate(about["layers"]):
            own = {k: arrays[f"{i}.{k}"] for k in KEPT if f"{i}.{k}" in arrays}
            found.add(_layer(entry, own))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise LedgerError(f"{file} is damaged: {why}. Train again, or restore a copy") from error
    if run is not None and about.get("run") != run:
        raise LedgerError(
            f"{file} belongs to an earlier run in this folder, not to the one that it holds now"
        )
    return found


def _layer(entry: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Layer:
    """A layer from its arrays, whose sizes must be those that its shape asks for."""
    shape = torch.Size([int(n) for n in entry["shape"]])
    layer = Layer(_place(entry), shape, seen=int(entry["seen"]))
    O, I = layer.matrix or (0, 0)  # noqa: E741
    whole = layer.matrix or tuple(layer.shape)
    sizes = {"U_S": (O, O), "U_A": (I, I), "spectrum": whole, "tau": (),
             "left": whole if layer.matrix is None else (O,), "right": (I,)}  # fmt: skip
    for key, size in sizes.items():
        x = arrays.get(key)
        if x is None and (key.startswith("U") or (key == "right" and layer.matrix is None)):
            continue
        if x is None or x.shape != size or x.dtype not in (np.float32, np.float64):
            raise ValueError(f"{key} of {str(entry['name'])!r:.80} has another size or type")
        if not np.isfinite(x).all() or (not key.startswith("U") and (x < 0).any()):
            raise ValueError(f"{key} of {str(entry['name'])!r:.80} has numbers that no run leaves")
        setattr(layer, key, torch.from_numpy(x))
    return layer


def _place(entry: Mapping[str, Any]) -> Place:
    bias = entry["bias"]
    return Place(
        str(entry["name"]), None if bias is None else str(bias), bool(entry["transposed"]),
        bool(entry["table"]),
    )  # fmt: skip


def state_of(curvature: Curvature) -> dict[str, Any]:
    """For a checkpoint of the training loop: all of it, as tensors."""
    layers = {
        name: {
            k: x.detach().clone() if isinstance(x, Tensor) else x
            for k, x in vars(own).items()
            if not k.startswith("_") and k != "place"
        }
        | {"shape": list(own.shape), "place": vars(own.place)}
        for name, own in curvature.layers.items()
    }
    return {"step": curvature.step, "seen": curvature.seen, "layers": layers}


def load_state(
    curvature: Curvature, state: Mapping[str, Any], params: Mapping[str, Tensor]
) -> None:
    """Continue from a checkpoint."""
    curvature.step, curvature.seen = int(state["step"]), int(state["seen"])
    curvature.layers.clear()
    for name, own in state["layers"].items():
        device = params[name].device if name in params else None
        layer = Layer(_place(own["place"]), torch.Size(own["shape"]))
        curvature.add(layer)
        for key, x in own.items():
            if key not in ("shape", "place"):
                setattr(layer, key, x.to(device) if isinstance(x, Tensor) else x)
