# SPDX-License-Identifier: Apache-2.0
"""The all-to-all under its module's name."""

from flashinfer.comm import *  # noqa: F403


def get_moe_alltoall_module() -> None:
    """Replaced by tests, which check that arguments are refused before compilation."""


def __getattr__(name: str) -> object:
    """Return a function that fails when called, for names that weft does not have."""
    if not name.startswith("moe_a2a_"):
        raise AttributeError(name)

    def absent(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"weft.compat.flashinfer has no {name}")

    return absent
