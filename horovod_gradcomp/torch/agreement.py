"""That all ranks are set alike, found out once, before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from ..core.agreement import check
from ..core.errors import BindingError, explain


def agree(
    facts: Mapping[str, str], more: Mapping[str, Any], ranks: Sequence[int], process_set: Any
) -> list[dict[str, Any]]:
    """Raise the same error on every rank unless all have the same facts.

    It waits for the other ranks, once for each optimizer and set of ranks.

    Args:
        facts: By name.
        more: What else a rank tells of itself, as JSON has it; may differ.
        ranks: Who takes part, in the order of gathered payloads.
        process_set: Of Horovod.

    Returns:
        What each rank tells, in the same order.

    Raises:
        SettingsError: With every fact that differs, its values and their ranks.
        BindingError: Some rank has joined already.
    """
    if len(ranks) < 2:
        return [dict(more)]
    try:
        every = gathered([dict(facts), dict(more)], "gradcomp.settings", process_set)
    except HorovodInternalError as error:
        if "with Join" not in str(error):
            raise
        raise BindingError(
            explain(
                got="the first step while a rank has joined (hvd.join)",
                expected="a first step of all ranks together",
                why="in it they find out whether they are set alike, and Horovod gathers nothing "
                "while one has joined",
                do="give every rank at least one batch",
            )
        ) from error
    check({rank: one[0] for rank, one in zip(ranks, every)})
    return [one[1] for one in every]


def gathered(value: Any, name: str, process_set: Any = hvd.global_process_set) -> list[Any]:
    """Return what each rank gives, in rank order.

    Args:
        value: What JSON can hold.
        name: Of the collective.
        process_set: Of Horovod.
    """
    line = json.dumps(value).encode() + b"\n"
    mine = torch.frombuffer(bytearray(line), dtype=torch.uint8)
    every = hvd.allgather(mine, name=name, process_set=process_set)
    return [json.loads(text) for text in bytes(every.tolist()).splitlines()]
