# SPDX-License-Identifier: Apache-2.0
"""Records of calls: the arguments that must be equal on all ranks, and their hash.

Ranks compare a hash of 24 bits (exchanges) or 40 bits (all-reduce), which is a part of the flags.
Each rank also stores the record in its header (`CallRecord` in device/header.cuh), from which
`describe_*` formats the error of a mismatch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
from collections.abc import Sequence

from weft.errors import InvalidArgument
from weft.heap.header import CallRecord

BACKENDS = {"oneshot": 1, "twoshot": 2, "twoshot_bulk": 3}
CODINGS = {"none": 0, "static": 1, "token": 2, "group": 3, "group_ue8m0": 4}
SLOTS = {
    1: "row",
    2: "row to be summed",
    3: "summed row",
    4: "statistics of the summed row",
    5: "call word",
}
PARTS = ("residual", "weight", "out")

MAX_LAYERS = MAX_ROUNDS = 1 << 16
CALL_WORDS = 4
FLAG_MASK = (1 << 24) - 1  # bits of a hash that flags carry
_CONSTANTS = struct.Struct("<ff")  # eps, weight_bias
_HASHED = struct.Struct("<QQQ")


def _record(descriptor: int, what: int, constants: int) -> CallRecord:
    digest = hashlib.blake2b(_HASHED.pack(descriptor, what, constants), digest_size=5).digest()
    return CallRecord(int.from_bytes(digest, "little"), what, constants, 0)


@functools.lru_cache(4096)
def make_dispatch_record(descriptor: int, layer: int, rows: int, round_index: int) -> CallRecord:
    """Build the record of a dispatch.

    Args:
        descriptor: Hash of the operator's geometry.
        layer: Number of the calling layer or lease, below MAX_LAYERS; 0 for the operator itself.
        rows: Largest token count of any rank in the whole call.
        round_index: Position of this dispatch in a call of several rounds, below MAX_ROUNDS.
    """
    return _record(descriptor, layer << 48 | round_index << 32 | rows, 0)


def describe_dispatch(record: CallRecord) -> str:
    """Format a record of `make_dispatch_record`."""
    layer, index, rows = record.what >> 48, record.what >> 32 & 0xFFFF, record.what & 0xFFFFFFFF
    caller = f"layer {layer} of this workspace, " if layer else ""
    return f"{caller}rows={rows}" + (f", round {index}" if index else "")


def pack_host_words(operator: int, record: CallRecord) -> tuple[int, int, int, int]:
    """Return the CALL_WORDS int32 values of a dispatch that hosts compare.

    They are the number of the operator, the layer, the round index and the rows.
    """
    layer, index, rows = record.what >> 48, record.what >> 32 & 0xFFFF, record.what & 0xFFFFFFFF
    return operator, layer, index, rows


def describe_host_words(words: Sequence[int]) -> str:
    """Format the words of `pack_host_words`."""
    operator, layer, index, rows = words
    call = CallRecord(0, layer << 48 | index << 32 | rows, 0, 0)
    return f"all-to-all {operator} of the group, {describe_dispatch(call)}"


def make_allreduce_record(
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
    """Build the record of an all-reduce.

    Args:
        descriptor: Hash of the operator's geometry.
        layer: Number of the calling lease, below MAX_LAYERS; 0 for the operator itself.
        tokens: Number of tokens of the call, below 2**20.
        backend: A name of BACKENDS.
        parts: Whether the call has each of PARTS.
        coding: A value of CODINGS.
        eps: Epsilon of the RMSNorm.
        weight_bias: Bias that is added to the RMSNorm weight.

    Raises:
        InvalidArgument: eps or weight_bias does not fit a float32.
    """
    try:
        constants = int.from_bytes(_CONSTANTS.pack(eps, weight_bias), "little")
    except (struct.error, OverflowError) as error:
        raise InvalidArgument(
            f"eps is {eps!r} and weight_bias is {weight_bias!r}; both must be representable as "
            "float32"
        ) from error
    flags = sum(1 << i for i, present in enumerate(parts) if present)
    what = layer << 48 | tokens << 16 | BACKENDS[backend] << 12 | flags << 8 | coding
    return _record(descriptor, what, constants)


def describe_allreduce(record: CallRecord) -> str:
    """Format a record of `make_allreduce_record`."""
    layer, tokens = record.what >> 48, record.what >> 16 & 0xFFFFF
    backend, flags, coding = record.what >> 12 & 15, record.what >> 8 & 15, record.what & 0xFF
    names = {number: name for name, number in BACKENDS.items()}
    codings = {number: name for name, number in CODINGS.items()}
    present = [name for i, name in enumerate(PARTS) if flags >> i & 1]
    eps, bias = map(_shortest_decimal, _CONSTANTS.unpack(record.constants.to_bytes(8, "little")))
    caller = f"layer {layer} of this workspace, " if layer else ""
    return (
        f"{caller}{tokens} tokens by {names.get(backend, backend)}, "
        f"with {' and '.join(present) or 'no residual, no weight'}, "
        f"quant {codings.get(coding, coding)}, eps {eps}, weight_bias {bias}"
    )


def _shortest_decimal(value: float) -> str:
    """Format a float32 as the shortest decimal that rounds to it."""
    texts = (f"{value:.{digits}g}" for digits in range(1, 10))
    return next((t for t in texts if ctypes.c_float(float(t)).value == value), str(value))
