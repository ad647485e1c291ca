"""``python -m horovod_gradcomp`` is the ``gradcomp`` command."""

from .cli.main import main

if __name__ == "__main__":
    main()
