"""What ``Compression.auto()`` chooses from, and by which rule.

In the first steps of a run gradients travel as they are, and the steps are timed. Then every
candidate is rehearsed: the gradients' exchange is run with it, beside the training, and timed. From
both follows what a step would take with each (:meth:`Rehearsal.step`, by the pipeline of
:mod:`.cost`), and from what all ranks have measured every rank draws the same conclusion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import fit
from .codec import Combine, check_range
from .cost import pipeline
from .errors import SettingsError, explain
from .options import Options
from .settings import Auto, Settings, assemble, make, parse_codec
from .stringform import split

CANDIDATES = (
    *("fp16", "linear", "qsgd:bits=8", "linear:bits=4"),
    *("acp", "powersgd", "topk", "topk:ratio=0.001"),
)
"""What is chosen from where nothing is named, the mildest first."""

NONE = "none"
"""The choice not to compress."""

WORTH_IT = 1.05
"""How many times as fast a step must be for a codec to be chosen."""

ALIKE = 1.1
"""Steps up to so many times the shortest count as short; of these the first candidate is chosen."""

_REFUSED = ("clip_norm", "clip_value")


@dataclass(frozen=True)
class Pace:
    """A step in which gradients travel as they are, in seconds.

    Attributes:
        step: All of it.
        before: From the end of the last step to the first gradient.
        backward: From the first gradient to the last.
    """

    step: float
    before: float
    backward: float


@dataclass(frozen=True)
class Rehearsal:
    """One exchange of all gradients with a candidate while nothing else is computed, in seconds.

    Attributes:
        encode: Until everything has been encoded.
        decode: What decoding takes, without waiting.
        whole: All of it.
        pieces: Messages in which gradients are encoded and sent one after the other.
    """

    encode: float
    decode: float
    whole: float
    pieces: int

    @property
    def transfer(self) -> float:
        """What messages take: the most that explains the whole as a pipeline of equal pieces."""
        most = self.whole - self.decode - self.encode / self.pieces
        last = self.pieces * (self.whole - self.decode - self.encode)
        return max(0.0, min(most, last))

    def step(self, pace: Pace) -> float:
        """Return the seconds of a training step: encoding takes turns with backward."""
        ended = pipeline(pace.backward + self.encode, self.transfer, self.pieces)
        return pace.before + ended + self.decode


def hopeless(best: float, pace: Pace, payload: float, bandwidth: float) -> bool:
    """Return whether a candidate's payload alone takes longer than another's step.

    Args:
        best: Seconds of the shortest step so far.
        pace: Of dense steps.
        payload: Bytes of a rank, each of which crosses the slowest link at least once.
        bandwidth: Of this link, bytes a second.
    """
    return pace.before + payload / bandwidth > best


def choose(pace: Pace, steps: Mapping[str, float]) -> str:
    """Return the form of the chosen candidate, or :data:`NONE`.

    Args:
        pace: Of dense steps.
        steps: Seconds of a step by candidate, the mildest first.
    """
    if not steps or pace.step < WORTH_IT * min(steps.values()):
        return NONE
    most = min(ALIKE * min(steps.values()), pace.step / WORTH_IT)
    return next(form for form, step in steps.items() if step <= most)


def settings_of(candidates: Any, budget: Any, given: Mapping[str, Any]) -> Settings:
    """Return checked settings of ``Compression.auto``: dense, with what is chosen from.

    Args:
        candidates: String forms, the mildest first; None for :data:`CANDIDATES`.
        budget: Seconds that rehearsals may take.
        given: Keywords of :class:`~.options.Options`, for all candidates.

    Raises:
        SettingsError: One of these is not allowed.
    """
    check_range("auto", "budget", budget, 0.0, 3600.0)
    forms = CANDIDATES if candidates is None else candidates
    texts = isinstance(forms, Sequence) and not isinstance(forms, str)
    if not texts or not forms or not all(isinstance(form, str) for form in forms):
        raise SettingsError(
            explain(
                got=f"auto(candidates={candidates!r})",
                expected="a list of string forms such as ['fp16', 'topk:ratio=0.01']",
            )
        )
    for name in _REFUSED:
        if given.get(name) is not None:
            raise SettingsError(
                explain(
                    got=f"auto({name}={given[name]!r})",
                    expected="no limit",
                    why="gradients that travel as they are in the first steps are not cut",
                    do="cut them in the training script, alike for all choices",
                )
            )
    known = [field.name for field in dataclasses.fields(Options) if field.name not in _REFUSED]
    for name in given:
        if name not in known:
            allowed = ", ".join(["candidates", "budget", *known])
            raise SettingsError(
                "auto: " + explain(got=f"keyword {name!r}", expected=f"one of {allowed}")
            )
    Options(**given)
    among = {}
    for form in forms:
        name, own = split(form)
        try:
            among[form] = make(name, {**given, **own})
        except SettingsError as error:
            raise SettingsError(f"auto, candidate {form!r}: {error}") from None
    dense = assemble(parse_codec(NONE), Options())
    return dataclasses.replace(dense, auto=Auto(tuple(among.items()), float(budget)))


def fitting(auto: Auto, groups: Iterable[Mapping[str, Any]]) -> dict[str, Settings]:
    """Return the candidates that nothing speaks against with an optimizer, by their forms.

    Args:
        auto: What there is.
        groups: The optimizer's parameter groups; empty where there is none.
    """
    groups = list(groups)
    return {
        form: settings
        for form, settings in auto.candidates
        if not settings.identity and not fit.doubts(settings, groups)
    }


def pieces(settings: Settings, count: int) -> int:
    """Return in how many messages ``count`` units of a candidate travel during backward."""
    return 1 if settings.codec.combine is Combine.ROUNDS else max(1, count)
