"""``Compression`` and ``Compressor``, mirroring ``horovod.tensorflow.compression``.

``Compression.topk(ratio=0.01)`` takes the place of ``hvd.Compression.fp16`` in
``hvd.DistributedGradientTape(compression=...)``. Make one compressor for each model.

A ``tf.function`` of your own that takes variables as arguments is traced once for all that have the
same shapes and dtypes, with the memories of the first ones: let it find its variables by closure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.compression import Compressor as HorovodCompressor

from ..core.errors import BindingError, SettingsError, explain
from ..core.namespace import Namespace
from ..core.settings import Settings, compose
from ..core.stats import Stats
from . import calls, refusals
from .binding import Binding
from .steps import Step, Steps
from .telemetry import Telemetry
from .unit import Sent, Unit

Tensor = Any
F = TypeVar("F", bound=Callable[..., Any])


def _as_written(function: F) -> F:
    """Keep autograph, which Horovod leaves on, out of a function."""
    return cast(F, tf.autograph.experimental.do_not_convert(function))


@dataclass(frozen=True)
class Ticket:
    """What ``decompress`` gets back as the context."""

    step: Step
    dtype: Any
    unit: Unit | None = None
    sent: Sent | None = None


class Compressor(HorovodCompressor, tf.Module):  # type: ignore[misc]
    """A codec with its memory in Horovod's ``compress`` / ``decompress`` slot.

    Make it with :data:`Compression`, one for each model. Its state, a flat residual and a step
    count for each compressed variable, is made when the variable is first met, or by :meth:`bind`,
    and ``tf.train.Checkpoint(compression=...)`` saves and restores it; every rank saves its own.

    Variables are told apart by identity. On the wire and in checkpoints they are named by the order
    in which they were first met, in a list of variables given to Horovod or to :meth:`bind`, and
    the last part of their name, as in ``0.kernel``; the rest of a name may differ between ranks.

    Args:
        settings: Checked settings, from :mod:`horovod_gradcomp.core.settings`.
        loss_scale: What the loss is multiplied by: a scalar ``tf.Variable``, the
            ``LossScaleOptimizer`` of ``tf_keras`` or Keras 3, or a function that returns one of
            these, as in ``loss_scale=lambda: optimizer.loss_scale`` where the optimizer is made
            later. What is remembered is then held in units of unscaled gradients. Without it a
            change of the loss scale puts the memory wrong by the ratio of both scales until all of
            it has been sent.
    """

    def __init__(self, settings: Settings, loss_scale: Any = None) -> None:
        refusals.unfit_settings(settings)
        super().__init__(name="compressor")
        self._settings = settings
        self._units: dict[str, Unit] = {}
        self._binding = Binding(settings, self._units, loss_scale)
        self._steps = Steps()
        self._manifest = self._binding.manifest

    # The slot ------------------------------------------------------------------------------------
    @_as_written
    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what Horovod is to reduce in place of a gradient.

        Args:
            tensor: A gradient, any float dtype. Other dtypes pass unchanged.

        Returns:
            One dense tensor and the context for :meth:`decompress`.

        Raises:
            BindingError: With a memory, when it cannot be told which variable this is.
            ExchangeError: The reduction is not Average or Sum.
            SettingsError: It is no tensor of TensorFlow.
        """
        if not isinstance(tensor.dtype, tf.DType):
            raise refusals.other_framework(tensor)
        if not tensor.dtype.is_floating:
            return tensor, None
        call = calls.find(tensor)
        if call is None:
            return self._dense(tensor)
        step = self._steps.find(call, self._binding.plan)
        place = step.place(call)
        tensor = step.gated(tensor)
        if not isinstance(call.variables[place], tf.Variable):
            payload, _ = self._dense(tensor)
            return payload, Ticket(step, tensor.dtype)
        unit, label = step.unit(place)
        if unit is None:
            payload, _ = _hand_on(tensor)
            step.record.bypass(label, call.variables[place], payload)
            return payload, Ticket(step, tensor.dtype)
        raw = unit.numel * tensor.dtype.size
        step.record.units[label] = unit.numel, raw, unit.wire_bytes()
        payload, sent = unit.send(tensor, step, call, step.record.counters.get(label))
        return payload, Ticket(step, tensor.dtype, unit, sent)

    @_as_written
    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Return the reduced gradient, of the shape and dtype that ``compress`` was given.

        Args:
            tensor: What Horovod made of the payload.
            ctx: The context from :meth:`compress`.

        Raises:
            InvalidArgumentError: When it runs: ranks are set differently, the reduction was not
                linear, or ran over other ranks, or a rank sent another number of bytes.
        """
        if ctx is None:
            return tensor
        if isinstance(ctx, tf.DType):
            return tf.cast(tensor, ctx)
        if not isinstance(ctx, Ticket):
            raise BindingError(
                explain(got=f"a context of {type(ctx).__name__}", expected="one from compress")
            )
        if ctx.unit is None or ctx.sent is None:
            result = tf.cast(tensor, ctx.dtype)
        else:
            result = ctx.unit.receive(tensor, ctx.sent)
        ctx.step.arrive(result)
        return result

    def __add__(self, other: Any) -> Compressor:
        """Return ``A + B``, where B encodes what A keeps, with the memory and options of A."""
        if callable(getattr(other, "_instance", None)):  # Compression.fp16, uncalled
            other = other._instance()
        if not isinstance(other, Compressor):
            return NotImplemented
        if other._binding.loss_scale is not None:
            raise SettingsError(
                explain(got="a loss_scale after '+'", expected="it before '+', with the memory")
            )
        if self._units:
            raise SettingsError(
                explain(got="a compressor in use before '+'", expected="compressors just made")
            )
        made = Compressor(compose(self._settings, other._settings))
        made._binding.loss_scale = self._binding.loss_scale
        return made

    # Binding -------------------------------------------------------------------------------------
    def bind(self, variables: Iterable[Any], *, optimizer: Any = None) -> Compressor:
        """Make the state of trainable variables now.

        Needed only where checkpoints are to be restored at once, or where ranks, or the run that
        saves and the one that restores, first meet their variables in different orders.

        Args:
            variables: Such as ``model.trainable_variables``, in the same order on all ranks.
            optimizer: Of ``tf_keras`` or Keras, to be told what goes badly with it. A gradient
                tape does not show it; ``hvd.DistributedOptimizer`` does, without this.

        Returns:
            This object.

        Raises:
            BindingError: One of them is no variable.
            StateError: A checkpoint that has been read is one of other variables.
        """
        given = list(variables)
        found = [v if isinstance(v, tf.Variable) else getattr(v, "value", v) for v in given]
        for variable in found:
            if not isinstance(variable, tf.Variable):
                raise refusals.unbuilt(variable)
        self._binding.meet(found, [getattr(v, "path", v.name) for v in given])
        self._binding.doubt(found, optimizer)
        return self

    def _dense(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Send a tensor of unknown origin as it is, which is always right."""
        if self._settings.memory.slots:
            raise refusals.unknown_tensor(tensor)
        if not self._settings.identity:
            self._binding.say(
                "a tensor that is no gradient of a variable in Horovod's reduction is sent "
                "uncompressed"
            )
        return _hand_on(tensor)

    def __hash__(self) -> int:
        # Horovod hashes its compressor while it wraps an optimizer, the one moment to refuse it.
        if calls.constructing_keras_3_optimizer():
            raise refusals.keras_3_optimizer()
        return object.__hash__(self)

    # Numbers -------------------------------------------------------------------------------------
    def telemetry(self, sink: Any, *, all_ranks: bool = False) -> Telemetry:
        """Return what writes records of bytes, bad steps and what is remembered.

        Records have the form of the torch front end's. A graph shows neither times nor what a step
        leaves out, so these are None; the norm of a residual is that between two steps.

        Args:
            sink: As of the torch front end: a path, a writer of ``tf.summary``, a function.
            all_ranks: Whether each rank writes its own; give each another path.

        Returns:
            An object whose ``record()``, called between two steps, writes what there was since the
            last time; and ``stop()``.

        Raises:
            SettingsError: The sink is something else, or cannot be written, or Horovod has not been
                initialized.
        """
        return Telemetry(self, sink, all_ranks)

    def residual_norms(self) -> dict[str, float]:
        """Return the norm of what each variable has not sent yet, under the names of `stats`."""
        found = {}
        for label in self.stats()["buckets"]:
            unit = next(
                (u for key, u in self._units.items() if _number(key) == _number(label)), None
            )
            residual = getattr(unit, "residual", None)
            if residual is not None:
                found[label] = float(tf.norm(tf.cast(residual, tf.float32)))
        return found

    def stats(self) -> dict[str, Any]:
        """Return bytes so far, as plain numbers, under the names of the torch front end.

        Steps are counted when they run. Sparse gradients, which Horovod never hands to a
        compressor, are named as bypassed, but their bytes are not counted. Of a gradient whose
        variable has no fixed shape, elements are the mean of a step. Times and collectives are
        None: a graph does not show them.
        """
        stats = Stats()
        for record in self._steps.records.values():
            record.add_to(stats)
        size = hvd.size() if hvd.is_initialized() else 1
        report = stats.report(size=size, settings=self._settings.describe())
        tables = [report, report["compressed"], report["bypassed"], *report["buckets"].values()]
        for table in tables:
            unknown = ("_ms_per_step", "collectives_per_step")
            table.update({key: None for key in table if key.endswith(unknown)})
        return report

    def __repr__(self) -> str:
        return f"Compressor({self._settings.describe()})"

    def __reduce__(self) -> Any:
        if self._units or self._binding.loss_scale is not None:
            raise refusals.copy_in_use()
        return Compressor, (self._settings,)

    def __deepcopy__(self, memo: Any) -> Compressor:
        """Return a compressor for another model, set alike, that follows the same loss scale."""
        if self._units:
            raise refusals.copy_in_use()
        made = Compressor(self._settings)
        made._binding.loss_scale = self._binding.loss_scale
        return made


def _number(name: str) -> str:
    """Return that part of a name or label which no two variables share."""
    return name.partition(".")[0]


def _hand_on(tensor: Tensor) -> tuple[Tensor, Any]:
    # Horovod has no bfloat16.
    if tensor.dtype == tf.bfloat16:
        return tf.cast(tensor, tf.float32), tensor.dtype
    return tensor, None


Compression = Namespace(Compressor, ("loss_scale",), no_auto=refusals.NO_AUTO)
"""``Compression.topk(ratio=0.01)`` and so on, one for each registered codec."""
