# SPDX-License-Identifier: Apache-2.0
"""Every fault of the table still matches the kernel sources; fails before the slow tests do."""

import pytest

from tests.mutations import TABLES, source_of


@pytest.mark.parametrize("table", TABLES)
def test_every_edit_matches_one_place(table: str):
    failed = []
    for name, mutation in TABLES[table].items():
        for file in dict.fromkeys(edit.file for edit in mutation.edits):
            try:
                assert mutation.apply(file, source_of(file)) != source_of(file)
            except (LookupError, AssertionError) as error:
                failed.append(f"{name!r}: {error}")
    assert not failed, "\n".join(failed)
