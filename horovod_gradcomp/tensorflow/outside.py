"""Making variables while a function is traced."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def outside(build: Callable[[], T]) -> T:
    """Return ``build()``, run outside of any function that is being traced and any name scope.

    A thread of its own has no function around it, so variables can be made while a function is
    traced anew, which ``tf.init_scope`` does not allow, and the first trace stays the only one.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(build())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="gradcomp-variables")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]
