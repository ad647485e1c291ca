"""``Compression`` and ``Compressor``, mirroring ``horovod.tensorflow.compression``.

``Compression.topk(ratio=0.01)`` takes the place of ``hvd.Compression.fp16`` in
``hvd.DistributedGradientTape(compression=...)``. Make one compressor for each model: Horovod
shares the traced reduction of two models of equal shapes that are given the same one.
"""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.compression import Compressor as HorovodCompressor

from ..core import policy
from ..core.errors import BindingError, SettingsError, explain
from ..core.namespace import Namespace
from ..core.settings import Settings, compose
from ..core.stats import Stats
from . import calls, refusals
from .steps import Steps, outside
from .unit import Ticket, Unit

Tensor = Any
F = TypeVar("F", bound=Callable[..., Any])


def _as_written(function: F) -> F:
    """Keep autograph, which Horovod leaves on, out of a function."""
    return cast(F, tf.autograph.experimental.do_not_convert(function))


class _Book:
    """What is no state: kept from ``tf.Module``, which looks into every container it is given."""

    def __init__(self) -> None:
        self.names: dict[int, tuple[Any, str, str]] = {}
        self.met = 0
        self.steps = Steps()
        self.warned = False


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
    """

    def __init__(self, settings: Settings) -> None:
        if not isinstance(settings, Settings):
            raise SettingsError(
                explain(
                    got=repr(settings),
                    expected="settings",
                    do="make compressors with Compression.topk(...), Compression.from_string(...)",
                )
            )
        if any(len(own.phases) > 1 for own in settings.every):
            raise SettingsError(
                explain(
                    got="a ramp or start_after=",
                    expected="one codec for all steps",
                    why="a graph is traced once; only the torch front end has schedules so far",
                )
            )
        super().__init__(name="compressor")
        self._settings = settings
        self._units: dict[str, Unit] = {}
        self._book = _Book()

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
        """
        if not tensor.dtype.is_floating:
            return tensor, None
        call = calls.find(tensor)
        if call is None:
            return self._dense(tensor)
        self._register(call.variables, call.names)
        step = self._book.steps.find(call)
        variable = call.variables[step.place(call)]
        if not isinstance(variable, tf.Variable):
            return self._dense(tensor)
        label = self._label(variable)
        if self._chosen(variable) is None:
            numel = int(variable.shape.num_elements() or 0)
            carried = _carriable(tensor.dtype)
            step.record.bypassed[label] = numel, numel * carried.size
            return _hand_on(tensor)
        refusals.unfit_reduction(call.op)
        unit = self._unit(variable)
        raw = unit.numel * tensor.dtype.size
        step.record.units[label] = unit.numel, raw, unit.wire_bytes()
        return unit.send(tensor, step.agreed(call.grads), call)

    @_as_written
    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Return the reduced gradient, of the shape and dtype that ``compress`` was given.

        Args:
            tensor: What Horovod made of the payload.
            ctx: The context from :meth:`compress`.

        Raises:
            InvalidArgumentError: When it runs: the reduction was not linear, or ran over other
                ranks, or a rank sent another number of bytes.
        """
        if ctx is None:
            return tensor
        if isinstance(ctx, tf.DType):
            return tf.cast(tensor, ctx)
        if not isinstance(ctx, Ticket):
            raise BindingError(
                explain(got=f"a context of {type(ctx).__name__}", expected="one from compress")
            )
        return ctx.unit.receive(tensor, ctx)

    def __add__(self, other: Any) -> Compressor:
        """Return ``A + B``, where B encodes what A keeps, with the memory and options of A."""
        if callable(getattr(other, "_instance", None)):  # Compression.fp16, uncalled
            other = other._instance()
        if not isinstance(other, Compressor):
            return NotImplemented
        if self._units:
            raise SettingsError(
                explain(got="a compressor in use before '+'", expected="compressors just made")
            )
        return Compressor(compose(self._settings, other._settings))

    # Binding -------------------------------------------------------------------------------------
    def bind(self, variables: Iterable[Any]) -> Compressor:
        """Make the state of trainable variables now.

        Needed only where checkpoints are to be restored at once, or where ranks first meet their
        variables in different orders.

        Args:
            variables: Such as ``model.trainable_variables``, in the same order on all ranks.

        Returns:
            This object.
        """
        given = list(variables)
        found = [v if isinstance(v, tf.Variable) else getattr(v, "value", v) for v in given]
        for variable in found:
            if not isinstance(variable, tf.Variable):
                raise refusals.unbuilt(variable)
        self._register(found, [getattr(v, "path", v.name) for v in given])
        for variable in found:
            if self._chosen(variable) is not None:
                self._unit(variable)
        return self

    def _register(self, variables: Sequence[Any], labels: Sequence[str] = ()) -> None:
        names = self._book.names
        for variable, label in zip(
            variables, labels or [getattr(v, "name", "") for v in variables]
        ):
            known = names.get(id(variable))
            if isinstance(variable, tf.Variable) and (known is None or known[0]() is not variable):
                name = f"{self._book.met}.{last_part(variable.name)}"
                self._book.met += 1
                names[id(variable)] = weakref.ref(variable), name, label.split(":")[0]

    def _unit(self, variable: Any) -> Unit:
        name = self._book.names[id(variable)][1]
        settings = self._chosen(variable)
        assert settings is not None
        if name not in self._units:
            # Tracked where it is made, so that a restore that waits for it can take place there.
            def make() -> None:
                self._units[name] = Unit(name, variable, settings)

            outside(make)
        return self._units[name]

    def _label(self, variable: Any) -> str:
        _, name, label = self._book.names[id(variable)]
        return f"{name.split('.')[0]}.{label}"

    def _chosen(self, variable: Any) -> Settings | None:
        shape = variable.shape
        if not shape.is_fully_defined():
            return None
        label = self._book.names[id(variable)][2]
        return policy.choose(self._settings, label, tuple(shape.as_list()))

    def _dense(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Send a tensor of unknown origin as it is, which is always right."""
        if self._settings.memory.slots:
            raise refusals.unknown_tensor(tensor)
        if not self._book.warned and not self._settings.identity:
            self._book.warned = True
            warnings.warn(
                "horovod_gradcomp: a tensor that is no gradient of a variable in Horovod's "
                "reduction is sent uncompressed",
                stacklevel=3,
            )
        return _hand_on(tensor)

    def __hash__(self) -> int:
        # Horovod hashes its compressor while it wraps an optimizer, the one moment to refuse it.
        if calls.constructing_keras_3_optimizer():
            raise refusals.keras_3_optimizer()
        return object.__hash__(self)

    # Numbers -------------------------------------------------------------------------------------
    def stats(self) -> dict[str, Any]:
        """Return bytes so far, as plain numbers, under the names of the torch front end.

        Steps are counted when they run. Sparse gradients, which Horovod never hands to a
        compressor, are not counted. Times and collectives are None: a graph does not show them.
        """
        stats = Stats()
        for record in self._book.steps.records.values():
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


def _carriable(dtype: Any) -> Any:
    return tf.float32 if dtype == tf.bfloat16 else dtype


def _hand_on(tensor: Tensor) -> tuple[Tensor, Any]:
    # Horovod has no bfloat16.
    if tensor.dtype == tf.bfloat16:
        return tf.cast(tensor, tf.float32), tensor.dtype
    return tensor, None


def last_part(name: str) -> str:
    """Return the part of a variable's name that Keras does not number."""
    part = re.sub(r"_\d+$", "", name.split(":")[0].split("/")[-1])
    return re.sub(r"[^A-Za-z0-9_-]", "_", part)


Compression = Namespace(Compressor)
"""``Compression.topk(ratio=0.01)`` and so on, one for each registered codec."""
