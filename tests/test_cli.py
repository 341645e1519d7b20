"""The command line, run for real on CPU ranks."""

from __future__ import annotations

import json

import pytest
import torch

import weft
from weft import cli_options, doctor
from weft.bench import moe, trial
from weft.errors import RankFailed, WeftError

SIZES = ["--tokens", "1,8", "--hidden", "256", "--top-k", "4", "--experts", "16"]
SMALL = ["bench", "moe", "--device", "cpu", "--quiet", *SIZES]


def test_bench_moe(weft_command, tmp_path):
    full, trt, picture = (tmp_path / name for name in ("all.json", "trt.json", "pair.png"))
    code, out, err = weft_command(
        *SMALL,
        *("--ranks", "2", "--iters", "4", "--backend", "onesided,collective"),
        *("--json", str(full), "--trtllm-json", str(trt), "--plot", str(picture)),
    )
    assert code == 0, err
    assert "bit by bit" in out
    data = json.loads(full.read_text())
    sizes = [(found["backend"], found["tokens"]) for found in data["results"]]
    assert sizes == [("onesided", 1), ("onesided", 8), ("collective", 1), ("collective", 8)]
    for found in data["results"]:
        for phase in ("dispatch", "combine", "pair"):
            samples = found["samples_us"][phase]
            assert [len(rank) for rank in samples] == [4, 4]
            assert all(us > 0 for rank in samples for us in rank)
    assert [found["max_tokens"] for found in data["results"]] == [8, 8, 1, 8]
    assert data["machine"]["torch"] == torch.__version__
    assert len(json.loads(trt.read_text())["results"]) == 4
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench_moe_fp8_on_three_ranks(weft_command):
    options = ("--ranks", "3", "--iters", "2", "--payload", "fp8", "--router", "perfect")
    code, out, err = weft_command(*SMALL, *options)
    assert code == 0, err
    assert "fp8 + scales out" in out


def test_bench_layer(weft_command, tmp_path):
    small = ("bench", "layer", "--device", "cpu", "--ranks", "2", "--iters", "2", "--quiet")
    path = tmp_path / "layer.json"
    options = ("--model", "glm-4.5-air", "--tokens", "3", "--routing", "zipf:1.5")
    files = ("--out", str(path), "--trace", str(tmp_path / "trace.json"))
    code, out, err = weft_command(*small, *options, "--overlap", "none", *files)
    assert code == 0, err
    (mode,) = json.loads((tmp_path / "trace.json").read_text())["metadata"]["modes"]
    assert mode["overlap"] == "none"
    assert "glm-4.5-air: 2 ranks" in out
    written = json.loads(path.read_text())
    assert [row["overlap"] for row in written["rows"]] == ["none"]
    code, out, err = weft_command(*small, *options, "--exchange", "expert", "--overlap", "shared")
    assert code == 0, err
    assert "rows by expert" in out
    code, out, err = weft_command(*small, "--dtype", "fp4")
    assert code == 1
    assert "dtype is 'fp4'" in err


class _Wrong(weft.AllToAll):
    """Spoils what rank 1 gets back, after some good rounds."""

    rounds = good_rounds = 0

    def combine(self, *args, **kwargs):
        out = super().combine(*args, **kwargs)
        self.rounds += 1
        if self.rank == 1 and self.rounds > self.good_rounds:
            out[0, 0] += 1
        return out


@pytest.mark.parametrize(
    ("good_rounds", "text"), [(0, "1 tokens: rank 1"), (2, "after timing, rank 1")]
)
def test_a_wrong_exchange_is_not_timed(weft_command, monkeypatch, tmp_path, good_rounds, text):
    monkeypatch.setattr(_Wrong, "good_rounds", good_rounds)
    monkeypatch.setitem(trial._EXCHANGES, "onesided", _Wrong)

    def as_threads(*args, **options):
        return weft.launch(*args, **{**options, "device": "threads"})

    monkeypatch.setattr(moe, "launch", as_threads)
    target = tmp_path / "all.json"
    code, out, err = weft_command(*SMALL, "--ranks", "2", "--iters", "2", "--json", str(target))
    assert code == 1
    assert "check failed" in err
    assert text in " ".join(err.split())
    assert "median" not in out
    assert not target.exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--case", "gpt-9"], "choose one of deepseek-v3"),
        (["--device", "tpu"], "device is 'tpu'"),
        (["--router", "best"], "choose one of random, perfect"),
        (["--tokens", "8", "--max-tokens", "4"], "do not fit"),
        (["--ranks", "2", "--hidden", "250"], "pad hidden to 256"),
    ],
)
def test_refusals_are_one_red_text(weft_command, arguments, text):
    code, out, err = weft_command(*SMALL, *arguments)
    assert code == 1
    assert out == ""
    assert text in " ".join(err.split())
    assert "Traceback" not in err


