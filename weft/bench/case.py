"""What one run measures: the settings that all operators share, and how their options are read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from weft.errors import InvalidArgument

if TYPE_CHECKING:
    from weft.bench.clock import Calls
    from weft.bench.run import Measurement, Report
    from weft.memory import Group

DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
FEWEST_REPLAYS = 11  # the median of fewer says little
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MATMUL = re.compile(r"matmul(?::(\d{1,5}))?")
_MATMUL_SIZE = 8192


class Refused(Exception):  # noqa: N818
    """A variant does not serve this size or layer; the text says why, equally on all ranks."""


class Trial(Protocol):
    """One variant at one size, with its inputs. All ranks make the same calls in the same order."""

    def calls(self) -> Calls:
        """What is timed."""

    def check(self) -> str | None:
        """Call once over poisoned memory; return what differs from the reference, or None."""

    def poison(self) -> None:
        """Overwrite the outputs, so that calls which write nothing are noticed after timing."""

    def compare(self) -> str | None:
        """Return how the outputs that lie there differ from the reference, or None."""

    def facts(self) -> dict[str, Any]:
        """What was counted, as JSON values; also raises what the device has recorded."""


class Session(Protocol):
    """What an operator keeps open during a run. Collective."""

    def trial(self, variant: str, tokens: int) -> AbstractContextManager[Trial]:
        """One thing to measure. Raises Refused."""

    def facts(self) -> dict[str, Any]:
        """What was counted of the whole run, as JSON values."""

    def close(self) -> None:
        """Give everything back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What one run of an operator measures. Equal on all ranks; each operator adds its own.

    tokens: sizes, tokens per rank.  samples: timed samples per size.  seed: of inputs and routing.
    graph: CUDA graphs, else eager calls.  cold: also time calls after a flush of the caches.
    num_sms: SMs that the kernels may fill, None for all.
    corun: None, or "matmul" or "matmul:4096": also time calls while a bf16 matmul of that size
    runs on the SMs that num_sms leaves.
    programmatic_launch: as in the operators.
    """

    ranks: int
    device: str
    tokens: tuple[int, ...]
    samples: int = 15
    graph: bool = True
    seed: int = 0
    cold: bool = False
    num_sms: int | None = None
    corun: str | None = None
    programmatic_launch: bool = True

    operator: ClassVar[str]  # its command
    whole: ClassVar[str] = "call"  # the phase that is quoted
    checked: ClassVar[str]  # how results are checked, in words

    def __post_init__(self) -> None:
        if not self.tokens:
            raise InvalidArgument("nothing to measure: pass at least one number of tokens")
        if min(self.tokens) < 1:
            raise InvalidArgument(f"{min(self.tokens)} tokens; a timed size is at least 1")
        if not 1 <= self.samples <= 5000:
            raise InvalidArgument(f"{self.samples} samples; choose 1..5000")
        if self.device == "cuda" and self.graph and self.samples < FEWEST_REPLAYS:
            raise InvalidArgument(
                f"{self.samples} replays of the graph; at least {FEWEST_REPLAYS} are needed for a "
                "median"
            )
        if self.num_sms is not None and self.device != "cuda":
            raise InvalidArgument(
                f"num_sms is {self.num_sms} on {self.device} ranks; it limits GPU kernels: "
                "leave it out"
            )
        self._check_corun()

    def _check_corun(self) -> None:
        """A matmul needs a GPU, SMs of its own, and calls that wait for no host."""
        if self.corun is None:
            return
        size = self.matmul_size
        if not 128 <= size <= 32768 or size % 8:
            raise InvalidArgument(
                f"corun is {self.corun!r}; write matmul, or matmul:SIZE with a multiple of 8 "
                "from 128 to 32768"
            )
        for wrong, why in (
            (self.device != "cuda", f"{self.device} ranks have no GPU to share: leave it out"),
            (self.num_sms is None, "no SM is left to the matmul: add for example --num-sms 16"),
            (not self.graph, "it is timed in CUDA graphs only: leave --eager out"),
        ):
            if wrong:
                raise InvalidArgument(f"corun is {self.corun!r}, and {why}")

    @property
    def matmul_size(self) -> int:
        """Rows, columns and depth of the matmul of `corun`; 0 where it names none."""
        found = _MATMUL.fullmatch(self.corun or "")
        return int(found[1] or _MATMUL_SIZE) if found else 0

    def seed_of(self, tokens: int, rank: int) -> int:
        """The seed of a rank's rows of one size, by which every rank can draw them."""
        return (self.seed * 7919 + tokens) * 64 + rank

    @property
    def variants(self) -> tuple[str, ...]:
        """What is measured side by side."""
        raise NotImplementedError

    def work(self) -> list[tuple[str, int]]:
        """(variant, tokens) in the order of the run."""
        return [(variant, tokens) for tokens in self.tokens for variant in self.variants]

    def session(self, group: Group) -> Session:
        """Open what the trials need. Collective."""
        raise NotImplementedError

    @property
    def fp8_back(self) -> bool:
        """Does combine return rows as FP8?"""
        return False

    @property
    def comparable(self) -> Case | None:
        """What other libraries are asked for, or None where they have nothing like it."""
        return self

    def title(self) -> str:
        """The sizes and options in words."""
        raise NotImplementedError

    def bytes_of(self, found: Measurement, phase: str) -> tuple[float, float]:
        """(logical, wire) bytes of a phase: of one rank's rows, and off the busiest rank."""
        return 0.0, 0.0

    def floor_us(self, found: Measurement, gpus: list[str]) -> float | None:
        """Least us of the whole on this hardware, or None where nothing was measured."""
        return None

    def floor_text(self) -> str:
        """What the floor is made of, in words."""
        return ""

    def columns(self, found: Measurement, report: Report) -> dict[str, float | str]:
        """Further columns of a row."""
        return {}

    def notes(self, report: Report) -> list[str]:
        """Lines below the table."""
        return []

    def records(self) -> tuple[str, str, dict[str, Any]] | None:
        """(section, times, wanted) of `peers.py`'s file, or None where nobody is like this."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsCase(Case):
    """A case of an operator that moves rows.

    hidden, dtype: of a row.   max_tokens: capacity of the operator; None: the largest size.
    """

    hidden: int = 7168
    dtype: str = "bf16"
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        Case.__post_init__(self)
        choose(dtype=(self.dtype, tuple(DTYPES)))
        if self.max_tokens is not None and max(self.tokens) > self.max_tokens:
            raise InvalidArgument(
                f"{max(self.tokens)} tokens do not fit max_tokens={self.max_tokens}; raise it"
            )

    @property
    def out_dtype(self) -> torch.dtype:
        """dtype of the rows that come back."""
        return DTYPES[self.dtype]

    @property
    def capacity(self) -> int:
        """Most tokens of one rank that the operator is built for."""
        return self.max_tokens or max(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCase(RowsCase):
    """A case of pairs of dispatch and combine.

    top_k, experts: of a token, and on all ranks.   routing: as in `routing.make_ids`.
    combine_dtype, split_phase: as in the operator.   model: what the sizes are called, or None.
    """

    whole: ClassVar[str] = "pair"

    top_k: int = 8
    experts: int = 256
    routing: str
    combine_dtype: str | None = None
    split_phase: bool = False
    model: str | None = None

    def __post_init__(self) -> None:
        RowsCase.__post_init__(self)
        choose(combine_dtype=(self.combine_dtype, (None, "fp8")))

    @property
    def fp8_back(self) -> bool:
        """Does combine return rows as FP8?"""
        return self.combine_dtype == "fp8"

    @property
    def sizes_text(self) -> str:
        """Model, sizes and routing, as titles begin."""
        name = f"{self.model}: " if self.model else ""
        return (
            f"{name}{self.ranks} ranks, hidden {self.hidden}, top {self.top_k} of {self.experts} "
            f"experts, routing {self.routing}"
        )


def choose(**given: tuple[Any, Sequence[Any]]) -> None:
    """Require each value to be one of those allowed. Raises InvalidArgument naming them."""
    for name, (value, allowed) in given.items():
        if value not in allowed:
            words = ", ".join(map(str, allowed))
            raise InvalidArgument(f"{name} is {value!r}; choose one of {words}")


def choose_backends(given: Sequence[str], allowed: Sequence[str]) -> None:
    """Require one backend at least, and each to be one of those allowed. Raises InvalidArgument."""
    for backend in given:
        choose(backend=(backend, allowed))
    if not given:
        raise InvalidArgument("nothing to measure: pass at least one backend")


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes named by `"1,8,64"`, by `"1..4096"` (doubling), or by a mix of both.

    Raises InvalidArgument for anything else.
    """
    sizes: list[int] = []
    for part in text.replace(" ", "").split(","):
        if match := _RANGE.fullmatch(part):
            size, last = int(match[1]), int(match[2])
            if size < 1 or last < size:
                raise InvalidArgument(f"{part!r} is empty; write e.g. 1..4096")
            while size <= last:
                sizes.append(size)
                size *= 2
        elif part.isdigit():
            sizes.append(int(part))
        else:
            raise InvalidArgument(f"{part!r} is no size; write 1,8,64 or 1..4096")
    return tuple(dict.fromkeys(sizes))
