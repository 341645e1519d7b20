# SPDX-License-Identifier: Apache-2.0
"""Every fault of the table still matches the kernel sources; fails before the slow tests do."""

from __future__ import annotations

import pytest

from tests.mutations import TABLES, Edit, source_of

TEXT = """\
template <class T> WEFT_FN void declared(T);
struct alignas(16) One {
    WEFT_FN One(int a) : a(a) { use(a); }  // a brace in a comment {
    WEFT_FN int get() const { return a + 1; }
};
template <class T> struct Other {
    WEFT_FN int get() { return declared(a
        + 1); }
};
WEFT_FN void both(int) { first(); }
WEFT_FN void both(long) { second(); }
"""


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


@pytest.mark.parametrize(
    ("function", "pattern", "changed"),
    [
        ("One::get", r"a \+ 1", "{ return X; }"),
        ("Other::get", r"a \+ 1", "return declared(X);"),
        ("One::One", r"use", ": a(a) { X(a); }"),
        ("both", "second", "{ first(); }\nWEFT_FN void both(long) { X(); }"),
    ],
)
def test_an_edit_stays_in_its_function(function: str, pattern: str, changed: str):
    assert changed in Edit("a.cuh", function, pattern, "X").apply(TEXT)


@pytest.mark.parametrize(
    ("function", "pattern", "times"),
    [("both", r"\(\)", 2), ("One::get", "use", 0), ("declared", "a", 0), ("gone", "a", 0)],
)
def test_an_edit_of_no_place_or_of_two_is_an_error(function: str, pattern: str, times: int):
    with pytest.raises(LookupError, match=f"matches {times} times in {function} of a.cuh"):
        Edit("a.cuh", function, pattern, "X").apply(TEXT)
