"""What a checkpoint says of the run that wrote it, and resuming on another number of ranks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ..core.errors import StateError, explain
from ..core.settings import Settings
from .names import Met

if TYPE_CHECKING:
    from .compression import Compressor

FORMAT = 1


class Manifest(tf.train.experimental.PythonState):  # type: ignore[misc]
    """What is saved beside the variables and compared on restoring.

    That is settings, rank, number of ranks, and names and shapes of the variables.

    Args:
        settings: Of the compressor.
        met: Its variables so far; it grows.
        in_use: Says whether there is anything in the memories yet.
    """

    def __init__(self, settings: Settings, met: list[Met], in_use: Callable[[], bool]) -> None:
        self._settings, self._met, self._in_use = settings.describe(), met, in_use
        self._read: list[Met] = []
        self.collected: list[dict[str, Any]] | None = None
        """Where not None, what is read is added to it and not compared."""

    def serialize(self) -> str:
        """Return what describes this run, for a checkpoint."""
        return json.dumps(self._here())

    def deserialize(self, string_value: bytes) -> None:
        """Compare a checkpoint with this run.

        Raises:
            StateError: Settings, rank, number of ranks or variables differ; all of it in one
                message, and nothing is restored.
        """
        there, here = json.loads(string_value), self._here()
        variables = _variables(there)
        strange = self._strangers(variables)
        if self.collected is not None and not strange:
            self.collected.append(there)
            return
        faults = [
            f"{what} {there.get(what)!r}, expected {here[what]!r}"
            for what in ("format", "settings")
            if there.get(what) != here[what]
        ]
        saved = (there.get("world_size"), there.get("rank"))
        own = saved == (here["world_size"], here["rank"]) or self.collected is not None
        if hvd.is_initialized() and not own:
            faults.append(
                f"saved by rank {saved[1]} of {saved[0]}, loaded by rank {here['rank']} of "
                f"{here['world_size']}; each rank must load what it saved; resize_state takes up "
                "what another number of ranks saved"
            )
        faults += strange
        if faults:
            raise StateError("this checkpoint does not fit: " + "; ".join(faults))
        self._read = variables or []

    def compare(self) -> None:
        """Compare variables just met with the checkpoint whose state waits for them.

        Raises:
            StateError: They are others.
        """
        faults = _differences(self._read, self._met) if self._read else []
        if faults:
            raise StateError("the checkpoint that was read does not fit: " + "; ".join(faults))

    def _strangers(self, variables: list[Met] | None) -> list[str]:
        if variables is None or not self._met or not (variables or self._in_use()):
            return []
        if len(variables) == len(self._met):
            return _differences(variables, self._met)
        count = f"{len(variables)} variables, expected {len(self._met)}"
        return [count, *_mismatches(variables, self._met)]

    def _here(self) -> dict[str, Any]:
        ready = hvd.is_initialized()
        return {
            "format": FORMAT,
            "world_size": hvd.size() if ready else 1,
            "rank": hvd.rank() if ready else 0,
            "settings": self._settings,
            "variables": self._met,
        }


def _variables(there: dict[str, Any]) -> list[Met] | None:
    told = there.get("variables")
    return None if told is None else [Met(*one) for one in told]


def _differences(there: Sequence[Met], here: Sequence[Met]) -> list[str]:
    """Return how variables of a checkpoint differ from those here, as far as there are both."""
    faults = _mismatches(there, here)
    if not faults and _confusable(there, here):
        faults.append(
            "variables of equal names and shapes, which the saving run met in lists of "
            f"{_lengths(there)} and this one in lists of {_lengths(here)}, so which is which is "
            "not known; before the first step bind lists of the same variables in the same order"
        )
    return faults


def _mismatches(there: Sequence[Met], here: Sequence[Met]) -> list[str]:
    return [
        f"variable {saved.name} of shape {saved.shape}, expected {own.name} of shape {own.shape}"
        for saved, own in zip(there, here)
        if saved[:2] != own[:2]
    ]


def _confusable(there: Sequence[Met], here: Sequence[Met]) -> bool:
    """Return whether two variables may have changed places.

    Order tells those of one list apart. Which list came first may be another in each run.
    """

    def lists(met: Sequence[Met]) -> list[list[int]]:
        places: dict[int, list[int]] = {}
        for place, one in enumerate(met):
            places.setdefault(one.listed, []).append(place)
        return [places[one.listed] for one in met]

    def kinds(met: Sequence[Met]) -> list[tuple[str, str]]:
        return [(one.name.partition(".")[2], one.shape) for one in met]

    counts = Counter(kinds(there)) | Counter(kinds(here))
    return any(
        saved != own and counts[kind] > 1
        for saved, own, kind in zip(lists(there), lists(here), kinds(here))
    )


def _lengths(met: Sequence[Met]) -> list[int]:
    listed = [one.listed for one in met]
    return [listed.count(number) for number in dict.fromkeys(listed)]


def resize_state(checkpoint: Any, paths: Sequence[str], compression: Compressor) -> None:
    """Restore a checkpoint that another number of ranks saved, on each rank that goes on.

    What is owed to the model is the mean of what ranks remember, since Horovod averages. Every rank
    therefore goes on from that mean, and nothing is lost or counted twice. All else in the
    checkpoint, such as weights and what compressors share, is taken from the last path.

    Args:
        checkpoint: A ``tf.train.Checkpoint`` of the objects to restore, ``compression`` among
            them under the name that it was saved with.
        paths: What all ranks of one run wrote at one step, one path a rank, in any order; every
            rank of the new run must be able to read them.
        compression: The compressor, bound to its variables.

    Raises:
        StateError: Nothing is bound, or checkpoints are missing, or are not of one run and step.
            The objects are then only partly restored.

    Example:
        >>> compression.bind(model.trainable_variables)                         # doctest: +SKIP
        >>> checkpoint = tf.train.Checkpoint(model=model, compression=compression)
        >>> resize_state(checkpoint, [f"run/rank{r}" for r in range(4)], compression)
    """
    units = list(compression._units.values())
    if not units:
        raise StateError(
            explain(
                got="a compressor without variables",
                expected="one that is bound",
                why="what is read from several checkpoints can only be averaged where it has a "
                "place",
                do="call compression.bind(model.trainable_variables) first",
            )
        )
    memories = [variable for unit in units for variable in unit.memory_slots]
    others = [variable for variable in compression.variables if _counts(variable)]
    sums = [tf.zeros(v.shape, tf.float64) for v in memories]
    counts: list[list[int]] = []
    found: list[dict[str, Any]] = []
    compression._manifest.collected = found
    try:
        for path in paths:
            checkpoint.read(path).assert_existing_objects_matched()
            sums = [total + tf.cast(v, tf.float64) for total, v in zip(sums, memories)]
            counts.append([int(v) for v in others])
    finally:
        compression._manifest.collected = None
    faults = _faults(found, counts, compression._manifest)
    if faults:
        raise StateError("these checkpoints are not those of one run: " + "; ".join(faults))
    for variable, total in zip(memories, sums):
        variable.assign(tf.cast(total / len(paths), variable.dtype))


def _counts(variable: Any) -> bool:
    return bool(variable.dtype == tf.int64 and variable.shape.rank == 0)


def _faults(
    found: Sequence[dict[str, Any]], counts: Sequence[list[int]], manifest: Manifest
) -> list[str]:
    faults = []
    ranks = sorted(one["rank"] for one in found)
    expected = found[0]["world_size"] if found else 1
    if ranks != list(range(expected)):
        faults.append(f"checkpoints of ranks {ranks}, expected one of each of {expected}")
    here = manifest._here()
    for what in ("format", "settings"):
        values = sorted({repr(one.get(what)) for one in (*found, here)})
        if len(values) > 1:
            faults.append(f"{what} differs: {', '.join(values)}")
    if any(one != counts[0] for one in counts):
        faults.append("they were saved at different steps")
    return faults
