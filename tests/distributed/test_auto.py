"""``Compression.auto`` on two ranks over Gloo."""

from __future__ import annotations

import functools

import pytest

from tests.distributed.launch import run_ranks

CHECKS = (
    "right_from_the_first_step",
    "clocks_that_differ",
    "no_codec_is_worth_it",
    "one_that_does_not_hold_what_it_promised",
    "a_bad_step_when_all_is_to_be_sent",
    "saved_and_resumed",
    "saved_before_the_choice",
    "ranks_with_other_choices_say_so",
    "an_optimizer_that_adapts",
    "log_and_join",
    "two_optimizers_and_a_trace",
    "telemetry_follows",
)
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]


@functools.cache
def run() -> tuple[list[dict[str, str]], str]:
    """Run all checks once; the first that fails on a rank ends the run."""
    try:
        return run_ranks("torch_auto.py", 2, args=CHECKS, timeout=180), ""
    except AssertionError as error:
        return [], str(error)


@pytest.mark.parametrize("check", CHECKS)
def test_check(check: str) -> None:
    reports, error = run()
    assert not error, error
    assert [report.get(check) for report in reports] == ["ok", "ok"]
