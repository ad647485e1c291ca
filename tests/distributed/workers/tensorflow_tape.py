"""Checks of the TensorFlow front end on real ranks; each reports what the test then judges.

The gradient of ``sum(w * g)`` is ``g``, so every rank knows every rank's gradients: ``draw``
makes them from (rank, step, variable). Arguments: the names of the checks to run.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
import traceback
import warnings

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_gradcomp.tensorflow import Compression, Compressor, calls
from tests.distributed.launch import report

SHAPES = ((24, 40), (40,), (40, 24), (40, 24))
NAMES = ("kernel", "bias", "kernel", "kernel")
CODECS = {
    "topk": "topk:ratio=0.05",
    "randomk": "randomk:ratio=0.1",
    "linear": "linear:bits=4",
    "fp16": "fp16",
    "none": "none",
}
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def make(codec, **options):
    return Compression.from_string(CODECS.get(codec, codec), min_numel=64, **options)


def new_weights(dtype=tf.float32):
    # As Keras does it where a rank has built one model more: names differ between ranks.
    start = np.random.default_rng(3)
    return [
        tf.Variable(
            tf.cast(start.standard_normal(shape), dtype), name=f"dense_{i + hvd.rank()}/{name}"
        )
        for i, (shape, name) in enumerate(zip(SHAPES, NAMES))
    ]


def draw(rank, step, shapes=SHAPES):
    generator = np.random.default_rng([rank, step])
    # The last layer's gradients are large, so that a residual in the wrong place shows.
    return [
        (generator.standard_normal(shape) * 10.0**i).astype(np.float32)
        for i, shape in enumerate(shapes)
    ]


class Trainer:
    """Reduces drawn gradients through a tape and keeps the books."""

    def __init__(self, compression, *, graph=True, rate=0.0, weights=None, **tape):
        self.compression, self.rate, self.tape = compression, rate, tape
        self.weights = weights or new_weights()
        self.applied = [np.zeros(w.shape) for w in self.weights]
        self.true = [np.zeros(w.shape) for w in self.weights]
        self.steps = 0
        self.reduce = tf.function(self._reduce) if graph else self._reduce

    def _reduce(self, grads, leave_out=()):
        weights = self.weights
        with tf.GradientTape() as tape:
            terms = [
                tf.reduce_sum(w * tf.cast(g, w.dtype))
                for i, (w, g) in enumerate(zip(weights, grads))
                if i not in leave_out
            ]
            loss = tf.add_n([tf.cast(term, tf.float32) for term in terms])
        tape = hvd.DistributedGradientTape(tape, compression=self.compression, **self.tape)
        return tape.gradient(loss, weights, use_generic_names=True)

    def step(self, change=None, leave_out=()):
        by_rank = [draw(rank, self.steps) for rank in range(hvd.size())]
        mine = [tf.constant(g) for g in (change or (lambda g: g))(by_rank[hvd.rank()])]
        reduced = self.reduce(mine, leave_out)
        self.steps += 1
        for i, grad in enumerate(reduced):
            if grad is None:
                continue
            self.true[i] += np.mean([np.float64(g[i]) for g in by_rank], axis=0)
            self.applied[i] += np.float64(tf.cast(grad, tf.float64).numpy())
            if self.rate:
                self.weights[i].assign_sub(self.rate * grad)
        return reduced

    def run(self, steps):
        return [self.step() for _ in range(steps)]

    def imbalance(self):
        """Law 1, for each variable: applied + mean residual - true, relative to the true sum."""
        out = []
        for i, (applied, true) in enumerate(zip(self.applied, self.true)):
            held = residual(self.compression, i)
            if held is not None:
                held = hvd.allreduce(held, op=hvd.Average, name=f"held.{i}").numpy()
                applied = applied + np.float64(held.reshape(true.shape))
            out.append(float(np.abs(applied - true).max() / np.abs(true).max()))
        return out


def residual(compression, i):
    for variable in getattr(compression, "variables", ()):
        if variable.name.split(":")[0] == f"dense_{i + hvd.rank()}/{NAMES[i]}/residual":
            return variable.read_value()
    return None


def digest(tensors):
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tf.convert_to_tensor(tensor).numpy().tobytes())
    return state.hexdigest()[:16]


def flat(steps):
    return [grad for grads in steps for grad in grads]


def mode(graph):
    return "function" if graph else "eager"


def message(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


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
        ("groups", False, {"groups": 2}),
        ("listed groups", True, {}),
        ("sum", True, {"op": hvd.Sum}),
        ("sum", False, {"op": hvd.Sum, "groups": 3}),
        ("predivide", True, {"gradient_predivide_factor": 2.0}),
    ):
        other = Trainer(make("topk"), graph=graph, **tape)
        if name == "listed groups":
            other.tape = {"groups": [[other.weights[3], other.weights[0]]]}
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
        for leave_out in ((2,), (), (0,), (), (0, 1), ()):
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
def spoil(where, value):
    def change(grads):
        if hvd.rank() == hvd.size() - 1:
            grads[where].flat[7] = value
        return grads

    return change


@check
def bad_step():
    return spoilt_runs(
        ("topk", "topk", 3, np.inf, {"graph": True}),
        ("topk grouped", "topk", 0, np.nan, {"graph": True, "groups": 2}),
        ("topk eager", "topk", 0, -np.inf, {"graph": False}),
        ("in a bias", "linear", 1, np.nan, {"graph": True}),
        ("randomk", "randomk", 2, np.inf, {"graph": False}),
        ("fp16", "fp16", 2, np.inf, {"graph": True}),
    )


@check
def bad_step_briefly():
    return spoilt_runs(("topk", "topk", 2, np.inf, {"graph": True}))


def spoilt_runs(*runs):
    out, straight = {}, {}
    for name, codec, where, value, options in runs:
        if codec not in straight:
            without = Trainer(make(codec))
            without.run(2)
            without.steps = 3
            straight[codec] = digest(flat(without.run(2)))
        trainer = Trainer(make(codec), **options)
        trainer.run(2)
        before = digest(trainer.compression.variables)
        grads = trainer.step(spoil(where, value))
        after = digest(trainer.compression.variables)
        out[name] = {
            "where": where,
            "finite": [bool(np.isfinite(g).all()) for g in grads],
            "state kept": before == after,
            "then as before": digest(flat(trainer.run(2))) == straight[codec],
            "counted": trainer.compression.stats()["bad_steps"],
        }
    return out


# Gradients of other kinds -------------------------------------------------------------------------
@check
def sparse():
    """An embedding's IndexedSlices pass by, yet spoil the step; as dense they are compressed."""
    out = {}
    for as_dense in (False, True):
        for graph in (True, False):
            table = tf.Variable(tf.zeros([30, 8]), name="table")
            kernel = tf.Variable(tf.zeros([24, 40]), name="kernel")
            compression = make("topk")

            def reduce(rows, g, table=table, kernel=kernel, compression=compression, d=as_dense):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(tf.gather(table, [1, 5, 5]) * rows)
                    loss += tf.reduce_sum(kernel * g)
                tape = hvd.DistributedGradientTape(tape, compression=compression, sparse_as_dense=d)
                return tape.gradient(loss, [table, kernel])

            reduce = tf.function(reduce) if graph else reduce
            rows, g = np.ones((3, 8), np.float32), draw(hvd.rank(), 0)[0]
            first, _ = reduce(tf.constant(rows), tf.constant(g))
            kept = digest(compression.variables)
            if hvd.rank() == 0:
                rows[1, 1] = np.nan
            _, dense = reduce(tf.constant(rows), tf.constant(g))
            residuals = [v.shape[0] for v in compression.variables if v.shape.rank]
            out[f"{'as dense' if as_dense else 'sparse'}, {mode(graph)}"] = {
                "kind": type(first).__name__,
                "table": tf.convert_to_tensor(first).numpy().sum(axis=1)[[1, 5, 7]].tolist(),
                "residuals": residuals,
                "state kept": kept == digest(compression.variables),
                "finite": bool(np.isfinite(dense).all()),
            }
    return out


