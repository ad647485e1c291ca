"""Training through a tape: laws 1, 2, 5 and 7."""

from __future__ import annotations

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_gradcomp.tensorflow import Compression
from tests.distributed.workers.tensorflow_trainer import (
    CODECS,
    SHAPES,
    Trainer,
    check,
    digest,
    draw,
    flat,
    make,
    mode,
    spoil,
    state,
)


# Training -----------------------------------------------------------------------------------------
def train(codec, graph, steps=30, **tape):
    trainer = Trainer(make(codec), graph=graph, rate=0.01, **tape)
    trainer.run(steps)
    return {"weights": digest(trainer.weights), "imbalance": trainer.imbalance()}


@check
def training():
    out = {}
    for codec in CODECS:
        for graph in (True, False):
            out[f"{codec}, {mode(graph)}"] = train(codec, graph)
    return out


@check
def training_briefly():
    return {"topk": train("topk", False), "linear": train("linear", True)}


@check
def options():
    """The same steps under other options of the tape."""
    out = {}
    plain = Trainer(make("topk"))
    expected = flat(plain.run(3))
    for name, graph, tape in (
        ("groups", True, {"groups": 2}),
        ("listed groups", True, {}),
        ("sum", False, {"op": hvd.Sum, "groups": 3}),
        ("predivide", False, {"gradient_predivide_factor": 2.0}),
    ):
        other = Trainer(make("topk"), graph=graph, **tape)
        if name == "listed groups":
            other.tape = {"groups": [[other.weights[2], other.weights[0]]]}
        factor = hvd.size() if name == "sum" else 1
        out[f"{name}, {mode(graph)}"] = {
            "difference": max(
                float(np.abs(y - factor * x).max() / np.abs(x).max())
                for x, y in zip(expected, flat(other.run(3)))
            ),
            "same state": digest(plain.compression.variables)
            == digest(other.compression.variables),
        }
    return out


@check
def none_is_horovod():
    out = {}
    for graph in (True, False):
        for groups in (None, 2):
            ours = Trainer(Compression.none(), graph=graph, rate=0.1, groups=groups)
            theirs = Trainer(hvd.Compression.none, graph=graph, rate=0.1, groups=groups)
            same = digest(flat(ours.run(3))) == digest(flat(theirs.run(3)))
            out[f"{mode(graph)}, groups={groups}"] = same and digest(ours.weights) == digest(
                theirs.weights
            )
    return out


@check
def missing_gradient():
    """One trace lacks the first gradient; the others keep their own residuals."""
    out = {}
    for graph in (True, False):
        trainer = Trainer(make("topk"), graph=graph)
        for leave_out in ((2,), (), (0,), ()):
            trainer.step(leave_out=leave_out)
        out[mode(graph)] = trainer.imbalance()
    return out


@check
def shared_gradient():
    """In a function two variables may get one and the same gradient tensor."""
    weights = [tf.Variable(tf.zeros([24, 40]), name=f"w{i}") for i in range(2)]
    compression = make("topk")

    @tf.function
    def reduce(g, only_second):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((weights[1] if only_second else weights[0] + weights[1]) * g)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        return tape.gradient(loss, weights)

    applied, true = np.zeros((2, 24, 40)), np.zeros((2, 24, 40))
    for step, only_second in enumerate((True, False, False, True, False)):
        every = [draw(rank, step)[0] for rank in range(hvd.size())]
        for i, grad in enumerate(reduce(tf.constant(every[hvd.rank()]), only_second)):
            if grad is not None:
                applied[i] += grad.numpy()
                true[i] += np.mean(every, axis=0, dtype=np.float64)
    held = [v for v in compression.variables if v.name.endswith("residual:0")]
    held = [hvd.allreduce(v, op=hvd.Average, name=v.name[:2]).numpy() for v in held]
    held = np.reshape(held, (2, 24, 40))
    return (np.abs(applied + held - true).max(axis=(1, 2)) / np.abs(true).max()).tolist()


@check
def two_tapes():
    """Two models of equal shapes in one function, with a compressor each and with one for both."""
    out = {}
    for shared in (False, True):
        kernels = [tf.Variable(tf.zeros([24, 40]), name="kernel") for _ in range(2)]
        first = make("topk")
        compressions = [first, first if shared else make("topk")]

        @tf.function
        def reduce(grads, kernels=kernels, compressions=compressions):
            out = []
            for kernel, compression, g in zip(kernels, compressions, grads):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(kernel * g)
                tape = hvd.DistributedGradientTape(tape, compression=compression)
                out += tape.gradient(loss, [kernel])
            return out

        applied, true = np.zeros((2, 24, 40)), np.zeros((2, 24, 40))
        for step in range(3):
            every = np.stack([draw(r, step, SHAPES[:1] * 2) for r in range(hvd.size())])
            applied += np.stack(reduce(list(map(tf.constant, every[hvd.rank()]))))
            true += every.mean(axis=0, dtype=np.float64)
        held = [v for c in dict.fromkeys(compressions) for v in c.variables if v.shape.rank]
        held = [hvd.allreduce(v, name=f"held.{i}").numpy() for i, v in enumerate(held)]
        off = np.abs(applied + np.reshape(held, (2, 24, 40)) - true).max(axis=(1, 2))
        out["shared" if shared else "own"] = (off / np.abs(true).max(axis=(1, 2))).tolist()
    return out


# Bad steps ----------------------------------------------------------------------------------------
@check
def bad_step():
    return spoilt_runs(
        ("topk", "topk", 2, np.inf, {"graph": True}),
        ("topk grouped, eager", "topk", 0, -np.inf, {"graph": False, "groups": 2}),
        ("in a bias", "topk", 1, np.nan, {"graph": True}),
        ("randomk", "randomk", 2, np.nan, {"graph": False}),
        ("fp16", "fp16", 0, np.inf, {"graph": True}),
        ("acp", "acp", 2, np.inf, {"graph": True}),
        ("powersgd", "powersgd", 2, np.inf, {"graph": True}),
    )


@check
def bad_step_briefly():
    return spoilt_runs(("topk", "topk", 2, np.inf, {"graph": True}))


def difference(x, y):
    """The greatest one, relative; infinite where there is no telling."""
    off = float(np.abs(x - y).max() / np.abs(y).max())
    return off if np.isfinite(off) else np.inf


def spoilt_runs(*runs):
    out, straight = {}, {}
    for name, codec, where, value, options in runs:
        if codec not in straight:
            without = Trainer(make(codec))
            without.run(2)
            without.steps = 3
            for variable in without.compression.variables:
                if variable.name.endswith("/step:0"):
                    variable.assign_add(1)
            straight[codec] = flat(without.run(2))
        trainer = Trainer(make(codec), **options)
        trainer.run(2)
        before = digest(state(trainer.compression))
        grads = trainer.step(spoil(where, value))
        after = digest(state(trainer.compression))
        out[name] = {
            "where": where,
            "finite": [bool(np.isfinite(g).all()) for g in grads],
            "state kept": before == after,
            "then off": max(map(difference, flat(trainer.run(2)), straight[codec])),
            "counted": trainer.compression.stats()["bad_steps"],
        }
    return out
