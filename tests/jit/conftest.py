# SPDX-License-Identifier: Apache-2.0
"""`fake`: a driver that records its calls. `cache`: an empty cache."""

from pathlib import Path

import pytest

from tests.fake_driver import Driver
from weft.cuda import driver as memory_driver
from weft.jit import launch, module
from weft.jit.cache import Cache


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver(current=1)
    for user in (module, launch, memory_driver):
        monkeypatch.setattr(user, "load_driver", lambda: driver)
    return driver


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", lock_timeout=600.0)
