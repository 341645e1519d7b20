# SPDX-License-Identifier: Apache-2.0
"""The identity of a call: what all ranks must agree on, hashed for flags and described in errors.

The ranks compare a hash of 24 bits (exchanges) or 40 bits (all-reduce) in the word that every round
exchanges anyway. Each rank also keeps the unhashed record in its header (`CallRecord` in
device/header.cuh), from which `describe_*` words the error of a mismatch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
from collections.abc import Sequence

from weft.errors import InvalidArgument
from weft.memory.header import CallRecord

BACKENDS = {"oneshot": 1, "twoshot": 2, "twoshot_bulk": 3}
CODINGS = {"none": 0, "static": 1, "token": 2, "group": 3, "group_ue8m0": 4}
SLOTS = {
    1: "row",
    2: "row to be summed",
    3: "summed row",
    4: "statistics of the summed row",
    5: "call word",
}
PARTS = ("residual", "weight", "the sum wanted")

MAX_LAYERS = MAX_ROUNDS = 1 << 16
CALL_WORDS = 4
FLAG_MASK = (1 << 24) - 1  # of a hash, as flags carry it
_CONSTANTS = struct.Struct("<ff")  # eps, weight_bias
_HASHED = struct.Struct("<QQQ")


def _record(descriptor: int, what: int, constants: int) -> CallRecord:
    digest = hashlib.blake2b(_HASHED.pack(descriptor, what, constants), digest_size=5).digest()
    return CallRecord(int.from_bytes(digest, "little"), what, constants, 0)


@functools.lru_cache(4096)
def exchange_call(descriptor: int, layer: int, rows: int, round_index: int) -> CallRecord:
    """Return the record of one dispatch.

    Args:
        descriptor: hash of the operator's geometry.
        layer: number of the layer or lease that calls, below MAX_LAYERS; 0 for the operator itself.
        rows: largest token count of any rank in the whole call.
        round_index: position of this dispatch in a call of several rounds, below MAX_ROUNDS.
    """
    return _record(descriptor, layer << 48 | round_index << 32 | rows, 0)


def describe_exchange(record: CallRecord) -> str:
    """Return a record of `exchange_call` in words."""
    layer, index, rows = record.what >> 48, record.what >> 32 & 0xFFFF, record.what & 0xFFFFFFFF
    caller = f"layer {layer} of this workspace, " if layer else ""
    return f"{caller}rows={rows}" + (f", round {index}" if index else "")


def call_words(operator: int, record: CallRecord) -> tuple[int, int, int, int]:
    """Return what hosts compare of a dispatch, as CALL_WORDS int32: the operator's number first."""
    layer, index, rows = record.what >> 48, record.what >> 32 & 0xFFFF, record.what & 0xFFFFFFFF
    return operator, layer, index, rows


def describe_words(words: Sequence[int]) -> str:
    """Return the words of `call_words` in words."""
    operator, layer, index, rows = words
    call = CallRecord(0, layer << 48 | index << 32 | rows, 0, 0)
    return f"all-to-all {operator} of the group, {describe_exchange(call)}"


def reduce_call(
    descriptor: int,
    layer: int,
    tokens: int,
    backend: str,
    *,
    parts: tuple[bool, ...],
    coding: int,
    eps: float,
    weight_bias: float,
) -> CallRecord:
    """Return the record of one all-reduce.

    Args:
        descriptor: hash of the operator's geometry.
        layer: number of the lease that calls, below MAX_LAYERS; 0 for the operator itself.
        tokens: rows of the call, below 2**20.
        backend: a name of BACKENDS.
        parts: whether there is each of PARTS.
        coding: a value of CODINGS.
        eps, weight_bias: constants of the RMSNorm.

    Raises:
        InvalidArgument: a constant is no float32.
    """
    try:
        constants = int.from_bytes(_CONSTANTS.pack(eps, weight_bias), "little")
    except (struct.error, OverflowError) as error:
        raise InvalidArgument(
            f"eps is {eps!r} and weight_bias is {weight_bias!r}; both must be numbers that a "
            "float32 can hold"
        ) from error
    flags = sum(1 << i for i, present in enumerate(parts) if present)
    what = layer << 48 | tokens << 16 | BACKENDS[backend] << 12 | flags << 8 | coding
    return _record(descriptor, what, constants)


def describe_reduce(record: CallRecord) -> str:
    """Return a record of `reduce_call` in words."""
    layer, tokens = record.what >> 48, record.what >> 16 & 0xFFFFF
    backend, flags, coding = record.what >> 12 & 15, record.what >> 8 & 15, record.what & 0xFF
    names = {number: name for name, number in BACKENDS.items()}
    codings = {number: name for name, number in CODINGS.items()}
    present = [name for i, name in enumerate(PARTS) if flags >> i & 1]
    eps, bias = map(_shortest, _CONSTANTS.unpack(record.constants.to_bytes(8, "little")))
    caller = f"layer {layer} of this workspace, " if layer else ""
    return (
        f"{caller}{tokens} tokens by {names.get(backend, backend)}, "
        f"with {' and '.join(present) or 'no residual, no weight'}, "
        f"quant {codings.get(coding, coding)}, eps {eps}, weight_bias {bias}"
    )


def _shortest(value: float) -> str:
    """The fewest digits that give this float32."""
    texts = (f"{value:.{digits}g}" for digits in range(1, 10))
    return next((t for t in texts if ctypes.c_float(float(t)).value == value), str(value))
