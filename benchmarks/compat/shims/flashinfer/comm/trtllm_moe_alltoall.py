# SPDX-License-Identifier: Apache-2.0
"""The all-to-all by its module's name."""

from flashinfer.comm import *  # noqa: F403


def get_moe_alltoall_module() -> None:
    """Tests replace this, to see that arguments are refused before anything is compiled."""


def __getattr__(name: str) -> object:
    """Functions that the tests import and that weft does not have fail when they are called."""
    if not name.startswith("moe_a2a_"):
        raise AttributeError(name)

    def absent(*args: object, **given: object) -> None:
        raise NotImplementedError(f"weft.compat.flashinfer has no {name}")

    return absent
