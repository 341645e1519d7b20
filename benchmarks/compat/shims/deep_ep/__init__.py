# SPDX-License-Identifier: Apache-2.0
"""deep_ep, from weft. Beside this file lie deep_ep's own helpers for tests, unchanged."""

from weft.compat import deep_ep as _weft
from weft.compat.deep_ep import *  # noqa: F403


def __getattr__(name: str) -> object:
    return getattr(_weft, name)
