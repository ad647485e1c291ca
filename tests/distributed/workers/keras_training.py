"""Training on any Keras and backend: two ranks against one process with the doubled batch."""

from __future__ import annotations

import os
import tempfile
import warnings

import numpy as np

import horovod_gradcomp.keras as hvd
from horovod_gradcomp.keras.flavour import BACKEND, LEGACY, keras
from horovod_gradcomp.keras.optimizer import distribution_of
from tests.distributed.workers.keras_trainer import (
    BATCH,
    STEPS,
    check,
    compiled,
    data,
    difference,
    distributed,
    fit,
    memory,
    message,
    mine,
    new_model,
    sgd,
    topk,
    weights,
)


class Spy(keras.callbacks.Callback):
    def __init__(self, look):
        super().__init__()
        self.look, self.seen = look, []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(self.look(self.model))


def scheduled():
    rate = keras.optimizers.schedules.ExponentialDecay(0.01, 4, 0.9)
    return keras.optimizers.AdamW(rate, weight_decay=0.01, use_ema=True, ema_momentum=0.9)


OPTIMIZERS = {
    "momentum, clipped": lambda: sgd(momentum=0.9, global_clipnorm=0.5),
    "adamw, schedule, average": scheduled,
}
BRIEFLY = LEGACY or BACKEND == "torch"
"""Whether what differs little from Keras 3 on TensorFlow is left out."""

if not BRIEFLY:
    OPTIMIZERS["accumulation"] = lambda: sgd(gradient_accumulation_steps=2)
    OPTIMIZERS["static scale"] = lambda: sgd(loss_scale_factor=8.0)


@check
def one_process():
    """The same as a plain optimizer with all examples of each step, to rounding."""
    out = {}
    for name, make in OPTIMIZERS.items():
        alone = compiled(make())
        fit(alone, data(), ranks=1)
        together = compiled(distributed(make()))
        fit(together)
        out[name] = {
            "weights": weights(together),
            "difference": difference(alone, together),
            "moved": difference(new_model(), together),
            "reductions": distribution_of(together.optimizer).reduction.count,
            "steps": 2 * STEPS,
        }
    return out


