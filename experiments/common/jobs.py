"""Parts side by side: each is a process of its own, begun when those it builds on are done."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from experiments.common.parts import ROOT, Experiment, finished


@dataclass
class Jobs:
    """Some parts of an experiment on their way; what they print is in ``out/logs``."""

    experiment: Experiment
    size: str
    out: Path
    options: list[str]  # of the command line, for each part
    show: Callable[[str], None]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def run(self, names: Iterable[str], jobs: int) -> None:
        """All that are missing, so many at a time. What fails does not stop the others, but for
        those that build on it."""
        parts = self.experiment.parts(self.size)
        needs = {name: self.experiment.needs(parts[name]) for name in names}

        def done(name: str) -> bool:
            return finished(self.out, name, parts[name]) is not None

        waiting = [name for name in needs if not done(name)]
        try:
            while waiting or self.running:
                self._collect()
                ready = [name for name in waiting if all(map(done, needs[name]))]
                for name in ready[: jobs - len(self.running)]:
                    waiting.remove(name)
                    self._begin(name, jobs)
                if waiting and not self.running:
                    break  # they build on what failed, or was not asked for
                time.sleep(0.2)
        finally:
            for process in self.running.values():
                process.terminate()
        wrong = [f"part {name} failed ({self._last_words(name)})" for name in self.failed]
        if waiting:
            missing = sorted({n for name in waiting for n in needs[name] if not done(n)})
            wrong.append(f"not begun: {', '.join(waiting)}, which need {', '.join(missing)}")
        if wrong:
            raise ValueError("; ".join(wrong))

    def _begin(self, name: str, jobs: int) -> None:
        self.show(f"{name} …")
        log = self._log(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "experiments", self.experiment.name, "--size", self.size]
        command += ["--out", str(self.out.resolve()), "--only", name, *self.options]
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
        paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        environment = threads | dict(os.environ) | {"PYTHONPATH": os.pathsep.join(paths)}
        with log.open("wb") as file:
            self.running[name] = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment
            )

    def _collect(self) -> None:
        for name, process in list(self.running.items()):
            if (code := process.poll()) is None:
                continue
            del self.running[name]
            self.show(f"{name}: {'done' if code == 0 else f'failed with code {code}'}")
            if code != 0:
                self.failed.append(name)

    def _log(self, name: str) -> Path:
        return self.out / "logs" / f"{name}.log"

    def _last_words(self, name: str) -> str:
        said = self._log(name).read_text("utf-8", "replace").split("\n")
        return f"{next((x for x in said[::-1] if x.strip()), '')}: see {self._log(name)}"
