"""What a user may set through WEFT_VLLM and WEFT_VLLM_*."""

from __future__ import annotations

from collections.abc import Mapping

from weft.plugins.settings import Settings

FORMS = ("", "block", "exchange")


def read(environment: Mapping[str, str] | None = None) -> Settings:
    """Those of the environment. Raises InvalidArgument naming the variable."""
    return Settings.read("VLLM", "WEFT_VLLM", FORMS, environment)
