"""docs/compat.md names what is served, what changes nothing and what is refused: each is looked up,
and each refusal is called.

The words in backticks are read from the page. A word under "Refused" that this file has no call for
fails.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.compat import calls
from tests.compat.reduces import BF16, Pattern, make, rows_for
from weft import errors
from weft.compat import deep_ep, flashinfer, triton_dist
from weft.compat.deep_ep import Buffer
from weft.compat.flashinfer import allreduce_fusion
from weft.errors import InvalidArgument

PAGE = (Path(__file__).parents[2] / "docs" / "compat.md").read_text()
MOST, HIDDEN, TOP_K, EXPERTS = 8, 256, 2, 8
# Each section: its module, and the classes whose methods stand there as names of their own.
SECTIONS: dict[str, tuple[Any, tuple[type, ...]]] = {
    "flashinfer.comm": (
        flashinfer,
        (flashinfer.MoeAlltoAll, flashinfer.AllReduceFusionWorkspace),
    ),
    "deep_ep.Buffer": (deep_ep, (Buffer, deep_ep.EventOverlap)),
    "triton_dist": (triton_dist, (triton_dist.EPLowLatencyAllToAllLayer,)),
}


def section(title: str) -> str:
    """The page below a heading that begins so."""
    found: str = PAGE.partition(f"\n## {title}")[2].partition("\n## ")[0]
    assert found, title
    return found


def cells(title: str) -> list[list[str]]:
    """Name, served, other, refused: the rows of a section's table, if it has one."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def words(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def sentence(text: str, begin: str) -> str:
    """From `begin` to the end of its sentence, without what stands in parentheses; or nothing."""
    found = re.search(rf"{begin}(.*?)\.(?:\s|$)", text, flags=re.DOTALL)
    return re.sub(r"\([^)]*\)", "", found[1]) if found else ""


def parameters(called: Any) -> set[str]:
    return set(inspect.signature(called).parameters)


def names(title: str) -> set[str]:
    """What a section may name: exported, or an attribute of its classes."""
    module, kinds = SECTIONS[title]
    return {name for each in (module, *kinds) for name in dir(each)}


def known(title: str) -> set[str]:
    """And what it may say of them: parameters of all these, errors, None."""
    module, kinds = SECTIONS[title]
    called = [getattr(module, name) for name in module.__all__]
    called += [method for kind in kinds for _, method in inspect.getmembers(kind)]
    found = names(title) | set(dir(errors)) | {"None", "metainfo"}
    for each in called:
        if inspect.isfunction(each) or (inspect.isclass(each) and each in (*kinds, module)):
            found |= parameters(each)
    for kind in kinds:
        found |= parameters(kind)
    return found


def there(word: str, among: set[str]) -> bool:
    """Is a word, perhaps with a `*` or with `=` and a value, one of these?"""
    return any(fnmatch(name, word.partition("=")[0]) for name in among)


@pytest.mark.parametrize("title", SECTIONS)
def test_what_the_page_names_is_there(title):
    """Names, arguments and attributes; and what it says is missing is."""
    for named, served, other, _ in cells(title):
        for word in words(named):
            assert there(word, names(title)), word
        absent = words(other) if other.startswith("no ") else []
        assert not [word for word in absent if there(word, known(title))]
        for word in (*words(served), *words("" if absent else other)):
            assert there(word, known(title)), word
    missing = words(sentence(section(title), "Not there:"))
    assert not [word for word in missing if there(word, names(title))]


@pytest.mark.parametrize("title", SECTIONS)
def test_what_changes_nothing_is_taken(title):
    text = section(title)
    idle = words(sentence(text, "Without effect:"))
    for found in re.findall(r"((?:`[^`]+`(?:,| and)?\s+)+)changes? nothing", text):
        idle += words(found)
    assert not [word for word in idle if not there(word, known(title))]
    assert len(idle) >= {"flashinfer.comm": 4, "deep_ep.Buffer": 3, "triton_dist": 0}[title]


def refused_words(title: str) -> set[str]:
    """In the table's last column, and in the sentence that begins so."""
    text = " ".join(row[3] for row in cells(title)) + sentence(section(title), "Refused:")
    return set(words(text))


def all_raise(title: str, refusals: dict[str, Callable[[], object]]) -> None:
    """There is a call for every word that the page has as refused, and each raises."""
    assert refused_words(title) <= set(refusals)
    for word, call in refusals.items():
        try:
            call()
        except InvalidArgument:
            continue
        pytest.fail(f"{word} was taken")


def numbers(text: str) -> set[int]:
    """Of "0, 2 to 4": {0, 2, 3, 4}."""
    spans = re.findall(r"(\d+)(?: to (\d+))?", text)
    return {n for first, last in spans for n in range(int(first), int(last or first) + 1)}


