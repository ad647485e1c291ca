"""One unit's own collective over Horovod: started, waited for, and cut into what each rank sent."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from ..core.errors import ExchangeError, explain
from ..core.exchange import Gather, Request, Scatter, Scope, Sum
from ..core.stats import Log

Tensor = torch.Tensor


class Wire:
    """At most one collective at a time."""

    def __init__(self) -> None:
        self._handle: int | None = None
        self._request: Request | None = None
        self._started, self._seen = 0.0, 0.0
        self.log: Log | None = None
        """Where to take down when a collective began and when it was over, while a trace runs."""

    def start(self, request: Request, name: str, process_set: Any) -> None:
        """Start the collective that an exchange asks for.

        Args:
            request: Of the exchange; not one that Horovod answers by itself.
            name: Equal on all ranks, and of no other collective that is under way.
            process_set: Of Horovod, of those ranks that the request is for.
        """
        self._request = request
        self._started, self._seen = time.perf_counter(), 0.0
        payload = request.payload
        if isinstance(request, Sum):
            self._handle = hvd.allreduce_async(
                payload, name=f"{name}.sum", op=hvd.Sum, process_set=process_set
            )
        elif isinstance(request, Scatter):
            splits = torch.tensor(request.sent, dtype=torch.int32)
            self._handle = hvd.alltoall_async(
                payload, splits, name=f"{name}.scatter", process_set=process_set
            )
        else:
            self._handle = hvd.allgather_async(
                payload, name=f"{name}.gather", process_set=process_set
            )

    def received(self, name: str) -> Sequence[Tensor]:
        """Wait for the collective and return what each rank has sent, or the sum of it.

        Args:
            name: Of the bucket, for messages.

        Raises:
            ExchangeError: It is not as many bytes as all ranks must send.
        """
        request, self._request = self._request, None
        handle, self._handle = self._handle, None
        received = hvd.synchronize(handle)
        if self.log is not None:
            self.log("exchange", self._started, self._seen or time.perf_counter())
        if not isinstance(request, (Gather, Scatter)):
            return (received,)
        if isinstance(request, Scatter):
            received, _ = received
        if received.numel() != sum(request.sizes):
            raise ExchangeError(
                explain(
                    got=f"{received.numel()} bytes for '{name}' from all ranks",
                    expected=f"{' + '.join(map(str, request.sizes))} bytes",
                    why="the size follows from the settings and the shape, so some rank has others",
                    do="give every rank the same compression and the same model",
                )
            )
        payloads: Sequence[Tensor] = received.split(list(request.sizes))
        return payloads

    def look(self) -> None:
        """Take note if the collective is over, for :attr:`log`."""
        if self._handle is not None and not self._seen and hvd.poll(self._handle):
            self._seen = time.perf_counter()

    @property
    def needs_all(self) -> bool:
        """Whether Horovod refuses the present collective while a rank has joined."""
        request = self._request
        return isinstance(request, (Gather, Scatter)) and request.scope is Scope.ALL

    def drain(self) -> None:
        """Wait for a collective whose result nobody wants."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            # If Horovod is going down or starting anew: nothing of this step counts anyway.
            with contextlib.suppress(HorovodInternalError):
                hvd.synchronize(handle)
        self._request = None

    def forget(self) -> None:
        """Leave a collective that will never end, or has ended with Horovod itself."""
        self._handle = self._request = None
