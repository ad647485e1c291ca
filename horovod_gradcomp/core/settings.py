"""From what a user writes to checked objects: keywords, string forms, defaults."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .codec import Codec, check_count
from .errors import SettingsError, explain
from .memory import MEMORIES, Memory


@dataclass(frozen=True)
class Options:
    """What every compressor takes beside its codec's settings.

    Args:
        memory: "residual", "none", "residual:decay=0.9", a :class:`Memory`, or None for the
            codec's default.
        seed: Of the random codecs; equal on all ranks.
        min_numel: Tensors with fewer elements are sent uncompressed.
        skip_1d: Whether biases and other tensors of one dimension are sent uncompressed.
        bucket_bytes: Most bytes (float32) of parameters that are packed into one message. Below
            32 MiB, from where on the C library returns freed storage to the system at once and
            every step pays again for fresh pages.
    """

    memory: str | Memory | None = None
    seed: int = 0
    min_numel: int = 1024
    skip_1d: bool = True
    bucket_bytes: int = 25 * 2**20

    def __post_init__(self) -> None:
        check_count("compressor", "min_numel", self.min_numel, minimum=0)
        check_count("compressor", "bucket_bytes", self.bucket_bytes, minimum=4)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise SettingsError(explain(got=f"seed={self.seed!r}", expected="a whole number"))
        if not isinstance(self.skip_1d, bool):
            raise SettingsError(explain(got=f"skip_1d={self.skip_1d!r}", expected="True or False"))


@dataclass(frozen=True)
class Settings:
    """A checked codec with its memory and options; what :class:`Compressor` is built from."""

    codec: Codec
    memory: Memory
    options: Options

    def describe(self) -> str:
        """Return one line that names every setting, equal on ranks that are set alike."""
        memory = next(n for n, cls in MEMORIES.items() if cls is type(self.memory))
        values = ",".join(f"{k}={v}" for k, v in dataclasses.asdict(self.memory).items())
        rest = {k: v for k, v in vars(self.options).items() if k != "memory"}
        tail = " ".join(f"{k}={v}" for k, v in rest.items())
        return f"{self.codec.describe()} memory={memory}{':' + values if values else ''} {tail}"


def make(name: str, settings: Mapping[str, Any], extra: Sequence[str] = ()) -> Settings:
    """Return checked settings from a codec's name and keywords for it and for :class:`Options`.

    Raises:
        SettingsError: A name, keyword or value is not allowed; the message says what is.
    """
    from ..codecs import REGISTRY

    cls = _look_up(name, REGISTRY, "codec")
    ours = {f.name for f in dataclasses.fields(Options)}
    theirs = [f.name for f in dataclasses.fields(cls)]
    for key in settings:
        if key not in ours and key not in theirs:
            if key == "then":
                raise SettingsError(_no_values(name, settings[key]))
            raise SettingsError(_unknown(f"{name}: keyword", key, [*theirs, *sorted(ours), *extra]))
    codec = _construct(name, cls, {k: v for k, v in settings.items() if k in theirs})
    options = Options(**{k: v for k, v in settings.items() if k in ours})
    return assemble(codec, options)


def assemble(codec: Codec, options: Options) -> Settings:
    """Return settings whose codec and memory fit one another."""
    memory = _memory(codec.default_memory if options.memory is None else options.memory)
    codec = codec.with_memory(memory.wants_error)
    memory.check(codec)
    return Settings(codec, memory, options)


def compose(first: Settings, second: Settings) -> Settings:
    """Return ``first + second``: the second codec encodes what the first one keeps.

    Memory and options are the first one's.

    Raises:
        SettingsError: The second has options of its own, or the codecs do not fit.
    """
    name = first.codec.describe().partition(":")[0]
    if second.options != Options():
        raise SettingsError(
            explain(
                got=f"options of its own for '{second.codec.describe()}' after '+'",
                expected="none",
                why="memory, seed and all other options are those of the codec before '+'",
            )
        )
    if not any(f.name == "then" for f in dataclasses.fields(first.codec)):
        raise SettingsError(_no_values(name, second.codec))
    if first.codec.then is not None:  # type: ignore[attr-defined]
        raise SettingsError(explain(got="a second '+'", expected="one"))
    joined: Any = first.codec
    return assemble(dataclasses.replace(joined, then=second.codec), first.options)


def parse_codec(text: str) -> Codec:
    """Return the codec of a string form.

    One is ``name`` or ``name:key=value,key=value``, two joined by ``+`` are one codec and another
    for what it keeps.

    Raises:
        SettingsError: The name, a keyword or a value is not allowed.
    """
    from ..codecs import REGISTRY

    name, settings = split(text)
    cls = _look_up(name, REGISTRY, "codec")
    codec: Codec = _construct(name, cls, settings)
    return codec


def split(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the keywords of a string form, values turned into numbers.

    What follows a ``+`` becomes the keyword ``then``.
    """
    if not isinstance(text, str):
        raise SettingsError(explain(got=repr(text), expected="a string such as 'topk:ratio=0.01'"))
    text, *inner = re.split(r"\+(?=\s*[A-Za-z_])", text, maxsplit=1)  # not in 1e+5
    name, _, rest = text.strip().partition(":")
    settings: dict[str, Any] = {"then": inner[0].strip()} if inner else {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = item.partition("=")
        if not equals:
            raise SettingsError(
                f"{name}: " + explain(got=repr(item), expected="key=value", do=f"see {text!r}")
            )
        if key.strip() in settings:
            raise SettingsError(f"{name}: " + explain(got=f"{key} twice", expected="it once"))
        settings[key.strip()] = _value(value.strip())
    return name.strip(), settings


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


def _memory(value: str | Memory) -> Memory:
    if isinstance(value, Memory):
        return value
    if not isinstance(value, str):
        expected = f"one of {', '.join(MEMORIES)}, with settings as in 'residual:decay=0.9'"
        raise SettingsError(explain(got=f"memory={value!r}", expected=expected))
    name, settings = split(value)
    built = _construct(name, _look_up(name, MEMORIES, "memory"), settings)
    assert isinstance(built, Memory)
    return built


def _construct(name: str, cls: type[Any], settings: Mapping[str, Any]) -> Any:
    allowed = [f.name for f in dataclasses.fields(cls)]
    for key in settings:
        if key not in allowed:
            if key == "then":
                raise SettingsError(_no_values(name, settings[key]))
            raise SettingsError(_unknown(f"{name}: keyword", key, allowed))
    if isinstance(settings.get("then"), str):
        settings = {**settings, "then": parse_codec(settings["then"])}
    return cls(**settings)


def _look_up(name: str, table: Mapping[str, type[Any]], what: str) -> type[Any]:
    if name not in table:
        raise SettingsError(_unknown(what, name, list(table)))
    return table[name]


def _no_values(name: str, inner: Any) -> str:
    from ..codecs import REGISTRY

    able = [n for n, c in REGISTRY.items() if any(f.name == "then" for f in dataclasses.fields(c))]
    inner = inner.describe() if isinstance(inner, Codec) else inner
    return f"{name}: " + explain(
        got=f"'+ {inner}' after '{name}'",
        expected=f"it after one of {', '.join(able)}",
        why=f"'{name}' keeps no values that another codec could encode",
    )


def _unknown(what: str, name: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(str(name), allowed, n=1)
    return explain(
        got=f"{what} {name!r}",
        expected=f"one of {', '.join(allowed)}" if allowed else "none",
        do=f"did you mean {close[0]!r}?" if close else "",
    )


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"True": True, "true": True, "False": False, "false": False, "None": None}.get(
        text, text
    )
