# SPDX-License-Identifier: Apache-2.0
"""deep_ep, implemented by weft, together with deep_ep's own unmodified test helpers."""

from weft.compat import deep_ep as _weft
from weft.compat.deep_ep import *  # noqa: F403


def __getattr__(name: str) -> object:
    return getattr(_weft, name)
