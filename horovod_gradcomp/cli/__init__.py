"""The ``gradcomp`` command. Needs the extra ``cli`` (typer and rich)."""
