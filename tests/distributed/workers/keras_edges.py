"""What is special to Keras 3 on TensorFlow: loss scales, own loops, XLA, sparse rows, classes."""

from __future__ import annotations

import os
import pickle
import tempfile
import warnings

import horovod.tensorflow.keras as horovods
import numpy as np
import tensorflow as tf

import horovod_gradcomp.keras as hvd
from horovod_gradcomp.keras.flavour import keras
from horovod_gradcomp.keras.optimizer import distribution_of
from horovod_gradcomp.tensorflow.reduction import Reduction
from tests.distributed.workers.keras_trainer import (
    BATCH,
    STEPS,
    check,
    compiled,
    data,
    difference,
    distributed,
    fit,
    message,
    mine,
    new_model,
    sgd,
    topk,
    weights,
)
from tests.distributed.workers.keras_training import half_precision_model, scaler


# Mixed precision ----------------------------------------------------------------------------------
@check
def growing_scale():
    """What is remembered follows the loss scale: with one that grows, training is the same."""
    models = []
    for options in (
        {"initial_scale": 2.0**8, "dynamic_growth_steps": 1000},
        {"initial_scale": 2.0**4, "dynamic_growth_steps": 2},
    ):
        optimizer = distributed(scaler(sgd(), **options), compression=topk())
        models.append(compiled(optimizer, half_precision_model()))
        fit(models[-1])
    return {
        "scales": [float(m.optimizer.dynamic_scale) for m in models],
        "difference": difference(*models),
        "moved": difference(new_model(), models[0]),
    }


# Loops --------------------------------------------------------------------------------------------
def loop(model, optimizer, apply, graph):
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        if apply == "apply_gradients":
            optimizer.apply_gradients(zip(grads, model.trainable_variables))
        elif apply == "apply":
            optimizer.apply(grads, model.trainable_variables)
        else:
            optimizer.apply(grads)

    step = tf.function(step) if graph else step
    x, y = mine()
    size = BATCH // hvd.size()
    for i in range(STEPS):
        step(tf.constant(x[i * size : (i + 1) * size]), tf.constant(y[i * size : (i + 1) * size]))


@check
def loops():
    """Own loops, in a function and eagerly, and other ways of fit: all train alike."""
    out = {}
    for name in ("none", "topk:ratio=0.1,min_numel=64"):
        expected = compiled(distributed(compression=name))
        fit(expected, epochs=1)
        others = [("apply_gradients", True), ("apply built", False)]
        if name != "none":
            others = [("apply_gradients", False), ("apply", True)]
        for apply, graph in others:
            model, optimizer = new_model(), distributed(compression=name)
            if apply == "apply built":
                optimizer.build(model.trainable_variables)
            loop(model, optimizer, apply, graph)
            out[f"{name}, {apply}, {graph}"] = difference(expected, model)
        options = {"steps_per_execution": 4} if name == "none" else {"run_eagerly": True}
        model = compiled(distributed(compression=name), **options)
        fit(model, epochs=1)
        out[f"{name}, {options}"] = difference(expected, model)
    return out


# XLA ----------------------------------------------------------------------------------------------
@check
def xla():
    refused = message(lambda: fit(compiled(distributed(), jit_compile=True), epochs=1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = compiled(distributed(compression=topk()), jit_compile=True)
        fit(model, epochs=1, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    return {
        "refused": refused,
        "weights": weights(model),
        "warnings": [str(w.message) for w in caught if "horovod_gradcomp" in str(w.message)],
    }


# Gradients and classes ----------------------------------------------------------------------------
def embedding_model():
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Embedding(30, 16), keras.layers.Flatten(), keras.layers.Dense(3)]
    return keras.Sequential([keras.layers.Input((5,), dtype="int32"), *layers])


@check
def sparse():
    generator = np.random.default_rng(1)
    x, y = generator.integers(0, 30, (STEPS * BATCH, 5)), generator.integers(0, 3, STEPS * BATCH)

    def part(values):
        parts = values.reshape(STEPS, hvd.size(), -1, *values.shape[1:])[:, hvd.rank()]
        return parts.reshape(-1, *values.shape[1:])

    alone = compiled(sgd(), embedding_model())
    fit(alone, (x, y), ranks=1)
    out = {}
    for name, options in (
        ("rows", {}),
        ("compressed", {"sparse_as_dense": True, "compression": topk()}),
        ("scaled", {"compression": topk()}),
    ):
        optimizer = scaler(sgd()) if name == "scaled" else sgd()
        model = compiled(distributed(optimizer, **options), embedding_model())
        fit(model, (part(x), part(y)))
        out[name] = {"weights": weights(model), "difference": difference(alone, model)}
    return out


@keras.saving.register_keras_serializable("team")
class Doubled(keras.optimizers.SGD):
    """A registered class with a setting of its own."""

    def __init__(self, times=2.0, **options):
        super().__init__(**options)
        self.times = times

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient * self.times, variable, learning_rate)

    def get_config(self):
        return {**super().get_config(), "times": self.times}


@check
def classes():
    """An optimizer of the user's own class and settings stays one, in a file, too."""
    optimizer = Doubled(learning_rate=0.05, times=3.0)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    wrapped = distributed(optimizer, compression=topk())
    model = compiled(wrapped)
    fit(model, epochs=1)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        loaded = keras.models.load_model(path).optimizer
    multi = keras.optimizers.MultiOptimizer(lambda v: keras.optimizers.SGD(0.05))
    together = compiled(distributed(multi))
    fit(together, epochs=1)
    alone = compiled(sgd())
    fit(alone, data(), ranks=1, epochs=1)
    return {
        "same object": wrapped is optimizer,
        "is": [isinstance(wrapped, Doubled), wrapped.__class__ is Doubled, repr(type(wrapped))],
        "registered": keras.saving.serialize_keras_object(wrapped)["registered_name"],
        "loaded": [type(loaded) is Doubled, loaded.times, int(loaded.iterations)],
        "variables": len(wrapped.variables) == len(loaded.variables),
        "multi": difference(alone, together),
    }


@check
def copies():
    """What is made of an optimizer's class, or unpickled, is a plain one."""
    optimizer = distributed(sgd(momentum=0.9))
    fit(compiled(optimizer), epochs=1)
    made = {
        "of its type": type(optimizer).from_config(optimizer.get_config()),
        "unpickled": pickle.loads(pickle.dumps(optimizer)),
    }
    out = {}
    for name, one in made.items():
        fit(compiled(one), data(), ranks=1, epochs=1)
        out[name] = [type(one) is keras.optimizers.SGD, distribution_of(one) is None, one.momentum]
    return out


class Twins(keras.Model):
    """Two models of equal shapes, trained in one step by an optimizer each."""

    def __init__(self):
        super().__init__()
        self.models = [new_model(3), new_model(4)]

    def build(self, shape):
        self.built = True

    def compile(self, optimizers):
        super().compile(optimizer=None)
        self.optimizers = optimizers

    def train_step(self, batch):
        x, y = batch
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        with tf.GradientTape(persistent=True) as tape:
            losses = [loss_of(y, model(x, training=True)) for model in self.models]
        for model, loss, optimizer in zip(self.models, losses, self.optimizers):
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables))
        return {"loss": losses[0]}


