# SPDX-License-Identifier: Apache-2.0
"""Every public call has a row of hostile arguments, or is listed here, and explains misspelling."""

import ast
import inspect
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import weft
import weft.compat.deep_ep
import weft.compat.flashinfer
import weft.compat.triton_dist
import weft.gemm
import weft.moe
from tests.hostile import public_parameters
from weft.errors import BadCall, InvalidArgument
from weft.keywords import is_internal

MODULES: tuple[ModuleType, ...] = (
    *(weft, weft.moe, weft.gemm),
    *(weft.compat.flashinfer, weft.compat.deep_ep, weft.compat.triton_dist),
)
TABLES = ("test_arguments.py", "moe/test_arguments.py", "compat/test_arguments.py")
# Objects that weft returns; users do not call their constructors.
RESULTS = {
    *("ExpertRows", "Grouped", "Received", "Reduced", "Routed", "LayerChoice"),
    *("ReplicaTable", "Lease"),
    *("DispatchMetaInfo", "AllReduceFusionWorkspace", "EventOverlap", "Placement", "Heap", "Group"),
}
# Declarations that hold what they are given, and are checked by the call that they are given to:
# tests/test_arguments.py tries every field there.
DECLARED = {"FP8Static", "MoEFinalize", "Payload", "Push", "ExpertWeights"}
ELSEWHERE = {
    "Group.from_meeting": "tests/group/test_meeting.py",
    "Group.attach": "tests/runtime/test_culprits.py",
    "Group.recover": "tests/group/test_recovery.py",
    **dict.fromkeys(
        ("Group.for_replacement", "Group.join", "Group.replace"), "tests/group/test_replacement.py"
    ),
    "Group.pid": "tests/runtime/test_culprits.py",
    "ExpertWeights.from_mxfp4": "tests/moe/test_mxfp4.py",
    "lease": "tests/test_leases.py",
    "Heap.write": "tests/runtime/test_culprits.py",
    "Buffer.low_latency_query_mask_buffer": "tests/compat/test_masks.py",
    "Buffer.low_latency_update_mask_buffer": "tests/compat/test_masks.py",
}
WORKSPACES = ("AllReduceFusionWorkspace", "TRTLLMAllReduceFusionWorkspace")
HELPERS = (
    *("select_backend", "run", "get_scale_tensor", "get_expert_major_indices"),
    *("get_operator", "get_default_operator"),
)
# Named by no document as a call of users: parts of weft, or of what they stand for.
INTERNAL = {
    "Expert.forward",
    *("GemmPlan.n_blocks", "GemmPlan.max_m_blocks"),
    *("WgmmaPlan.max_m_blocks", "WgmmaPlan.stages", "WgmmaPlan.ctas_per_sm"),
    "WgmmaPlan.has_wide_n",
    *(f"{w}.{m}" for w in WORKSPACES for m in HELPERS),
    *("Buffer.clean_low_latency_buffer", "AllReduceFusionPattern", "QuantizationSFLayout"),
}


# Names in the tables of calls that have another name.
ROWS = {"launch": "launched"}


def calls() -> Iterator[tuple[str, Any]]:
    """Yield every public function, constructor and method that takes arguments, by name."""
    for module in MODULES:
        for name in module.__all__:
            result = getattr(module, name)
            if name == "errors" or not callable(result):
                continue
            if not inspect.isclass(result):
                yield name, result
                continue
            if name not in RESULTS:
                yield name, result
            for attribute, member in inspect.getmembers(result):
                own = any(attribute in vars(base) for base in result.__mro__ if _ours(base))
                named = attribute == "__call__" or attribute[0] != "_"
                if own and callable(member) and named and not is_internal(member):
                    yield f"{name}.{attribute}", member


def _ours(base: type) -> bool:
    return base.__module__.startswith("weft")


def passed_on() -> set[str]:
    result = set()
    for table in TABLES:
        tree = ast.parse((Path(__file__).parent / table).read_text())
        called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and id(node) not in called:
                result.add(node.attr)
            elif isinstance(node, ast.Name) and id(node) not in called:
                result.add(node.id)
    return result


def test_every_public_call_has_its_row():
    rows = passed_on()
    left_out = DECLARED | INTERNAL | set(ELSEWHERE)
    missing = [
        name
        for name, call in calls()
        if name not in left_out
        and public_parameters(call)
        and ROWS.get(name, name.rpartition(".")[2]) not in rows
    ]
    assert not missing


def test_every_exemption_exists():
    names = {name for name, _ in calls()}
    assert sorted((DECLARED | INTERNAL | set(ELSEWHERE) | set(ROWS)) - names) == []
    for path in ELSEWHERE.values():
        assert (Path(__file__).parents[1] / path).is_file()


CALLS = [
    pytest.param(name.partition(".")[0], call, id=name)
    for name, call in calls()
    if call.__module__.startswith("weft.")
    and name not in ("ExpertGroups.scatter", "ExpertGroups.send", "lease")
    and not (isinstance(call, type) and "__init__" not in vars(call))
]


@pytest.mark.parametrize(("kind", "call"), CALLS)
def test_every_misspelt_keyword_gets_a_suggestion(kind: str, call: Any) -> None:
    """The suggestion comes before any argument is checked."""
    parameters = inspect.signature(call).parameters
    names = [name for name in parameters if name[0] != "_" and name != "self"]
    required: dict[str, Any] = dict.fromkeys(
        name for name in names if parameters[name].default is inspect.Parameter.empty
    )
    owner = []
    if "self" in parameters:
        owner = [object.__new__(next(getattr(m, kind) for m in MODULES if kind in m.__all__))]
    draw = random.Random(call.__qualname__)
    for name in names:
        place = draw.randrange(len(name))
        wrong = name[:place] + name[place + 1 :] if len(name) > 3 else name + "s"
        if wrong in names or parameters[name].kind in (2, 4):
            continue
        with pytest.raises(BadCall) as caught:
            call(*owner, **required, **{wrong: 1})
        text = str(caught.value)
        assert f"has no argument {wrong}: did you mean" in text, text
        assert isinstance(caught.value, InvalidArgument | TypeError)


def test_a_type_error_from_within_is_not_touched() -> None:
    def broken(local: Any) -> Any:
        raise TypeError("of a caller's function")

    def body(group: weft.Group) -> None:
        config = weft.MoEConfig(hidden=128, intermediate=128, routing=weft.moe.Routing(4, 2))
        with pytest.raises(Exception, match="of a caller's function") as caught:
            weft.MoE(group, config, broken, max_tokens=4)
        assert not isinstance(caught.value, BadCall)

    weft.launch(body, ranks=1, device="threads")


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(BadCall, match=r"AllReduce\(\): missing a required argument: 'hidden'"):
        weft.AllReduce(None, max_tokens=8)  # type: ignore