@check
def dtypes():
    out = {}
    for dtype in (tf.float16, tf.bfloat16, tf.float64):
        trainer = Trainer(make("topk"), weights=new_weights(dtype), graph=dtype is not tf.float64)
        grads = flat(trainer.run(4))
        plain = Trainer(Compression.none(), weights=new_weights(dtype)).run(1)[0]
        out[dtype.name] = {
            "dtypes": sorted({g.dtype.name for g in [*grads, *plain]}),
            "residuals": sorted({v.dtype.name for v in trainer.compression.variables}),
            "imbalance": trainer.imbalance(),
        }
    whole = tf.range(5) + hvd.rank()
    total = hvd.allreduce(whole, op=hvd.Sum, compression=make("topk"), name="whole")
    out["int32"] = {"dtypes": [total.dtype.name], "sum": total.numpy().tolist()}
    return out


@check
def unknown_tensor():
    tensor = tf.ones([24, 40]) * (hvd.rank() + 1)
    lossy = make("linear:bits=2", memory="none")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(2):
            mean = hvd.allreduce(tensor * [[1.0] * 39 + [1.3]], compression=lossy, name=f"u{i}")
    return {
        "with memory": message(lambda: hvd.allreduce(tensor, compression=make("topk"), name="u")),
        "without": float(mean[0, 0]),
        "warnings": [str(w.message) for w in caught if "horovod_gradcomp" in str(w.message)],
    }