def test_cuda_needs_a_gpu(weft_command, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = weft_command("bench", "moe", "--device", "cuda")
    assert code == 1
    assert "sees no GPU" in " ".join(err.split())
    assert cli_options.chosen_device("auto") == "cpu"
    assert cli_options.chosen_samples(0, "cuda", graph=True) == 15
    with pytest.raises(WeftError, match="at least 11"):
        cli_options.chosen_samples(10, "cuda", graph=True)


def test_a_failed_rank_shows_its_traceback(weft_command, monkeypatch):
    def fails(*_args, **_options):
        raise RankFailed("rank 1 of 2 raised ValueError\nTraceback ...") from ValueError("boom")

    monkeypatch.setattr(moe, "launch", fails)
    code, _, err = weft_command(*SMALL, "--ranks", "2")
    assert code == 1
    assert "RankFailed: rank 1 of 2 raised ValueError" in err


def test_demo(weft_command, tmp_path):
    target = tmp_path / "demo.png"
    options = ("--ranks", "2", "--device", "cpu", "--tokens", "8", "--picture", str(target))
    code, out, err = weft_command("demo", *options)
    assert code == 0, err
    assert "right" in out
    assert target.exists()


def test_doctor(weft_command):
    code, out, _ = weft_command("doctor", "--json")
    found = json.loads(out)
    names = {finding["name"]: finding["status"] for finding in found["findings"]}
    assert code == (found["status"] == "fail")
    assert names["python"] == names["torch"] == "ok"
    assert names["C++ compiler"] == names["memfd and seals"] == names["loopback"] == "ok"
    code, out, _ = weft_command("doctor")
    assert "ready for" in out


def test_doctor_says_what_to_do(weft_command, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "open"))
    code, out, _ = weft_command("doctor", "--json")
    found = {finding["name"]: finding for finding in json.loads(out)["findings"]}
    assert code == 1
    assert "chmod 700" in found["cache"]["detail"]
    assert "no-such-compiler" in found["C++ compiler"]["detail"]
    assert found["C++ compiler"]["status"] == ("warn" if torch.cuda.is_available() else "fail")


def test_doctor_survives_what_it_finds(monkeypatch):
    def broken():
        raise ZeroDivisionError("odd machine")
        yield

    monkeypatch.setattr(doctor, "_gpus", broken)
    findings = doctor.examine()
    (odd,) = [finding for finding in findings if finding.section == "GPUs"]
    assert odd.status == "fail"
    assert "odd machine" in odd.detail
    assert findings[-1].section == "system", "the rest is examined nevertheless"


def test_cache(weft_command, monkeypatch, tmp_path):
    from weft.jit.cache import Cache, key_of

    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    Cache().put(key_of(name="x"), b"12345", {"name": "dispatch", "kind": "cubin", "arch": "sm_90a"})
    code, out, _ = weft_command("cache", "list")
    assert code == 0
    assert "dispatch" in out
    assert "sm_90a" in out
    assert "1 entry, 0.0 KiB" in out
    _, out, _ = weft_command("cache", "clear")
    assert "removed 1 entry" in out
    assert Cache().entries() == []


def test_version_and_help(weft_command):
    code, out, _ = weft_command("--version")
    assert code == 0
    assert out.startswith(f"weft {weft.__version__}")
    _, out, _ = weft_command("bench", "moe", "--help")
    for option in ("--router", "--trtllm-json", "--payload", "--eager"):
        assert option in out