class Breaking(keras.callbacks.Callback):
    """Ends a fit by an error."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            raise InterruptedError("a broken fit")


@check
def telemetry():
    """A record an epoch, and one every few batches, by the first rank alone."""
    out = {}
    kinds = {"epochs": (None, {}, {}), "batches": (3, {}, {})}
    if BACKEND == "torch":
        kinds["passes"] = (4, {"backward_passes_per_step": 4}, {})
        kinds["epochs of passes"] = (None, {"backward_passes_per_step": 4}, {})
    elif not LEGACY:
        kinds["executions"] = (4, {}, {"steps_per_execution": 4})
    for name, (every, passes, executions) in kinds.items():
        compression, records = topk(), []
        model = compiled(distributed(compression=compression, **passes), **executions)
        callback = hvd.callbacks.TelemetryCallback(records.append, every=every)
        fit(model, callbacks=[callback])
        told = compression.stats()
        sent = sum(r["total"]["wire_bytes"] * r["steps"] for r in records)
        out[name] = {
            "steps": [r["step"] for r in records],
            "all": not records or abs(sent - told["wire_bytes"]) < 1e-4 * told["wire_bytes"],
            "counted": sum(r["steps"] for r in records),
            "layers": [sorted(r["layers"]) for r in records[:1]],
            "residuals": [
                layer["residual_norm"] for r in records for layer in r["layers"].values()
            ],
            "total": [r["total"]["residual_norm"] for r in records],
        }
    callback, seen = hvd.callbacks.TelemetryCallback(records.append), len(records)
    out["broken"] = message(lambda: fit(model, callbacks=[callback, Breaking()]))
    fit(model, epochs=1, callbacks=[callback])
    out["steps once"] = [r["step"] for r in records[seen:]]
    out["refused"] = message(
        lambda: fit(compiled(sgd()), callbacks=[hvd.callbacks.TelemetryCallback(print)])
    )
    return out


def accuracy(model):
    x, y = data()
    return float((np.argmax(model.predict(x, verbose=0), axis=1) == y).mean())


@check
def compressed():
    """What is sent shrinks; ranks stay equal; accuracy is that of one process, uncompressed."""
    alone = compiled(sgd())
    fit(alone, data(), ranks=1, epochs=4)
    out = {"alone": accuracy(alone)}
    kinds = {"none": None, "topk": topk()}
    if not BRIEFLY:
        kinds.update(string="linear:bits=8,min_numel=64", uncalled=hvd.Compression.fp16)
    for name, compression in kinds.items():
        model = compiled(distributed(compression=compression))
        fit(model, epochs=4)
        out[name] = {
            "weights": weights(model),
            "accuracy": accuracy(model),
            "ratio": distribution_of(model.optimizer).reduction.compression.stats()["ratio"],
        }
    return out


@check
def options():
    """Sum, predivide and a process set change nothing but the factor."""
    alone = compiled(keras.optimizers.SGD(0.1))
    fit(alone, data(), ranks=1)
    out = {}
    for name, rate, extra in (
        ("sum", 0.05, {"op": hvd.Sum}),
        ("sum, compressed", 0.05, {"op": hvd.Sum, "compression": "fp16"}),
        ("predivide", 0.1, {"gradient_predivide_factor": 2.0, "name": "other"}),
        ("process set", 0.1, {"process_set": hvd.global_process_set, "compression": "none"}),
    ):
        model = compiled(distributed(keras.optimizers.SGD(rate), **extra))
        fit(model)
        out[name] = {"weights": weights(model), "difference": difference(alone, model)}
    return out


@check
def passes():
    """Gradients added up over two passes are those of both passes' examples."""
    alone = compiled(sgd(momentum=0.9))
    fit(alone, data(), ranks=0.5)
    out = {}
    for name, compression, average, rate in (
        ("summed", None, False, 0.025),
        ("compressed", topk(), True, 0.05),
    ):
        optimizer = keras.optimizers.SGD(rate, momentum=0.9)
        options = {"backward_passes_per_step": 2, "average_aggregated_gradients": average}
        model = compiled(distributed(optimizer, compression=compression, **options))
        fit(model)
        out[name] = {
            "weights": weights(model),
            "difference": difference(alone, model),
            "reductions": distribution_of(model.optimizer).reduction.count,
            "updates": int(model.optimizer.iterations),
        }
    return out


