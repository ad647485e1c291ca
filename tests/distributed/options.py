"""Every family of codecs under every option of Horovod's torch optimizer, and its page.

``python -m tests.distributed.options --output docs/options.md`` runs all cells and writes the page.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple, Optional

import typer

from tests.distributed.launch import run_ranks

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "fp16": ("fp16", {}),
    "linear": ("linear:bits=4", {}),
    "two_phase": ("linear:bits=4", {"exchange": "two_phase"}),
    "topk": ("topk:ratio=0.05", {}),
    "randomk": ("randomk:ratio=0.1", {}),
    "cltk": ("cltk:ratio=0.1", {}),
    "acp": ("acp:rank=2,max_rate=1.0", {}),
    "powersgd": ("powersgd:rank=2,max_rate=1.0", {}),
    "svd": ("svd:rank=2,max_rate=1.0", {}),
    "topk+linear": ("topk:ratio=0.05+linear:bits=8", {}),
}
"""By name: the string form of one representative, and more options of the compressor."""

LOSSY = frozenset(FAMILIES) - {"none"}
REMEMBERING = LOSSY - {"fp16"}
SHARING = frozenset({"randomk", "cltk", "acp"})
"""Payloads are summed, at positions or in a basis that follows from the step."""

GATHERING = frozenset({"linear", "two_phase", "topk", "svd", "topk+linear"})


class Option(NamedTuple):
    """One row of the page.

    Attributes:
        title: What is used.
        ranks: How many see it, in ``workers/torch_options.py``.
        refused: Families with which it is refused, with a message; it works with all others.
    """

    title: str
    ranks: int = 2
    refused: frozenset[str] = frozenset()

    def expected(self, family: str) -> str:
        """Return what a cell holds."""
        return "refused" if family in self.refused else "works"


_ALL = frozenset(FAMILIES)
SECTIONS: dict[str, dict[str, Option]] = {
    "Arguments of `hvd.DistributedOptimizer`": {
        "average": Option("`op=hvd.Average`"),
        "sum": Option("`op=hvd.Sum`"),
        "adasum": Option("`op=hvd.Adasum`", refused=_ALL),
        "predivide": Option("`gradient_predivide_factor`"),
        "passes": Option("`backward_passes_per_step`, with an accumulation cut short"),
        "groups_number": Option("`groups`, a number"),
        "groups_list": Option("`groups`, lists, of which a member is unused in some steps"),
        "sparse_as_dense": Option("`sparse_as_dense=True`, sparse gradients"),
        "sparse": Option("`sparse_as_dense=False`, sparse gradients (sent as they are)"),
        "parameter_groups": Option("several parameter groups"),
        "no_names": Option("no `named_parameters`"),
        "process_set": Option("`process_set`, two of three ranks", 3),
    },
    "Models": {
        "float16": Option("a float16 model"),
        "bfloat16": Option("a bfloat16 model"),
        "float64": Option("a float64 model"),
        "mixed": Option("several dtypes in one model"),
        "channels_last": Option("`channels_last`"),
        "turned": Option("transposed parameters"),
        "expanded": Option("expanded and strided gradients"),
        "frozen": Option("parameters frozen at first, or later"),
        "tied": Option("tied parameters"),
        "used_sometimes": Option("layers used in some steps only"),
        "used_on_one_rank": Option("layers used on some ranks only"),
        "unfrozen_later": Option(
            "parameters added or unfrozen later (Horovod never reduces them; the others are right)"
        ),
        "made_anew": Option(
            "a state loaded after parameters were added or unfrozen", refused=LOSSY
        ),
    },
    "Uses": {
        "two_optimizers_two_objects": Option("two optimizers, a compressor each"),
        "two_optimizers_one_object": Option("two optimizers, one compressor"),
        "synchronize_then_step": Option("`synchronize()`, then a plain `step()`"),
        "bound_allreduce": Option("`hvd.allreduce(p.grad, compression=c)` of bound parameters"),
        "bound_grouped_allreduce": Option("`hvd.grouped_allreduce` of bound parameters"),
        "other_process_set": Option(
            "`hvd.allreduce` over another process set than was bound", 3, _ALL
        ),
        "bare_allreduce": Option(
            "`hvd.allreduce(x, compression=c)` of any tensor", refused=REMEMBERING
        ),
        "bare_grouped_allreduce": Option(
            "`hvd.grouped_allreduce` of any tensors", refused=REMEMBERING
        ),
        "reducescatter": Option("`hvd.reducescatter(x, compression=c)`", refused=_ALL),
        "one_rank": Option("one rank, an optimizer", 1),
        "one_rank_bound": Option("one rank, `hvd.allreduce` of bound parameters", 1),
        "deep_copy": Option("`copy.deepcopy` of a compressor in use"),
        "pickled": Option("`pickle` of a compressor in use"),
        "interrupted": Option(
            "an exception inside `compress`; `optimizer.load_state_dict`, and the next step"
        ),
        "join": Option("`compression.join()`, `HOROVOD_CACHE_CAPACITY=0`", 3),
        "plain_join": Option(
            "`hvd.join()` alone, and another step", 3, GATHERING | SHARING | {"powersgd"}
        ),
        "join_with_cache": Option(
            "`compression.join()` with Horovod's response cache", refused=GATHERING
        ),
        "elastic_commit": Option("elastic: `commit`, `restore` and `sync` of our `TorchState`"),
        "elastic_of_horovod": Option("elastic: `hvd.elastic.TorchState`", refused=LOSSY),
    },
}
OPTIONS = {name: option for section in SECTIONS.values() for name, option in section.items()}
COME_AND_GO = frozenset({"topk", "acp"})
"""Families that ``test_ranks_come_and_go`` trains while ranks come and go."""

Outcomes = dict[str, dict[str, str]]
"""By option and family: the first line of the message, or nothing where it works."""

_COMMAND = "python -m tests.distributed.options --output docs/options.md"
_HEAD = f"""\
<!-- Written by `{_COMMAND}` from what the tests saw. -->