# State and numbers --------------------------------------------------------------------------------
@check
def checkpoint():
    out = {}
    for codec in ("topk", "randomk"):
        straight = Trainer(make(codec))
        straight.run(3)
        with tempfile.TemporaryDirectory() as folder:
            path = tf.train.Checkpoint(compression=straight.compression).write(f"{folder}/c")
            expected = digest(flat(straight.run(3)))
            for bound in (True, False) if codec == "topk" else (False,):
                again = Trainer(make(codec), graph=bound)
                if bound:
                    again.compression.bind(again.weights)
                status = tf.train.Checkpoint(compression=again.compression).read(path)
                again.steps = 3
                same = digest(flat(again.run(3))) == expected
                status.assert_existing_objects_matched()
                out[f"{codec} {'bound' if bound else 'not yet made'}"] = same
    return out


@check
def counting():
    compression = make("topk")
    trainer = Trainer(compression)
    before = compression.stats()["active"]
    trainer.run(3)
    trainer.step(leave_out=(0,))
    return {"before": before, "stats": compression.stats(), "repr": repr(compression)}


@check
def traces():
    """Each variable is traced once, whether its state exists or not, and never again."""
    seen = []

    class Watched(Compressor):
        @tf.autograph.experimental.do_not_convert
        def compress(self, tensor):
            seen.append(tensor.name)
            return super().compress(tensor)

    compression = Watched(make("topk")._settings)
    trainer = Trainer(compression, graph=False)
    trainer.run(20)
    return {"compress": len(seen), "variables": len(compression.variables)}


@check
def eager_everything():
    tf.config.run_functions_eagerly(True)
    try:
        trainer = Trainer(make("topk"), graph=False)
        trainer.run(2)
        before = digest(trainer.compression.variables)
        grads = trainer.step(spoil(0, np.inf))
        after = digest(trainer.compression.variables)
        trainer = Trainer(make("topk"), graph=False)
        trainer.run(3)
        stats = trainer.compression.stats()
    finally:
        tf.config.run_functions_eagerly(False)
    return {
        "finite": [bool(np.isfinite(g).all()) for g in grads],
        "state kept": before == after,
        "imbalance": trainer.imbalance(),
        "steps": stats["steps"],
    }


