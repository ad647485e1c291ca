"""Nothing is lost: schedules, memories, loss scales, overflows, settings and numbers of ranks."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_gradcomp.tensorflow import Compression, resize_state
from tests.distributed.workers.tensorflow_trainer import (
    SHAPES,
    Trainer,
    check,
    digest,
    draw,
    flat,
    make,
    message,
    new_weights,
    residual,
    spoil,
    state,
)

SCHEDULES = {
    "ramp": ("topk:ratio=0.5..0.05@6", {}),
    "sums": ("randomk:ratio=0.2", {"start_after": 3, "start_with": "fp16"}),
    "ranks": ("acp:rank=3..1@6/steps", {"memory": "residual"}),
    "rounds": ("powersgd:rank=2", {"start_after": 2, "start_with": "topk:ratio=0.1"}),
}
RESUMED = ("ramp", "ranks")
MEMORIES = {
    "residual": "topk:ratio=0.05",
    "momentum": "topk:ratio=0.05",
    "ef21": "topk:ratio=0.05",
    "differential:alpha=0.5": "randomk:ratio=0.1",
}
FOLDER = "GRADCOMP_TEST_CHECKPOINTS"
"""Environment variable that names where one run leaves checkpoints for another."""


def wire_bytes(trainer):
    return trainer.compression.stats()["wire_bytes"]


def resumed(steps, make_again, path, **options):
    """Return a trainer that goes on from a checkpoint after some steps."""
    again = Trainer(make_again(), **options)
    again.compression.bind(again.weights)
    tf.train.Checkpoint(compression=again.compression).read(path).assert_existing_objects_matched()
    again.steps = steps
    return again


@check
def schedules():
    """Sizes change at their steps, the books balance, and a run resumes within a ramp, eagerly."""
    out = {}
    for name, (text, options) in SCHEDULES.items():

        def build(text=text, options=options):
            return make(text, **options)

        straight, sent = Trainer(build(), rate=0.01), [0]
        with tempfile.TemporaryDirectory() as folder:
            for step in range(8):
                straight.step()
                sent.append(wire_bytes(straight))
                if step == 3:
                    path = tf.train.Checkpoint(compression=straight.compression).write(
                        f"{folder}/c"
                    )
                    weights = [w.read_value() for w in straight.weights]
            end, again = digest(straight.weights), straight
            if name in RESUMED:
                again = resumed(4, build, path, rate=0.01, graph=False)
        if name in RESUMED:
            for weight, value in zip(again.weights, weights):
                weight.assign(value)
            again.run(4)
        steps = np.diff(sent).tolist()
        out[name] = {
            "sent": steps,
            "changes": [i for i in range(1, 8) if steps[i] != steps[i - 1]],
            "imbalance": straight.imbalance(),
            "weights": end,
            "resumed": digest(again.weights) == end,
            "turns": sorted(
                int(v) for v in straight.compression.variables if v.name.endswith("turn:0")
            ),
        }
    return out


@check
def bad_step_in_a_schedule():
    """All steps count for a schedule, good ones only for a codec."""
    trainer = Trainer(make("topk:ratio=0.5..0.05@4", start_after=0))
    trainer.run(1)
    before = digest(state(trainer.compression))
    trainer.step(spoil(0, np.nan))
    after = digest(state(trainer.compression))
    sent = []
    for _ in range(4):
        begun = wire_bytes(trainer)
        trainer.step()
        sent.append(wire_bytes(trainer) - begun)
    return {
        "kept": before == after,
        "sent": sent,
        "turns": [int(v) for v in trainer.compression.variables if v.name.endswith("turn:0")],
    }


@check
def overflow():
    """Finite inputs whose sum, or whose cast, is not: all memories stay, on all ranks."""
    out = {}
    for codec, where, dtype, size, options in (
        ("topk", 0, tf.float32, 2e38, {"groups": 2}),
        ("topk", 1, tf.float32, 2e38, {}),  # a bias, which is not compressed
        ("topk", 2, tf.float16, 6e4, {}),
        ("randomk", 0, tf.float32, 2e38, {"graph": False}),
        ("fp16", 0, tf.float16, 6e4, {}),
        ("topk:ratio=0.1,memory=ef21", 2, tf.float32, 2e38, {}),
    ):
        text, _, memory = codec.partition(",memory=")
        options = {**options, "op": hvd.Sum, "weights": new_weights(dtype)}
        trainer = Trainer(make(text, **({"memory": memory} if memory else {})), **options)
        trainer.run(1)
        before = digest(state(trainer.compression))

        def huge(grads, where=where, size=size):
            grads[where][:] = size
            return grads

        grads = trainer.step(huge)
        after = digest(state(trainer.compression))
        out[f"{codec} {where} {dtype.name}"] = {
            "where": where,
            "finite": [bool(np.isfinite(tf.cast(g, tf.float32)).all()) for g in grads],
            "state kept": before == after,
            "counted": trainer.compression.stats()["bad_steps"],
            "then": all(np.isfinite(tf.cast(g, tf.float32)).all() for g in trainer.step()),
            "moved": digest(state(trainer.compression)) != after,
        }
    return out


@check
def loss_scale():
    """The memory is held without the scale: the books balance in unscaled units."""
    out = {}
    for codec, memory, slot, graph in (
        ("topk", "residual", "residual", True),
        ("randomk", "residual", "residual", False),
        ("topk", "ef21", "mean", False),
    ):
        scale = tf.Variable(1024.0)
        sources = {"topk": scale, "randomk": lambda scale=scale: scale}
        compression = make(codec, memory=memory, loss_scale=sources[codec])
        trainer = Trainer(compression, scale=scale, graph=graph)
        plain = Trainer(make(codec, memory=memory))
        same = []
        for factor in (1024.0, 64.0, 64.0, 4096.0, 1.0):
            scale.assign(factor)
            expected = plain.step()
            same.append(digest(expected) == digest([g / factor for g in trainer.step()]))
        out[f"{codec} {memory}"] = {
            "as without a scale": same,
            "state": digest(state(compression)) == digest(state(plain.compression)),
            "imbalance": trainer.imbalance(slot) if memory == "residual" else [0.0],
        }
    out["refused"] = [
        message(lambda: make("topk", loss_scale="auto")),
        message(lambda: make("topk") + make("linear", loss_scale=tf.Variable(1.0))),
        message(lambda: make("topk", loss_scale=lambda: "2")._binding.loss_scale.read()),
    ]
    return out


@check
def loss_scale_optimizer():
    """Keras' own loss-scale optimizer: a bad step on one rank halves the scale on all."""
    import keras

    weights = [keras.Variable(w) for w in new_weights()]
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=256.0)
    unbuilt = message(lambda: make("topk", loss_scale=optimizer)._binding.loss_scale.read())
    optimizer.build(weights)
    compression = make("topk", loss_scale=optimizer)
    inner = [w.value for w in weights]

    @tf.function
    def step(grads):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(w * g) for w, g in zip(inner, grads)])
            loss = optimizer.scale_loss(loss)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        optimizer.apply(tape.gradient(loss, inner, use_generic_names=True), weights)

    scales, kept = [], []
    for number in range(4):
        grads = draw(hvd.rank(), number)
        if number == 2:
            grads = spoil(2, np.inf)(grads)
        before = digest(state(compression)), digest(inner)
        step([tf.constant(g) for g in grads])
        kept.append((digest(state(compression)), digest(inner)) == before)
        scales.append(float(optimizer.dynamic_scale))
    return {"unbuilt": unbuilt, "scales": scales, "kept": kept, "weights": digest(inner)}


