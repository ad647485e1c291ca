"""Which codec shortens a step, by how much, and whether any does.

Predicted steps come from :mod:`horovod_gradcomp.core.cost`; payloads are what each codec declares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Callable

from ..core import hierarchical, twophase
from ..core.codec import Shape, adds_halves
from ..core.cost import Cost, Job, Speed, cheapest, dense, exchanges
from ..core.links import Cluster
from ..core.options import Options
from ..core.settings import Settings, assemble, parse_codec
from .costs import Costs

WORTH_IT = 1.05
"""How many times as fast a step must be for compression to be advised: predictions are rough."""

ALIKE = 1.1
"""Steps up to so many times the shortest count as short; of these the mildest codec is chosen."""

NEARLY = 1.01
"""Errors up to so many times the least count as equal: of these the shortest step is chosen."""

_BANDWIDTHS = (1e4, 1e14)
"""Bytes a second between which the limit of what pays is looked for."""

_COMPUTES = (1e-4, 1e4)
"""Seconds of computing between which the limit of what pays is looked for."""

_LAYERS = 1024
"""Layers of one shape whose payload is worked out; more of them send so many times as much."""


@dataclass(frozen=True)
class Row:
    """One codec with its best exchange."""

    codec: str
    cost: Cost
    payload: int
    """Bytes a rank."""

    speedup: float
    """Uncompressed step over this one."""

    error: float | None
    measured: bool
    """Whether encoding and decoding are counted; without them the step is a lower bound."""


@dataclass(frozen=True)
class Question:
    """What is to be advised on.

    Attributes:
        params: Float32 parameters.
        layer: Shape that they are taken to have; low-rank codecs depend on it.
        tensors: The real shapes, where they are known.
        cluster: Ranks and links.
        compute: Seconds of forward and backward pass of a step.
        overlap: Whether anything is sent before backward ends.
        framework: Whose operations encode: "torch" or "tensorflow".
        device: "cpu" or "cuda".
        copy: Bytes a second of a plain copy; None takes that of the measured rows.
        exchange: The only exchange to consider for gathered payloads; None for all.
    """

    params: int
    cluster: Cluster
    layer: Shape = (1024, 1024)
    tensors: tuple[Shape, ...] = ()
    compute: float = 0.0
    overlap: bool = True
    framework: str = "torch"
    device: str = "cpu"
    copy: float | None = None
    exchange: str | None = None

    @property
    def raw(self) -> int:
        """Bytes of gradients a rank."""
        return 4 * self.params

    @property
    def parts(self) -> list[tuple[Sequence[Shape], float]]:
        """Shapes, and how many times they are there: layers, and one more of what is left."""
        if self.tensors:
            return [(self.tensors, 1.0)]
        whole, left = divmod(self.params, math.prod(self.layer))
        rest: list[Shape] = [(left,)] if left else []
        if whole <= _LAYERS:
            return [([self.layer] * whole + rest, 1.0)]
        layers = ([self.layer] * _LAYERS, whole / _LAYERS)
        return [layers, (rest, 1.0)] if rest else [layers]

    def job(self, payload: float, rounds: int = 1) -> Job:
        """Return the work of a step; backward is taken to be two thirds of the computing."""
        return Job(
            raw=self.raw,
            payload=payload,
            forward=self.compute / 3,
            backward=self.compute * 2 / 3,
            buckets=math.ceil(self.raw / Options.bucket_bytes),
            rounds=rounds,
            overlap=self.overlap,
        )

    def dense(self) -> Cost:
        """Return the uncompressed step."""
        return dense(self.job(self.raw), self.cluster)

    def at(self, bandwidth: float) -> Question:
        """Return the same question with another bandwidth between hosts."""
        between = replace(self.cluster.between, bandwidth=bandwidth)
        plain = replace(self.cluster, gathers=None, short_gathers=None, halves=None)
        return replace(self, cluster=replace(plain, between=between))


@dataclass(frozen=True)
class Candidate:
    """A codec with what it sends and costs."""

    form: str
    settings: Settings
    payload: int
    rounds: int
    speed: Speed | None
    error: float | None


@dataclass(frozen=True)
class Advice:
    """The answer.

    Attributes:
        dense: The uncompressed step.
        rows: All codecs, the shortest step first.
        chosen: The one to use; None: do not compress, or it cannot be told.
        reason: Why, in a few sentences.
        pays_below: Bytes a second between hosts below which compression pays; None if at none or
            at all that were tried, or if it cannot be told.
    """

    dense: Cost
    rows: list[Row]
    chosen: Row | None
    reason: str
    pays_below: float | None


def candidates(question: Question, forms: Sequence[str], costs: Costs) -> list[Candidate]:
    """Return what there is to choose from; what changes nothing is left out.

    Raises:
        SettingsError: A form is no codec.
    """
    out, parts = [], question.parts
    for form in forms:
        settings = assemble(parse_codec(form), Options())
        codec = settings.codec
        if codec.identity:
            continue
        found = costs.of(form, question.framework, question.device)
        copy = found and (question.copy or found.copy)
        out.append(
            Candidate(
                form=form,
                settings=settings,
                payload=round(sum(n * codec.wire_bytes(*shapes) for shapes, n in parts)),
                rounds=max(codec.round_count(shapes) for shapes, _ in parts),
                speed=found.speed(copy) if found and copy else None,
                error=found.error if found else None,
            )
        )
    return out


def allowed(question: Question, settings: Settings) -> tuple[str, ...]:
    """Return the exchanges that the framework has for a codec with its memory on this cluster."""
    misfit = {"two_phase": twophase.misfit, "hierarchical": hierarchical.misfit}
    return tuple(
        name
        for name in exchanges(settings.codec.combine, question.cluster)
        if name not in misfit
        or (question.framework == "torch" and not misfit[name](settings.codec, settings.memory))
    )


def rows(question: Question, among: Sequence[Candidate]) -> list[Row]:
    """Return each candidate with its best exchange, the shortest step first."""
    plain, out = question.dense(), []
    for each in among:
        names = allowed(question, each.settings)
        if question.exchange in names:
            names = (question.exchange,)
        halves = adds_halves(each.settings.codec)
        job = replace(question.job(each.payload, each.rounds), halves=halves)
        best = cheapest(names, job, question.cluster, each.speed or Speed())
        speedup = plain.step / best.step if best.step else 1.0
        measured = each.speed is not None
        out.append(Row(each.form, best, each.payload, speedup, each.error, measured))
    return sorted(out, key=lambda row: row.cost.step)


def advise(question: Question, among: Sequence[Candidate]) -> Advice:
    """Return what to do."""
    plain, every = question.dense(), rows(question, among)
    if question.cluster.ranks == 1:
        return Advice(plain, every, None, "One worker: Horovod reduces nothing.", None)
    if not every:
        return Advice(plain, every, None, "Do not compress: no codec was named.", None)
    limit = _pays_below(question, among)
    best = every[0]
    if best.speedup < WORTH_IT:
        return Advice(plain, every, None, _against(question, plain, best), limit)
    if not best.measured:
        return Advice(plain, every, None, _unknown(question, plain, every), None)
    pays = [row for row in every if row.speedup >= WORTH_IT and row.measured]
    short = [row for row in pays if row.cost.step <= ALIKE * best.cost.step]
    chosen, mildest = _mildest(short), _mildest(pays)
    reason = _in_favour(question, plain, short, chosen)
    if mildest is not chosen:
        reason += (
            f" The mildest that still pays is {mildest.codec} over {mildest.cost.exchange}: "
            f"{ms(mildest.cost.step)}, {100 * (mildest.error or 0):.3g} %."
        )
    return Advice(plain, every, chosen, reason, limit)


def _mildest(among: Sequence[Row]) -> Row:
    """Return the row that leaves out least; the first of those that leave out nearly as little."""
    least = min(row.error or 0.0 for row in among)
    return next(row for row in among if (row.error or 0.0) <= NEARLY * least)


def _pays_below(question: Question, among: Sequence[Candidate]) -> float | None:
    return _limit(_BANDWIDTHS, lambda bandwidth: rows(question.at(bandwidth), among))


def pays_until(question: Question, among: Sequence[Candidate]) -> float | None:
    """Return the seconds of computing in a step above which nothing pays, on these links."""
    return _limit(_COMPUTES, lambda compute: rows(replace(question, compute=compute), among))


def _limit(between: tuple[float, float], found: Callable[[float], list[Row]]) -> float | None:
    """Return up to where compression pays; None where it does everywhere, or nowhere."""

    def pays(at: float) -> bool:
        return found(at)[0].speedup >= WORTH_IT

    low, high = between
    if not pays(low) or pays(high):
        return None
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


def _waits(question: Question, plain: Cost) -> str:
    waits = plain.step - question.compute
    return f"Uncompressed, a step takes {ms(plain.step)}, of which {ms(waits)} wait for the network"


def _against(question: Question, plain: Cost, best: Row) -> str:
    gain = "no faster" if best.speedup <= 1 else f"{100 * (best.speedup - 1):.1f} % faster"
    least = f"{100 * (WORTH_IT - 1):.0f} %"
    even = "" if best.measured else ", even if encoding cost nothing"
    return (
        f"Do not compress. {_waits(question, plain)}. The best, {best.codec}, would take "
        f"{ms(best.cost.step)}{even}: {gain}, and less than {least} is not worth what "
        "compression does to accuracy."
    )


def _in_favour(question: Question, plain: Cost, short: Sequence[Row], chosen: Row) -> str:
    text = (
        f"{_waits(question, plain)}. With {chosen.codec} over {chosen.cost.exchange} it takes "
        f"{ms(chosen.cost.step)}: {chosen.speedup:.2f} times as fast."
    )
    if short[0] is chosen:
        return f"{text} Nothing is faster."
    return text + (
        f" Of {len(short)} codecs within {100 * (ALIKE - 1):.0f} % of the fastest "
        f"({short[0].codec}, {ms(short[0].cost.step)}), one encoding with it leaves out least: "
        f"{100 * (chosen.error or 0):.3g} % of the gradient's norm."
    )


def _unknown(question: Question, plain: Cost, every: Sequence[Row]) -> str:
    best = every[0]
    budget = plain.step / WORTH_IT - best.cost.step
    return (
        "It cannot be told: what encoding and decoding cost here was not measured. At best, with "
        f"{best.codec}, a step takes {ms(best.cost.step)} instead of {ms(plain.step)}; it pays if "
        f"both together take less than {ms(budget)}. Measure with 'gradcomp bench codecs "
        f"--framework {question.framework} --device {question.device} --json FILE' on such a "
        "machine and give --costs FILE."
    )


def ms(seconds: float) -> str:
    """Return a time in milliseconds."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{1e3 * seconds:,.0f} ms"
