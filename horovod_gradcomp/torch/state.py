"""Saving and loading of one rank's memory, by parameter name, and of what all ranks share."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from ..core.errors import StateError
from ..core.settings import Settings
from .binding import Binding

FORMAT = 1


def save(settings: Settings, bindings: Sequence[Binding]) -> dict[str, Any]:
    """Return a manifest and the memory of each optimizer."""
    size, rank = bindings[0].world if bindings else (1, 0)
    if hvd.is_initialized():  # it may have been shut down since the last step
        size, rank = hvd.size(), hvd.rank()
    return {
        "format": FORMAT,
        "world_size": size,
        "rank": rank,
        "settings": settings.describe(),
        "optimizers": [save_binding(b) for b in bindings],
    }


def save_binding(binding: Binding) -> dict[str, Any]:
    """Return a copy of one optimizer's entry."""
    auto = {} if binding.tuner is None else {"auto": binding.tuner.saved()}
    return {
        **auto,
        "model": binding.fingerprint,
        "step": binding.step,
        "turns": {unit.bucket.name: unit.turn for unit in binding.units},
        "memory": _copied(_parts(binding)),
        "shared": _copied(_shared_parts(binding)),
        "owed": owed_parts(binding),
        "guard": binding.watch.state() if binding.watch is not None else None,
    }


