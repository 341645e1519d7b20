# SPDX-License-Identifier: Apache-2.0
"""weft's plug-in for SGLang.

`--moe-a2a-backend weft` runs MoE blocks, `--elastic-ep-backend weft` keeps the server running
after a rank has died, and WEFT_SGLANG_ALLREDUCE=1 runs the all-reduces of --tp.

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
            choice "weft", so its parser rejects a command line that uses it.
    """
    allreduce.register()
    SGLANG.check((*engine.HOOKS, *engine.EXPECTED_API))
    Settings.read("SGLANG")
    choice_lists = flags.get_choice_lists()
    if any(NAME not in choice_list for choice_list in choice_lists):
        install(engine.HOOKS)
        for choice_list in choice_lists:
            choice_list.append(NAME)
