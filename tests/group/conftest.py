# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the group tests."""

import pytest

from weft.group.meeting import Meeting


@pytest.fixture
def meeting():
    meeting = Meeting.open()
    yield meeting
    meeting.close()
