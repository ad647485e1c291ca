"""``Compression.auto()``: the settings of an optimizer are chosen in its first steps.

Gradients travel as they are while a few steps are timed. At the end of one of them, where every
rank is at the same place of its program, the candidates are rehearsed, and all ranks draw the same
conclusion from what all have measured. The chosen one then has to prove itself in real steps; if
these are no shorter, what it has not sent so far is sent, and gradients travel as they are again.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Iterable, Mapping
from typing import Any, Callable, NamedTuple

import horovod.torch as hvd

from ..core.auto import NONE, Pace, choose, fitting, hopeless
from ..core.environment import elastic
from ..core.errors import BindingError, explain
from . import probe
from .agreement import gathered
from .binding import Binding
from .rehearsal import load, rehearse

_WARM, _TIMED = 2, 4
"""Steps that do not count, and that do: of dense ones, and of the chosen candidate's."""

_log = logging.getLogger("horovod_gradcomp")


class Timed(NamedTuple):
    """When what happened in a step, in seconds."""

    before: float
    backward: float
    step: float


class Tuner:
    """Chooses the settings of one optimizer.

    Args:
        binding: Of the optimizer, with dense settings that say what is chosen from.
        groups: The optimizer's parameter groups.

    Raises:
        BindingError: Elastic training, where ranks may come that know of no choice.
    """

    def __init__(self, binding: Binding, groups: Iterable[Mapping[str, Any]]) -> None:
        if elastic():
            refuse_elastic()
        assert binding.settings.auto is not None
        self._binding, self._dense = binding, binding.settings
        self._budget = binding.settings.auto.budget
        self._among = fitting(binding.settings.auto, groups)
        self._every = dict(binding.settings.auto.candidates)
        self.choice: str | None = None
        """What is in use: the form of a candidate, "none", or None as long as nothing is chosen."""
        self._stage: Callable[[bool], None] | None = self._pace
        self._told: dict[str, Any] = {}
        self._times: list[Timed] = []
        self._ended: float | None = None
        self._first = self._last = 0.0

    @property
    def settled(self) -> bool:
        """Whether the choice will not change."""
        return self._stage is None

    def arrived(self, *, first: bool) -> None:
        """Take note of a gradient."""
        if self._stage is not None:
            self._last = time.perf_counter()
            self._first = self._last if first else self._first

    def ended(self, *, bad: bool) -> None:
        """Take note of the end of a step; all ranks are at the end of the same one."""
        if self._stage is None:
            return
        now = time.perf_counter()
        if self._ended is not None:
            timed = (self._first - self._ended, self._last - self._first, now - self._ended)
            self._times.append(Timed(*timed))
        self._stage(bad)
        self._ended = time.perf_counter()

    # The stages -------------------------------------------------------------------------------
    def _pace(self, bad: bool) -> None:
        if len(self._times) < _WARM + _TIMED - 1:  # the first step has no beginning
            return
        begun = time.perf_counter()
        if self._size < 2 or not self._among:
            self._settle(NONE, "there is nothing to choose from")
            return
        pace = Pace(**self._agreed()._asdict())
        self._told = {"dense_step_ms": 1e3 * pace.step, "candidates": {}}
        self._say(f"a step takes {_ms(pace.step)} uncompressed; trying {len(self._among)} codecs")
        choice = choose(pace, self._steps(pace, begun))
        self._told["seconds"] = time.perf_counter() - begun
        if choice == NONE:
            self._settle(NONE, f"no codec is worth it, a step takes {_ms(pace.step)}")
            return
        self._take_up(choice)
        expected = _ms(self._told["candidates"][choice]["step_ms"] / 1e3)
        if self._among[choice].phases[-1].first > self._binding.step:
            self._settle(choice, f"{expected} a step instead of {_ms(pace.step)} once it begins")
            return
        self._say(f"{choice} should take {expected} a step; trying it")
        self._stage = self._trial

    def _trial(self, bad: bool) -> None:
        if len(self._times) < _WARM + _TIMED:
            return
        step, dense = self._agreed().step, self._told["dense_step_ms"] / 1e3
        self._told["trial_step_ms"] = 1e3 * step
        if step <= dense:
            self._settle(str(self.choice), f"{_ms(step)} a step instead of {_ms(dense)}")
        elif self._binding.remembers:
            for unit in self._binding.units:
                unit.let_go(self._binding.step)
            self._stage = self._flush
        else:
            self._flush(bad=False)

    def _flush(self, bad: bool) -> None:
        if bad:  # nothing was sent
            return
        took, dense = self._told["trial_step_ms"] / 1e3, self._told["dense_step_ms"] / 1e3
        failed = self.choice
        self._binding.take_up(self._dense)
        self._settle(NONE, f"{failed} took {_ms(took)} a step, uncompressed it was {_ms(dense)}")

    # What they measure ------------------------------------------------------------------------
    def _steps(self, pace: Pace, begun: float) -> dict[str, float]:
        """Return the predicted seconds of a step by candidate, the mildest first."""
        binding = self._binding
        name = f"{binding.prefix}.auto"
        device = binding.params[0].device
        link = probe.ring(name, binding.process_set, device, work=False)
        self._told["bytes_a_second"] = link.bandwidth
        loads = {
            form: load(settings, binding.names, binding.params)
            for form, settings in self._among.items()
        }
        steps: dict[str, float] = {}
        for number, form in enumerate(sorted(loads, key=lambda form: loads[form].payload)):
            found, row = loads[form], self._told["candidates"].setdefault(form, {})
            row["payload_bytes"] = found.payload
            best = min([pace.step, *steps.values()])
            if not found.tried or hopeless(best, pace, found.payload, link.bandwidth):
                row["left_out"] = "its bytes alone take longer" if found.tried else "no tensor"
                continue
            spent = probe.slowest(time.perf_counter() - begun, f"{name}.spent", binding.process_set)
            if spent + found.payload / found.scale / link.bandwidth > self._budget:
                row["left_out"] = "no time left"
                continue
            tried = rehearse(binding, self._among[form], found, f".auto{number}")
            steps[form] = tried.step(pace)
            row.update(
                encode_ms=1e3 * tried.encode,
                transfer_ms=1e3 * tried.transfer,
                decode_ms=1e3 * tried.decode,
                step_ms=1e3 * steps[form],
            )
            self._say(f"{form} should take {_ms(steps[form])} a step", quiet=True)
        return {form: steps[form] for form in self._among if form in steps}

    def _agreed(self) -> Timed:
        """Return the pace of the slowest rank, from the medians of all."""
        mine = [statistics.median(column) for column in zip(*self._times[-_TIMED:])]
        name = f"{self._binding.prefix}.auto.pace"
        every = [Timed(*one) for one in gathered(mine, name, self._binding.process_set)]
        slow = max(every, key=lambda one: one.before + one.backward)
        return slow._replace(step=max(one.step for one in every))

    # The choice -------------------------------------------------------------------------------
    def resume(self, choice: str | None) -> None:
        """Go on with the choice of a run that was saved; None: it had not chosen yet."""
        if choice is None:
            return
        if choice != (self.choice or NONE):
            self._binding.take_up(self._dense if choice == NONE else self._every[choice])
        self.choice, self._stage = choice, None

    def saved(self) -> dict[str, Any]:
        """Return what :meth:`resume` needs, and whose it is."""
        return {"choice": self.choice}

    def report(self) -> dict[str, Any]:
        """Return the choice and what it rests on."""
        return {"choice": self.choice, "settled": self.settled, **self._told}

    def _take_up(self, choice: str) -> None:
        self._binding.take_up(self._among[choice])
        self.choice, self._times = choice, []

    def _settle(self, choice: str, why: str) -> None:
        self.choice, self._stage, self._times = choice, None, []
        self._say(f"chose {choice}: {why}", loud=True)

    @property
    def _size(self) -> int:
        return len(self._binding.process_set.ranks or range(hvd.size()))

    def _say(self, text: str, *, loud: bool = False, quiet: bool = False) -> None:
        """Log on the first rank: the choice as a warning, so that it shows by default."""
        if hvd.rank() == (self._binding.process_set.ranks or [0])[0]:
            level = logging.WARNING if loud else logging.DEBUG if quiet else logging.INFO
            _log.log(level, "horovod_gradcomp auto, %s: %s", self._binding.prefix, text)


def refuse_elastic() -> None:
    """Raise in elastic training.

    Raises:
        BindingError: Always.
    """
    raise BindingError(
        explain(
            got="Compression.auto in elastic training",
            expected="a codec",
            why="ranks that come later have not taken part in the choice",
            do="name what it chose in a run without elastic, as its log tells",
        )
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g} ms" if seconds < 1 else f"{1e3 * seconds:,.0f} ms"
