# SPDX-License-Identifier: Apache-2.0
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
import os
import sys
from typing import TYPE_CHECKING, Any

from weft import logs
from weft.distribution import check_torch
from weft.errors import WeftError

__version__ = "0.1.0"

# Why weft cannot be used in this process, where it is the command, which says so in a line.
startup_error: WeftError | None = None


def _is_command() -> bool:
    """Whether this process is `weft` or `python -m weft`."""
    words = sys.orig_argv
    by_module = "-mweft" in words or ("-m", "weft") in zip(words, words[1:], strict=False)
    return by_module or os.path.basename(sys.argv[0] if sys.argv else "") == "weft"


try:
    logs.configure()
    check_torch()
except WeftError as error:
    if not _is_command():
        raise
    startup_error = error

if TYPE_CHECKING:
    from weft.public import *  # noqa: F403
    from weft.public import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module 'weft' has no attribute {name!r}")
        if startup_error is not None:
            raise startup_error
        public = importlib.import_module("weft.public")
        names = globals()
        names.update({each: getattr(public, each) for each in public.__all__})
        names["__all__"] = public.__all__
        if name in names:  # also the packages that came with them, such as weft.moe
            return names[name]
        raise AttributeError(f"module 'weft' has no attribute {name!r}")

    def __dir__() -> list[str]:
        __getattr__("__all__")
        return sorted(globals())
