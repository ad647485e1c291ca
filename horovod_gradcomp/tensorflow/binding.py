"""Which variable a gradient belongs to, what is remembered for it, and what is to be done with it.

A compressor has one :class:`Binding`. It names variables when they are first met, chooses each
one's settings, makes its :class:`~.unit.Unit`, and plans a step from the gradients that Horovod
reduces in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from ..core import fit, policy
from ..core.settings import Settings
from . import calls, refusals
from .apart import handed_over
from .names import Names
from .outside import outside
from .scaling import LossScale
from .state import Manifest
from .steps import Plan, dense
from .unit import Unit


class Binding:
    """The variables of one compressor.

    It is no ``tf.Module``, which would look into every container that it is given.

    Args:
        settings: Of the compressor.
        units: Where units are kept by name; the compressor's own, so that checkpoints have them.
        loss_scale: As of the compressor.
    """

    def __init__(self, settings: Settings, units: dict[str, Unit], loss_scale: Any) -> None:
        self.loss_scale = None if loss_scale is None else LossScale(loss_scale)
        self._settings, self._units = settings, units
        self._names = Names()
        self.manifest = Manifest(settings, self._names.met, self._in_use)
        """What checkpoints say of these variables."""
        self._compared = 0
        self._said: set[str] = set()

    def meet(self, variables: Sequence[Any], paths: Sequence[str]) -> None:
        """Name variables and make their units.

        Args:
            variables: In the same order on all ranks.
            paths: What rules and reports call them.

        Raises:
            StateError: A checkpoint that has been read is one of other variables.
        """
        self._meet(variables, paths)
        for variable in variables:
            if self._chosen(variable) is not None:
                self._unit(variable)

    def plan(self, call: calls.Call) -> Plan:
        """Say what is to be done in a step that has just begun."""
        names = self._names
        self._meet(call.variables, call.names)
        units: list[Unit | None] = []
        for variable, grad in zip(call.variables, call.grads):
            known = isinstance(variable, tf.Variable) and dense(grad)
            if known and self._chosen(variable) is not None:
                refusals.unfit_reduction(call.op)
                unit = self._unit(variable)
                if unit.memory_slots and unit in units:
                    raise refusals.twice(names.label(variable))
                units.append(unit)
            else:
                units.append(None)
        self.doubt(call.variables, calls.optimizer(), call.groups)
        if any(unit.memory_slots for unit in units if unit) and handed_over(call.variables):
            self.say(
                "a tf.function that takes variables as arguments is traced once for all of equal "
                "shapes, with the memories of the first: let it find its variables by closure, or "
                "never call it with others"
            )
        return Plan(
            units,
            list(map(names.label, call.variables)),
            {
                **self._settings.facts(),
                **call.settings,
                "variables": names.describe(call.variables),
            },
            self.loss_scale,
        )

    def doubt(
        self,
        variables: Sequence[Any],
        optimizer: Any = None,
        groups: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Warn of what is known to go badly.

        Args:
            variables: Of the optimizer.
            optimizer: Of Keras; None where it is not known, or ``groups`` describe it.
            groups: As of an optimizer of PyTorch.
        """
        paths = [self._names.path(v) for v in variables if isinstance(v, tf.Variable)]
        doubts = fit.unused_rules(self._settings, paths)
        if optimizer is not None:
            groups = [fit.keras_group(outside(optimizer.get_config))]
        doubts += [d for own in self._settings.every for d in fit.doubts(own, groups)]
        for doubt in doubts:
            self.say(doubt)

    def say(self, text: str) -> None:
        """Warn, once."""
        if text not in self._said:
            self._said.add(text)
            warnings.warn(f"horovod_gradcomp: {text}", stacklevel=4)

    def _meet(self, variables: Sequence[Any], paths: Sequence[str]) -> None:
        self._names.meet(variables, paths)
        if len(self._names.met) > self._compared:
            self.manifest.compare()
            self._compared = len(self._names.met)

    def _in_use(self) -> bool:
        return any(int(unit.step) for unit in self._units.values())

    def _unit(self, variable: Any) -> Unit:
        name, settings = self._names.of(variable), self._chosen(variable)
        assert settings is not None
        if name not in self._units:
            # Tracked where it is made, so that a restore that waits for it can take place there.
            def make() -> None:
                self._units[name] = Unit(name, variable, settings)

            outside(make)
        return self._units[name]

    def _chosen(self, variable: Any) -> Settings | None:
        shape = variable.shape
        if not shape.is_fully_defined():
            return None
        path = self._names.path(variable)
        return policy.choose(self._settings, path, tuple(shape.as_list()))