@check
def twins():
    """Their reductions have the same names, and train each model as if it were alone."""
    out = {}
    for name in ("none", "topk:ratio=0.1,min_numel=64"):
        twins = Twins()
        twins.compile([distributed(compression=name) for _ in twins.models])
        fit(twins, epochs=1)
        alone = [compiled(distributed(compression=name), new_model(seed)) for seed in (3, 4)]
        for one in alone:
            fit(one, epochs=1)
        out[name] = [difference(one, twin) for one, twin in zip(alone, twins.models)]
    return out


@check
def names():
    """Of one optimizer's reductions over all ranks and over each alone."""
    variables = [v.value for v in new_model().trainable_variables]
    sets = [hvd.global_process_set, *(hvd.ProcessSet([rank]) for rank in range(hvd.size()))]
    return [Reduction("none", name="n", process_set=s)._wire_name(variables) for s in sets]


@check
def refusals():
    import tf_keras

    def other_callbacks():
        model = tf_keras.Sequential([tf_keras.layers.Dense(3)])
        hvd.callbacks.MetricAverageCallback().set_model(model)

    def fixed_rate():
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
        callback = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5)
        fit(compiled(distributed(keras.optimizers.SGD(schedule))), callbacks=[callback])

    wrap = hvd.DistributedOptimizer
    legacy = tf_keras.optimizers
    return {
        "twice": message(lambda: wrap(distributed())),
        "inner": message(lambda: wrap(distributed(scaler(sgd())).inner_optimizer)),
        "op": message(lambda: wrap(sgd(), op=horovods.Average + 2)),
        "factor": message(lambda: wrap(sgd(), gradient_predivide_factor=0)),
        "passes": message(lambda: wrap(sgd(), backward_passes_per_step=0)),
        "compression": message(lambda: wrap(sgd(), compression=4)),
        "text": message(lambda: wrap(sgd(), compression="topk:ratio=2")),
        "no optimizer": message(lambda: wrap("sgd")),
        "legacy": message(lambda: wrap(legacy.legacy.SGD())),
        "passes of tf_keras": message(lambda: wrap(legacy.SGD(), backward_passes_per_step=2)),
        "class": message(lambda: wrap(keras.optimizers.SGD)),
        "wrapped": message(lambda: wrap(horovods.DistributedOptimizer(sgd()))),
        "no set": message(lambda: wrap(sgd(), process_set=[0, 1])),
        "unknown set": message(lambda: wrap(sgd(), process_set=hvd.ProcessSet([0, 1]))),
        "endless": message(lambda: wrap(sgd(), gradient_predivide_factor=float("inf"))),
        "words": message(lambda: wrap(sgd(), backward_passes_per_step="two")),
        "horovod's": message(lambda: horovods.DistributedOptimizer(sgd(), compression=topk())),
        "other callbacks": message(other_callbacks),
        "rate": message(lambda: hvd.callbacks.LearningRateScheduleCallback(0, 0.5)),
        "warmup": message(lambda: hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=0)),
        "schedule": message(fixed_rate),
        "untouched": distribution_of(sgd()) is None,
    }
