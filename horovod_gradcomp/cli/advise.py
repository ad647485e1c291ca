"""``gradcomp advise``: whether to compress, and how, before a cluster is paid for."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..core.codec import Combine, Shape
from ..core.cost import EXCHANGES, Cost, exchanges
from ..core.errors import SettingsError, explain
from ..core.links import Cluster, Link
from . import units
from .advice import Advice, Candidate, Question, Row, candidates, ms, pays_until
from .advice import advise as answer
from .bench import FORMS
from .costs import Costs, copy_speed, load
from .here import look
from .models import MODELS, shapes_of


def advise(
    params: Optional[str] = typer.Option(  # noqa: UP045 - typer reads this on Python 3.9
        None, help="Parameters of the model: 100e6, 25_000_000, 1.5B."
    ),
    model: Optional[str] = typer.Option(  # noqa: UP045
        None, help=f"In place of --params, the shapes of one of {', '.join(MODELS)}."
    ),
    workers: Optional[int] = typer.Option(  # noqa: UP045
        None, min=1, help="Ranks in all."
    ),
    bandwidth: Optional[str] = typer.Option(  # noqa: UP045
        None, help="Of a host's network interface, each way: 10gbit, 100Mb/s, 1.25GB/s."
    ),
    measure: bool = typer.Option(
        False,
        help="Measure links and copies here in place of --workers, --per-node, --bandwidth and the "
        "like; run it on every rank, by horovodrun.",
    ),
    latency: str = typer.Option("50us", help="Of a message between hosts: 50us, 0.2ms."),
    per_node: int = typer.Option(1, min=1, help="Ranks a host; they share its interface."),
    inside_bandwidth: str = typer.Option("100gbit", help="Between two ranks of a host."),
    inside_latency: str = typer.Option("10us", help="Of a message inside a host."),
    compute_ms: float = typer.Option(
        0.0, min=0.0, help="Forward and backward pass of a step on one rank; hides the exchange."
    ),
    overlap: bool = typer.Option(True, help="Whether gradients are sent while backward goes on."),
    device: str = typer.Option("cpu", help="Where codecs run: cpu or gpu."),
    framework: str = typer.Option("torch", help="torch or tensorflow."),
    codec: Optional[list[str]] = typer.Option(  # noqa: UP045
        None, help="Only this one, by its string form; several times for several."
    ),
    exchange: Optional[str] = typer.Option(  # noqa: UP045
        None, help="Only this one for gathered payloads: allgather, two_phase or hierarchical."
    ),
    layer: str = typer.Option("1024x1024", help="Shape of a layer, for low-rank codecs."),
    memcpy: Optional[str] = typer.Option(  # noqa: UP045
        None, help="Speed of a plain copy, 6GB/s; default: measured now (gpu: as in --costs)."
    ),
    costs: Optional[Path] = typer.Option(  # noqa: UP045
        None, help="What 'gradcomp bench codecs --json FILE' measured; default: packaged rows."
    ),
    json_file: Optional[Path] = typer.Option(  # noqa: UP045
        None, "--json", help="Write volume, rows and advice to this file."
    ),
    plot: Optional[Path] = typer.Option(  # noqa: UP045
        None, help="Draw step time over bandwidth into this file (needs matplotlib)."
    ),
) -> None:
    """Say what a step costs with every codec, which one to use, or not to compress."""
    _one_of("--device", device, ("cpu", "gpu"))
    _one_of("--framework", framework, ("torch", "tensorflow"))
    if exchange is not None:
        _one_of("--exchange", exchange, [name for name in EXCHANGES if name != "allreduce"])
    if not math.isfinite(compute_ms):
        raise SettingsError(explain(got=f"--compute-ms {compute_ms}", expected="a finite time"))
    for option, file in (("--json", json_file), ("--plot", plot)):
        if file is not None and not file.absolute().parent.is_dir():
            raise SettingsError(explain(got=f"{option} {file}", expected="a file in a folder"))
    measured = load(costs)
    tensors, count = _size(params, model)
    shape = units.shape(layer, "--layer")
    copy = units.bandwidth(memcpy, "--memcpy") if memcpy else None
    runs_on = "cuda" if device == "gpu" else device
    if measure:
        cluster, found, first = look(runs_on)
        if not first:
            return
        copy = copy or found
    else:
        ranks = _given("--workers", workers)
        if per_node > ranks:
            raise SettingsError(
                explain(got=f"--per-node {per_node}", expected=f"at most --workers, {ranks}")
            )
        cluster = Cluster(
            ranks=ranks,
            per_host=per_node,
            between=_link(_given("--bandwidth", bandwidth), latency, "--bandwidth", "--latency"),
            inside=_link(
                inside_bandwidth, inside_latency, "--inside-bandwidth", "--inside-latency"
            ),
        )
    if exchange is not None:
        _refuse_absent(exchange, framework, cluster)
    if copy is None and device == "cpu":
        copy = copy_speed()
    question = Question(
        params=count,
        cluster=replace(cluster, copy=copy),
        layer=shape,
        tensors=tensors,
        compute=compute_ms / 1e3,
        overlap=overlap,
        framework=framework,
        device=runs_on,
        copy=copy,
        exchange=exchange,
    )
    among = candidates(question, codec or FORMS, measured)
    advice = answer(question, among)
    _show(Console(), question, advice, [*_notes(question, among, advice, measured)])
    if measure:
        Console().print(_links(cluster), highlight=False, soft_wrap=True)
    if json_file:
        json_file.write_text(json.dumps(_report(question, advice, measured), indent=2) + "\n")
    if plot:
        _draw(plot, question, among, advice)


def _size(params: str | None, model: str | None) -> tuple[tuple[Shape, ...], int]:
    """Return the shapes of a model, where one is named, and the number of its parameters."""
    if (params is None) == (model is None):
        got = "neither --params nor --model" if params is None else "--params and --model"
        raise SettingsError(explain(got=got, expected="one of both"))
    if params is not None:
        return (), units.count(params, "--params")
    shapes = tuple(shapes_of(str(model)))
    return shapes, sum(map(math.prod, shapes))


def _refuse_absent(exchange: str, framework: str, cluster: Cluster) -> None:
    """Raise where nothing could take an exchange that was asked for."""
    there = cluster.ranks > 1 and exchange in exchanges(Combine.GATHER, cluster)
    where = "two workers or more"
    if exchange == "hierarchical":
        where = "several hosts of as many workers each, two or more"
    if framework == "tensorflow":
        where, there = "allgather, TensorFlow's only one", exchange == "allgather"
    if not there:
        raise SettingsError(explain(got=f"--exchange {exchange}", expected=where))


def _given(option: str, value: Any) -> Any:
    if value is None:
        raise SettingsError(
            explain(got=f"no {option}", expected="it, or --measure under horovodrun")
        )
    return value


def _links(cluster: Cluster) -> str:
    """Return one line on measured links."""
    parts: dict[str, Link] = {"between hosts": cluster.between} if cluster.hosts > 1 else {}
    parts |= {"inside them": cluster.inside} if cluster.local > 1 else {}
    others = {
        "in gathers": cluster.gathers,
        "in short gathers": cluster.short_gathers,
        "in sums of float16": cluster.halves,
    }
    parts |= {where: link for where, link in others.items() if link}
    text = ", ".join(
        f"{where} {units.show_rate(link.bandwidth)} and {1e6 * link.latency:.0f} us a message"
        for where, link in parts.items()
    )
    return f"Links as measured here, with Horovod's own overhead: {text}."


def _link(bandwidth: str, latency: str, *options: str) -> Link:
    return Link(units.bandwidth(bandwidth, options[0]), units.duration(latency, options[1]))


def _one_of(option: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise SettingsError(
            explain(got=f"{option} {value}", expected=f"one of {', '.join(allowed)}")
        )


def _volume(question: Question, advice: Advice) -> dict[str, float]:
    """Return bytes a step: a rank's gradients, all ranks', and what leaves a host uncompressed."""
    ranks = question.cluster.ranks
    return {
        "bytes_a_worker": question.raw,
        "bytes_in_all": question.raw * ranks,
        "ring_bytes_a_link": 2 * (ranks - 1) / ranks * question.raw,
        "bytes_out_of_a_host": advice.dense.host_bytes,
    }


def _show(console: Console, question: Question, advice: Advice, notes: Sequence[str]) -> None:
    cluster, volume = question.cluster, _volume(question, advice)
    each, whole, ring = (units.show_bytes(v) for v in list(volume.values())[:3])
    console.print(
        f"\n{question.params:,} parameters, {cluster.ranks} workers on {cluster.hosts} hosts, "
        f"{units.show_rate(cluster.between.bandwidth)}: a step makes {each} of gradients a worker, "
        f"{whole} in all. A ring moves {ring} over each link.\n",
        highlight=False,
    )
    # Wider than any table, so that none is cut, whatever the width of the terminal.
    Console(width=500).print(_table(question, advice))
    console.print(f"\n{advice.reason}", highlight=False, style="bold", soft_wrap=True)
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)


def _table(question: Question, advice: Advice) -> Table:
    table = Table(
        box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), caption="MB and ms a step"
    )
    table.add_column("codec", no_wrap=True)
    table.add_column("exchange", no_wrap=True)
    heads = ("MB", "coding", "sending", "step", "as fast,\ntimes", "left\nout, %")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    plain = advice.dense
    dense = ("uncompressed", plain.exchange, *_cells(question.raw, plain), "1.00", "0")
    table.add_row(*dense, style="cyan", end_section=True)
    for row in advice.rows:
        cells = list(_cells(row.payload, row.cost))
        if not row.measured:
            cells[1], cells[3] = "?", f"> {cells[3]}"
        table.add_row(
            row.codec,
            row.cost.exchange,
            *cells,
            f"{row.speedup:.2f}",
            "?" if row.error is None else f"{100 * row.error:.3g}",
            style="bold green" if row is advice.chosen else "",
        )
    return table


def _cells(payload: float, cost: Cost) -> tuple[str, ...]:
    times = (cost.encode + cost.decode, cost.transfer, cost.step)
    return (f"{payload / 1e6:,.3g}", *(_short(1e3 * value) for value in times))


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.3g}"


def _notes(
    question: Question, among: Sequence[Candidate], advice: Advice, measured: Costs
) -> Iterator[str]:
    if advice.chosen:
        chosen = next(one for one in among if one.form == advice.chosen.codec)
        yield from _how(question, chosen, advice.chosen.cost.exchange)
    if advice.pays_below is not None:
        yield f"Compression pays up to about {units.show_rate(advice.pays_below)} a host."
    if not question.compute:
        limit = pays_until(question, among) if advice.chosen else None
        until = f" On these links nothing pays above about {ms(limit)} a step." if limit else ""
        yield (
            "Without --compute-ms a step is its exchange alone: real steps gain less, since "
            f"computing takes its time and hides part of the exchange.{until}"
        )
    if any(row.measured for row in advice.rows):
        about = measured.about
        where = ", ".join(about[key] for key in ("machine", "date", "file") if key in about)
        copy = question.copy and f", times a copy of {units.show_bytes(question.copy)}/s"
        yield f"Codecs as measured on {where}{copy or ''}."
    if advice.chosen:
        yield (
            "'left out' is the error of one encoding of Gaussian values; a memory sends it "
            "later. Check accuracy before a long run."
        )


def _how(question: Question, chosen: Candidate, exchange: str) -> Iterator[str]:
    """Yield what to write, and what to heed."""
    alone = exchange == "allreduce" or question.framework == "tensorflow"
    choice = "" if alone else f', exchange="{exchange}"'
    yield f'In the script: compression=Compression.from_string("{chosen.form}"{choice}).'
    if exchange == "hierarchical":
        yield (
            "The hierarchical exchange needs hvd.init(process_sets=node_process_sets()) and "
            "hvd.barrier() at the end; both are in the README."
        )
    if chosen.settings.memory.slots:
        yield (
            "With Adam and its kin begin dense (start_after=, 10 to 25 % of all steps), or take a "
            "codec without a memory: qsgd, natural, fp16."
        )


def _report(question: Question, advice: Advice, measured: Costs) -> dict[str, Any]:
    chosen = advice.chosen
    return {
        "question": {
            **{key: value for key, value in vars(question).items() if key != "cluster"},
            "cluster": {
                key: vars(value) if isinstance(value, Link) else value
                for key, value in vars(question.cluster).items()
            },
        },
        "volume": _volume(question, advice),
        "costs": measured.about,
        "uncompressed": _times(advice.dense),
        "rows": [_row(row) for row in advice.rows],
        "advice": {
            "compress": chosen is not None,
            "codec": chosen and chosen.codec,
            "exchange": chosen and chosen.cost.exchange,
            "reason": advice.reason,
            "pays_below_bytes_a_second": advice.pays_below,
        },
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "codec": row.codec,
        "payload_bytes": row.payload,
        **_times(row.cost),
        "speedup": row.speedup,
        "rel_error": row.error,
        "codec_time_counted": row.measured,
    }


def _times(cost: Cost) -> dict[str, Any]:
    return {
        "exchange": cost.exchange,
        "encode_ms": 1e3 * cost.encode,
        "transfer_ms": 1e3 * cost.transfer,
        "decode_ms": 1e3 * cost.decode,
        "step_ms": 1e3 * cost.step,
        "bytes_out_of_a_host": cost.host_bytes,
    }


def _draw(path: Path, question: Question, among: Sequence[Candidate], advice: Advice) -> None:
    from .plots import step_over_bandwidth

    step_over_bandwidth(path, question, among, advice)