# Codecs and options under PyTorch

Every cell is a test on real ranks over Gloo (`tests/distributed/test_options.py`): two, three for
process sets and ranks that join, and one. **works**: over some steps, in which ranks get their
gradients in another order each, all ranks end with the same finite gradients, and what was applied
and what is still remembered add up to the true gradients; without a memory (`none`, `fp16`) what
was applied is as near to them as the dtype. **refused**: an error says so before anything is
applied.
"""
_COME_AND_GO = """\
The last row is of `test_ranks_come_and_go` in `tests/distributed/test_torch.py`, which trains
`topk`, whose memory is each rank's own, and `acp`, which shares a factor as well. n/a: not run;
what differs between codecs there is how they commit, restore and meet again, two rows above it.
"""


@functools.cache
def outcomes(ranks: int) -> list[Outcomes]:
    """Run all cells that so many ranks show, once, and return what each rank reported."""
    env = {"HOROVOD_CACHE_CAPACITY": "0"} if ranks == 3 else {}
    return run_ranks("torch_options.py", ranks, env=env, timeout=500)


def kind(message: str) -> str:
    """Return what a cell holds, from what a rank reported."""
    return "refused" if message else "works"


def page(found: Outcomes) -> str:
    """Return the page of all cells, from what rank 0 reported."""
    lines = [_HEAD]
    names = [f"`{name}`" for name in FAMILIES]
    for section, options in SECTIONS.items():
        lines += [f"## {section}", "", _row("", names), _row("---", ["---"] * len(names))]
        for name, option in options.items():
            cells = [kind(found[name][family]) for family in FAMILIES]
            lines.append(_row(option.title, cells))
        if "elastic_commit" in options:
            cells = ["works" if family in COME_AND_GO else "n/a" for family in FAMILIES]
            lines.append(_row("elastic: ranks that come and go", cells))
        lines.append("")
    lines += ["What the columns are:", ""]
    for name, (text, more) in FAMILIES.items():
        extra = "".join(f', `{key}="{value}"`' for key, value in more.items())
        lines.append(f"- `{name}`: `{text}`{extra}")
    lines += ["", _COME_AND_GO, "## What refusals say", ""]
    for name, option in OPTIONS.items():
        messages = dict.fromkeys(m for m in found[name].values() if kind(m) == "refused")
        lines += [f"- {option.title}: {message}" for message in list(messages)[:1]]
    return "\n".join(lines) + "\n"


def _row(first: str, cells: list[str]) -> str:
    return "| " + " | ".join([first, *cells]) + " |"


def main(
    output: Optional[Path] = typer.Option(  # noqa: UP045 - as in the package
        None, help="Write to this file instead of to the terminal."
    ),
) -> None:
    """Run every cell and write the page."""
    found = {name: outcomes(option.ranks)[0][name] for name, option in OPTIONS.items()}
    if output:
        output.write_text(page(found))
    else:
        typer.echo(page(found), nl=False)


if __name__ == "__main__":
    typer.run(main)
