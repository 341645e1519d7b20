"""What a user may set through WEFT_SGLANG_*."""

from __future__ import annotations

from collections.abc import Mapping

from weft.plugins.settings import Settings

FORMS = ("block", "dispatcher")


def read(environment: Mapping[str, str] | None = None) -> Settings:
    """Those of the environment. Raises InvalidArgument naming the variable."""
    return Settings.read("SGLANG", "WEFT_SGLANG_FORM", FORMS, environment)
