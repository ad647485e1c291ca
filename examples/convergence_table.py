"""What the convergence runs compare: one row for each setting, one entry for each task.

Nothing here needs a framework. A row's ``role`` says what is expected of it: a "default" (mild) one
should end within the task's bound of dense training, a "contrast" forgets what it does not send and
should be worse than the same codec with its memory.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANKS = 2


@dataclass(frozen=True)
class Setting:
    """One kind of compression.

    Args:
        family: Rows of one family share a panel of the plot.
        codec: "dense" for ``hvd.Compression.none``, else a string form; ``{ramp}`` stands for the
            number of steps in which a ramp reaches its end, a third of the run.
        memory: As of ``Compression.from_string``; None for the codec's default. ``{m}`` stands
            for the task's momentum, which the optimizer then does not have.
        role: "baseline", "default", "aggressive", "contrast", or "reason" for rows that only
            explain others.
        start: Part of the steps that are sent dense before the codec begins.
    """

    family: str
    codec: str
    memory: str | None = None
    role: str = "default"
    start: float = 0.0

    def resolved(self, task: Task) -> tuple[str, dict[str, Any], float]:
        """Return string form, options and optimizer momentum for a task."""
        codec = self.codec.format(ramp=task.steps // 3)
        options: dict[str, Any] = {}
        if self.memory is not None:
            options["memory"] = self.memory.format(m=task.momentum)
        if self.start:
            options["start_after"] = round(self.start * task.steps)
        own_momentum = self.memory is not None and self.memory.startswith("momentum")
        return codec, options, 0.0 if own_momentum else task.momentum

    def label(self, task: Task) -> str:
        """Return what tables call the row; unique within a task."""
        codec, options, _ = self.resolved(task)
        start = f", dense for {options['start_after']} steps" if self.start else ""
        return codec + start


@dataclass(frozen=True)
class Task:
    """A data set with a network, and how long and how fast it is trained.

    Args:
        name: Used in file names.
        title: One line for people.
        kind: Which data and network, a key of ``convergence_worker.KINDS``.
        steps: Optimizer steps; the learning rate falls linearly to 0 over them.
        batch: Samples a rank and step.
        lr: First learning rate, for all ranks together.
        momentum: Of SGD.
        bound: How much worse than dense is still alike, in the unit of the task, or as a part of
            the dense result where ``relative``.
        settings: The rows.
        shrink: Network and test set of ``--quick``.
        floor: What dense must reach in ``--quick`` for the other rows to mean anything.
        extra: Runs only when asked for by name.
    """

    name: str
    title: str
    kind: str
    steps: int
    batch: int
    lr: float
    momentum: float
    bound: float
    settings: tuple[Setting, ...]
    optimizer: str = "sgd"
    relative: bool = False
    shrink: bool = False
    floor: float | None = None
    seeds: int = 3
    extra: bool = False

    @property
    def unit(self) -> str:
        return "bits per character" if self.relative else "accuracy %"

    def worse(self, value: float, than: float) -> float:
        """Return by how much a result is worse than another, in units of the bound."""
        if self.relative:
            return (value - than) / than / self.bound
        return (than - value) / self.bound

    def fixed(self) -> dict[str, Any]:
        """Return what a result depends on, beside setting and seed."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in NOT_FIXED}


def key(task: Task, setting: Setting, seed: int) -> str:
    """Return what the JSON file calls a run."""
    memory = setting.memory or "default"
    return f"{task.name} | {setting.label(task)} | {memory} | seed {seed}"


def write(path: Path, content: dict[str, Any]) -> None:
    """Replace the file at once, one run a line."""
    runs = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in content["runs"].items())
    text = f'{{"about": {json.dumps(content["about"])},\n "runs": {{\n{runs}\n}}}}\n'
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    os.replace(new, path)


NOT_FIXED = ("settings", "title", "bound", "floor", "seeds", "extra")

DENSE = Setting("baseline", "dense", role="baseline")

FAMILIES = (
    DENSE,
    Setting("baseline", "fp16"),
    Setting("linear", "linear:bits=8"),
    Setting("linear", "linear:bits=2", role="aggressive"),
    Setting("linear", "linear:bits=2", "none", role="contrast"),
    Setting("sign", "sign"),
    Setting("sign", "sign", "none", role="contrast"),
    Setting("qsgd", "qsgd"),
    Setting("qsgd", "qsgd:bits=2", role="aggressive"),
    Setting("topk", "topk:ratio=0.01"),
    Setting("topk", "topk:ratio=0.001", role="aggressive"),
    Setting("topk", "topk:ratio=0.001", "none", role="contrast"),
    Setting("randomk", "randomk:ratio=0.05"),
    Setting("randomk", "randomk:ratio=0.01", role="aggressive"),
    Setting("randomk", "randomk:ratio=0.01", "none", role="contrast"),
    Setting("acp", "acp:rank=4"),
    Setting("acp", "acp:rank=1", role="aggressive"),
    Setting("acp", "acp:rank=1", "none", role="contrast"),
    Setting("powersgd", "powersgd:rank=4"),
    Setting("powersgd", "powersgd:rank=1", role="aggressive"),
    Setting("powersgd", "powersgd:rank=1", "none", role="contrast"),
    Setting("combined", "topk:ratio=0.01+linear:bits=8"),
)

