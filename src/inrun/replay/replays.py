"""``watch(..., cuda_graphs=True)``: the passes of equal batches are recorded and replayed.

With small batches the host is the limit: it takes longer to launch the kernels of a pass than the
GPU to run them. A replay is one launch. It repeats kernels and not the Python that chose them, so
it stands in for the model's forward pass only where that would do the same again:

1. the pass has a plan (capture/plan.py): it was equal in several batches, its sites and its
   autograd graph, and nothing in it depends on the content of a tensor. Now and then the model runs
   as usual, and is compared with its plan again;
2. shapes, types and other arguments are those of the plan, and so are training flags, autocast and
   settings of torch;
3. the loop calls the model once in a batch, and goes backward once, from the same outputs;
4. nothing that can be reached from the model and from the code of its classes has changed
   (around.py): attributes, containers, hooks, global variables; nor where tensors are;
5. a trial shows that the pass does not wait for the device, draws no random numbers on the host,
   writes to no parameter and has gradients for nothing but the model's parameters;
6. before its first use, and once in 64 times, a replay is the same as the model's own pass
   (proof.py).

What Python does in a forward pass beside calling torch (a print, a counter somewhere else) does not
happen in a replay: that is why it must be asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from inrun.capture.capture import Capture
from inrun.capture.micro_batch import MicroBatch
from inrun.capture.plan import Plan
from inrun.replay.around import Around, without
from inrun.replay.proof import difference
from inrun.replay.recorder import Recorder, recorder_for
from inrun.replay.recording import Recording, Replay, look_at
from inrun.replay.trees import CannotRecordError, swapped, tensors_of
from inrun.tensors.autocast import as_it_was

USUAL = 8  # passes of a plan before it is recorded
AGAIN = 64  # replays after which the next is proven again
_MOST = 4  # recordings: each has memory of its own
_CHANGES = 3  # of the model, after which nothing is recorded any more
_log = logging.getLogger("inrun")


class Replays:
    """Stands in for the model's forward pass.

    Args:
        recorder: makes recordings.
        waiting: are batches waiting for the optimizer's step? Then their records are in the memory
            that a replay would write to.

    Attributes:
        count: passes that were replayed.
        why: why a pass was not recorded, the last one, or why none is any more; None: all were.
        paused: the model's own passes are needed.
    """

    def __init__(self, capture: Capture, recorder: Recorder, waiting: Callable[[], bool]) -> None:
        self.capture, self.model = capture, capture.model
        self._recorder, self._waiting = recorder, waiting
        self._seen: dict[Plan, frozenset[int]] = {}  # outputs that received a gradient
        self._known: dict[Plan, Recording] = {}
        self._refused: set[Plan] = set()
        self._around: Around | None = None  # the passes so far
        self._changes = self.count = 0
        self.why: str | None = None
        self._stopped = self.paused = False
        self._instead = self._forward  # one object: it is compared by identity
        self._open: MicroBatch | None = None
        self._own: Any = None  # the model's own forward
        self._held: Any = None  # the same, where it is an attribute of the model itself
        self._calls = 0  # of the model in this batch
        self._chosen: Plan | None = None  # of the call under way
        self._looked: tuple[Plan, set[int]] | None = None  # in this batch: see ``_look``
        self._used: Replay | None = None  # in this batch
        capture.aside.instead = self.take

    @contextmanager
    def batch(self, micro: MicroBatch) -> Iterator[None]:
        """While a batch is open, the model's forward is ours."""
        self._used = self._looked = None
        if self._stopped or self.paused:
            yield
            return
        own = vars(self.model)
        self._held, self._own = own.get("forward"), self.model.forward
        self._open, self._calls, self._chosen = micro, 0, None
        own["forward"] = self._instead
        try:
            yield
        finally:
            del own["forward"]
            if self._held is not None:
                own["forward"] = self._held
            self._open = self._own = self._held = None

    def take(self, plan: Plan) -> bool:
        """A call of the model begins that would follow this plan: will it be recorded, replayed or
        looked at?"""
        if self._open is None or self._calls or self._stopped or not self._as_before():
            return False
        found = self._known.get(plan)
        if found is None and plan.passes < USUAL:
            return False
        if plan in self._refused or (found is None and len(self._known) >= _MOST):
            return False
        if self._waiting():
            self._stop("gradients are accumulated over several batches")
            return False
        if not all(x.free for x in self._known.values()):  # they share memory
            return False
        self._chosen = plan
        return True

    def collect(self, micro: MicroBatch) -> None:
        """The batch is over: what its replay has left belongs to it."""
        if self._used is not None and self._used.done:
            self._used.recording.hand_over(micro)
        if self._looked is not None and micro.backward:
            plan, arrived = self._looked
            self._seen[plan] = frozenset(arrived)
            if micro.again:
                self._refuse(plan, "the loop goes backward several times, or keeps the graph")
        self._used = self._looked = None

    def close(self) -> None:
        """Let go of all memory."""
        self._known.clear()
        self._around = self._chosen = self._used = None
        self._stopped, self.why = True, self.why or "the run is closed"

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of the model's own."""
        plan, self._chosen = self._chosen, None
        if self._open is None:
            return self._own(*args, **kwargs)
        if torch.is_grad_enabled() and not self.capture.is_paused:
            self._calls += 1
            if self._calls == 2:
                self._stop("the loop calls the model several times in a batch")
        if plan is None or self._stopped:
            return self._own(*args, **kwargs)
        if plan not in self._seen:
            return self._look(plan, self._own(*args, **kwargs))
        recording = self._known.get(plan)
        if recording is None:
            self._record(plan, args, kwargs)
        elif recording.fits(args, kwargs) and self._prove(plan, recording, args, kwargs):
            return self._replay(recording, args, kwargs)
        return self._own(*args, **kwargs)

    def _replay(self, recording: Recording, args: Any, kwargs: Any) -> Any:
        assert self._open is not None
        begun = partial(self.capture.keeper.first_gradient, self._open)
        with self.capture.paused():
            out, tensors, self._used = recording.run(args, kwargs, begun)
        for t, origin in zip(tensors, recording.origins, strict=True):
            self.capture.provenance.note(t, origin)
        self._open.met, self._open.autocast = True, recording.micro.autocast
        self.count += 1
        return out

    def _look(self, plan: Plan, out: Any) -> Any:
        """Note to which of the outputs of a pass gradients come from outside."""
        arrived, provenance = set[int](), self.capture.provenance
        outs = tensors_of(out)
        at = [i for i, t in enumerate(outs) if t.requires_grad]
        after = list(outs)
        with self.capture.paused():
            for i, t in zip(at, look_at(arrived, at, [outs[i] for i in at]), strict=True):
                provenance.note(t, provenance.find(outs[i]))
                after[i] = t
        self._looked = plan, arrived
        return swapped(out, outs, after)

    def _record(self, plan: Plan, args: Any, kwargs: Any) -> None:
        given = tensors_of((args, kwargs))
        device, around = self._recorder.device, self._around
        assert around is not None
        if any(t.device != device for t in (*given, *self.model.parameters())):
            return self._refuse(plan, f"not everything is on {device}")
        if any(t.requires_grad for t in given):
            return self._refuse(plan, "its inputs have gradients")

        def made() -> None:
            under = self.capture.interceptor.backward_under[device.type]
            self._known[plan] = Recording(
                self.model, args, kwargs, self.capture, self._recorder, around.tensors,
                self._seen[plan], partial(as_it_was, under),
            )  # fmt: skip

        if (why := self._failure(made)) is not None:
            self._recorder.settle()
            self._refuse(plan, why)
        return None

    def _prove(self, plan: Plan, recording: Recording, args: Any, kwargs: Any) -> bool:
        """Is a replay the model's own pass? Asked before the first, and now and then."""
        recording.uses += 1
        if recording.uses % AGAIN != 1:
            return True
        modules, taps = self.capture.provenance.modules, self.capture.taps
        exact = self._recorder.exact and not taps.fast

        def proven() -> None:
            found = difference(recording, args, kwargs, modules, exact)
            if found is not None:
                raise CannotRecordError(f"a replay is not the model's own pass: {found} differ")

        if (why := self._failure(proven)) is not None:
            self._recorder.settle()
            self._refuse(plan, why)
            return False
        return True

    def _failure(self, work: Callable[[], None]) -> str | None:
        """Do it, unseen by the capture; returns why it failed."""
        try:
            with self.capture.paused():
                work()
        except torch.cuda.OutOfMemoryError:
            return "there is not enough memory"
        except CannotRecordError as error:
            return str(error)
        except Exception as error:  # the pass itself raises it again if it is an error of its own
            return f"{type(error).__name__}: {error}"
        return None

    def _refuse(self, plan: Plan, why: str) -> None:
        self._known.pop(plan, None)
        self._refused.add(plan)
        self.why = why
        _log.info("a pass of the model is not recorded as a CUDA graph: %s", why)

    def _stop(self, why: str) -> None:
        self._stopped, self.why = True, why
        self._known.clear()
        _log.info("passes of the model are no longer recorded as CUDA graphs: %s", why)

    def _as_before(self) -> bool:
        """Is all around the passes as it was at the last one?"""
        modules = self.capture.provenance.modules
        with without(self.model):
            if self._around is not None and self._around.same(modules, self._held):
                return True
            self._known.clear()
            self._seen.clear()
            self._changes += self._around is not None
            self._around = Around(self.model, modules, self._held, self._recorder.device)
        if self._around.why is not None:
            self._stop(self._around.why)
        elif self._changes > _CHANGES:
            self._stop("what the model holds has changed again and again")
        return False


def make_replays(capture: Capture, waiting: Callable[[], bool]) -> Replays | None:
    """None where nothing can be recorded: on a CPU."""
    device = next(iter(capture.params.values())).device
    recorder = recorder_for(device)
    if recorder is None:
        return None
    capture.replays = found = Replays(capture, recorder, waiting)
    return found
