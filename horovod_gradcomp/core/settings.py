"""From names and keywords to checked objects that fit one another: codecs, a memory, options."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import hierarchical, twophase
from .codec import Codec, Combine
from .errors import SettingsError, explain
from .guard import Guard
from .memories import MEMORIES
from .memory import Memory
from .options import Options
from .projection import Composable
from .schedule import Phase, Ramp, at, describe
from .stringform import split


@dataclass(frozen=True)
class Auto:
    """What is chosen from in the first steps of a run, see :mod:`.auto`."""

    candidates: tuple[tuple[str, Settings], ...]
    """String forms with their settings, the mildest first."""

    budget: float
    """Seconds that trying them may take."""


@dataclass(frozen=True)
class Settings:
    """A checked codec with its memory and options; what :class:`Compressor` is built from."""

    codec: Codec
    """The one that is used in the end."""

    memory: Memory
    options: Options
    phases: tuple[Phase, ...]
    """All codecs, in the order of their first steps; the first begins at step 0."""

    exceptions: tuple[tuple[str, Settings | None], ...] = ()
    """The rules of the options, with checked settings."""

    guard: Guard | None = None
    """When to use another codec for a while."""

    auto: Auto | None = None
    """What takes the place of these settings after the first steps."""

    @property
    def every(self) -> list[Settings]:
        """These settings and those of the rules."""
        return [self, *(own for _, own in self.exceptions if own is not None)]

    @property
    def identity(self) -> bool:
        """Whether nothing is ever changed."""
        clips = self.options.clip_norm is not None or self.options.clip_value is not None
        return not clips and all(phase.codec.identity for phase in self.phases)

    @property
    def by_horovod(self) -> bool:
        """Whether payloads are what Horovod itself reduces, in every step."""
        summed = all(phase.codec.combine is Combine.SUM for phase in self.phases)
        return summed and not self.memory.references and self.guard is None

    def codec_at(self, step: int) -> Codec:
        """Return the codec of a step."""
        return at(self.phases, step) if len(self.phases) > 1 else self.phases[0].codec

    def of(self, name: str) -> Settings | None:
        """Return the settings of a parameter by its name; None where it is sent uncompressed."""
        for pattern, settings in self.exceptions:
            if re.fullmatch(pattern, name):
                return settings
        return self

    def facts(self) -> dict[str, str]:
        """Return every setting by name, equal on ranks that are set alike."""
        if self.auto is not None:
            among = "; ".join(own.describe() for _, own in self.auto.candidates)
            return {"codec": "auto", "budget": f"{self.auto.budget:g}", "candidates": among}
        memory = next(n for n, cls in MEMORIES.items() if cls is type(self.memory))
        values = ",".join(f"{k}={v}" for k, v in dataclasses.asdict(self.memory).items())
        options = {k: str(v) for k, v in vars(self.options).items() if k != "memory"}
        memory = f"{memory}:{values}" if values else memory
        if self.guard is not None:
            options["guard"] = self.guard.describe()
        return {"codec": describe(self.phases), "memory": memory, **options}

    def describe(self) -> str:
        """Return one line that names every setting, equal on ranks that are set alike."""
        codec, *others = self.facts().items()
        return " ".join([codec[1], *(f"{key}={value}" for key, value in others)])


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
    options = Options(**{k: v for k, v in settings.items() if k in ours})
    return assemble(_phases(name, cls, {k: settings[k] for k in theirs if k in settings}), options)


def refuse_unchecked(settings: Any) -> None:
    """Raise :class:`SettingsError` where a compressor is given something else than settings."""
    if not isinstance(settings, Settings):
        raise SettingsError(
            explain(
                got=repr(settings),
                expected="settings",
                do="make compressors with Compression.topk(...), Compression.from_string(...)",
            )
        )


def assemble(codec: Codec | Sequence[Phase], options: Options) -> Settings:
    """Return settings whose codecs and memory fit one another."""
    phases = [Phase(0, codec)] if isinstance(codec, Codec) else list(codec)
    final = phases[-1].codec
    memory = _memory(final.default_memory if options.memory is None else options.memory)
    misfit = {"two_phase": twophase.misfit, "hierarchical": hierarchical.misfit}
    asked = misfit.get(options.exchange)
    if asked is not None and (why := asked(final, memory)):
        raise SettingsError(
            explain(
                got=f"exchange={options.exchange!r} with '{final.describe()}' and its memory",
                expected="a codec whose packed payloads can be decoded part by part, and a memory "
                "that goes with it",
                why=why,
                do="leave exchange= out",
            )
        )
    if options.start_after:
        later = [Phase(first + options.start_after, codec) for first, codec in phases]
        phases = [Phase(0, parse_codec(options.start_with)), *later]
    elif options.start_with != "none":
        parse_codec(options.start_with)  # wrong is wrong, also where it is not used
    fitted = []
    for first, each in phases:
        each = each.with_memory(memory.wants_error)
        if not each.identity or len(phases) == 1:  # in between, nothing is left to remember
            memory.check(each)
            if options.state_dtype != "float32":
                memory.check_narrow()
        fitted.append(Phase(first, each))
    exchange = "auto" if asked is not None else options.exchange
    bare = dataclasses.replace(options, rules=(), exchange=exchange)
    exceptions = []
    for pattern, text in options.rules:
        try:
            exceptions.append((pattern, None if text is None else _exception(text, bare)))
        except SettingsError as error:
            raise SettingsError(f"rules, {pattern!r}: {error}") from None
    return Settings(fitted[-1].codec, memory, options, tuple(fitted), tuple(exceptions))


def _exception(text: str, options: Options) -> Settings:
    """Return the settings of a rule: its own codec and memory, all else as it is elsewhere."""
    name, settings = split(text)
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    if given["memory"] is not None and "memory" not in settings:
        del given["memory"]  # it suits the other codec
    return make(name, {**given, **settings})


def _phases(name: str, cls: type[Any], settings: Mapping[str, Any]) -> list[Phase]:
    """Return the codec of each value that a setting takes."""
    moving = [key for key, value in settings.items() if isinstance(value, Ramp)]
    if len(moving) > 1:
        raise SettingsError(
            f"{name}: " + explain(got=f"ramps of {' and '.join(moving)}", expected="one ramp")
        )
    if not moving:
        return [Phase(0, _construct(name, cls, settings))]
    (key,) = moving
    return [
        Phase(first, _construct(name, cls, {**settings, key: value}))
        for first, value in settings[key].values()
    ]


def compose(first: Settings, second: Settings) -> Settings:
    """Return ``first + second``: the second codec encodes what the first one keeps.

    Memory and options are the first one's.

    Raises:
        SettingsError: The second has options of its own, or the codecs do not fit.
    """
    if second.options != Options():
        raise SettingsError(
            explain(
                got=f"options of its own for '{second.codec.describe()}' after '+'",
                expected="none",
                why="memory, seed and all other options are those of the codec before '+'",
            )
        )
    if first.guard is not None or second.guard is not None:
        raise SettingsError(
            explain(
                got="'+' with a guarded compressor",
                expected="both codecs in the string, as in guarded('topk+linear:bits=8', ...)",
            )
        )
    if not isinstance(first.codec, Composable):
        raise SettingsError(_no_values(first.codec.registered, second.codec))
    if first.codec.then is not None:
        raise SettingsError(explain(got="a second '+'", expected="one"))
    if len(second.phases) > 1:
        raise SettingsError(explain(got="a ramp after '+'", expected="a codec that stays"))
    begun = first.options.start_after
    phases = []
    for phase in first.phases[1 if begun else 0 :]:
        joined: Any = phase.codec
        phases.append(Phase(phase.first - begun, dataclasses.replace(joined, then=second.codec)))
    return assemble(phases, first.options)


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
    if any(isinstance(value, Ramp) for value in settings.values()):
        raise SettingsError(f"{name}: " + explain(got="a ramp", expected="a codec that stays"))
    codec: Codec = _construct(name, cls, settings)
    return codec


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

    able = [n for n, c in REGISTRY.items() if issubclass(c, Composable) and c.composes]
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
