"""weft carries tokens across GPUs: one-sided NVLink communication for MoE inference.

The same protocol runs on CPU ranks over shared memory.

Every error is in `weft.errors`. `weft.reference` has what each operation means, in plain torch.
The parts of a layer are in `weft.moe`, the experts' products in `weft.gemm`. Other projects' calls
are in `weft.compat.flashinfer`, `weft.compat.deep_ep` and `weft.compat.triton_dist`;
`weft.plugins.transformers` carries the experts of transformers' models.

The public names are those of `weft.public`. They are imported when one is first asked for, so that
`weft --version` and shell completion need no torch.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from weft import logs
from weft.errors import TorchTooOld

__version__ = "0.1.0"

logs.set_up()


def _check_torch() -> None:
    """Refuse a torch that lacks what weft calls, before a missing name does in worse words."""
    try:
        found = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return  # built without metadata, or not there: importing it says so
    major, minor = found.split(".")[:2]
    if (int(major), int(minor)) < (2, 8):
        raise TorchTooOld(
            f"weft needs torch 2.8 or newer, this is {found}: pip install 'torch>=2.8'"
        )


_check_torch()

if TYPE_CHECKING:
    from weft.public import *  # noqa: F403
    from weft.public import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module 'weft' has no attribute {name!r}")
        public = importlib.import_module("weft.public")
        here = globals()
        here.update({each: getattr(public, each) for each in public.__all__})
        here["__all__"] = public.__all__
        if name in here:  # also the packages that came with them, such as weft.moe
            return here[name]
        raise AttributeError(f"module 'weft' has no attribute {name!r}")

    def __dir__() -> list[str]:
        __getattr__("__all__")
        return sorted(globals())
