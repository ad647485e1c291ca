"""The ``Compression`` object of a front end: one attribute for each registered codec."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Sequence
from typing import Any, Callable

from ..codecs import REGISTRY
from .codec import Codec
from .errors import SettingsError, explain
from .guard import guarded
from .options import Options
from .settings import make
from .stringform import split

BUDGET = 5.0
"""Seconds that ``auto`` may try candidates, by default."""


class Factory:
    """``Compression.topk``: call it with settings, or hand it to Horovod for the defaults."""

    def __init__(self, name: str, build: Callable[..., Any], extra: Sequence[str]) -> None:
        self._name, self._build, self._extra = name, build, extra
        self._default: Any = None
        self.__name__ = name
        self.__doc__ = REGISTRY[name].__doc__
        self.__signature__ = signature(REGISTRY[name], extra)

    def __call__(self, *args: Any, **settings: Any) -> Any:
        if args:
            raise SettingsError(
                f"{self._name}: settings are keywords; got {args!r} by position, "
                f"expected {self._name}{self.__signature__}"
            )
        own = {key: settings.pop(key) for key in self._extra if key in settings}
        return self._build(make(self._name, settings, self._extra), **own)

    def compress(self, tensor: Any) -> Any:
        """Compress with the default settings, as ``hvd.Compression.fp16`` does uncalled."""
        return self._instance().compress(tensor)

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Decompress with the default settings."""
        return self._instance().decompress(tensor, ctx)

    def __add__(self, other: Any) -> Any:
        return self._instance() + other

    def _instance(self) -> Any:
        if self._default is None:
            self._default = self()
        return self._default

    def __hash__(self) -> int:
        # A compressor may refuse the place where it is used as a key.
        return hash(self._instance())

    def __repr__(self) -> str:
        return f"Compression.{self._name}"


class Chooser(Factory):
    """``Compression.auto``: leaves the choice to measurements in the first steps of a run.

    ``Compression.auto(candidates=["fp16", "topk:ratio=0.01"], budget=5.0)``. See
    :mod:`horovod_gradcomp.core.auto` for how it chooses, and in a front end for what it does.
    """

    def __init__(self, build: Callable[..., Any], extra: Sequence[str], refusal: str) -> None:
        super().__init__("none", build, extra)
        self.__name__, self.__doc__ = "auto", Chooser.__doc__
        keyword = inspect.Parameter.KEYWORD_ONLY
        own: list[tuple[str, Any]] = [("candidates", None), ("budget", BUDGET)]
        own += [(field.name, field.default) for field in dataclasses.fields(Options)]
        own += [(name, None) for name in extra]
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(name, keyword, default=default) for name, default in own]
        )
        self._refusal = refusal

    def __call__(self, *args: Any, **settings: Any) -> Any:
        from .auto import settings_of

        if self._refusal:
            raise SettingsError(self._refusal)
        if args:
            raise SettingsError(f"auto: settings are keywords; got {args!r} by position")
        own = {key: settings.pop(key) for key in self._extra if key in settings}
        candidates, budget = settings.pop("candidates", None), settings.pop("budget", BUDGET)
        return self._build(settings_of(candidates, budget, settings), **own)

    def __repr__(self) -> str:
        return "Compression.auto"