def refused_by_flashinfer(group: weft.Group) -> None:
    title = "flashinfer.comm"
    ids, weights = calls.routing(0, group.rank, 3)
    x = torch.ones((3, calls.HIDDEN), dtype=BF16)
    y = torch.zeros((group.size, 4, calls.HIDDEN), dtype=BF16)
    a2a = calls.make(group)
    a2a.dispatch(ids, [x, ids, weights], 4)
    rows = rows_for(group.device, 2)
    index = torch.zeros((2, 1), dtype=torch.int32)
    with make(group) as workspace:

        def fused(pattern: int, **more: Any) -> object:
            given: dict[str, Any] = {"residual_in": rows.residual, "rms_gamma": rows.weight}
            if pattern == Pattern.kMoEFinalizeARResidualRMSNorm:
                given["expanded_idx_to_permuted_idx"] = index
            return allreduce_fusion(rows.xs[0], workspace, pattern, **given, **more)

        finalize = Pattern.kMoEFinalizeARResidualRMSNorm
        fused(finalize)
        all_raise(
            title,
            {
                'backend="cake"': lambda: calls.make(group, backend="cake"),
                '"cake"': lambda: fused(finalize, moe_finalize_backend="cake"),
                "output_scales": lambda: a2a.combine(y, 4, output_scales=x),
                "sf_layout": lambda: a2a.combine(y, 4, sf_layout=0),
                '"mnnvl"': lambda: make(group, backend="mnnvl"),
                "quant_out": lambda: fused(finalize, quant_out=x),
            },
        )
        for refuses in (a2a, workspace):
            with pytest.raises(InvalidArgument):
                refuses.checkpoint_prepare()
            with pytest.raises(InvalidArgument):
                refuses.checkpoint_restore(None)
        unserved = {word for row in cells(title) if not row[1] for word in words(row[0])}
        assert all(there(word, {"checkpoint_prepare", "checkpoint_restore"}) for word in unserved)
        # The row of patterns: those that it lists, and those that it refuses.
        (row,) = [row for row in cells(title) if "patterns" in row[1]]
        listed = numbers(row[1])
        (nvfp4,) = re.findall(r"NVFP4 \(([\d, ]+)", row[3])
        assert listed | numbers(nvfp4) == set(map(int, Pattern))
        assert not listed & numbers(nvfp4)
        for pattern in numbers(nvfp4):
            with pytest.raises(InvalidArgument, match="NVFP4"):
                fused(pattern)
    a2a.combine(y, 4)
    a2a.close()


def test_what_the_page_refuses_of_flashinfer_raises(ranks):
    ranks(2, "threads")(refused_by_flashinfer)


def tokens(group: weft.Group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.full((3, HIDDEN), float(group.rank + 1), dtype=BF16)
    ids = torch.arange(TOP_K).expand(3, -1).contiguous()
    return x, ids, torch.ones((3, TOP_K))


def idle_in_deep_ep(group: weft.Group) -> None:
    """Switches without effect, either way; the rounds between them are right."""
    switches = [each for each in parameters(Buffer) if fnmatch(each, "allow_*")]
    assert switches
    for value in (False, True):
        given: dict[str, Any] = dict.fromkeys([*switches, "use_fabric"], value)
        buffer = Buffer(group, low_latency_mode=True, num_qps_per_rank=1 + value, **given)
        buffer.clean_low_latency_buffer(MOST, HIDDEN, EXPERTS)
        buffer.low_latency_clean_mask_buffer()
        x, ids, weights = tokens(group)
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False)
        assert isinstance(rows, torch.Tensor)
        out, _, _ = buffer.low_latency_combine(rows, ids, weights, handle)
        assert torch.equal(out, x * TOP_K)
        buffer.destroy()
    assert len(fields(deep_ep.Config)) == 5


def test_what_changes_nothing_in_deep_ep_changes_nothing(ranks):
    ranks(2, "threads")(idle_in_deep_ep)


def refused_by_deep_ep(group: weft.Group) -> None:
    buffer = Buffer(group, low_latency_mode=True)
    x, ids, weights = tokens(group)

    def send(**more: Any) -> Any:
        return buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, **more)

    rows, _, handle, _, _ = send(use_fp8=False)

    def back(**more: Any) -> Any:
        return buffer.low_latency_combine(rows, ids, weights, handle, **more)

    stats = torch.zeros(group.size, dtype=torch.int64)
    all_raise(
        "deep_ep.Buffer",
        {
            "use_logfmt": lambda: back(use_logfmt=True),
            "enable_shrink": lambda: Buffer(group, low_latency_mode=True, enable_shrink=True),
            "use_ue8m0": lambda: send(use_ue8m0=True),
            "round_scale": lambda: send(use_ue8m0=True, round_scale=False),
            "num_rdma_bytes": lambda: Buffer(group, 0, 1 << 20),
            "wait statistics": lambda: send(dispatch_wait_recv_cost_stats=stats),
            "and of combine": lambda: back(combine_wait_recv_cost_stats=stats),
            "a mask": lambda: buffer.low_latency_update_mask_buffer(0, mask=True),
        },
    )
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
    all_raise(
        "triton_dist",
        {
            "online_quant_fp8=False": lambda: layer(3, False),
            "send_scales": lambda: made.dispatch(x, torch.ones((3, 2)), ids),
            "local_world_size": lambda: layer(6, group.size + 1),
            "world_size": lambda: layer(7, group.size + 1),
        },
    )
    made.finalize()


def test_what_the_page_refuses_of_triton_dist_raises(ranks):
    ranks(2, "threads")(refused_by_triton_dist)


@pytest.mark.parametrize("title", SECTIONS)
def test_the_pages_examples_use_calls_and_arguments_that_exist(title):
    """What an example imports, and every call of what it made, with its arguments' names."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", section(title), flags=re.DOTALL))
    imported = re.search(r"from (weft\.compat\.\w+) import (\w+)", code)
    assert imported
    module = SECTIONS[title][0]
    assert module.__name__ == imported[1]
    kind = getattr(module, imported[2])
    found = re.findall(r"\b(?:a2a|buffer|layer|Buffer)\.(\w+)\((.*?)\)\n", code, re.DOTALL)
    assert found
    for name, given in found:
        wanted = set(re.findall(r"\b(\w+)=", given))
        assert wanted <= parameters(getattr(kind, name)), (name, wanted)