@check
def memories():
    """Books, equal ranks, a bad step, and resuming, of each memory."""
    out = {}
    for memory, text in MEMORIES.items():

        def build(text=text, memory=memory):
            return make(text, memory=memory)

        kind = Momentum if memory == "momentum" else Trainer
        trainer = kind(build(), rate=0.01)
        trainer.run(5)
        before = digest(state(trainer.compression))
        weights = [w.read_value() for w in trainer.weights]
        books = [a.copy() for a in trainer.applied], [t.copy() for t in trainer.true]
        spoilt = trainer.step(spoil(0, np.nan))
        kept = before == digest(state(trainer.compression))
        trainer.applied, trainer.true = books
        for weight, value in zip(trainer.weights, weights):
            weight.assign(value)
        with tempfile.TemporaryDirectory() as folder:
            path = tf.train.Checkpoint(compression=trainer.compression).write(f"{folder}/c")
            again = resumed(trainer.steps, build, path, graph=False)
        grads = digest(flat(trainer.run(2)))
        out[memory] = {
            "spoilt": [bool(np.isfinite(g).all()) for g in spoilt],
            "kept": kept,
            "weights": digest(trainer.weights),
            "resumed": digest(flat(again.run(2))) == grads,
            "books": books_of(memory, trainer),
        }
    return out


class Clipped(Trainer):
    """Keeps the books of gradients that each rank clips."""

    def step(self, *args, **options):
        for rank in range(hvd.size()):
            for true, grad in zip(self.true[::2], draw(rank, self.steps)[::2]):
                true += (np.clip(grad, -0.5, 0.5) - np.float64(grad)) / hvd.size()
        return super().step(*args, **options)


@check
def options_of_memories():
    """Clipping comes before the memory, which may be narrow; references are sent anew."""
    narrow = Trainer(make("topk", state_dtype="bfloat16"), rate=0.01)
    narrow.run(4)
    clipped = Clipped(make("topk", clip_value=0.5))
    clipped.run(4)
    fresh = Trainer(make("linear:bits=4", memory="differential:refresh_every=3"))
    sent, off = [], []
    for step in range(5):
        before = wire_bytes(fresh)
        fresh.step()
        sent.append(wire_bytes(fresh) - before)
        own, true = residual(fresh.compression, 0, "own"), draw(hvd.rank(), step)[0].ravel()
        off.append(float(np.abs(own - true).max() / np.abs(true).max()))
    return {
        "narrow": {
            "dtype": [v.dtype.name for v in narrow.compression.variables if "residual" in v.name],
            "imbalance": narrow.imbalance(),
            "weights": digest(narrow.weights),
        },
        "clipped": clipped.imbalance(),
        "sent": sent,
        "off": max(hvd.allgather_object(off[3])),
        "worse": min(hvd.allgather_object(off[2])),
        "refused": {
            how: message(lambda how=how: make("linear", exchange=how))
            for how in ("two_phase", "hierarchical")
        },
    }


