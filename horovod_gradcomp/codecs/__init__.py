"""The codecs: one file each, one line each in :data:`REGISTRY`."""

from __future__ import annotations

import dataclasses
import inspect
import re

from ..core.codec import Codec
from ..core.errors import SettingsError, explain
from .acp import ACP
from .bernoulli import Bernoulli
from .bf16 import BF16
from .cltk import CLTK
from .dgc import DGC
from .fp8 import FP8
from .fp16 import FP16
from .linear import Linear
from .logarithmic import Logarithmic
from .natural import Natural
from .none import NoneCodec
from .onebit import OneBit
from .powersgd import PowerSGD
from .qsgd import QSGD
from .randomk import RandomK
from .sign import Sign
from .svd import SVD
from .terngrad import TernGrad
from .threshold import Threshold
from .topk import TopK
from .tucker import Tucker

REGISTRY: dict[str, type[Codec]] = {
    "none": NoneCodec,
    "fp16": FP16,
    "bf16": BF16,
    "fp8": FP8,
    "linear": Linear,
    "logarithmic": Logarithmic,
    "qsgd": QSGD,
    "terngrad": TernGrad,
    "natural": Natural,
    "sign": Sign,
    "onebit": OneBit,
    "topk": TopK,
    "threshold": Threshold,
    "dgc": DGC,
    "randomk": RandomK,
    "bernoulli": Bernoulli,
    "cltk": CLTK,
    "acp": ACP,
    "powersgd": PowerSGD,
    "svd": SVD,
    "tucker": Tucker,
}
"""Name, as in ``Compression.<name>`` and in string forms, to class."""


_TAKEN = "auto", "from_string", "guarded", "resolve"
"""What ``Compression`` has under these names is no codec."""


def register(name: str, cls: type[Codec]) -> None:
    """Give a codec of one's own a name, for ``Compression.<name>`` and string forms.

    Do it on every rank before a compressor is made, as by importing the module that does.

    Args:
        name: Lower case letters, digits and underscores, and no other codec's.
        cls: A frozen dataclass that descends from :class:`horovod_gradcomp.core.codec.Codec`.

    Raises:
        SettingsError: It is something else, or the name is taken.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in _TAKEN:
        raise SettingsError(explain(got=f"name {name!r}", expected="one such as 'my_codec'"))
    if REGISTRY.get(name, cls) is not cls:
        owner = REGISTRY[name].__name__
        raise SettingsError(explain(got=f"name {name!r}, which {owner} has", expected="a new one"))
    codec = isinstance(cls, type) and issubclass(cls, Codec) and dataclasses.is_dataclass(cls)
    if not codec or not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise SettingsError(
            explain(got=repr(cls), expected="a class of codecs, @dataclass(frozen=True)")
        )
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise SettingsError(explain(got=f"{cls.__name__} without {missing}", expected="them"))
    REGISTRY[name] = cls


def name_of(codec: Codec) -> str:
    """Return the name under which a codec's class is registered."""
    found = next((name for name, cls in REGISTRY.items() if cls is type(codec)), None)
    if found is None:
        raise SettingsError(
            explain(
                got=f"a codec of {type(codec).__name__}, which has no name",
                expected="a registered class",
                do=f"register('{type(codec).__name__.lower()}', {type(codec).__name__})",
            )
        )
    return found


def build(text: str) -> Codec:
    """Return the codec that a string form such as ``"topk:ratio=0.01"`` stands for.

    Raises:
        SettingsError: The name, a keyword or a value is not known.
    """
    from ..core.settings import parse_codec

    return parse_codec(text)
