"""The optimizers that one compressor serves, and how they are found."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, overload

import horovod.torch as hvd
import torch

from ..core import fit
from ..core.errors import BindingError, explain
from ..core.settings import Settings
from ..core.stats import Stats
from . import identity, state
from .auto import Tuner
from .binding import Binding
from .handover import take_over

Tensor = torch.Tensor


OPS = {hvd.Average: "Average", hvd.Sum: "Sum"}


class Bindings(Sequence[Binding]):
    """One binding for each optimizer, the one that was used last first.

    Args:
        settings: Of the compressor.
        stats: Of the compressor.
        grad_scaler: As of :class:`Compressor`.
        welcome: Is called with each new binding.
    """

    def __init__(
        self,
        settings: Settings,
        stats: Stats,
        grad_scaler: Any,
        welcome: Callable[[Binding], None],
    ) -> None:
        self._settings, self._stats, self._grad_scaler = settings, stats, grad_scaler
        self._welcome = welcome
        self._all: list[Binding] = []
        self._lock = threading.RLock()
        self._said: set[str] = set()
        self._in_use: tuple[Any, Any] = (None, None)
        self.pending: list[Mapping[str, Any]] = []
        """Entries of a saved state whose optimizers have not come yet."""

    @overload
    def __getitem__(self, index: int) -> Binding: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Binding]: ...

    def __getitem__(self, index: int | slice) -> Binding | Sequence[Binding]:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._all)

    @property
    def ordered(self) -> list[Binding]:
        """All of them, in the order in which they were bound, alike on all ranks."""
        return sorted(self._all, key=lambda binding: binding.number)

    # Finding ----------------------------------------------------------------------------------
    def find(self, tensor: Tensor) -> tuple[Binding, int] | None:
        """Return whose gradient a tensor is, and of which parameter; None if nobody's."""
        for i, binding in enumerate(self._all):
            index = binding.index_of(tensor)
            if index is not None:
                if i:
                    self._put_first(binding)
                return binding, index
        return self._find_caller(tensor)

    def _find_caller(self, tensor: Tensor) -> tuple[Binding, int] | None:
        optimizer = identity.calling_optimizer()
        if optimizer is None:
            identity.refuse_other_callers()
            return None
        identity.refuse_adasum(tensor, optimizer)
        if self.bind_once(optimizer):
            return self.find(tensor)
        p = identity.calling_parameter(tensor)
        for binding in self._all:
            index = None if p is None else binding.index_of_parameter(p)
            if index is not None:
                return binding, index
        return None

    def _put_first(self, binding: Binding) -> None:
        """Look there first, from now on; other threads may be going through the old list."""
        with self._lock:
            others = [b for b in self._all if b.optimizer is None or b.optimizer()]
            self._all = [binding, *(b for b in others if b is not binding)]

    # Binding ----------------------------------------------------------------------------------
    def bind(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        process_set: Any,
        groups: Sequence[Mapping[str, Any]] = (),
        facts: Mapping[str, str] = MappingProxyType({}),
    ) -> Binding:
        """Return the binding of parameters that were named by hand; see :meth:`Compressor.bind`.

        Args:
            named_parameters: Names and parameters.
            process_set: Of their reductions.
            groups: As of an optimizer, to be told what goes badly with it; empty if there is none.
            facts: What else must be alike on all ranks, by name.
        """
        named = [(name, p) for name, p in _pairs(named_parameters) if p.requires_grad]
        if len({name for name, _ in named}) != len(named):
            raise BindingError(explain(got="a name twice", expected="unique parameter names"))
        if groups:
            met = [name for binding in self._all for name in binding.names]
            self._doubt(groups, met + [name for name, _ in named])
        known = next((b for b in self._all if b.stands_for(named, process_set)), None)
        if known is not None:  # what it remembers must not be left behind
            self._put_first(known)
            return known
        binding = self._add(named, process_set, None, groups)
        binding.facts = facts
        return binding

    def bind_optimizer(self, optimizer: Any) -> None:
        """Bind what Horovod's optimizer reduces; see :meth:`Compressor.bind_optimizer`."""
        for attribute in ("_parameter_names", "_requires_update", "param_groups"):
            if not hasattr(optimizer, attribute):
                raise BindingError(
                    explain(
                        got=type(optimizer).__name__,
                        expected="an optimizer made by hvd.DistributedOptimizer",
                    )
                )
        named = [
            (optimizer._parameter_names[p], p)
            for group in optimizer.param_groups
            for p in group["params"]
            if p in optimizer._requires_update
        ]
        groups = optimizer.param_groups
        self._doubt(groups, [name for name, _ in named])
        process_set = getattr(optimizer, "process_set", hvd.global_process_set)
        op = getattr(optimizer, "op", None)
        predivide = getattr(optimizer, "gradient_predivide_factor", 1.0)
        facts = {"op": OPS.get(op, str(op)), "gradient_predivide_factor": f"{predivide:g}"}
        self._add(named, process_set, optimizer, groups).facts = facts

    def _doubt(self, groups: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
        """Warn of what is known to go badly."""
        doubts = [doubt for own in self._settings.every for doubt in fit.doubts(own, groups)]
        auto = self._settings.auto
        ruled = auto.candidates[0][1] if auto else self._settings
        for doubt in doubts + fit.unused_rules(ruled, names):
            self.say(doubt)

    def bind_once(self, optimizer: Any) -> bool:
        """Bind an optimizer; return False where it was bound already."""
        with self._lock:
            if any(b.optimizer and b.optimizer() is optimizer for b in self._all):
                return False
            self.bind_optimizer(optimizer)
            return True

    def _add(
        self,
        named: list[tuple[str, Tensor]],
        process_set: Any,
        optimizer: Any,
        groups: Sequence[Mapping[str, Any]],
    ) -> Binding:
        binding = Binding(
            self._settings, self._stats, named, process_set, optimizer, self._grad_scaler
        )
        if self._settings.auto is not None:
            binding.tuner = Tuner(binding, groups)
        elif named and not binding.units and not self._settings.identity:
            self.say(
                f"none of {len(named)} parameters is compressed: all are shorter than min_numel, "
                "have one dimension (skip_1d=False changes that), or a rule leaves them out"
            )
        if optimizer is None:
            binding.begins = self._take_over
        self._welcome(binding)
        self._put_first(binding)
        if self.pending:
            (mine,), left = state.share_out([binding], self.pending)
            assert mine is not None
            self.pending = left
            state.load_binding(binding, mine)
        return binding

    def _take_over(self, binding: Binding) -> None:
        """Take what other bindings by hand remember, where another one was in use before."""
        using = binding, binding.units  # which are other ones once settings are taken up
        if all(now is before for now, before in zip(using, self._in_use)):
            return
        others = [
            b
            for b in self.ordered
            if b is not binding and b.begins is not None and b.process_set is binding.process_set
        ]
        self._in_use = using if take_over(binding, others) else (None, None)

    def say(self, text: str) -> None:
        """Warn, once."""
        if text not in self._said:
            self._said.add(text)
            warnings.warn(f"horovod_gradcomp: {text}", stacklevel=5)


def _pairs(named_parameters: Any) -> list[tuple[str, Tensor]]:
    """Return names and parameters, or raise: a matrix of two rows would pass for a pair."""
    try:
        pairs = list(named_parameters)
    except TypeError:
        pairs = [named_parameters]
    for one in pairs:
        pair = isinstance(one, tuple) and len(one) == 2
        if not pair or not isinstance(one[0], str) or not isinstance(one[1], Tensor):
            raise BindingError(
                explain(
                    got=f"named_parameters= with {type(one).__name__}",
                    expected="pairs of a name and a parameter",
                    do="pass model.named_parameters()",
                )
            )
    return pairs
