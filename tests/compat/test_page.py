"""docs/compat.md says what is served, what is without effect and what is refused: each is called.

The words in backticks are read from the page. A word that the page names and this file has no call
for fails, and so does a call that the page no longer names.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.compat import calls
from tests.compat.reduces import BF16, Pattern, make, rows_for
from weft.compat import deep_ep, flashinfer, triton_dist
from weft.compat.deep_ep import Buffer
from weft.compat.flashinfer import allreduce_fusion
from weft.errors import InvalidArgument

PAGE = (Path(__file__).parents[2] / "docs" / "compat.md").read_text()
MOST, HIDDEN, TOP_K, EXPERTS = 8, 256, 2, 8
Calls = dict[str, Callable[[], object]]


def section(title: str) -> str:
    """The page below a heading that begins so."""
    found: str = PAGE.partition(f"\n## {title}")[2].partition("\n## ")[0]
    assert found, title
    return found


def cells(table: str) -> list[list[str]]:
    """The rows of a table, below its head."""
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in rows]


def words(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def sentence(text: str, begin: str) -> str:
    """From `begin` to the end of its sentence, without what stands in parentheses."""
    found = re.search(rf"{begin}(.*?)\.(?:\s|$)", text, flags=re.DOTALL)
    assert found, f"no sentence with {begin!r}"
    return re.sub(r"\([^)]*\)", "", found[1])


def parameters(*called: Any) -> set[str]:
    return {name for call in called for name in inspect.signature(call).parameters}


def all_raise(refusals: Calls, named: list[str]) -> None:
    """Each call is refused, and there is one for every word that the page names."""
    assert set(named) == set(refusals)
    for name, call in refusals.items():
        with pytest.raises(InvalidArgument) as caught:
            call()
        word = re.sub(r"\W.*", "", name)
        assert not word or word in str(caught.value), f"{name}: {caught.value}"


CLASSES = (flashinfer.MoeAlltoAll, flashinfer.AllReduceFusionWorkspace)
OPTION = re.compile(r"\w+(?==)")


def test_what_the_table_serves_exists():
    """Names, and the arguments and attributes that the other columns have in backticks."""
    rows = cells(section("flashinfer.comm"))
    assert len(rows) >= 10
    known = parameters(*CLASSES, *(getattr(flashinfer, name) for name in flashinfer.__all__))
    for kind in CLASSES:
        known |= {name for name in vars(kind) if not name.startswith("_")}
        for _, method in inspect.getmembers(kind, inspect.isfunction):
            known |= parameters(method)
    for names, served, other, _ in rows:
        for name in words(names):
            assert hasattr(flashinfer, name) or any(hasattr(kind, name) for kind in CLASSES)
        absent = words(other) if other.startswith("no ") else []
        assert not known & set(absent), "they are there, and the page says no"
        for word in (*words(served), *words("" if absent else other)):
            assert (OPTION.search(word) or [word])[0] in known, f"{word} is nowhere"


def refused_by_flashinfer(group: weft.Group) -> None:
    rows = cells(section("flashinfer.comm"))
    named = [word for *_, refused in rows for word in words(refused)]
    unserved = [name for names, served, *_ in rows if not served for name in words(names)]
    ids, weights = calls.routing(0, group.rank, 3)
    x = torch.ones((3, calls.HIDDEN), dtype=BF16)
    y = torch.zeros((group.size, 4, calls.HIDDEN), dtype=BF16)
    a2a = calls.make(group)
    a2a.dispatch(ids, [x, ids, weights], 4)
    rows_in = rows_for(group.device, 2)
    with make(group) as workspace:
        given: dict[str, Any] = {"residual_in": rows_in.residual, "rms_gamma": rows_in.weight}

        def fused(pattern: int, **more: Any) -> object:
            return allreduce_fusion(rows_in.xs[0], workspace, pattern, **given, **more)

        all_raise(
            {
                'backend="cake"': lambda: calls.make(group, backend="cake"),
                "output_scales": lambda: a2a.combine(y, 4, output_scales=x),
                "sf_layout": lambda: a2a.combine(y, 4, sf_layout=0),
                '"mnnvl"': lambda: make(group, backend="mnnvl"),
            },
            named,
        )
        assert unserved == ["checkpoint_prepare", "checkpoint_restore"]
        for refuses in (a2a, workspace):
            with pytest.raises(InvalidArgument):
                refuses.checkpoint_prepare()
            with pytest.raises(InvalidArgument):
                refuses.checkpoint_restore(None)
        # The table's row of patterns: those that it lists, and those that it refuses.
        served = [row for row in rows if "patterns" in row[1]]
        listed = numbers(served[0][1])
        assert listed | numbers(re.sub(r".*NVFP4 \(([^)]*)\).*", r"\1", served[0][3])) == set(
            range(len(Pattern))
        )
        for pattern in set(range(len(Pattern))) - listed:
            with pytest.raises(InvalidArgument, match="NVFP4"):
                fused(pattern)
        index = torch.zeros((2, 1), dtype=torch.int32)
        more: dict[str, Any] = {"expanded_idx_to_permuted_idx": index}
        fused(Pattern.kMoEFinalizeARResidualRMSNorm, **more)
        for name, value in (("quant_out", x), ("moe_finalize_backend", "cute")):
            with pytest.raises(InvalidArgument, match=name):
                fused(Pattern.kMoEFinalizeARResidualRMSNorm, **more, **{name: value})
    a2a.combine(y, 4)
    a2a.close()


def numbers(text: str) -> set[int]:
    """Of "0, 2 to 4": {0, 2, 3, 4}."""
    spans = re.findall(r"(\d+)(?: to (\d+))?", text)
    return {n for first, last in spans for n in range(int(first), int(last or first) + 1)}


def test_what_flashinfers_table_refuses_raises(ranks):
    ranks(calls.RANKS - 1, "threads")(refused_by_flashinfer)


def test_what_changes_nothing_in_an_all_reduce_is_taken():
    """The names of arguments in that sentence; tests/compat/test_arguments.py brings values."""
    idle = re.search(r"((?:`\w+`(?:,| and)?\s+)+)change nothing", section("flashinfer.comm"))
    assert idle
    taken = parameters(allreduce_fusion, flashinfer.create_allreduce_fusion_workspace)
    assert set(words(idle[1])) <= taken
    assert len(words(idle[1])) >= 4


def idle_in_deep_ep(group: weft.Group) -> None:
    """Each call and argument without effect, and then a round whose result is right."""
    text = section("deep_ep.Buffer")
    named = words(sentence(text, "Without effect:"))
    taken = parameters(Buffer)
    for word in named:
        if word.endswith("*"):
            assert any(each.startswith(word[:-1]) for each in taken), word
        else:
            assert word in taken or hasattr(Buffer, word) or hasattr(deep_ep, word), word
    switches = [each for each in taken if each.startswith("allow_") or each == "use_fabric"]
    before = Buffer.num_sms
    for value in (False, True):
        buffer = Buffer(group, low_latency_mode=True, **dict.fromkeys(switches, value))
        buffer.clean_low_latency_buffer(MOST, HIDDEN, EXPERTS)
        buffer.low_latency_clean_mask_buffer()
        x, ids, weights = tokens(group)
        numbers_, _, handle, _, _ = buffer.low_latency_dispatch(
            x, ids, MOST, EXPERTS, use_fp8=False
        )
        assert isinstance(numbers_, torch.Tensor)
        out, _, _ = buffer.low_latency_combine(numbers_, ids, weights, handle)
        assert torch.equal(out, x * TOP_K)
        buffer.destroy()
    assert Buffer.num_sms == before
    assert len(fields(deep_ep.Config)) == 5


def tokens(group: weft.Group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.full((3, HIDDEN), float(group.rank + 1), dtype=BF16)
    ids = torch.arange(TOP_K).expand(3, -1).contiguous()
    return x, ids, torch.ones((3, TOP_K))


def test_what_the_page_calls_without_effect_in_deep_ep_has_none(ranks):
    ranks(2, "threads")(idle_in_deep_ep)


def refused_by_deep_ep(group: weft.Group) -> None:
    buffer = Buffer(group, low_latency_mode=True)
    x, ids, weights = tokens(group)

    def send(**more: Any) -> Any:
        return buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, **more)

    numbers_, _, handle, _, _ = send(use_fp8=False)
    text = sentence(section("deep_ep.Buffer"), "Refused:")

    def back(**more: Any) -> Any:
        return buffer.low_latency_combine(numbers_, ids, weights, handle, **more)

    named = [word for word in words(text) if word != "round_scale"]
    all_raise(
        {
            "use_logfmt": lambda: back(use_logfmt=True),
            "enable_shrink": lambda: Buffer(group, low_latency_mode=True, enable_shrink=True),
            "use_ue8m0": lambda: send(use_ue8m0=True),
        },
        named,
    )
    assert "wait statistics" in text
    stats = torch.zeros(group.size, dtype=torch.int64)
    with pytest.raises(InvalidArgument, match="dispatch_wait_recv_cost_stats"):
        send(dispatch_wait_recv_cost_stats=stats)
    with pytest.raises(InvalidArgument, match="combine_wait_recv_cost_stats"):
        back(combine_wait_recv_cost_stats=stats)
    assert "a mask that leaves a rank out" in text
    with pytest.raises(InvalidArgument, match="mask"):
        buffer.low_latency_update_mask_buffer(0, mask=True)
    buffer.destroy()


def test_what_the_page_refuses_of_deep_ep_raises(ranks):
    ranks(2, "threads")(refused_by_deep_ep)


def refused_by_triton_dist(group: weft.Group) -> None:
    sizes = (MOST, HIDDEN, TOP_K, True, group.rank, EXPERTS, group.size, group.size)

    def layer(place: int, value: object) -> Any:
        changed: Any = [*sizes[:place], value, *sizes[place + 1 :]]
        return triton_dist.EPLowLatencyAllToAllLayer(*changed, group=group)

    made = layer(0, MOST)
    x, ids, _ = tokens(group)
    named = words(sentence(section("triton_dist"), "Refused:"))
    all_raise(
        {
            "online_quant_fp8=False": lambda: layer(3, False),
            "send_scales": lambda: made.dispatch(x, torch.ones((3, 2)), ids),
            "local_world_size": lambda: layer(6, group.size + 1),
        },
        [word for word in named if word != "world_size"],
    )
    made.finalize()


def test_what_the_page_refuses_of_triton_dist_raises(ranks):
    ranks(2, "threads")(refused_by_triton_dist)


@pytest.mark.parametrize(
    ("title", "module"),
    [("flashinfer.comm", flashinfer), ("deep_ep.Buffer", deep_ep), ("triton_dist", triton_dist)],
)
def test_the_pages_examples_use_calls_and_arguments_that_exist(title, module):
    """Every name that an example imports, and every call of what it made, with its arguments."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", section(title), flags=re.DOTALL))
    imported = re.search(r"from weft\.compat\.(\w+) import (\w+)", code)
    assert imported
    assert module.__name__ == f"weft.compat.{imported[1]}"
    kind = getattr(module, imported[2])
    for name, given in re.findall(r"\b(?:a2a|buffer|layer|Buffer)\.(\w+)\((.*?)\)\n", code, re.S):
        wanted = set(re.findall(r"\b(\w+)=", given))
        assert wanted <= parameters(getattr(kind, name)), (name, wanted)
