"""The form of a call of the fused all-reduce: all of it but the addresses, checked once, kept.

An engine makes the same few calls for every token: other rows, other weights, equal in all that the
checks read but for where they lie. What they read of a call is its key; a call whose key has passed
is compared by its addresses alone, and whatever does not fit goes back to the checks, which refuse
it in words. Nothing here holds a tensor: memory that a caller gives up is free.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.allreduce.args import ADDRESSES, ReduceArgs
from weft.allreduce.request import OUTPUTS, Fresh, Pair, Request, apart
from weft.allreduce.source import MOE
from weft.allreduce.spec import FP8Static, MoEFinalize, Quant, Reduced
from weft.errors import InvalidArgument
from weft.runtime.args import Site
from weft.runtime.call_word import BACKENDS, CODINGS, signature

LIMIT = 512  # forms of one all-reduce; each about 3 KiB
_CONSTANTS = struct.Struct("<ff")  # eps, weight_bias
_FACTOR = struct.Struct("<f")
_BLOCK = struct.Struct(f"={len(ADDRESSES)}Q")
_START = ReduceArgs.x.offset
_FIRST_OUTPUT, _END_OUTPUT = ADDRESSES.index("out"), ADDRESSES.index("scale_out") + 1
_address = torch.Tensor.data_ptr  # unbound: a TypeError for what is no tensor

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """One kind of call that was checked: its entry, and arguments that lack only addresses.

    fresh: outputs to be made.   unwanted: places of those that nobody wants.
    apart: pairs of tensors that must not overlap.
    """

    name: str
    tokens: int
    args: ReduceArgs
    fresh: tuple[Fresh, ...]
    unwanted: tuple[int, ...]
    apart: tuple[Pair, ...]

    @classmethod
    def of(cls, request: Request, name: str, eps: float, weight_bias: float, *, site: Site) -> Form:
        """The form of a checked request on backend `name`."""
        args = _filled(request, name, eps, weight_bias, site)
        places = request.places
        unwanted = tuple(place for place in OUTPUTS.values() if places[place] is None)
        entry = name if request.prologue is None else name + MOE
        return cls(entry, request.tokens, args, request.fresh, unwanted, request.apart)

    def place(self, addresses: Sequence[int]) -> None:
        """Put the addresses of a call, in the order of ADDRESSES, into the arguments."""
        _BLOCK.pack_into(self.args, _START, *addresses)

    def make(self, places: list[Any], addresses: list[int]) -> Reduced:
        """Make the outputs that were not given, and put them into both lists.

        They need no check: nothing else lies in memory that was just allocated.
        """
        for place, maker in self.fresh:
            made = maker()
            places[place], addresses[place] = made, made.data_ptr()
        for place in self.unwanted:
            places[place] = None
        return Reduced(*places[_FIRST_OUTPUT:_END_OUTPUT])


class Forms:
    """The forms of one all-reduce that were checked; the oldest goes where there are too many."""

    def __init__(self) -> None:
        self._kept: dict[Key, Form] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: Key | None, addresses: Sequence[int]) -> Form | None:
        """The form of a call that the checks would pass now; None where they must decide."""
        try:
            form = None if key is None else self._kept.get(key)
        except TypeError:  # a backend that cannot be hashed is none: the checks say so
            form = None
        return form if form is not None and apart(addresses, form.apart) is None else None

    def keep(self, key: Key | None, form: Form) -> None:
        """Remember what was checked just now."""
        if key is None:
            return
        if len(self._kept) >= LIMIT:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = form


def places_of(
    inputs: tuple[Any, ...],
    outputs: tuple[Any, ...],
    quant: Quant | None,
    prologue: MoEFinalize | None,
) -> list[Any]:
    """What a caller passed, in the order of ADDRESSES: tensors, or what stands for one."""
    scale = quant.scale if isinstance(quant, FP8Static) else None
    if prologue is None:
        return [*inputs, *outputs, scale, None, None, None, None]
    if not isinstance(prologue, MoEFinalize):
        return [*inputs, *outputs, scale, prologue, None, None, None]
    parts = (prologue.rows, prologue.index, prologue.scales, prologue.shared)
    return [*inputs, *outputs, scale, *parts]


def key_of(
    places: Sequence[Any],
    backend: str,
    coding: str,
    eps: float,
    weight_bias: float,
    prologue: MoEFinalize | None,
) -> tuple[Key | None, list[int]]:
    """Everything that the checks read of a call but which memory it is, and the addresses.

    Of an address only its alignment counts; constants count by their bits, as 0.0 equals -0.0.
    The key is None where an argument is not what it should be, has no memory, or wants a gradient.
    """
    addresses: list[int] = []
    grads = torch.is_grad_enabled()
    try:
        key: list[object] = [backend, coding, _CONSTANTS.pack(eps, weight_bias)]
        if prologue is not None:
            key.append(_FACTOR.pack(prologue.routed_scaling_factor))
        for t in places:
            if t is None or t is True or t is False:  # and not 1, which only equals True
                key.append(t)
                addresses.append(0)
            else:
                address = _address(t)
                if not address or (grads and t.requires_grad):
                    return None, addresses
                addresses.append(address)
                dense = t.is_contiguous()  # then the shape says all that is ever read
                key += (t.shape, t.dtype, t.device, address & 15, dense or t.stride())
    except (TypeError, AttributeError, RuntimeError, OverflowError, struct.error):
        return None, addresses  # the checks, which come next, say what is wrong with it
    return tuple(key), addresses


def _salt(eps: float, weight_bias: float) -> int:
    """A hash of a call's constants. Raises InvalidArgument for what is no float32."""
    try:
        return zlib.crc32(_CONSTANTS.pack(eps, weight_bias))
    except (struct.error, OverflowError) as error:
        raise InvalidArgument(
            f"eps is {eps!r} and weight_bias is {weight_bias!r}; both must be numbers that a "
            "float32 can hold"
        ) from error


def _scale_pitch(request: Request) -> int:
    """int32 words from one column of packed scales to the next."""
    scale = request.reduced.scale
    if scale is None or scale.dtype != torch.int32:
        return 0
    return scale.stride(1) if scale.shape[1] > 1 else math.ceil(request.tokens / 4) * 4


def _filled(request: Request, name: str, eps: float, weight_bias: float, site: Site) -> ReduceArgs:
    """Arguments of the entries for a request, but for what a launch adds."""
    reduced, prologue, weight = request.reduced, request.prologue, request.weight
    salt = _salt(eps, weight_bias)
    a = ReduceArgs(site=site, tokens=request.tokens, eps=eps, weight_bias=weight_bias)
    a.weight_is_fp32 = weight is not None and weight.dtype == torch.float32
    a.coding = CODINGS[request.coding] if reduced.quant is not None else 0
    a.scale_stride = _scale_pitch(request)
    if prologue is not None:
        a.row_limit, a.top_k = prologue.rows.shape[0], prologue.index.shape[1]
        a.routed_scaling_factor = float(prologue.routed_scaling_factor)
        a.scales_are_fp32 = prologue.scales is not None and prologue.scales.dtype == torch.float32
    a.signature = signature(
        request.tokens,
        BACKENDS[name],
        parts=(request.residual is not None, weight is not None, reduced.out is not None),
        coding=a.coding,
        salt=salt,
    )
    return a
