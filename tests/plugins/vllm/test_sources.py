# SPDX-License-Identifier: Apache-2.0
"""The plug-in's names beside vLLM's sources: a table of three wheels, and the stand-in.

WEFT_VLLM_SITE is a folder with a wheel's `vllm/` and metadata, which the table is then compared to.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.plugins.sources import differences, version_of
from tests.plugins.vllm.tables import ENTRIES, known, read, row
from tests.plugins.vllm.workers import STANDIN
from weft.plugins.names import relied_on
from weft.plugins.vllm.engine import VLLM

NAMES = known()


def test_the_table_has_what_is_served() -> None:
    """And nothing else."""
    assert set(NAMES) == set(VLLM.served)


@pytest.mark.parametrize("version", VLLM.served)
def test_every_name_is_in_the_sources(version: str) -> None:
    """Names, signatures, attributes and fields, as tables.py read them in the wheel."""
    for entry, expected in relied_on(ENTRIES, version):
        assert NAMES[version][entry.target] == row(expected, entry.names.split()), entry.target


def test_the_stand_in_is_as_the_sources() -> None:
    """So it cannot drift away from them."""
    assert differences(Path(STANDIN), ENTRIES, "0.32.0") == []


if "WEFT_VLLM_SITE" in os.environ:

    def test_the_table_is_of_the_wheel() -> None:
        """What tables.py wrote is what it would write now."""
        site = Path(os.environ["WEFT_VLLM_SITE"])
        assert NAMES[version_of(site, "vllm")] == read(site)
