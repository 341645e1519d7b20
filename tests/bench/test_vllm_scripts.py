# SPDX-License-Identifier: Apache-2.0
"""The scripts that measure inside vLLM, from an engine to a table, by a stand-in of vLLM."""

from __future__ import annotations

import struct
import tarfile

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def engine() -> str:
    return "vllm"


TINY = ("--model", "tiny")
SIZES = ("--input", "16", "--output", "24", "--waves", "2")


def test_a_run_of_decode_becomes_a_table(measure, script, tmp_path):
    more = ("--more", '{"data_parallel_size": 2}')
    code, said, lines = measure("decode", *TINY, *SIZES, *more, "--requests", "4", "8")
    assert code == 0, said
    assert {each["gpus"] for each in lines} == {2}
    found = [(each["variant"], each["requests"], each["result"]["completed"]) for each in lines]
    assert found == [("stock", 4, 8), ("stock", 8, 16), ("block", 4, 8), ("block", 8, 16)]
    assert lines[2]["environment"] == {"WEFT_VLLM": "block"}
    assert "max_num_seqs=8" in lines[0]["flags"]
    assert "cudagraph_capture_sizes=[1, 2, 4, 8]" in lines[0]["flags"]
    assert "moe_backend=triton" in lines[0]["flags"]
    assert lines[0]["result"]["median_itl_ms"] > 19.0
    assert lines[2]["result"]["median_itl_ms"] > 9.0
    with tarfile.open(tmp_path / "out" / "vllm-decode.tar.gz") as archive:
        assert {"./decode-stock.log", "./decode-block-result.jsonl"} <= set(archive.getnames())
    text = script("report").report(lines)
    assert "decode: tiny, 16 tokens in, 24 out; " in text
    assert "| 8 | block |" in text


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("dies", "FAILED block: exit status 1\n    | CUDA out of memory"),
        ("forgets", "does not say 'MoE layers of vLLM on'"),
        ("stops", "FAILED block-4: 3 of 4 requests"),
    ],
)
def test_an_engine_that_is_not_what_was_asked_for_fails_the_command(measure, how, text):
    sizes = (*SIZES[:-1], "1", "--requests", "4", "--variants", "block")
    code, said, lines = measure("decode", *TINY, *sizes, STAND_IN=how)
    assert code == 1
    assert text in said
    assert len(lines) == (how == "stops")


def test_a_trace_becomes_a_step_by_kernel(measure, script):
    sizes = ("--input", "16", "--output", "24", "--requests", "4", "--steps", "3")
    code, said, lines = measure("profile", *TINY, *sizes)
    assert code == 0, said
    assert [(each["steps"], each["result"]["us"]) for each in lines] == [(3, 100.0)] * 2
    assert "fused_moe_kernel 50, ncclDevKernel_AllGather 30" in script("report").report(lines)
    code, said, _ = measure("profile", *TINY, *sizes, "--variants", "stock", STAND_IN="mixes")
    assert code == 1
    assert "its trace is not of decode alone" in said


def test_right_answers_and_equal_texts_are_counted(measure, script):
    code, said, lines = measure("arithmetic", "--ranks", "1", "2", "--questions", "20")
    assert code == 1, said
    found = {(one["variant"], one["gpus"]): one["result"]["right"] for one in lines}
    assert found == {
        **{(name, ranks): 1.0 for name in ("stock", "block") for ranks in (1, 2)},
        ("exchange", 1): 0.95,
        ("exchange", 2): 0.95,
    }
    assert "FAILED exchange-1: 19 of 20 answers are right" in said
    assert "| exchange | 2 | 95.0 % | 95.0 % | 20 |" in script("report").report(lines)
    code, said, lines = measure("arithmetic", "--cpu", "--ranks", "2", "--questions", "4")
    cases = [(one["variant"], one["gpus"]) for one in lines[6:]]
    assert cases == [("stock", 1), ("block", 2), ("exchange", 2)]  # whose texts are held to stock's
    code, said, _ = measure("arithmetic", "--variants", "stock", STAND_IN="dies")
    assert (code, "ranks [0] gave no answers" in said) == (1, True)


def test_a_server_is_loaded(measure, script):
    code, said, lines = measure("load", "--loaded", "2", "--clients", "2")
    assert code == 0, said
    result = lines[0]["result"]
    assert 0 < result["asked"] >= result["dropped"]
    assert list(result["end"]["ranks"]) == ["VLLM::EngineCore"]
    assert script("report").report(lines) == "", "no table"


def container(*entries: tuple[int, int, bytes]) -> bytes:
    """A fat binary of entries: kind, architecture, code."""
    body = b""
    for kind, arch, code in entries:
        body += struct.pack("<HHIQ12xI", kind, 0x101, 32, len(code), arch) + code
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_other_gpus_code_is_cut_and_no_address_changes(script):
    trim = script("trim_kernels").trim
    own, other, ptx = (2, 90, b"hopper--"), (2, 80, b"ampere--" * 4), (1, 80, b"text----")
    first, second = container(other, own, ptx), container(other, ptx)
    data = bytearray(first + bytes(8) + second)
    assert trim(memoryview(data), 90) == (2, 1)
    kept, left = data[: len(first)], data[len(first) + 8 :]
    assert kept == container(own) + bytes(len(first) - len(container(own)))
    zeros = container((2, 80, bytes(32)))
    assert left == zeros + bytes(len(second) - len(zeros))
    for at, text in ((16 + 4, "no entry at 16 of"), (len(first) - 8 - 32 + 8, "the last entry of")):
        data = bytearray(first)
        data[at] = 24  # bytes of the first entry's header, and of the last one's code
        with pytest.raises(SystemExit, match=text):
            trim(memoryview(data), 90)
    with pytest.raises(SystemExit, match="no fat binary at 0"):
        trim(memoryview(bytearray(b"x" * 64)), 90)
