# SPDX-License-Identifier: Apache-2.0
"""One-sided NVLink communication for MoE inference.

The same protocol runs on CPU ranks over shared memory.

`weft.errors` has all errors, and `weft.reference` specifies each operation in plain torch. MoE
layers are in `weft.moe`, grouped GEMMs in `weft.gemm`. `weft.compat.flashinfer`,
`weft.compat.deep_ep` and `weft.compat.triton_dist` implement the APIs of other projects, and
`weft.plugins.transformers` runs the experts of transformers models.

The public names are those of `weft.public`. They are imported at their first use, so that
`weft --version` and shell completion do not import torch.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from weft import logs
from weft.distribution import check_torch
from weft.errors import WeftError

__version__ = "0.1.0"

# Error that makes weft unusable in this process. Only set in the command, which reports it.
startup_error: WeftError | None = None


def _is_command() -> bool:
    """Whether this process is `weft` or `python -m weft`."""
    args = sys.orig_argv
    by_module = "-mweft" in args or ("-m", "weft") in zip(args, args[1:], strict=False)
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
        names.update({public_name: getattr(public, public_name) for public_name in public.__all__})
        names["__all__"] = public.__all__
        if name in names:  # includes subpackages that were imported, such as weft.moe
            return names[name]
        raise AttributeError(f"module 'weft' has no attribute {name!r}")

    def __dir__() -> list[str]:
        __getattr__("__all__")
        return sorted(globals())