MEMORIES = (  # those of role "reason": what masking costs, and how far EF21's references lag
    DENSE,
    Setting("residual", "topk:ratio=0.01"),
    Setting("residual", "topk:ratio=0.25..0.001@{ramp}", role="aggressive"),
    Setting("momentum", "topk:ratio=0.01", "momentum:m={m}"),
    Setting("momentum", "topk:ratio=0.01", "momentum:m={m},masking=False", role="reason"),
    Setting("ef21", "topk:ratio=0.01", "ef21"),
    Setting("ef21", "topk:ratio=0.1", "ef21", role="reason"),
)

ADAM = (
    DENSE,
    Setting("topk", "topk:ratio=0.01"),
    Setting("topk", "topk:ratio=0.01", start=0.1),
    Setting("topk", "topk:ratio=0.01", start=0.25),
    Setting("topk", "topk:ratio=0.01", "none", role="contrast"),
)

LONGER_DIGITS = (
    DENSE,
    Setting("randomk", "randomk:ratio=0.05"),
    Setting("combined", "topk:ratio=0.01", "momentum:m={m}"),
    Setting("combined", "topk:ratio=0.01", "ef21"),
)

LONGER_TEXT = (
    DENSE,
    Setting("topk", "topk:ratio=0.01"),
    Setting("randomk", "randomk:ratio=0.05"),
    Setting("acp", "acp:rank=4"),
    Setting("powersgd", "powersgd:rank=4"),
)

QUICK = (
    DENSE,
    Setting("linear", "linear:bits=8"),
    Setting("topk", "topk:ratio=0.01"),
    Setting("acp", "acp:rank=4"),
    Setting("topk", "topk:ratio=0.001", role="aggressive"),
    Setting("topk", "topk:ratio=0.001", "none", role="contrast"),
)

DIGITS = Task(
    name="digits",
    title="A convolutional net of 147,000 parameters on 4,000 MNIST digits",
    kind="digits",
    steps=400,
    batch=16,
    lr=0.1,
    momentum=0.5,
    bound=0.5,
    settings=FAMILIES,
)

TEXT = Task(
    name="text",
    title="A character LSTM of 1.03 million parameters on Python's standard library",
    kind="text",
    steps=160,
    batch=16,
    lr=4.0,
    momentum=0.5,
    bound=0.01,
    relative=True,
    settings=FAMILIES,
)

TASKS = (
    DIGITS,
    dataclasses.replace(
        DIGITS,
        name="residual",
        title="A residual net with batch norm, 44,000 parameters, on the same digits",
        kind="residual",
        steps=220,
        batch=24,
    ),
    TEXT,
    dataclasses.replace(
        DIGITS,
        name="memories",
        title="The conv net again: other memories, and a ratio that falls during training",
        settings=MEMORIES,
        extra=True,
    ),
    dataclasses.replace(
        TEXT,
        name="adam",
        title="The LSTM with Adam: how long to send everything first",
        steps=240,
        lr=0.003,
        momentum=0.9,
        optimizer="adam",
        settings=ADAM,
        extra=True,
    ),
    dataclasses.replace(
        DIGITS,
        name="longer_digits",
        title="The conv net with three times as many steps",
        steps=1200,
        settings=LONGER_DIGITS,
        seeds=1,
        extra=True,
    ),
    dataclasses.replace(
        TEXT,
        name="longer_text",
        title="The LSTM with more than four times as many steps",
        steps=720,
        settings=LONGER_TEXT,
        seeds=1,
        extra=True,
    ),
)


def quick(task: Task) -> Task:
    """Return a task of seconds, with bounds that one seed's noise does not reach."""
    small = dataclasses.replace(task, title=f"In small: {task.name}", shrink=True, seeds=1)
    if task.relative:
        rows = QUICK[:3] + QUICK[4:]
        return dataclasses.replace(small, steps=120, bound=0.1, floor=4.0, settings=rows)
    return dataclasses.replace(small, steps=160, bound=5.0, floor=88.0, settings=QUICK)


QUICK_TASKS = (quick(DIGITS), quick(TEXT))
