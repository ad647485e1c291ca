"""Other gradients, state, numbers, refusals and surroundings."""

from __future__ import annotations

import copy
import os
import pickle
import tempfile
import warnings

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_gradcomp.tensorflow import Compression, Compressor, calls
from tests.distributed.workers.tensorflow_trainer import (
    SETS,
    Trainer,
    check,
    digest,
    draw,
    flat,
    make,
    message,
    mode,
    new_weights,
    residual,
    spoil,
    state,
)


# Gradients of other kinds -------------------------------------------------------------------------
@check
def sparse():
    """An embedding's IndexedSlices pass by, yet spoil the step; as dense they are compressed."""
    out = {}
    for as_dense in (False, True):
        for graph in (True, False) if as_dense else (True,):
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
            kept = digest(state(compression))
            if hvd.rank() == 0:
                rows[1, 1] = np.nan
            _, dense = reduce(tf.constant(rows), tf.constant(g))
            residuals = [v.shape[0] for v in compression.variables if v.shape.rank]
            out[f"{'as dense' if as_dense else 'sparse'}, {mode(graph)}"] = {
                "kind": type(first).__name__,
                "table": tf.convert_to_tensor(first).numpy().sum(axis=1)[[1, 5, 7]].tolist(),
                "residuals": residuals,
                "state kept": kept == digest(state(compression)),
                "finite": bool(np.isfinite(dense).all()),
                "bypassed": compression.stats()["bypassed"]["names"],
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


@check
def outer_tape():
    """A tape around the step, which nobody asks for a gradient of what was reduced."""
    kernel = tf.Variable(draw(0, 0)[0], name="kernel")
    compression = make("linear:bits=4")
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(kernel**2)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        reduced = tape.gradient(loss, [kernel])[0]
        outside = tf.reduce_sum(kernel)
    return [bool(np.isfinite(reduced).all()), digest(outer.gradient(outside, [kernel]))]


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
                again = Trainer(make(codec), graph=False)
                if bound:
                    again.compression.bind(again.weights)
                status = tf.train.Checkpoint(compression=again.compression).read(path)
                again.steps = 3
                same = digest(flat(again.run(3))) == expected
                status.assert_existing_objects_matched()
                out[f"{codec} {'bound' if bound else 'not yet made'}"] = same
    return out


@check
def copies():
    """A compressor just made can be copied, one in use says that it cannot."""
    out = {}
    scaled = Compression.topk(ratio=0.05, loss_scale=4.0)
    for name, copy_of in {"deepcopy": copy.deepcopy, "pickle": through_pickle}.items():
        fresh = make("topk")
        same = copy_of(fresh)
        Trainer(same).run(1)
        out[name] = {
            "alike": repr(same) == repr(fresh),
            "own": [len(fresh.variables), len(same.variables) > 0],
            "in use": message(lambda c=copy_of, s=same: c(s)),
            "scaled": message(lambda c=copy_of: c(scaled)),
        }
    return out


def through_pickle(thing):
    return pickle.loads(pickle.dumps(thing))


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
        before = digest(state(trainer.compression))
        grads = trainer.step(spoil(0, np.inf))
        after = digest(state(trainer.compression))
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

    # What fails as it runs reduces one variable only: a rank that has failed starts no more
    # reductions, and its peers would wait for them.
    def found_as_average(tensor, find=calls.find):
        return find(tensor)._replace(op=hvd.Average)

    def unnoticed():
        find = calls.find
        calls.find = found_as_average
        try:
            Trainer(make("topk"), weights=new_weights()[:1], op=hvd.Max).step()
        finally:
            calls.find = find

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
        "no variables": message(lambda: make("topk").bind([tf.ones([3, 3])])),
        "no settings": message(lambda: Compressor("topk")),
        "auto": message(Compression.auto),
        "other context": message(lambda: make("topk").decompress(tf.ones([3]), 5)),
        "other framework": message(lambda: make("topk").compress(np.ones(3))),
    }


# Process sets, one process, Keras -----------------------------------------------------------------
@check
def process_set():
    """Ranks 0 and 2 of three train together, rank 1 by itself."""
    members = SETS[0].ranks
    trainer = Trainer(make("topk"), process_set=SETS[0])
    grads = [trainer.reduce([tf.constant(g) for g in draw(hvd.rank(), i)]) for i in range(5)]
    imbalance = []
    for i in (0, 2) if hvd.rank() in members else ():
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

    def wrap(compression):
        hvd_keras.DistributedOptimizer(keras.optimizers.SGD(), compression=compression)

    return [message(lambda c=c: wrap(c)) for c in (make("topk"), Compression.topk)]


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


@check
def legacy_keras_mixed():
    """A loss-scale optimizer of tf_keras around Horovod's; one batch of the last rank overflows."""
    import horovod.tensorflow.keras as hvd_keras
    import tf_keras as keras

    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.layers.Input((40,)), keras.layers.Dense(24)])
    compression = make("topk", loss_scale=lambda: optimizer.loss_scale)
    inner = hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=compression)
    optimizer = keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=64.0)
    model.compile(optimizer, loss="mse")
    data = np.random.default_rng(hvd.rank())
    x, y = (data.standard_normal((64, n)).astype(np.float32) for n in (40, 24))
    if hvd.rank() == hvd.size() - 1:
        y[20, 3] = np.inf
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, y, batch_size=8, epochs=1, verbose=0, shuffle=False)
    held = [v.numpy() for v in state(compression) if v.name.endswith("residual:0")]
    return {
        "scale": float(optimizer.loss_scale),
        "weights": digest(model.get_weights()),
        "finite": all(np.isfinite(w).all() for w in [*model.get_weights(), *held]),
        "held": float(max(np.abs(h).max() for h in held)),
        "steps": [compression.stats()["steps"], compression.stats()["bad_steps"]],
        "warnings": [str(w.message) for w in caught if "horovod_gradcomp" in str(w.message)],
    }