def check(settings: Settings, saved: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the optimizers' entries of a saved state that fits this run, or raise."""
    faults = []
    if saved.get("format") != FORMAT:
        faults.append(f"format {saved.get('format')!r}, expected {FORMAT}")
    if saved.get("settings") != settings.describe():
        faults.append(f"settings {saved.get('settings')!r}, expected {settings.describe()!r}")
    if hvd.is_initialized():
        here = (hvd.size(), hvd.rank())
        there = (saved.get("world_size"), saved.get("rank"))
        if here != there:
            faults.append(
                f"saved by rank {there[1]} of {there[0]}, loaded by rank {here[1]} of {here[0]}; "
                "each rank must load what it saved; resize_state makes states for other ranks"
            )
    if faults:
        raise StateError("this state does not fit: " + "; ".join(faults))
    entries: Sequence[Mapping[str, Any]] = saved["optimizers"]
    return entries


def resize_state(states: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Return states for another number of ranks, from those of all ranks that saved.

    What is owed to the model is the mean of what ranks remember, since Horovod averages. Every new
    rank therefore starts from that mean, and nothing is lost or counted twice. What all ranks share
    stays as it is.

    Args:
        states: What ``state_dict`` returned, of every rank of one run at one step, in any order.
        world_size: Ranks that will go on, at least 1.

    Returns:
        One state a rank, in rank order, for ``load_state_dict``.

    Raises:
        StateError: States are missing, or are not of one run and step.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise StateError(f"got world_size={world_size!r}; expected a whole number, at least 1")
    ordered = sorted(states, key=lambda state: state["rank"])
    faults = []
    expected = ordered[0]["world_size"] if ordered else 1
    found = [state["rank"] for state in ordered]
    if found != list(range(expected)):
        faults.append(f"states of ranks {found}, expected one of each of {expected}")
    for what in ("format", "world_size", "settings"):
        values = {repr(state.get(what)) for state in ordered}
        if len(values) > 1:
            faults.append(f"{what} differs: {', '.join(sorted(values))}")
    steps = {tuple(entry["step"] for entry in state["optimizers"]) for state in ordered}
    if len(steps) > 1:
        faults.append(f"saved at different steps: {sorted(steps)}")
    if faults:
        raise StateError("these states are not those of one run: " + "; ".join(faults))
    optimizers = [_mean_entry(entries) for entries in zip(*(s["optimizers"] for s in ordered))]
    return [
        {
            **ordered[0],
            "world_size": world_size,
            "rank": rank,
            "optimizers": copy.deepcopy(optimizers),
        }
        for rank in range(world_size)
    ]


def _mean_entry(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one optimizer's entry with the mean of what ranks remember, summed in float64."""
    first = entries[0]
    owed: dict[str, torch.Tensor] = {}
    for entry in entries:
        for name, (start, values) in entry.get("owed", {}).items():
            shape = next(iter(first["memory"].values()))[name].shape
            flat = owed.setdefault(name, torch.zeros(shape, dtype=torch.float64)).view(-1)
            flat[start : start + values.numel()] += values
    memory = {
        slot: {
            name: torch.stack([e["memory"][slot][name].double() for e in entries]).mean(0)
            for name in table
        }
        for slot, table in first["memory"].items()
    }
    for name, part in owed.items() if "residual" in memory else ():
        memory["residual"][name] += part
    if "own" in memory:  # the reference of all was behind by what is owed
        memory["mean"] = memory["own"]
    narrow = {
        slot: {name: part.float() for name, part in table.items()} for slot, table in memory.items()
    }
    guard = first.get("guard")  # what was measured was of other ranks
    guard = guard and {**guard, "rows": {}}
    return {**first, "memory": narrow, "owed": {}, "guard": guard}


def share_out(
    bindings: Sequence[Binding], entries: Sequence[Mapping[str, Any]]
) -> tuple[list[Mapping[str, Any] | None], list[Mapping[str, Any]]]:
    """Return the entry of each optimizer, None where there is none, and those that are left.

    By the names and shapes of parameters, then by names alone; what is like in both, and what fits
    nobody (so that it is refused), in order.
    """
    mine: dict[int, Mapping[str, Any]] = {}
    left = list(entries)
    for fits in (_of_model, _of_names, lambda binding, entry: True):
        for place, binding in enumerate(bindings):
            found = next((e for e in left if place not in mine and fits(binding, e)), None)
            if found is not None:
                mine[place] = found
                left = [e for e in left if e is not found]
    return [mine.get(place) for place in range(len(bindings))], left


def _of_model(binding: Binding, entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("model") == binding.fingerprint)


def _of_names(binding: Binding, entry: Mapping[str, Any]) -> bool:
    return {unit.bucket.name for unit in binding.units} == set(entry["turns"])


def load(bindings: Sequence[Binding], entries: Sequence[Mapping[str, Any] | None]) -> None:
    """Fill the memory of optimizers, or raise and leave all as they were.

    Args:
        bindings: The optimizers.
        entries: Of each, None for one that had not begun when the state was taken.
    """
    before: list[tuple[Binding, dict[str, Any]]] = []
    try:
        for binding, entry in zip(bindings, entries):
            was = save_binding(binding)
            clear(binding) if entry is None else load_binding(binding, entry)
            before.append((binding, was))
    except StateError:
        for binding, was in before:
            load_binding(binding, was)
        raise


def clear(binding: Binding) -> None:
    """Let an optimizer begin anew."""
    if binding.watch is not None:
        binding.watch.stand((), 0)
    for unit in binding.units:
        unit.begin_anew()
    binding.step = 0
    if binding.meter is not None:
        binding.meter.set_rows({})


def load_binding(binding: Binding, entry: Mapping[str, Any]) -> None:
    """Fill one optimizer's memory, or raise and leave it as it was."""
    if binding.tuner is not None and "auto" in entry and _of_model(binding, entry):
        binding.tuner.resume(entry["auto"]["choice"])
    before = [unit.phase for unit in binding.units]
    watch, guard = binding.watch, entry.get("guard") or {"standing": (), "rows": {}}
    stood = () if watch is None else watch.standing
    if watch is not None:
        watch.stand(guard["standing"], entry["step"])
    for unit in binding.units:
        unit.prepare(max(entry["step"] - 1, 0))
    parts = {**_parts(binding), **_shared_parts(binding)}
    saved = {**entry["memory"], **entry["shared"]}
    faults = []
    for slot, here in parts.items():
        there = saved.get(slot, {})
        faults += [f"{slot} of '{n}' is missing" for n in sorted(here.keys() - there.keys())]
        faults += [f"{slot} of '{n}' is not known" for n in sorted(there.keys() - here.keys())]
        faults += [
            f"{slot} of '{n}' has shape {tuple(there[n].shape)}, expected {tuple(here[n].shape)}"
            for n in sorted(here.keys() & there.keys())
            if there[n].shape != here[n].shape
        ]
    turns = {unit.bucket.name: unit for unit in binding.units}
    if not faults and turns.keys() != entry["turns"].keys():
        faults.append(f"it holds buckets {sorted(entry['turns'])}, expected {sorted(turns)}")
    if faults:
        for unit, phase in zip(binding.units, before):
            unit.phase = phase
        if watch is not None:
            watch.stand(stood, binding.step)
        raise StateError("this state does not fit the model: " + "; ".join(faults))
    for slot, here in parts.items():
        for name, part in here.items():
            part.copy_(saved[slot][name])
    binding.step = entry["step"]
    for name, unit in turns.items():
        unit.turn = entry["turns"][name]
    _load_owed(binding, entry.get("owed", {}))
    if binding.meter is not None:
        binding.meter.set_rows(guard["rows"])


Tables = dict[str, dict[str, torch.Tensor]]


def _copied(tables: Tables) -> Tables:
    return {
        slot: {name: part.clone().cpu() for name, part in table.items()}
        for slot, table in tables.items()
    }


def _shared_parts(binding: Binding) -> Tables:
    """Return the codecs' shared state by slot and by the name of the unit."""
    out: Tables = {}
    for unit in binding.units:
        for slot, tensor in zip(unit.codec.slots, unit.shared):
            out.setdefault(slot, {})[unit.bucket.name] = tensor
    return out


def owed_parts(binding: Binding) -> dict[str, tuple[int, torch.Tensor]]:
    """Return what this rank owes as a reducing side: by parameter, from which element on, values.

    So it does not depend on how parameters are laid out in buckets, nor on the number of ranks.
    """
    out = {}
    for unit in binding.units:
        if unit.side.owed is not None:
            start, stop = unit.side.part.start, unit.side.part.stop
            for m in unit.bucket.members:
                first, last = max(start, m.start), min(stop, m.start + m.numel)
                if first < last:
                    values = unit.side.owed[first - start : last - start].clone().cpu()
                    out[m.name] = first - m.start, values
    return out


def _load_owed(binding: Binding, owed: Mapping[str, tuple[int, torch.Tensor]]) -> None:
    for unit in binding.units:
        unit.side.clear()
        found = [(m, *owed[m.name]) for m in unit.bucket.members if m.name in owed]
        if found:
            first = found[0][0].start + found[0][1]
            unit.side.set(first, torch.cat([values for *_, values in found]))


def _parts(binding: Binding) -> Tables:
    """Return the memory by slot and by the name of the parameter."""
    out: Tables = {}
    for unit in binding.units:
        for slot, flat in zip(unit.memory.slots, unit.store.state):
            table = out.setdefault(slot, {})
            for m in unit.bucket.members:
                table[m.name] = flat[m.start : m.start + m.numel].view(m.shape)
    return out
