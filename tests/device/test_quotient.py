# SPDX-License-Identifier: Apache-2.0
"""The scales of FP8 blocks, which GPUs divide for in their own way, are those of a division."""

import subprocess
from pathlib import Path

from tests.programs import compile_program

SOURCE = Path(__file__).with_name("quotient.cpp")


def test_scales_are_rounded_once_however_a_gpu_rounds_its_reciprocals():
    program = compile_program(SOURCE, name="quotient")
    reported = subprocess.run([str(program), "1009"], capture_output=True, text=True)
    assert reported.returncode == 0, reported.stdout + reported.stderr
    tried = int(reported.stdout.split()[2])
    assert reported.stdout.startswith("0 of ")
    assert tried > 5 * 2**23
