"""Arrays from a .npz file that may be somebody else's: no pickle, and nothing larger than the file.

``numpy.load`` believes what a member's header says about its size, and unpacks what is compressed.
"""

from __future__ import annotations

import math
import zipfile
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]


def read_arrays(file: Path) -> Arrays:
    """All arrays of a file that ``numpy.savez`` wrote; ValueError: why it is none."""
    try:
        with zipfile.ZipFile(file) as source:
            members = source.infolist()
            _check(members, file.stat().st_size)
            return {m.filename.removesuffix(".npy"): _array(source, m) for m in members}
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise ValueError(" ".join(str(error).split())) from error


def _check(members: list[zipfile.ZipInfo], size: int) -> None:
    """Members are as they are in memory, and together no larger than the file."""
    for m in members:
        if m.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{m.filename:.80} is compressed: it may be of any size")
    if len({m.filename for m in members}) < len(members):
        raise ValueError("a name occurs twice")
    if sum(m.file_size for m in members) > size:
        raise ValueError("its parts are larger than the file")


def _array(source: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with source.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        if version != (1, 0):
            raise ValueError(f"{member.filename:.80} is not as numpy.savez writes it")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
        data = stream.read()
    if dtype.hasobject or dtype.itemsize * math.prod(shape) != len(data):
        raise ValueError(f"{member.filename:.80} does not hold what its header says")
    return np.frombuffer(bytearray(data), dtype).reshape(shape, order="F" if fortran else "C")