@check
def doubting():
    """What goes badly together is said once, and left out of what is chosen from."""
    out = {}
    momentum = {"memory": "momentum"}
    kinds = {"adam": (keras.optimizers.Adam(), {"rules": [("nothing.*", "fp16")]})}
    if BACKEND == "torch":
        kinds["scaled"] = (scaler(keras.optimizers.Lion()), {})
        kinds["late"] = (keras.optimizers.Adam(), {"start_after": 2})
        kinds["momentum"] = (sgd(momentum=0.9), momentum)
        kinds["none"] = (sgd(), momentum)
    x, y = (part[:8] for part in mine())
    for name, (optimizer, options) in kinds.items():
        model = compiled(distributed(optimizer, compression=topk(**options)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model.train_on_batch(x, y)
        texts = [str(w.message) for w in caught if "horovod_gradcomp" in str(w.message)]
        out[name] = [text[:75] for text in texts]  # before names, which differ between ranks
    if BACKEND == "torch":
        auto = hvd.Compression.auto(candidates=["topk:ratio=0.1", "fp16"])
        model = compiled(distributed(keras.optimizers.Adam(), compression=auto))
        model.train_on_batch(x, y)
        out["among"] = list(auto._bindings[0].tuner._among)
    return out


MEMORIES = {
    "residual": {},
    "momentum": {"memory": "momentum"},
    "ef21": {"memory": "ef21"},
    "differential": {"memory": "differential"},
    "bfloat16": {"state_dtype": "bfloat16"},
    "schedule": {"start_after": 6},
    "two phases": {"exchange": "two_phase"},
}


@check
def freezing():
    """A layer is frozen for some steps; gradients depend on examples alone, not on weights.

    Each layer trains as if there were no other one. In two phases it does not, as they share the
    parts that ranks reduce; there all that was held back comes out in the end.
    """
    generator = np.random.default_rng(hvd.rank())
    batches = [generator.standard_normal((2, 8, 40)).astype(np.float32) for _ in range(12)]
    nothing = [np.zeros_like(batches[0])] * 25

    def trained(compression, parts):
        keras.utils.set_random_seed(3)
        put = keras.layers.Input((40,))
        layers = [keras.layers.Dense(40, use_bias=False) for _ in range(2)]
        model = keras.Model(put, keras.layers.Add()([layer(put) for layer in layers]))
        optimizer = distributed(compression=compression)
        for frozen, part in parts:
            layers[0].trainable = not frozen
            model.compile(optimizer, loss=lambda y, p: keras.ops.mean(y * p))
            for x, y in part:
                model.train_on_batch(x, y)
        return model.get_weights()

    out = {}
    for name, options in MEMORIES.items():
        options = {"bucket_bytes": 4, **options} if name != "two phases" else options
        compression, again = topk(**options), topk(**options)
        frozen = [(False, batches[:4]), (True, batches[4:8]), (False, batches[8:])]
        end = [(False, nothing)] if name == "two phases" else []
        first, second = trained(compression, [*frozen, *end])
        expected = trained(None if end else again, [(False, batches)])[1]
        differences = [float(np.abs(second - expected).max())]
        if name != "schedule":
            some = [(False, batches[:4] + batches[8:])]
            expected = trained(None if end else topk(**options), some)[0]
            differences.append(float(np.abs(first - expected).max()))
        out[name] = differences
        saved = compression.state_dict()["optimizers"]
        assert {one["step"] for one in saved} == {8, 12 + len(nothing) * bool(end)}
    return out


# Mixed precision ----------------------------------------------------------------------------------
def half_precision_model():
    policy = keras.mixed_precision
    choose = policy.set_global_policy if LEGACY else policy.set_dtype_policy
    choose("mixed_float16")
    try:
        return new_model()
    finally:
        choose("float32")


def scaler(optimizer, **options):
    return keras.mixed_precision.LossScaleOptimizer(optimizer, **options)


def scale_of(optimizer):
    return float(optimizer.loss_scale if LEGACY else optimizer.dynamic_scale)


@check
def overflow():
    """Gradients overflow on one rank only, in the third step."""
    x, y = mine()
    if hvd.rank() == 1:
        x = x.copy()
        x[2 * BATCH // hvd.size()] = 1e7
    out = {}
    kinds = {
        "added by compile": lambda **c: distributed(**c),
        "inside": lambda **c: distributed(scaler(sgd()), **c),
    }
    if not BRIEFLY:
        kinds["around"] = lambda **c: scaler(distributed(**c))
        kinds["uncompressed"] = lambda **c: distributed()
        kinds["in passes"] = lambda **c: distributed(backward_passes_per_step=2, **c)
    for name, make in kinds.items():
        compression = topk()
        model = compiled(make(compression=compression), half_precision_model())

        def look(model, compression=compression):
            return scale_of(model.optimizer), memory(compression), weights(model)

        spy = Spy(look)
        fit(model, (x, y), epochs=1, callbacks=[spy])
        scales, kept, trained = zip(*spy.seen)
        out[name] = {
            "scales": scales,
            "memory moved": [a != b for a, b in zip(kept, kept[1:])],
            "weights moved": [a != b for a, b in zip(trained, trained[1:])],
            "weights": trained[-1],
            "finite": all(bool(np.isfinite(w).all()) for w in model.get_weights()),
            "class": type(model.optimizer).__module__,
        }
    return out


# Files --------------------------------------------------------------------------------------------
@check
def saving():
    """A file is that of the plain optimizer, and a loaded model goes on as the saved one."""
    out = {}
    with tempfile.TemporaryDirectory() as folder:
        # Keras 3 cannot train what it has loaded from .h5.
        for suffix in ("keras", "h5") if LEGACY else ("keras",):
            path = os.path.join(folder, f"model.{suffix}")
            model = compiled(distributed(sgd(momentum=0.9)))
            fit(model, epochs=1)
            model.save(path)
            plain = keras.models.load_model(path)
            again = hvd.load_model(path, compression="none")
            out[suffix] = {
                "class": type(plain.optimizer).__module__,
                "distributed": [distribution_of(m.optimizer) is not None for m in (plain, again)],
                "iterations": [int(m.optimizer.iterations) for m in (plain, again)],
                "config": plain.optimizer.get_config() == model.optimizer.get_config(),
            }
            fit(model, epochs=1)
            fit(again, epochs=1)
            out[suffix]["difference"] = difference(model, again)
            out[suffix]["weights"] = weights(again)
    return out


# Callbacks ----------------------------------------------------------------------------------------
@check
def broadcasting():
    """Every rank begins with other weights and another state, and trains as rank 1 began."""
    expected = compiled(sgd(momentum=0.9), new_model(1))
    fit(expected, data(), ranks=1)
    fit(expected, data(), ranks=1)
    start = new_model(hvd.rank())
    model = compiled(distributed(sgd(momentum=0.9)), start)
    if hvd.rank() == 1:
        # As if it alone had loaded a checkpoint: its optimizer is built, with a state of its own.
        alone = compiled(sgd(momentum=0.9), new_model(1))
        fit(alone, data(), ranks=1)
        model.set_weights(alone.get_weights())
        model.optimizer.build(model.trainable_variables)
        for own, theirs in zip(variables(model.optimizer), variables(alone.optimizer)):
            own.assign(theirs)
    fit(model, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(1)])
    return {
        "weights": weights(model),
        "difference": difference(expected, model),
        "iterations": int(model.optimizer.iterations),
    }


def variables(optimizer):
    return optimizer.variables() if callable(optimizer.variables) else optimizer.variables


@check
def metrics():
    model = compiled(distributed())
    history = fit(model, epochs=1, validation_data=mine())
    own = {name: values[0] for name, values in history.items()}
    model = compiled(distributed())
    average = hvd.callbacks.MetricAverageCallback()
    history = fit(model, epochs=1, validation_data=mine(), callbacks=[average])
    return {"own": own, "averaged": {name: values[0] for name, values in history.items()}}


@check
def metrics_of_many():
    """A metric of each class, and one that other ranks do not have."""
    x, y = mine()
    part = x, np.eye(3, dtype=np.float32)[y]
    out = {}
    for name, callbacks in (("own", []), ("averaged", [hvd.callbacks.MetricAverageCallback()])):
        model = new_model()
        one = keras.metrics.F1Score(average=None, name="f1")
        model.compile(distributed(), loss="mse", metrics=[one])
        history = fit(model, part, epochs=1, callbacks=callbacks)
        out[name] = np.asarray(history["f1"][0]).tolist()
        out[f"kinds {name}"] = type(history["loss"][0]).__name__
    only = {"validation_data": part} if hvd.rank() == 0 else {}
    out["other"] = message(lambda: fit(model, part, epochs=1, callbacks=callbacks, **only))
    return out


@check
def metric_names():
    """Metrics that Keras numbers differently on each rank are averaged with their like."""
    callback = hvd.callbacks.MetricAverageCallback()
    callback.set_model(compiled(distributed()))
    first, second = ("", "_1") if hvd.rank() == 0 else ("_9", "_10")
    first, second = f"dense{first}_loss", f"dense{second}_loss"
    logs = {first: 1.0, second: 2.0, "loss": 3.0}
    callback.on_epoch_end(0, logs)
    return [logs[first], logs[second], logs["loss"]]


@check
def frozen():
    """Where nothing is left to train, fit trains nothing."""
    out = {}
    for name, optimizer in (("plain", sgd()), ("distributed", distributed(compression=topk()))):
        model = new_model()
        model.trainable = False
        model = compiled(optimizer, model)
        out[name] = message(lambda m=model: fit(m, epochs=1))
    return out


@check
def legacy():
    """The broadcast serves optimizers of tf_keras.optimizers.legacy, too."""
    import horovod.tensorflow.keras as horovods

    out = {}
    for name, wrap in (("plain", lambda o: o), ("wrapped", horovods.DistributedOptimizer)):
        optimizer = wrap(keras.optimizers.legacy.SGD(0.05, momentum=0.9))
        model = compiled(optimizer, new_model(hvd.rank()))
        if hvd.rank() == 1:
            model.optimizer._create_all_weights(model.trainable_variables)
            for variable in model.optimizer.variables():
                variable.assign(np.full(variable.shape, 3).astype(variable.dtype.name))
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(1)
        broadcast.set_model(model)
        broadcast.on_train_begin()
        state = model.optimizer.variables()
        out[name] = [weights(model), [float(np.sum(v.numpy())) for v in state]]
        fit(model, epochs=1, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(1)])
        if name == "wrapped":
            out["trained"] = weights(model)
    return out


@check
def disagreement():
    """Arguments that differ between ranks are found out on all of them."""
    cases = {
        "op": ({"op": hvd.Average}, {"op": hvd.Sum}),
        "predivide": ({}, {"gradient_predivide_factor": 2.0}),
        "passes": ({}, {"backward_passes_per_step": 2}),
        "mean": (
            {"backward_passes_per_step": 2},
            {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
        ),
    }

    def step(**options):
        layer = keras.layers.Dense(3, use_bias=False)
        layer.build((None, 40))
        optimizer = distributed(compression=topk(), **options)
        for _ in range(2):
            optimizer.apply_gradients([(v * 0 + 1, v) for v in layer.trainable_variables])

    out = {}
    for name, options in cases.items():
        if not LEGACY or name in ("op", "predivide"):
            own = options[hvd.rank() % 2]
            text = message(lambda own=own: step(**own))
            out[name] = text[text.find("SettingsError") :].split("\n")[0]
    out["alike"] = message(step)
    return out


@check
def rates():
    """The learning rate after each batch, and momentum that follows it."""
    out = {}
    names = hvd.callbacks
    for name, callback in (
        ("warmup", names.LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=0)),
        ("decay", names.LearningRateScheduleCallback(0.4, 0.5, start_epoch=1, end_epoch=3)),
        ("from zero", names.LearningRateScheduleCallback(0.4, lambda epoch: epoch / 2)),
    ):
        model = compiled(distributed(keras.optimizers.SGD(0.4)))
        spy = Spy(lambda m: float(m.optimizer.learning_rate))
        history = fit(model, epochs=3, callbacks=[callback, spy])
        out[name] = {"seen": spy.seen, "logged": [float(rate) for rate in history["lr"]]}
    # Next to no rate leaves next to nothing of the momentum gathered before.
    moved = {}
    for corrected in (True, False):
        drop = names.LearningRateScheduleCallback(
            0.05, lambda epoch: 1e-9**epoch, momentum_correction=corrected
        )
        model = compiled(distributed(sgd(momentum=0.9)))
        fit(model, epochs=1, callbacks=[drop])
        before = [np.array(w) for w in model.get_weights()]
        x, y = mine()
        options = {"epochs": 2, "initial_epoch": 1, "batch_size": len(x), "verbose": 0}
        model.fit(x, y, callbacks=[drop], **options)
        moved[str(corrected)] = max(
            float(np.abs(a - b).max()) for a, b in zip(before, model.get_weights())
        )
    return {**out, "moved": moved}


@check
def warning():
    """An epoch without a reduction is noticed, whatever optimizer it is; a good one is silent."""
    out = {}
    average = hvd.callbacks.MetricAverageCallback
    optimizers = {"plain": sgd(), "distributed": distributed()}
    if not LEGACY:
        optimizers["short epoch"] = distributed(backward_passes_per_step=2 * STEPS)
    for name, optimizer in optimizers.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(compiled(optimizer), epochs=1, callbacks=[average()])
        out[name] = [str(w.message) for w in caught if "horovod_gradcomp" in str(w.message)]
    if BACKEND == "tensorflow":
        import horovod.tensorflow.keras as horovods

        model = compiled(horovods.DistributedOptimizer(sgd()))
        out["horovod's"] = message(lambda: fit(model, epochs=1, callbacks=[average()]))
        fit(model, epochs=1)
        out["weights of horovod's"] = weights(model)
    return out
