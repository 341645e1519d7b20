# SPDX-License-Identifier: Apache-2.0
"""weft inside SGLang: `--moe-a2a-backend weft`, `--elastic-ep-backend weft` beside it for a server
that outlives its ranks, and WEFT_SGLANG_ALLREDUCE=1 for --tp.

SGLang finds `register` by its entry point; docs/user/sglang.md says what is served. Importing this
package imports nothing of SGLang.
"""

from __future__ import annotations

from weft.plugins.settings import Settings
from weft.plugins.sglang import allreduce, engine
from weft.plugins.sglang.hooks import NAME, SGLANG, install

__all__ = ["register"]


def register() -> None:
    """Add "weft" to the choices of SGLang's two flags, and install the hooks.

    SGLang calls it before it parses its flags, in every process. Every name and signature is
    checked before anything is patched.

    Raises:
        SetupError: where SGLang is another, and InvalidArgument for a wrong setting: SGLang logs
            either and goes on, but then has no choice "weft", so a command line that asks for it is
            refused.
    """
    allreduce.register()
    SGLANG.check((*engine.HOOKS, *engine.KNOWN))
    Settings.read("SGLANG")
    choices = engine.choices()
    if any(NAME not in each for each in choices):
        install(engine.HOOKS)
        for each in choices:
            each.append(NAME)
