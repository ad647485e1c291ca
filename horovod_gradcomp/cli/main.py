"""Entry point: what commands there are."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; errors of use end with a message and exit code 2."""
    try:
        import typer
    except ImportError:
        sys.exit("gradcomp needs typer and rich: pip install 'horovod_gradcomp[cli]'")
    from ..core.errors import GradCompError
    from . import bench, docs

    app = typer.Typer(
        name="gradcomp",
        help="Gradient compression for Horovod: measure it, describe it.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.add_typer(bench.app, name="bench")
    app.add_typer(docs.app, name="docs")
    try:
        app()
    except GradCompError as error:
        typer.echo(f"gradcomp: {error}", err=True)
        sys.exit(2)