class Momentum(Trainer):
    """Keeps the books of momentum: what is owed is the gathered momentum, not the gradient."""

    m = 0.9

    def step(self, *args, **options):
        before = [residual(self.compression, i, "momentum") for i in range(len(SHAPES))]
        for i, speed in enumerate(before):
            if speed is not None:
                mean = hvd.allreduce(self.m * speed, name=f"speed.{i}").numpy()
                self.true[i] += np.float64(mean.reshape(SHAPES[i]))
        return super().step(*args, **options)


def books_of(memory, trainer):
    """Return how far the books of a memory are off, relative to the greatest value."""
    if memory in ("residual", "momentum"):
        return trainer.imbalance()
    off = []  # the reference that all share is the mean of the ranks' own
    for i in (0, 2):
        own = residual(trainer.compression, i, "own")
        mean = residual(trainer.compression, i, "mean").numpy()
        held = hvd.allreduce(own, name=f"own.{i}").numpy()
        off.append(float(np.abs(held - mean).max() / np.abs(mean).max()))
    return off


@check
def disagreement():
    """Found out on every rank, before anything is sent, and never by waiting for a trace."""
    rank = hvd.rank()
    cases = {
        "codec": lambda: make(f"linear:bits={4 + rank}"),
        "kind": lambda: (make("topk"), make("fp16"))[rank % 2],
        "memory": lambda: make("topk", memory=("none", "residual")[rank % 2]),
        "size": lambda: Compression.topk(min_numel=64 if rank else 10**6),
        "none": lambda: (Compression.none(), make("topk"))[rank % 2],
    }
    out = {}
    for name, build in cases.items():
        trainer = Trainer(build(), graph=name == "kind")
        out[name] = message(trainer.step)
    out["op"] = message(Trainer(make("topk"), op=(hvd.Average, hvd.Sum)[rank % 2]).step)
    steps = Trainer(make("topk"))
    steps.compression.bind(steps.weights)
    for variable in steps.compression.variables:
        if variable.name.endswith("/step:0"):
            variable.assign(7 * rank)
    out["steps"] = message(steps.step)
    if rank == 0:  # traced, and never run
        alone = Trainer(make("topk"))
        alone.reduce.get_concrete_function([tf.constant(g) for g in draw(0, 0)])
    trainer = Trainer(make("topk"))
    out["afterwards"] = digest(flat(trainer.run(2)))
    return out


@check
def save_for_others():
    """Four steps of this many ranks, and their books."""
    folder, trainer = Path(os.environ[FOLDER]), Trainer(make("topk"))
    trainer.run(4)
    tf.train.Checkpoint(compression=trainer.compression).write(f"{folder}/rank{hvd.rank()}")
    trainer.run(1)
    tf.train.Checkpoint(compression=trainer.compression).write(f"{folder}/late{hvd.rank()}")
    trainer = Trainer(make("topk"))
    trainer.run(4)
    held = trainer.imbalance()
    if hvd.rank() == 0:
        np.savez(folder / "books.npz", *trainer.applied, *trainer.true)
    return held


@check
def go_on_from_three():
    folder = Path(os.environ[FOLDER])
    paths = [f"{folder}/rank{rank}" for rank in range(3)]
    with np.load(folder / "books.npz") as file:
        books = [file[f"arr_{i}"] for i in range(6)]
    trainer = Trainer(make("topk"))
    checkpoint = tf.train.Checkpoint(compression=trainer.compression)
    unbound = message(lambda: resize_state(checkpoint, paths, trainer.compression))
    trainer.compression.bind(trainer.weights)
    refused = {
        "unbound": unbound,
        "unresized": message(lambda: checkpoint.read(paths[hvd.rank()])),
        "missing": message(lambda: resize_state(checkpoint, paths[:2], trainer.compression)),
        "steps": message(
            lambda: resize_state(checkpoint, [*paths[:2], f"{folder}/late2"], trainer.compression)
        ),
    }
    other = Trainer(make("topk:ratio=0.1"))
    other.compression.bind(other.weights)
    refused["settings"] = message(
        lambda: resize_state(
            tf.train.Checkpoint(compression=other.compression), paths, other.compression
        )
    )
    resize_state(checkpoint, paths[::-1], trainer.compression)
    trainer.applied, trainer.true = books[:3], books[3:]
    before = trainer.imbalance()
    trainer.steps = 4
    grads = digest(flat(trainer.run(2)))
    return {"refused": refused, "before": before, "grads": grads, "after": trainer.imbalance()}
