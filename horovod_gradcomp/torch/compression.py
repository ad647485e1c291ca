"""``Compression`` and ``Compressor``, mirroring ``horovod.torch.compression``.

``Compression.topk(ratio=0.01)`` takes the place of ``hvd.Compression.fp16`` in
``hvd.DistributedOptimizer(compression=...)`` and needs nothing else: the optimizer is found when
it first calls.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.compression import Compressor as HorovodCompressor

from ..core.errors import BindingError, SettingsError, StateError, explain
from ..core.namespace import Namespace
from ..core.settings import Settings, compose, refuse_unchecked
from ..core.stats import Stats
from . import identity, regroup, state
from .auto import refuse_elastic
from .binding import Binding, Ticket
from .bindings import Bindings
from .telemetry import Telemetry
from .trace import Trace

Tensor = torch.Tensor


class Compressor(HorovodCompressor):  # type: ignore[misc]  # Horovod is untyped
    """A codec with its memory in Horovod's ``compress`` / ``decompress`` slot.

    Make it with :data:`Compression`. One object serves one or several optimizers; each has
    buckets, memory and names of its own.

    Args:
        settings: Checked settings, from :mod:`horovod_gradcomp.core.settings`.
        named_parameters: As of ``model.named_parameters()``, to :meth:`bind` at once.
        process_set: The Horovod process set of the reductions, with ``named_parameters``.
        grad_scaler: The ``torch.amp.GradScaler`` that scales the loss. What is remembered is then
            held in units of unscaled gradients. Without it a change of the loss scale puts the
            memory wrong by the ratio of both scales until all of it has been sent.
    """

    def __init__(
        self,
        settings: Settings,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        process_set: Any = None,
        grad_scaler: Any = None,
    ) -> None:
        refuse_unchecked(settings)
        self._settings = settings
        self._stats = Stats()
        self._follows_resets = False
        self._trace: Trace | None = None
        self._telemetry: list[Telemetry] = []
        if grad_scaler is not None and not hasattr(grad_scaler, "_get_scale_async"):
            raise SettingsError(
                explain(got=f"grad_scaler={grad_scaler!r}", expected="a torch.amp.GradScaler")
            )
        self._grad_scaler = grad_scaler
        self._bindings = Bindings(settings, self._stats, grad_scaler, self._welcome)
        if named_parameters is not None:
            self.bind(named_parameters, process_set=process_set or hvd.global_process_set)
        elif process_set is not None:
            raise SettingsError(
                explain(
                    got="process_set= alone",
                    expected="named_parameters= with it",
                    why="an optimizer that is found by itself brings its own process set",
                )
            )

    # The slot ---------------------------------------------------------------------------------
    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what Horovod is to reduce in place of a gradient.

        Args:
            tensor: ``p.grad`` of a parameter of the calling optimizer, any float dtype and
                strides. Whole numbers pass unchanged.

        Returns:
            One dense tensor and the context for :meth:`decompress`.

        Raises:
            BindingError: With a memory, when it cannot be told which parameter this is; or the
                reduction is over another process set than was bound.
        """
        found = self._bindings.find(tensor)
        if found is None:
            return self._dense(tensor)
        binding, index = found
        if binding.optimizer is None:
            identity.refuse_other_set(binding.process_set)
        with binding.lock:
            return binding.compress(index, tensor)

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Return the reduced gradient, of the shape and dtype that ``compress`` was given.

        Args:
            tensor: What Horovod made of the payload; a sparse tensor with context None passes.
            ctx: The context from :meth:`compress`.

        Raises:
            ExchangeError: The reduction was not linear, or ran over other ranks.
        """
        if isinstance(ctx, Ticket):
            with ctx.binding.lock:
                return ctx.binding.decompress(tensor, ctx)
        if ctx is None:  # a sparse gradient, which Horovod reduces without compress
            return tensor
        if isinstance(ctx, torch.dtype):
            return tensor.to(ctx)
        raise BindingError(
            explain(got=f"a context of {type(ctx).__name__}", expected="one from compress")
        )

    def __add__(self, other: Any) -> Compressor:
        """Return ``A + B``, where B encodes what A keeps, with the memory and options of A."""
        if callable(getattr(other, "_instance", None)):  # Compression.fp16, uncalled
            other = other._instance()
        if not isinstance(other, Compressor):
            return NotImplemented
        if other._grad_scaler is not None:
            raise SettingsError(
                explain(got="a grad_scaler after '+'", expected="it before '+', with the memory")
            )
        if self._settings.auto is not None or other._settings.auto is not None:
            raise SettingsError(explain(got="'+' with Compression.auto", expected="a codec"))
        if self._bindings or self._bindings.pending:
            raise SettingsError(
                explain(got="a compressor in use before '+'", expected="compressors just made")
            )
        return Compressor(compose(self._settings, other._settings), grad_scaler=self._grad_scaler)

    # Binding ----------------------------------------------------------------------------------
    def bind(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        *,
        process_set: Any = hvd.global_process_set,
    ) -> Compressor:
        """Say which parameters will come, where that cannot be found out.

        Needed only where this object is used without a Horovod optimizer around it, for instance
        in ``hvd.allreduce(p.grad, compression=...)``. To say the same again changes nothing.

        Args:
            named_parameters: As of ``model.named_parameters()``; names equal on all ranks.
            process_set: The Horovod process set of the reductions.

        Returns:
            This object.
        """
        self._bindings.bind(named_parameters, process_set)
        return self

    def bind_optimizer(self, optimizer: Any) -> Compressor:
        """Take names, parameters and process set from a Horovod optimizer.

        This happens by itself on the optimizer's first call.

        Args:
            optimizer: What ``hvd.DistributedOptimizer`` returned.
        """
        self._bindings.bind_optimizer(optimizer)
        return self

    def _welcome(self, binding: Binding) -> None:
        binding.follows_resets = self._follows_resets
        binding.recorder = self._trace.recorder(binding) if self._trace else None
        for telemetry in self._telemetry:
            telemetry.attach(binding)

    def _dense(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Send a tensor of unknown origin as it is, which is always right."""
        if self._settings.memory.slots and tensor.is_floating_point():
            raise BindingError(
                explain(
                    got=f"a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, that is no "
                    "gradient of a bound parameter",
                    expected="p.grad of a parameter of a Horovod optimizer",
                    why="what is not sent must be kept for this parameter's next step, and two "
                    "parameters must never share it",
                    do="bind it first: compression.bind(model.named_parameters()), or use "
                    "memory='none'",
                )
            )
        if not self._settings.identity:
            self._bindings.say(
                "a tensor that is no gradient of a bound parameter is sent uncompressed; "
                "compression.bind(model.named_parameters()) changes that"
            )
        if tensor.dtype is torch.bfloat16:
            return tensor.float(), tensor.dtype
        return tensor, None

    # State and numbers ------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's memory and step, for ``torch.save``; every rank saves its own.

        Returns:
            A manifest (format, world_size, rank, settings) and for each optimizer its step and
            its memory tensors by parameter name.
        """
        saved = state.save(self._settings, self._bindings.ordered)
        saved["optimizers"] += copy.deepcopy(self._bindings.pending)  # loaded, and not yet taken up
        return saved

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` returned on this rank.

        May be called before the first step; parameters are matched by name. Several optimizers are
        told apart by the names and shapes of their parameters; those alike in both, by the order
        in which they first step (or are bound), which must then be that of the run that saved. An
        optimizer that had not begun when the state was taken begins anew.

        Raises:
            StateError: Settings, world size, names or shapes differ; all of it in one message, and
                nothing is changed.
        """
        entries = state.check(self._settings, saved)
        bound = self._bindings.ordered
        mine, left = state.share_out(bound, entries)
        state.load(bound, mine)
        self._bindings.pending = left

    def join(self, device: int = -1) -> int:
        """Do ``hvd.join()``, then bring all ranks to the same step again.

        Call it in place of ``hvd.join()`` where ranks have different numbers of batches: ranks that
        are at different steps draw different random numbers and follow schedules apart.

        While a rank has joined, Horovod gathers nothing, and what would be gathered is added up at
        full size. With Horovod's response cache on, a rank that has joined would take part in
        gathers that it has done before, and die (Horovod 0.28.1): run with
        ``HOROVOD_CACHE_CAPACITY=0``.

        Args:
            device: As of ``hvd.join``.

        Returns:
            The rank that joined last.

        Raises:
            BindingError: Payloads are gathered, and Horovod's response cache is on, the exchange
                is hierarchical, or gradients are reduced over a process set of its own.
        """
        return regroup.join(self._bindings, device)

    # For elastic training; see elastic.py -----------------------------------------------------
    def follow_resets(self, optimizer: Any) -> None:
        """Take part in elastic training: :meth:`meet_again` follows every change of the ranks."""
        if self._settings.auto is not None:
            refuse_elastic()
        self._follows_resets = True
        self._bindings.bind_once(optimizer)
        for binding in self._bindings:
            binding.follows_resets = True

    def meet_again(self) -> None:
        """Meet the ranks anew in the next step."""
        for binding in self._bindings.ordered:
            binding.meet_again()

    def tell_norms(self) -> None:
        """Let all ranks know how much each has not yet sent; all must call it."""
        for binding in self._bindings.ordered:
            binding.tell_norms()

    def snapshot(self) -> dict[int, dict[str, Any]]:
        """Return a copy of what is remembered, for :meth:`rewind` in this process."""
        return {binding.number: state.save_binding(binding) for binding in self._bindings}

    def rewind(self, saved: Mapping[int, Mapping[str, Any]]) -> None:
        """Go back to a :meth:`snapshot`; the running step counts for nothing."""
        for binding in self._bindings.ordered:
            binding.meet_again()
            if binding.number in saved:
                state.load_binding(binding, saved[binding.number])

    @property
    def never_remembers(self) -> bool:
        """Whether gradients are always sent as they are."""
        return self._settings.identity and self._settings.auto is None

    def stats(self) -> dict[str, Any]:
        """Return bytes and times so far, as plain numbers.

        ``raw_bytes`` is what the gradients hold, ``wire_bytes`` what this rank handed to Horovod
        (payloads, carriers and uncompressed tensors), ``ratio`` their quotient; each in total, per
        step, for compressed tensors only, for bypassed ones with their names, and per bucket.
        ``inside_bytes`` are those of ``wire_bytes`` that a hierarchical exchange leaves inside a
        node, ``between_bytes`` all others; each also per step.
        ``collectives_per_step`` counts tensors handed to Horovod, which fuses most of them, and
        ``own_collectives_per_step`` those of them that take the place of Horovod's reductions and
        are started here. Times are in milliseconds: ``encode_ms_per_step``,
        ``decode_ms_per_step``, of both what codec and memory take (``codec_ms_per_step``), and
        ``wait_ms_per_step`` for own collectives.

        Of ``Compression.auto`` there is ``auto``, for each optimizer: ``choice`` (None before there
        is one), whether it is ``settled``, and what was measured.
        """
        size = hvd.size() if hvd.is_initialized() else 1
        report = self._stats.report(size=size, settings=self._settings.describe())
        if self._settings.auto is not None:
            report["auto"] = [
                b.tuner.report() for b in self._bindings.ordered if b.tuner is not None
            ]
        return report

    def telemetry(
        self, sink: Any, *, every: int | None = 100, all_ranks: bool = False
    ) -> Telemetry:
        """Record some steps from now on: bytes, times, norms, cosines, of layers and in total.

        A record is made for every step whose number (from 0) divides by ``every``: bytes and times
        are means of the steps since the record before, norms and cosines are those of the step.
        Beside this rank's own figures it has those of all ranks together that record this step,
        which ride on the next step's carriers, so that it is written one step late. Where Horovod
        itself adds payloads up (``randomk``, ``acp``, ``fp16``) there are no carriers, and a
        record tells of its own rank only. What is sent and remembered stays as it is, to the bit.
        See ``docs/telemetry.md``.

        Args:
            sink: A path (JSON lines, which are added to what a file holds), a ``SummaryWriter`` of
                ``torch.utils.tensorboard``, one of ``tf.summary``, or a function of a record. If it
                fails later on, that is warned of once, and training goes on.
            every: Steps from one record to the next, at least 1; None for those steps alone before
                which ``record()`` is called.
            all_ranks: Whether each rank writes its own; give each another path. Without it the
                first rank writes. Ranks that do not call this are not counted in means.

        Returns:
            An object with ``stop()``, or for a ``with`` block; its ``record()`` records the next
            step, too.

        Raises:
            SettingsError: The sink is something else, or cannot be written, or ``every`` is out of
                range, or Horovod has not been initialized.

        Example:
            >>> compression.telemetry("run.jsonl", every=50)  # doctest: +SKIP
        """
        return Telemetry(sink, every, all_ranks, self._stats, self._report_to)

    def _report_to(self, telemetry: Telemetry, on: bool) -> None:
        for binding in self._bindings.ordered:
            telemetry.attach(binding) if on else telemetry.detach(binding)
        if on:
            self._telemetry.append(telemetry)
        else:
            self._telemetry.remove(telemetry)

    def trace(self, path: str | os.PathLike[str], *, gather: bool = True) -> Trace:
        """Return a trace of some steps, to be used in a ``with`` block or by start and stop.

        It ends up in a file in the format of Chrome, which https://ui.perfetto.dev shows. Each rank
        is a process in it; its rows are the steps, with when each bucket was encoded, waited for
        and decoded, and for each bucket when it was on its way. A step begins with its first
        gradient and ends with its last result.

        Args:
            path: Of the file, in a folder that there is.
            gather: Whether rank 0 writes what all ranks did; all of them must then stop the trace.
                Without it this rank writes what it did, so give each rank another path.

        Returns:
            An object with ``start()`` and ``stop()``. If the block ends with an error, each rank
            writes what it did, and its number is put into the name of the file.

        Raises:
            SettingsError: There is no such folder, or another trace runs.

        Example:
            >>> with compression.trace("steps.json"):  # doctest: +SKIP
            ...     train(steps=10)
        """
        return Trace(path, gather, self._record)

    def _record(self, trace: Trace | None) -> None:
        if trace is not None and self._trace is not None:
            raise SettingsError(
                explain(got="a trace within a trace", expected="stop() before another start()")
            )
        self._trace = trace
        for binding in self._bindings:
            if binding.recorder is not None:
                binding.recorder.close()
            binding.recorder = trace.recorder(binding) if trace else None

    def __repr__(self) -> str:
        return f"Compressor({self._settings.describe()})"

    def __getstate__(self) -> dict[str, Any]:
        if self._grad_scaler is not None:
            raise StateError(
                explain(
                    got="pickle of a compressor with a grad_scaler",
                    expected="state_dict()",
                    why="the copy would follow a scaler of its own",
                )
            )
        return {"settings": self._settings, "pending": self.state_dict()["optimizers"]}

    def __setstate__(self, saved: Mapping[str, Any]) -> None:
        self.__init__(saved["settings"])  # type: ignore[misc]
        self._bindings.pending = list(saved["pending"])

    def __deepcopy__(self, memo: dict[int, Any]) -> Compressor:
        """Return a copy with a memory of its own, that follows the same loss scaler."""
        made = Compressor(self._settings, grad_scaler=self._grad_scaler)
        made._bindings.pending = copy.deepcopy(self.state_dict()["optimizers"], memo)
        return made


Compression = Namespace(Compressor, ("named_parameters", "process_set", "grad_scaler"))
"""``Compression.topk(ratio=0.01)`` and so on, one for each registered codec."""
