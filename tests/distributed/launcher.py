"""``horovodrun`` without its look at what Horovod was built with.

It imports every framework for that, twice, which takes longer than most runs under test. A Horovod
that was built without what a run needs makes the ranks fail instead.
"""

from __future__ import annotations

from horovod.runner import launch


def main() -> None:
    launch.gloo_built = launch.mpi_built = lambda verbose=False: True
    launch.run_commandline()


if __name__ == "__main__":
    main()
