"""Entry point: what commands there are."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line; errors of use end with a message and exit code 2.

    A command that is terminated takes its ranks and networks away first, as after Ctrl-C.
    """
    try:
        import typer
    except ImportError:
        sys.exit("gradcomp needs typer and rich: pip install 'horovod_gradcomp[cli]'")
    from ..core.errors import GradCompError
    from . import bench, docs
    from .advise import advise
    from .doctor import doctor
    from .lab import lab
    from .plot import plot

    app = typer.Typer(
        name="gradcomp",
        help="Gradient compression for Horovod: whether it pays, what it costs, what there is.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.command()(advise)
    app.command()(doctor)
    app.command()(lab)
    app.command()(plot)
    app.add_typer(bench.app, name="bench")
    app.add_typer(docs.app, name="docs")
    signal.signal(signal.SIGTERM, _terminated)
    try:
        app()
    except (GradCompError, OSError) as error:  # OSError: a file that cannot be written
        typer.echo(f"gradcomp: {error}", err=True)
        sys.exit(2)


def _terminated(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)
