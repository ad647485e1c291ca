"""What ``gradcomp bench step --framework tensorflow`` runs on every rank.

Gradients are held in variables and handed to the tape, so that a step is what Horovod and the
compressor do of it. Rank 0 prints one JSON line for each turn.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any, Callable

from .models import shapes_of
from .step_worker import BASE, MARK

GROUPED = " in groups of "
"""What stands between a system's name and how many groups its gradients travel in."""

_WARM = 2


class System:
    """Variables whose gradients are reduced in one way, by a traced function.

    Args:
        name: :data:`BASE`, or the string form of a codec; with :data:`GROUPED` and a number.
        model: A name that :func:`shapes_of` knows.
    """

    def __init__(self, name: str, model: str) -> None:
        import horovod.tensorflow as hvd
        import tensorflow as tf

        from ..tensorflow import Compression

        form, _, groups = name.partition(GROUPED)
        shapes, draw = shapes_of(model), tf.random.Generator.from_seed(hvd.rank())
        variables = [tf.Variable(tf.zeros(shape), name=f"p{i}") for i, shape in enumerate(shapes)]
        grads = [tf.Variable(draw.normal(shape), trainable=False) for shape in shapes]
        plain = form == BASE
        compression = hvd.Compression.none if plain else Compression.from_string(form)

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def step() -> Any:
            with tf.GradientTape() as tape:
                values = [variable.read_value() for variable in variables]
            tape = hvd.DistributedGradientTape(
                tape, compression=compression, groups=int(groups or 0) or None
            )
            reduced = tape.gradient(values, variables, [grad.read_value() for grad in grads])
            return tf.add_n([tf.reshape(one, [-1])[0] for one in reduced])

        start = time.perf_counter()
        graph = step.get_concrete_function().graph.as_graph_def()
        self.trace_s = time.perf_counter() - start
        inner = sum(len(function.node_def) for function in graph.library.function)
        self.operations = len(graph.node) + inner
        self.name, self._step = name, step
        self._compression = None if plain else compression

    def step(self) -> None:
        """Reduce all gradients once."""
        float(self._step())  # waits for it

    def nbytes(self) -> int:
        """Return the bytes handed to Horovod so far, 0 where the compressor is Horovod's."""
        return 0 if self._compression is None else int(self._compression.stats()["wire_bytes"])


def turn(system: System, steps: int, wait: Callable[[], None]) -> dict[str, Any]:
    """Return what some steps took, a step; ``wait`` returns once all ranks are there."""
    wait()
    before, start = system.nbytes(), time.perf_counter()
    for _ in range(steps):
        system.step()
    wait()
    seconds = time.perf_counter() - start
    return {
        "step_ms": 1e3 * seconds / steps,
        "bytes": (system.nbytes() - before) / steps,
        "operations": system.operations,
        "trace_s": system.trace_s,
    }


def main() -> None:
    """Run the turns that the JSON on the command line asks for."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    wanted = json.loads(sys.argv[1])
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    number = itertools.count()

    def wait() -> None:
        hvd.allreduce(tf.zeros([1]), name=f"turn {next(number)}")

    systems = []
    for name in wanted["systems"]:
        system = System(name, wanted["model"])
        turn(system, _WARM, wait)
        systems.append(system)
    for _ in range(wanted["rounds"]):
        for system in systems:
            found = turn(system, wanted["steps"], wait)
            if hvd.rank() == 0:
                sys.stdout.write(MARK + json.dumps({"system": system.name, **found}) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
