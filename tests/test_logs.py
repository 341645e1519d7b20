# SPDX-License-Identifier: Apache-2.0
"""What weft logs of its decisions, and when it logs nothing."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import weft
from tests.moe.layers import CONFIGS, Case
from weft import logs
from weft.errors import InvalidArgument

ROOT = Path(__file__).parents[1]
PROGRAM = """
import weft

def rank(group):
    weft.AllReduce(group, max_tokens=8, hidden=64).close()

if __name__ == "__main__":
    weft.launch(rank, ranks=2)
    weft.launch(rank, ranks=2)
"""


@pytest.fixture
def own_logger(monkeypatch):
    """The logger `weft` as it was, whatever a test does to it."""
    logger = logging.getLogger("weft")
    level, handlers = logger.level, list(logger.handlers)
    yield monkeypatch
    logger.setLevel(level)
    logger.handlers[:] = handlers


def _ours():
    return [each for each in logging.getLogger("weft").handlers if isinstance(each, logs._ToStderr)]


def _told(caplog, level=logging.DEBUG):
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


def test_ranks_tell_what_they_decided(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "WEFT_CACHE": str(tmp_path / "cache"),
        "WEFT_LOG": "info",
    }
    result = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=900
    )
    assert result.returncode == 0, result.stderr
    for pattern, times in (
        (r"INFO weft\.jit\.cache, process \d+: allreduce \(c\+\+, \S+\): compiled in [\d.]+ s", 1),
        (r"allreduce \(c\+\+, \S+\): another process compiled it, waited|read from", 3),
        (r"rank 0 of 2 on cpu met the others after [\d.]+ s; processes by rank: \[", 2),
        (r"heap 1: \d+ bytes on each of 2 ranks \(cpu\)", 4),
    ):
        assert len(re.findall(pattern, result.stderr)) == times, (pattern, result.stderr)
    assert "DEBUG" not in result.stderr


@pytest.mark.parametrize(
    ("set_up", "times"),
    [
        ("", 1),
        ("logging.basicConfig(format='root: %(message)s', force=True)", 1),
        ("logging.basicConfig(format='root: %(message)s', level='ERROR', force=True)", 1),
        ("logging.basicConfig(filename=sys.argv[1], force=True)", 2),
    ],
    ids=["nothing", "root", "root of errors", "file"],
)
def test_a_line_is_written_to_the_terminal_once(tmp_path, set_up, times):
    """SGLang sets up the root logger after weft is imported; a log file has the line as well."""
    program = (
        f"import logging, sys, weft\n{set_up}\nlogging.getLogger('weft.jit').info('compiled')\n"
    )
    file = tmp_path / "log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WEFT_LOG": "info"}
    result = subprocess.run(
        [sys.executable, "-c", program, str(file)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    lines = result.stderr + result.stdout + (file.read_text() if file.exists() else "")
    assert lines.count("compiled") == times, lines


def test_a_choice_is_told_once(ranks, caplog):
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
    choices = [each for each in caplog.records if each.name == "weft.allreduce.operator"]
    assert [each.levelname for each in choices] == ["INFO", "DEBUG"], "one backend, two sizes"
    assert "oneshot for 1 rows of 128 bytes" in choices[0].getMessage()


def test_a_round_of_the_all_to_all_tells_nothing(ranks, caplog):
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


def test_a_layer_tells_its_choice(ranks, caplog):
    caplog.set_level(logging.DEBUG, "weft")
    case = Case(CONFIGS["softmax"], tokens=(2, 1))

    def body(group):
        with case.open(group, timeout=600.0) as layer:
            group.barrier()
            before = len(caplog.records)
            group.barrier()
            for _ in range(3):
                layer(*case.of(group.rank, group.device))
            group.barrier()
            return layer.explain().text, len(caplog.records) - before

    (text, later), (_, more) = ranks(2, "threads")(body)
    choices = [each for each in caplog.records if each.name == "weft.moe.choice"]
    assert [each.levelname for each in choices] == ["INFO"], "by rank 0, for both"
    assert choices[0].getMessage().endswith(text)
    assert (later, more) == (0, 0)


def test_no_handler_is_added_unasked(own_logger):
    own_logger.delenv(logs.VARIABLE, raising=False)
    logs.set_up()
    assert not _ours()


def test_warnings_are_shown_unasked_and_nothing_else():
    program = "import weft, logging; log = logging.getLogger('weft.x'); log.info(1); log.warning(2)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop(logs.VARIABLE, None)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.stderr == "2\n"


def test_the_variable_adds_one_handler_and_takes_it_away(own_logger, capsys):
    logger = logging.getLogger("weft")
    for level in ("debug", "Info"):
        own_logger.setenv(logs.VARIABLE, level)
        logs.set_up()
        assert logging.getLevelName(logger.level) == level.upper()
    logging.getLogger("weft.jit.cache").info("here")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"INFO weft.jit.cache, process {os.getpid()}: here")
    own_logger.setenv(logs.VARIABLE, "")
    logs.set_up()
    assert not _ours()
    assert logger.level == logging.NOTSET


def test_a_level_that_is_none_is_refused(own_logger):
    own_logger.setenv(logs.VARIABLE, "loud")
    with pytest.raises(InvalidArgument, match=r"WEFT_LOG is 'loud'; set it to debug, info"):
        logs.set_up()
