"""That all ranks are set alike, found out when a set of variables is first reduced.

It is part of the graph and not of its tracing: a rank may trace a function that others never run,
and must not wait for them. Nothing else of the step is sent before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ..core.agreement import check

Tensor = Any


def settle(
    alike: Any, facts: Mapping[str, str], steps: Sequence[Tensor], name: str, process_set: Any
) -> Tensor:
    """Return True, which cannot be read where ranks differ.

    Args:
        alike: A variable that remembers that it has been found out.
        facts: By name.
        steps: So far, of each compressed variable; at least one, and read from a variable.
        name: Of the reduction, alike on all ranks.
        process_set: Of Horovod.

    Raises:
        InvalidArgumentError: When it runs, on all ranks: with every fact that differs, its values
            and their ranks.
    """
    ranks = list(process_set.ranks or range(process_set.size()))

    def complain(gathered: Any) -> bool:
        every = [json.loads(text) for text in bytes(gathered.tolist()).splitlines()]
        check(dict(zip(ranks, every)))
        return True

    def ask() -> Tensor:
        mine = _line(facts, steps)
        every = hvd.allgather(
            mine,
            name=f"gradcomp.settings.{name}",
            ignore_name_scope=True,
            process_set=process_set,
        )
        wanted = tf.tile(mine, [len(ranks)])
        fits = tf.equal(tf.size(every), tf.size(wanted))
        same = tf.cond(
            fits, lambda: tf.reduce_all(tf.equal(every, wanted)), lambda: tf.constant(False)
        )
        told = tf.cond(
            same,
            lambda: tf.constant(True),
            lambda: tf.ensure_shape(tf.numpy_function(complain, [every], tf.bool), []),
        )
        with tf.control_dependencies([alike.assign(told)]):
            return tf.identity(told)

    with tf.device("CPU:0"):
        return tf.cond(alike.read_value(), lambda: tf.constant(True), ask)


def _line(facts: Mapping[str, str], steps: Sequence[Tensor]) -> Tensor:
    """Return this rank's line as bytes, with step counts that are known only when it runs."""
    mark = "#"
    before, _, after = json.dumps({**facts, "steps so far": mark}).rpartition(mark)
    counts = tf.unique(tf.stack(steps)).y
    told = tf.strings.reduce_join(tf.strings.as_string(counts), separator=" ")
    return tf.io.decode_raw(tf.strings.join([before, told, after, "\n"]), tf.uint8)
