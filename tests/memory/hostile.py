# SPDX-License-Identifier: Apache-2.0
"""What somebody might send who is no rank, and what no rank would send."""

import json

from hypothesis import strategies as st

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
BODIES = st.one_of(
    st.binary(max_size=64),
    JSON_VALUES.map(lambda value: json.dumps(value).encode()),
    JSON_VALUES.map(lambda value: json.dumps({"nonce": value}).encode()),
    st.sampled_from(
        [
            b'{"nonce":"\\ud800"}', b'{"nonce":NaN}', b'{"nonce":1e999}', b"[" * 4000, b"{}", b"@",
            b'{"nonce":' + b"9" * 4000 + b"}", b'{"nonce":"' + b"\xff" * 64 + b'"}', b"",
            b" " * 50_000,
        ]
    ),
)  # fmt: skip
