# SPDX-License-Identifier: Apache-2.0
"""Logged decisions, and when nothing is logged."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

import pytest
import torch

import weft
from tests.moe.layers import CONFIGS, Case
from weft import logs
from weft.errors import InvalidArgument
from weft.launcher.processes import start_fork_server


@pytest.fixture
def own_logger(monkeypatch):
    """Restore the logger `weft` after the test."""
    logger = logging.getLogger("weft")
    level, handlers = logger.level, list(logger.handlers)
    yield monkeypatch
    logger.setLevel(level)
    logger.handlers[:] = handlers


def _ours():
    return [each for each in logging.getLogger("weft").handlers if isinstance(each, logs._ToStderr)]


def compile_or_read(group):
    """Make an object that needs a compiled kernel; return the messages and the level."""
    texts: list[str] = []
    handler: Any = logging.Handler()
    logger = logging.getLogger("weft")
    handler.emit = lambda record: texts.append(record.getMessage())
    logger.addHandler(handler)
    weft.AllReduce(group, max_tokens=8, hidden=64).close()
    return "\n".join(texts), logger.level


def test_decisions_are_logged(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    monkeypatch.setenv("WEFT_LOG", "info")
    (first, second), later = (weft.launch(compile_or_read, ranks=2) for _ in range(2))
    logged = [text for text, _ in (first, second, *later)]
    assert {level for _, level in (first, second, *later)} == {logging.INFO}
    compiled = r"allreduce \(c\+\+, \S+\): compiled in [\d.]+ s"
    assert sum(len(re.findall(compiled, text)) for text in logged) == 1
    known = r"allreduce \(c\+\+, \S+\): another process compiled it, waited|read from"
    assert sum(len(re.findall(known, text)) for text in logged) == 3
    assert all(re.search(r"heap 1: \d+ bytes on each of 2 ranks \(cpu\)", t) for t in logged)


def write_lines(file, level, set_up, level_of_line):
    """Log as a program that imports weft and then configures its own logging."""
    out = os.open(file, os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.pop(logs.VARIABLE, None)
    if level:
        os.environ[logs.VARIABLE] = level
    logs.configure()
    if set_up is not None:
        logging.basicConfig(**set_up, force=True)
    for each in level_of_line:
        logging.getLogger("weft.jit").log(each, "line of %d", each)


@pytest.mark.parametrize(
    ("level", "set_up", "lines"),
    [
        ("info", None, {logging.INFO: 1}),
        ("info", {"format": "root: %(message)s"}, {logging.INFO: 1}),
        ("info", {"level": "ERROR"}, {logging.INFO: 1}),
        ("info", {"filename": "own"}, {logging.INFO: 2}),
        ("", None, {logging.INFO: 0, logging.WARNING: 1}),
    ],
    ids=["nothing", "root", "root of errors", "file", "unasked"],
)
def test_a_line_is_written_to_the_terminal_once(tmp_path, level, set_up, lines):
    """SGLang configures the root logger after weft is imported; a log file has the line as well."""
    if set_up is not None and "filename" in set_up:
        set_up = {"filename": str(tmp_path / "own")}
    file = tmp_path / "out"
    process = start_fork_server().Process(
        target=write_lines, args=(str(file), level, set_up, list(lines))
    )
    process.start()
    process.join()
    assert process.exitcode == 0
    text = "".join(path.read_text() for path in tmp_path.iterdir())
    assert {each: text.count(f"line of {each}") for each in lines} == lines, text


def test_a_choice_is_logged_once(ranks, caplog):
    caplog.set_level(logging.DEBUG, "weft")
    rows = torch.ones(4, 64, dtype=torch.bfloat16)

    def body(group):
        with weft.AllReduce(group, max_tokens=8, hidden=64) as reduce:
            reduce.fused(rows[:1])
            reduce.fused(rows)
            group.barrier()
            before = len(caplog.records)
            group.barrier()
            for _ in range(20):
                reduce.fused(rows[:1])
                reduce.fused(rows)
            group.barrier()
            return len(caplog.records) - before

    assert ranks(2, "threads")(body) == [0, 0]
    assert re.search(
        r"rank 0 of 2 on cpu connected to the others after [\d.]+ s; processes", caplog.text
    )
    choices = [each for each in caplog.records if each.name == "weft.allreduce.operator"]
    assert [each.levelname for each in choices] == ["INFO", "DEBUG"], "one backend, two sizes"
    assert "oneshot for 1 rows of 128 bytes" in choices[0].getMessage()


def test_a_round_logs_nothing(ranks, caplog):
    caplog.set_level(logging.DEBUG, "weft")

    def body(group):
        x, ids = torch.ones(2, 64, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 2)
        with weft.AllToAll(group, max_tokens=2, top_k=2, num_experts=4, hidden=64) as a2a:
            group.barrier()
            before = len(caplog.records)
            group.barrier()
            received = a2a.dispatch(x, ids, torch.ones(2, 2))
            a2a.combine(weft.reference.identity_experts(received, x.dtype))
            group.barrier()
            return before > 0, len(caplog.records) - before

    assert ranks(2, "threads")(body) == [(True, 0)] * 2


def test_a_layer_logs_its_choice(ranks, caplog):
    caplog.set_level(logging.DEBUG, "weft")
    case = Case(CONFIGS["softmax"], tokens=(2, 1))

    def body(group):
        with case.open(group, timeout=600.0) as layer:
            group.barrier()
            before = len(caplog.records)
            group.barrier()
            for _ in range(3):
                layer(*case.inputs_of(group.rank, group.device))
            group.barrier()
            return layer.explain().text, len(caplog.records) - before

    (text, later), (_, more) = ranks(2, "threads")(body)
    choices = [each for each in caplog.records if each.name == "weft.moe.layer.choice"]
    assert [each.levelname for each in choices] == ["INFO"], "by rank 0, for both"
    assert choices[0].getMessage().endswith(text)
    assert (later, more) == (0, 0)


def test_no_handler_is_added_unasked(own_logger):
    own_logger.delenv(logs.VARIABLE, raising=False)
    logs.configure()
    assert not _ours()


def test_the_variable_adds_one_handler_and_takes_it_away(own_logger, capsys):
    logger = logging.getLogger("weft")
    for level in ("debug", "Info"):
        own_logger.setenv(logs.VARIABLE, level)
        logs.configure()
        assert logging.getLevelName(logger.level) == level.upper()
    logging.getLogger("weft.jit.cache").info("here")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"INFO weft.jit.cache, process {os.getpid()}: here")
    own_logger.setenv(logs.VARIABLE, "")
    logs.configure()
    assert not _ours()
    assert logger.level == logging.NOTSET


def test_an_invalid_log_level_is_refused(own_logger):
    own_logger.setenv(logs.VARIABLE, "loud")
    with pytest.raises(InvalidArgument, match=r"WEFT_LOG is 'loud'; set it to debug, info"):
        logs.configure()