class Namespace:
    """``Compression``: mirrors ``hvd.Compression``.

    Args:
        build: Makes a compressor of checked settings and the front end's own keywords.
        extra: Names of these keywords.
        no_auto: Why the front end has no ``auto``; empty where it has.
    """

    auto: Chooser

    def __init__(
        self, build: Callable[..., Any], extra: Sequence[str] = (), no_auto: str = ""
    ) -> None:
        self._build, self._extra = build, extra
        for name in REGISTRY:
            setattr(self, name, Factory(name, build, extra))
        self.auto = Chooser(build, extra, no_auto)

    def __getattr__(self, name: str) -> Factory:
        if name in REGISTRY:  # since this object was made
            made = Factory(name, self._build, self._extra)
            setattr(self, name, made)
            return made
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            make(name, {})
        except SettingsError as error:
            raise AttributeError(f"Compression.{name}: {error}") from None
        raise AttributeError(name)

    def from_string(self, text: str, **options: Any) -> Any:
        """Return the compressor of a string form, such as ``"topk:ratio=0.01+linear:bits=8"``.

        Args:
            text: Name and settings of a codec, and of one more after ``+``.
            options: As of ``Compression.<name>``: memory, seed, min_numel, ...

        Raises:
            SettingsError: The name, a keyword or a value is not allowed.
        """
        name, settings = split(text)
        if name not in REGISTRY and name != "auto":
            make(name, {})  # says what is known
        factory: Factory = getattr(self, name)
        return factory(**{**settings, **options})

    def guarded(
        self,
        text: str,
        *,
        fallback: str = "fp16",
        residual_norm: float | None = None,
        cosine: float | None = None,
        every: int = 10,
        patience: int = 1,
        hold: int = 100,
        **options: Any,
    ) -> Any:
        """Return a compressor that sends with another codec for a while when a bound is crossed.

        Every few steps norms are measured, and their means over all ranks, which every rank reads
        in the same reduction, are held against the bounds. All ranks fall back at the same step and
        return at the same step. Nothing is lost: what ranks remember goes out with the fallback.
        PyTorch only.

        Args:
            text: As of :meth:`from_string`.
            fallback: String form of the codec to fall back to; "none" for uncompressed.
            residual_norm: Most norm of what is left out, in norms of the gradient, above 0.
            cosine: Least cosine between what was to be sent and what was, -1 to 1.
            every: Steps from one look to the next, at least 1.
            patience: Looks in a row that must find a bound crossed, at least 1.
            hold: Steps of the fallback, at least 1.
            options: As of ``Compression.<name>``.

        Raises:
            SettingsError: Neither bound is given, or something is out of range.

        Example:
            >>> Compression.guarded("topk:ratio=0.01", cosine=0.1)  # doctest: +SKIP
        """
        name, settings = split(text)
        own = {key: options.pop(key) for key in self._extra if key in options}
        made = guarded(
            make(name, {**settings, **options}, self._extra),
            fallback,
            residual_norm=residual_norm,
            cosine=cosine,
            every=every,
            patience=patience,
            hold=hold,
        )
        return self._build(made, **own)

    def resolve(self, given: Any, horovods_none: Any) -> Any:
        """Return the compressor that a ``compression=`` argument means.

        Args:
            given: One of these, its string form, one of Horovod's, or None.
            horovods_none: ``hvd.Compression.none``, in whose place ``none`` comes.

        Raises:
            SettingsError: It is something else.
        """
        if given is None or given is horovods_none:
            given = "none"
        if isinstance(given, str):
            return self.from_string(given)
        uncalled = isinstance(given, Factory)
        if uncalled:
            given = given._instance()
        kind = given if isinstance(given, type) else type(given)
        own = getattr(horovods_none, "__module__", None)
        for module in (base.__module__ for base in kind.__mro__):
            if own and module != own and re.fullmatch(r"horovod\.\w+\.compression", module):
                raise SettingsError(
                    explain(
                        got=f"compression={given!r} of another framework",
                        expected=f"one that descends from {own}",
                    )
                )
        if not uncalled and not callable(getattr(given, "compress", None)):
            raise SettingsError(
                explain(
                    got=f"compression={given!r}",
                    expected="Compression.topk(...) or another one, its string form, or one of "
                    "hvd.Compression",
                )
            )
        return given


def signature(cls: type[Codec], extra: Sequence[str] = ()) -> inspect.Signature:
    """Return the keyword signature of ``Compression.<name>`` for help and editors."""
    parameters = [
        inspect.Parameter(
            f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type
        )
        for owner in (cls, Options)
        for f in sorted(dataclasses.fields(owner), key=lambda f: f.name == "then")
    ]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in extra
    ]
    return inspect.Signature(parameters)
