"""The clock of costs: seconds on the wall, or with ``--cpu-seconds`` this process's seconds of CPU
time, for a machine that does other work as well."""

import time
from collections.abc import Callable

now: Callable[[], float] = time.perf_counter