# Refusals -----------------------------------------------------------------------------------------
@check
def refusals():
    def jitted():
        trainer = Trainer(make("topk"))
        trainer.reduce = tf.function(trainer._reduce, jit_compile=True)
        trainer.step()

    def found_as_average(tensor, find=calls.find):
        return find(tensor)._replace(op=hvd.Average)

    def unnoticed():
        find = calls.find
        calls.find = found_as_average
        try:
            Trainer(make("topk"), op=hvd.Max).step()
        finally:
            calls.find = find

    def other_settings():
        Trainer(make(f"linear:bits={4 + hvd.rank()}")).step()

    def elastic():
        os.environ["HOROVOD_ELASTIC"] = "1"
        try:
            Trainer(make("topk")).step()
        finally:
            del os.environ["HOROVOD_ELASTIC"]

    return {
        "elastic": message(elastic),
        "Adasum": message(lambda: Trainer(make("topk"), op=hvd.Adasum).step()),
        "Max": message(lambda: Trainer(make("topk"), op=hvd.Max).step()),
        "XLA": message(jitted),
        "Max unnoticed": message(unnoticed),
        "other settings": message(other_settings),
        "no variables": message(lambda: make("topk").bind([tf.ones([3, 3])])),
        "no settings": message(lambda: Compressor("topk")),
        "other context": message(lambda: make("topk").decompress(tf.ones([3]), 5)),
    }


# Process sets, one process, Keras -----------------------------------------------------------------
@check
def process_set():
    """Ranks 0 and 2 of three train together, rank 1 by itself."""
    members = SETS[0].ranks
    trainer = Trainer(make("topk"), process_set=SETS[0])
    grads = [trainer.reduce([tf.constant(g) for g in draw(hvd.rank(), i)]) for i in range(5)]
    imbalance = []
    for i in (0, 2, 3) if hvd.rank() in members else ():
        held = hvd.allreduce(residual(trainer.compression, i), name=f"h{i}", process_set=SETS[0])
        applied = np.sum([step[i] for step in grads], axis=0, dtype=np.float64)
        true = np.sum([draw(r, s)[i] for r in members for s in range(5)], axis=0) / len(members)
        off = np.abs(applied + held.numpy().reshape(true.shape) - true).max()
        imbalance.append(off / np.abs(true).max())
    return {
        "grads": digest(flat(grads)),
        "own": digest(flat([draw(1, i) for i in range(5)])),
        "steps": trainer.compression.stats()["steps"],
        "imbalance": imbalance,
    }


@check
def one_process():
    trainer = Trainer(make("topk"))
    grads = flat(trainer.run(2))
    return {
        "untouched": digest(grads) == digest(flat([draw(0, 0), draw(0, 1)])),
        "stats": trainer.compression.stats(),
    }


@check
def keras_3_optimizer():
    import horovod.tensorflow.keras as hvd_keras
    import keras

    def wrap():
        hvd_keras.DistributedOptimizer(keras.optimizers.SGD(), compression=make("topk"))

    return message(wrap)


@check
def legacy_keras():
    """tf_keras, the one Keras that Horovod's own optimizer reduces for."""
    import horovod.tensorflow.keras as hvd_keras
    import tf_keras as keras

    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(24, activation="relu"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.layers.Input((40,)), *layers])
    compression = make("topk")
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.05), compression=compression)
    model.compile(optimizer, loss="mse")
    before = digest(model.get_weights())
    data = np.random.default_rng(hvd.rank())
    x, y = data.standard_normal((64, 40)), data.standard_normal((64, 3))
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    stats = compression.stats()
    return {
        "before": before,
        "after": digest(model.get_weights()),
        "steps": stats["steps"],
        "ratio": stats["compressed"]["ratio"],
    }


SETS = []

if __name__ == "__main__":
    if "process_set" in sys.argv:
        SETS.append(hvd.ProcessSet([0, 2]))
    hvd.init(process_sets=SETS)
    seconds = {}
    for name in sys.argv[1:]:
        start = time.monotonic()
        try:
            value = CHECKS[name]()
        except Exception:
            value = {"error": traceback.format_exc()}
        seconds[name] = round(time.monotonic() - start, 1)
        report({name: value, "seconds": seconds})
        # A rank that ends takes Horovod's process sets with it.
        hvd.allreduce(tf.zeros([1]), name=f"end of {name}")
