"""Other gradients, state, numbers, refusals and surroundings."""

from __future__ import annotations

import copy
import gc
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
def handed_over():
    """Who is warned that a function takes variables as arguments."""
    out = {}
    weights = new_weights()
    kernels = weights[0], weights[2]
    grad = tf.constant(draw(0, 0)[0])

    def reduce(kernel, compression):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(kernel * grad)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        return tape.gradient(loss, [kernel])

    def run(codec, how):
        compression = make(codec)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            how(compression)
        return [str(w.message) for w in caught if "horovod_gradcomp" in str(w.message)]

    def argument(compression):
        step = tf.function(lambda kernel, unused=None: reduce(kernel, compression))
        outer = tf.function(lambda kernels: [step(kernel=kernel) for kernel in kernels])
        outer(kernels)

    def closure(compression):
        tf.function(lambda: reduce(kernels[0], compression))()

    def eager(compression):
        for kernel in kernels:
            reduce(kernel, compression)

    for how in (argument, closure, eager):
        out[how.__name__] = run("topk", how)
    out["no memory"] = run("fp16", argument)
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
def other_variables():
    """Eagerly, variables of equal shapes in turn, on the one function that Horovod has for them."""
    one = tf.constant(np.arange(1.0, 81.0, dtype=np.float32).reshape(8, 10))

    def tape(compression, variables, grads):
        with tf.GradientTape() as inner:
            loss = tf.add_n([tf.reduce_sum(v * g) for v, g in zip(variables, grads)])
        inner = hvd.DistributedGradientTape(inner, compression=compression)
        return inner.gradient(loss, variables)

    def optimizer(compression):
        inner = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        wrapped = hvd.DistributedOptimizer(inner, compression=compression)

        def reduce(_, variables, grads):
            def loss():
                return tf.add_n([tf.reduce_sum(v * g) for v, g in zip(variables, grads)])

            return [grad for grad, _ in wrapped.compute_gradients(loss, variables)]

        return reduce

    def most(reduce, compression, variables, grads):
        return max(float(tf.reduce_max(tf.abs(g))) for g in reduce(compression, variables, grads))

    def kernel(name="dense_1/kernel"):
        return tf.Variable(tf.zeros([8, 10]), name=name)

    compression = make("topk")
    reduce = optimizer(compression)
    out = {"optimizer": [most(reduce, compression, [kernel()], [g]) for g in (one, 0 * one)]}
    compression = make("topk", rules=[("dense_head.*", None)])
    first, second = kernel(), kernel()
    out["first"] = most(tape, compression, [first], [one])
    out["second"] = most(tape, compression, [second], [0 * one])
    dense = tape(compression, [kernel("dense_head/kernel")], [one])[0]
    out["nonzeros of a dense one"] = int(tf.math.count_nonzero(dense))
    out["owed"] = [float(residual_of(compression, f"{i}.kernel").max()) for i in range(2)]
    del second
    gc.collect()
    out["third"] = most(tape, compression, [kernel()], [0 * one])
    out["steps"] = compression.stats()["steps"]
    return out


def residual_of(compression, name):
    return compression._units[name].residual.numpy()


@check
def strangers():
    """Checkpoints onto other variables than they were saved for."""

    def trainer(names=("kernel", "kernel"), shapes=((8, 10), (8, 10)), bind=True):
        weights = [tf.Variable(tf.zeros(s), name=n) for n, s in zip(names, shapes)]
        compression = make("topk")
        return weights, compression.bind(weights) if bind else compression

    def step(compression, weights):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum((i + 1.5) * w) for i, w in enumerate(weights)])
        hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, weights)

    def read(compression, path):
        tf.train.Checkpoint(compression=compression).read(path).expect_partial()

    out = {}
    with tempfile.TemporaryDirectory() as folder:
        weights, saved = trainer()
        step(saved, weights[::-1])
        path = tf.train.Checkpoint(compression=saved).write(f"{folder}/bound")
        weights, unbound = trainer(bind=False)
        step(unbound, weights[1:])
        step(unbound, weights)
        parts = tf.train.Checkpoint(compression=unbound).write(f"{folder}/parts")
        _, again = trainer()
        read(again, path)
        out["alike"] = [
            digest([residual_of(c, f"{i}.kernel") for i in range(2)]) for c in (saved, again)
        ]
        others = {
            "three": trainer(["kernel"] * 3, [(8, 10)] * 3),
            "one": trainer(["kernel"], [(8, 10)]),
            "shape": trainer(shapes=((8, 10), (16, 10))),
            "name": trainer(names=("kernel", "bias")),
        }
        for name, (_, compression) in others.items():
            out[name] = message(lambda c=compression: read(c, path))
        out["parts"] = message(lambda: read(again, parts))
        kept = digest([residual_of(again, f"{i}.kernel") for i in range(2)])
        out["kept"] = kept == out["alike"][0]
        weights, late = trainer(bind=False)
        read(late, parts)
        out["late"] = message(lambda: late.bind(weights))
        out["late again"] = message(lambda: step(late, weights))
    return out


@check
def unknown_shape():
    compression = make("topk")
    one = tf.Variable(tf.zeros([50, 4]), shape=[None, 4], name="one")
    for rows in (50, 30):
        one.assign(tf.zeros([rows, 4]))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(one * 1.5)
        hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, [one])
    stats = compression.stats()
    return {"bypassed": stats["bypassed"], "raw": stats["raw_bytes"], "ratio": stats["ratio"]}


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

    def twice(**options):
        (kernel, *_) = new_weights()
        Trainer(make("topk", **options), weights=[kernel, kernel]).step()

    return {
        "twice": message(twice),
        "twice without memory": message(lambda: twice(memory="none")),
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
