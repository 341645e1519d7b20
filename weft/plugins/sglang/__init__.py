# SPDX-License-Identifier: Apache-2.0
"""weft's plug-in for SGLang.

`--moe-a2a-backend weft` serves MoE blocks, `--elastic-ep-backend weft` keeps the server running
after a rank has died, and WEFT_SGLANG_ALLREDUCE=1 serves the all-reduces of --tp.

SGLang finds `register` by its entry point; docs/user/sglang.md lists what is supported. Importing
this package does not import SGLang.
"""

from __future__ import annotations

from weft.plugins.settings import Settings
from weft.plugins.sglang import allreduce, engine, flags
from weft.plugins.sglang.hooks import NAME, SGLANG, install

__all__ = ["register"]


def register() -> None:
    """Add "weft" to the choices of SGLang's flags, and install the hooks.

    SGLang calls this in every process before it parses its flags. All names and signatures are
    checked before anything is patched.

    Raises:
        SetupError: If the SGLang version is not supported.
        InvalidArgument: If a setting is invalid. SGLang logs either error and continues without the
            choice "weft", so a command line that uses it is refused.
    """
    allreduce.register()
    SGLANG.check((*engine.HOOKS, *engine.KNOWN))
    Settings.read("SGLANG")
    choices = flags.choices()
    if any(NAME not in each for each in choices):
        install(engine.HOOKS)
        for each in choices:
            each.append(NAME)
