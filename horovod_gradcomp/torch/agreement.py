"""That all ranks are set alike, found out once, before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from ..core.agreement import check


def agree(facts: Mapping[str, str], ranks: Sequence[int], process_set: Any) -> None:
    """Raise the same error on every rank unless all have the same facts.

    It waits for the other ranks, once for each optimizer and set of ranks.

    Args:
        facts: By name.
        ranks: Who takes part, in the order of gathered payloads.
        process_set: Of Horovod.

    Raises:
        SettingsError: With every fact that differs, its values and their ranks.
    """
    if len(ranks) < 2:
        return
    line = json.dumps(dict(facts)).encode() + b"\n"
    mine = torch.frombuffer(bytearray(line), dtype=torch.uint8)
    gathered = hvd.allgather(mine, name="gradcomp.settings", process_set=process_set)
    every = [json.loads(text) for text in bytes(gathered.tolist()).splitlines()]
    check(dict(zip(ranks, every)))
