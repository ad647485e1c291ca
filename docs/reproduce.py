"""Measure again what the pages say: ``make reproduce``.

Each entry is one command, the page that quotes its output, and a short form for ``--quick``. Pages
that are written by a command are written anew; tables that people copied are printed, and kept in
``results/``, to be compared. The quick form touches no page.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
QUICK = Path("results/quick")


@dataclass(frozen=True)
class Figure:
    """What one command measures.

    Args:
        name: For ``--only``, and of the file that keeps what it printed.
        page: That quotes it, from the top of the checkout.
        command: As the page names it.
        quick: The short form; empty where the command itself is short and writes no page.
        root: Whether it makes network namespaces.
    """

    name: str
    page: str
    command: str
    quick: str = ""
    root: bool = False

    def form(self, quick: bool) -> str:
        """Return the command to run."""
        return (quick and self.quick) or self.command


LAB = "gradcomp lab --hosts 2 --bandwidth"
STEP = "gradcomp bench step"
NETWORK = "gradcomp bench network"
RECORD = (
    "horovodrun --gloo -np 2 -H localhost:2 python examples/torch_mnist.py "
    "--compression topk:ratio=0.01 --telemetry"
)

FIGURES = (
    Figure("demo", "README.md", "make demo", "python examples/demo.py --epochs 2"),
    Figure(
        "demo-tensorflow",
        "README.md",
        "make demo-tensorflow",
        "python examples/demo.py --script examples/tensorflow_mnist.py --epochs 2",
    ),
    Figure(
        "demo-keras",
        "README.md",
        "make demo-keras",
        "python examples/demo.py --script examples/keras_mnist.py --epochs 2",
    ),
    Figure(
        "advise",
        "README.md",
        "gradcomp advise --params 100e6 --workers 100 --bandwidth 10gbit --per-node 8 "
        "--compute-ms 120 --memcpy 6.4GB/s --codec fp16 --codec linear:bits=4 --codec sign "
        "--codec topk --codec topk:ratio=0.001 --codec randomk --codec powersgd",
    ),
    Figure(
        "codecs",
        "docs/codecs.md",
        "gradcomp docs codecs --output docs/codecs.md",
        f"gradcomp docs codecs --output {QUICK}/codecs.md",
    ),
    Figure(
        "errors",
        "docs/codecs.md",
        "python examples/error_against_bytes.py docs/error_against_bytes.png",
        f"python examples/error_against_bytes.py {QUICK}/error_against_bytes.png --steps 5 "
        "--task digits",
    ),
    Figure(
        "options",
        "docs/options.md",
        "python -m tests.distributed.options --output docs/options.md",
        f"python -m tests.distributed.options --output {QUICK}/options.md",
    ),
    Figure(
        "steps",
        "docs/steps.md",
        f"{STEP} --model resnet50 --rounds 3 --steps 2",
        f"{STEP} --model resnet50 --rounds 1 --steps 1 --codec topk",
    ),
    Figure(
        "steps-tensorflow",
        "docs/steps.md",
        f"{STEP} --framework tensorflow --model resnet50 --rounds 3 --steps 2 --codec linear "
        "--codec topk --groups 8",
        f"{STEP} --framework tensorflow --model lstm --rounds 1 --steps 1 --codec topk",
    ),
    Figure(
        "steps-tensorflow-lstm",
        "docs/steps.md",
        f"{STEP} --framework tensorflow --model lstm --rounds 3 --steps 2 --codec linear "
        "--codec topk --groups 2",
        f"{STEP} --framework tensorflow --model lstm --rounds 1 --steps 1 --codec topk --groups 2",
    ),
    Figure(
        "encode-tensorflow",
        "docs/steps.md",
        "gradcomp bench codecs --framework tensorflow --numel 1048576 --numel 25001984 "
        "--codec linear --codec topk --codec qsgd --codec logarithmic --codec natural "
        "--codec sign --codec fp8 --codec fp16",
        "gradcomp bench codecs --framework tensorflow --numel 65536 --repeat 2",
    ),
    Figure(
        "telemetry-cost",
        "docs/telemetry.md",
        f"{STEP} --codec topk --telemetry 10 --steps 10 --rounds 5",
        f"{STEP} --codec topk --telemetry 2 --steps 2 --rounds 1",
    ),
    Figure("telemetry", "docs/telemetry.md", f"{RECORD} results/run.jsonl"),
    Figure(
        "telemetry-picture",
        "docs/telemetry.md",
        "gradcomp plot results/run.jsonl -o docs/telemetry.png",
        f"gradcomp plot results/run.jsonl -o {QUICK}/telemetry.png",
    ),
    Figure(
        "trace",
        "README.md",
        f"{LAB} 1gbit -- python examples/torch_trace.py --output results/steps.json",
        root=True,
    ),
    Figure(
        "trace-picture",
        "README.md",
        "gradcomp plot results/steps.json -o docs/trace.png",
        f"gradcomp plot results/steps.json -o {QUICK}/trace.png",
    ),
    Figure(
        "network",
        "docs/benchmarks.md",
        f"{NETWORK} --bandwidth 100mbit,1gbit,10gbit --rounds 3 --json docs/benchmarks.json "
        "--docs docs/benchmarks.md --check",
        f"{NETWORK} --model mlp4x256 --bandwidth 1gbit --rounds 1 --json {QUICK}/network.json "
        "--check",
        root=True,
    ),
    Figure(
        "network-exchanges",
        "docs/benchmarks.md",
        f"{NETWORK} --bandwidth 500mbit --exchange allgather,two_phase --codec linear:bits=4 "
        "--codec sign --codec topk --codec acp --rounds 3 --add --json docs/benchmarks.json "
        "--docs docs/benchmarks.md --check",
        f"{NETWORK} --bandwidth 500mbit --exchange allgather,two_phase --model mlp4x256 "
        f"--codec sign --rounds 1 --add --json {QUICK}/network.json --check",
        root=True,
    ),
    Figure(
        "network-models",
        "docs/benchmarks_more.md",
        f"{NETWORK} --bandwidth 1gbit --model vgg16-small,lstm,transformer --rounds 3 --add "
        "--json docs/benchmarks_more.json --docs docs/benchmarks_more.md --check",
        f"{NETWORK} --bandwidth 1gbit --model transformer --rounds 1 --codec topk --add "
        f"--json {QUICK}/network.json --check",
        root=True,
    ),
    Figure(
        "network-hosts",
        "docs/benchmarks_more.md",
        f"{NETWORK} --bandwidth 500mbit --hosts 2,3,4 --exchange allgather,two_phase "
        "--codec linear:bits=4 --codec sign --codec topk --codec acp --rounds 3 --add "
        "--json docs/benchmarks_more.json --docs docs/benchmarks_more.md --check",
        f"{NETWORK} --bandwidth 500mbit --hosts 3 --exchange allgather,two_phase "
        f"--model mlp4x256 --codec sign --rounds 1 --add --json {QUICK}/network.json --check",
        root=True,
    ),
    Figure(
        "time-to-accuracy",
        "docs/choosing.md",
        f"{LAB} 100mbit -- python examples/time_to_accuracy.py --compression dense "
        "--compression fp16 --compression linear:bits=4 --compression topk:ratio=0.01",
        f"{LAB} 100mbit -- python examples/time_to_accuracy.py --compression topk:ratio=0.01",
        root=True,
    ),
    Figure(
        "convergence",
        "docs/convergence.md",
        "python examples/convergence.py --docs docs/convergence.md",
        "python examples/convergence.py --quick --task digits",
    ),
    Figure(
        "convergence-more",
        "docs/convergence.md",
        "python examples/convergence.py --task adam --task memories --docs docs/convergence.md",
        "python examples/convergence.py --quick --task text",
    ),
)


def run(figure: Figure, quick: bool, results: Path, console: Console) -> int:
    """Run a command, show what it prints and keep it; return its exit code."""
    command = figure.form(quick)
    console.rule(f"{figure.name}: {figure.page}")
    console.print(f"$ {command}", highlight=False, markup=False, soft_wrap=True)
    start = time.monotonic()
    with (results / f"{figure.name}.txt").open("w") as kept:
        process = subprocess.Popen(
            shlex.split(command), cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            kept.write(line)
        code = process.wait()
    console.print(f"{figure.name}: code {code}, {time.monotonic() - start:.0f} s")
    return code


def main(
    quick: bool = typer.Option(False, "--quick", help="Short forms, which touch no page."),
    only: list[str] = typer.Option([], help="Names of entries; several times for several."),
    show: bool = typer.Option(False, "--list", help="Show the entries and run nothing."),
) -> None:
    """Run every command that the pages name for their figures."""
    names = [figure.name for figure in FIGURES]
    unknown = [name for name in only if name not in names]
    if unknown:
        raise typer.BadParameter(f"--only {unknown[0]}: there are {', '.join(names)}")
    chosen = [figure for figure in FIGURES if figure.name in only or not only]
    console = Console()
    if show:
        for figure in chosen:
            line = f"{figure.name}, {figure.page}: {figure.form(quick)}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        return
    results = ROOT / (QUICK if quick else "results")
    results.mkdir(parents=True, exist_ok=True)
    failed, left_out = [], []
    for figure in chosen:
        if figure.root and os.geteuid() != 0:
            left_out.append(figure.name)
        elif run(figure, quick, results, console):
            failed.append(figure.name)
    if left_out:
        console.print(f"not run, since only root may make networks: {', '.join(left_out)}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    typer.run(main)
