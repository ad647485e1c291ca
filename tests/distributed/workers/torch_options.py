"""Every family of codecs under every option, as far as this number of ranks shows it.

Each cell is reported as what it returned: nothing where the option works, or the first line of the
message with which it was refused. The first cell that fails on a rank ends the run.
"""

from __future__ import annotations

import os
import sys

import horovod.torch as hvd
import torch

from tests.distributed.launch import report
from tests.distributed.options import FAMILIES
from tests.distributed.workers import (
    options_models,
    options_ranks,
    options_reduction,
    options_uses,
)

CHECKS = {
    1: options_ranks.ONE,
    2: {
        **options_reduction.OPTIONS,
        **options_models.OPTIONS,
        **options_uses.OPTIONS,
        **options_ranks.TWO,
    },
    3: options_ranks.THREE,
}
"""By number of ranks."""


def outcome(option: str, family: str) -> str:
    """Return with which message a cell was refused, or nothing."""
    try:
        return CHECKS[hvd.size()][option](family) or ""
    except Exception as error:
        raise AssertionError(f"{option} with {family}") from error


def main() -> None:
    """Run all options, or those that the command line names, with all families or named ones."""
    size = int(os.environ["HOROVOD_SIZE"])
    hvd.init(process_sets=[options_ranks.PAIR, options_ranks.ALONE] if size == 3 else None)
    torch.set_num_threads(1)
    for option in [a for a in sys.argv[1:] if a in CHECKS[size]] or CHECKS[size]:
        families = [a for a in sys.argv[1:] if a in FAMILIES] or FAMILIES
        report({option: {family: outcome(option, family) for family in families}})


if __name__ == "__main__":
    main()
