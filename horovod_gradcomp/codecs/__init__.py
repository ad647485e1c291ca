"""The codecs: one file each, one line each in :data:`REGISTRY`."""

from __future__ import annotations

from ..core.codec import Codec
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


def name_of(codec: Codec) -> str:
    """Return the name under which a codec's class is registered."""
    return next(name for name, cls in REGISTRY.items() if cls is type(codec))


def build(text: str) -> Codec:
    """Return the codec that a string form such as ``"topk:ratio=0.01"`` stands for.

    Raises:
        SettingsError: The name, a keyword or a value is not known.
    """
    from ..core.settings import parse_codec

    return parse_codec(text)
