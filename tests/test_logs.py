# SPDX-License-Identifier: Apache-2.0
"""A line is logged once, and a round logs nothing."""

import logging
import os

import pytest

from tests.moe.layers import CONFIGS, Case
from weft import logs
from weft.launcher.processes import start_fork_server


def write_lines(file, level, set_up, level_of_line):
    """Log as a program that imports weft and then configures its own logging."""
    out = os.open(file, os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    for each in ("debug", level):  # the later one counts
        os.environ[logs.VARIABLE] = each
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
    inputs = (str(tmp_path / "out"), level, set_up, list(lines))
    process = start_fork_server().Process(target=write_lines, args=inputs)
    process.start()
    process.join()
    assert process.exitcode == 0
    text = "".join(path.read_text() for path in tmp_path.iterdir())
    assert {each: text.count(f"line of {each}") for each in lines} == lines, text


def test_a_choice_is_logged_once_and_a_round_never(ranks, caplog):
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
