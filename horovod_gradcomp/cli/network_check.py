"""What the cost model predicts for the rows of ``gradcomp bench network``, beside what they took.

Nothing is taken from the row itself: links are those that the same run measured before the first
turn, and the speed of a copy is the median of all turns; computing is what a step without any
exchange took, and codecs cost what is known of them, as in ``gradcomp advise``. The model knows of
no other work on the machine, so what is predicted is the quietest turn of each system, and the same
turn tells what computing takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..core import policy
from ..core.codec import Combine, Shape, adds_halves
from ..core.cost import Cost, Job, Speed, cost
from ..core.links import Cluster, Link
from ..core.options import Options
from ..core.plan import buckets
from ..core.route import Team, route
from ..core.settings import Settings, assemble, parse_codec
from .costs import Costs
from .network_worker import ALONE, AUTO, DDP, HOROVOD, OVER

Row = dict[str, Any]

NEAR = 0.2
"""A prediction that is off by no more than this part of what was measured is near."""

_MEASURED = "gathers", "short_gathers", "halves"
"""Ways in which links are used, beside the plain one."""

_DDP_BUCKET = 25 * 2**20
_PRIVATE = DDP[2]
"""A system whose workings the model does not know."""


class Checked(NamedTuple):
    """A row with what was predicted for it, and its quietest turn; times in milliseconds.

    ``crowded`` tells that there were more ranks than processors.
    """

    row: Row
    cost: Cost
    step_ms: float
    crowded: bool

    @property
    def measured_ms(self) -> float:
        """Of a step of the quietest turn."""
        return float(self.row["step_ms_least"])

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.step_ms / self.measured_ms

    @property
    def near(self) -> bool:
        """Whether it is within :data:`NEAR`."""
        return abs(self.ratio - 1) <= NEAR


def check(content: dict[str, Any], costs: Costs) -> list[Checked]:
    """Return every row that can be predicted with its prediction."""
    out = []
    for facts in content["facts"]:
        mine = [row for row in content["rows"] if _alike(row, facts)]
        (alone,) = (row for row in mine if row["system"] == ALONE)
        for row in mine:
            name = row["choice"] if row["system"] == AUTO else row["system"]
            found = predict(name, facts, alone, costs)
            if found is not None:
                out.append(Checked(row, found, 1e3 * found.step, facts["crowded"]))
    return out


def predict(system: str, facts: dict[str, Any], alone: Row, costs: Costs) -> Cost | None:
    """Return what a step takes; None where the system or its codec is not known.

    Args:
        system: Name of a row, or the form of a codec.
        facts: Of its run.
        alone: The row of steps without an exchange.
        costs: Of codecs.
    """
    shapes = [tuple(shape) for shape in facts["shapes"]]
    link = Link(**facts["link"])
    others = {key: Link(**facts[key]) for key in _MEASURED if key in facts}
    cluster = Cluster(facts["ranks"], 1, link, link, facts["spare"], copy=facts["copy"], **others)
    plain = HOROVOD[0] if system == "none" else system
    if plain in (ALONE, _PRIVATE):
        return None
    backward = alone["backward_ms"] / 1e3
    forward = alone["step_ms_least"] / 1e3 - backward
    computed = Job(raw=0.0, payload=0.0, forward=forward, backward=backward)
    raw = 4.0 * sum(map(math.prod, shapes))
    if plain in (*HOROVOD, *DDP):
        narrow = plain.endswith("fp16")
        speed = _speed("fp16", facts, costs) if narrow else Speed()
        pieces = len(shapes) if plain in HOROVOD else 1 + math.ceil(raw / _DDP_BUCKET)
        sent = raw / 2 if narrow else raw
        halves = narrow and plain in HOROVOD
        job = replace(computed, raw=raw, payload=sent, buckets=pieces, halves=halves)
        return cost("allreduce", job, cluster, speed)
    form, _, exchange = plain.removeprefix("gradcomp ").partition(OVER)
    settings = assemble(parse_codec(form), Options(exchange=exchange or "auto"))
    speed = _speed(form, facts, costs)
    return _ours(settings, shapes, cluster, speed, computed)


def _ours(
    settings: Settings,
    shapes: Sequence[Shape],
    cluster: Cluster,
    speed: Speed,
    computed: Job,
) -> Cost:
    codec = settings.codec
    packed = [s for s in shapes if policy.choose(settings, "", s) is not None]
    rest = 4.0 * sum(math.prod(s) for s in shapes if policy.choose(settings, "", s) is None)
    entries = [(str(i), shape) for i, shape in enumerate(reversed(packed))]
    laid = buckets(entries, settings.options.bucket_bytes, together=not settings.by_horovod)
    job = replace(
        computed,
        raw=4.0 * sum(map(math.prod, packed)),
        payload=codec.wire_bytes(*packed) + rest,
        buckets=len(laid),
        rounds=codec.round_count(packed),
    )
    if codec.combine is not Combine.GATHER:
        return cost("allreduce", replace(job, halves=adds_halves(codec)), cluster, speed)
    taken = route(
        settings.options.exchange, codec, settings.memory, packed, Team(cluster.ranks, 0)
    ).exchange
    return cost({"whole": "allgather"}.get(taken, taken), job, cluster, speed)


def _speed(form: str, facts: dict[str, Any], costs: Costs) -> Speed:
    found = costs.of(form, "torch", "cpu")
    return found.speed(facts["copy"]) if found else Speed()


def _alike(row: Row, facts: Row) -> bool:
    return all(row[key] == facts[key] for key in ("model", "bandwidth", "hosts"))


# What is shown ---------------------------------------------------------------------------------
WHICH = ("model", "hosts", "link", "system")
HEADS = ("encode", "decode", "sending", "step", "measured", "ratio")


def which(one: Checked) -> tuple[str, ...]:
    """Return which row it is, as :data:`WHICH` says."""
    row = one.row
    return row["model"], str(row["hosts"]), row["bandwidth"], row["system"]


def cells(one: Checked) -> Iterator[str]:
    """Yield what a table shows of a prediction, as :data:`HEADS` says."""
    for seconds in (one.cost.encode, one.cost.decode, one.cost.transfer):
        yield f"{1e3 * seconds:,.0f}"
    yield f"{one.step_ms:,.0f}"
    yield f"{one.measured_ms:,.0f}"
    yield f"{one.ratio:.2f}" + ("" if one.near else " *")


def summary(checked: Sequence[Checked]) -> str:
    """Return how many predictions are near, apart where ranks crowd the processors."""
    parts = []
    for crowded in (False, True):
        mine = [one for one in checked if one.crowded is crowded]
        near = sum(one.near for one in mine)
        if mine:
            where = (
                "with more ranks than processors" if crowded else "with a processor for each rank"
            )
            share = 100 * near / len(mine)
            parts.append(f"{near} of {len(mine)} predictions ({share:.0f} %) {where}")
    return (
        f"{' and '.join(parts)} are within {100 * NEAR:.0f} % of what was measured; * marks others"
    )


def table(content: dict[str, Any], costs: Costs) -> Table:
    """Return a table of every prediction."""
    checked = check(content, costs)
    out = Table(
        title="predicted and measured, ms",
        caption=summary(checked),
        box=SIMPLE_HEAD,
        show_edge=False,
    )
    for head in WHICH:
        out.add_column(head, no_wrap=True)
    for head in HEADS:
        out.add_column(head, justify="right", no_wrap=True)
    for one in checked:
        out.add_row(*which(one), *cells(one))
    return out
