"""The list of checks on a GPU, and how it is gone through."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from bigsgan import cli, shipped
from bigsgan.doctor import registry
from tests import REPOSITORY
from tests.distributed import agreement
from tests.gpu import __main__ as checks
from tests.gpu import kernels, variants
from tests.gpu.__main__ import CHECKS, Check

PYTHON = [sys.executable, "-c"]


def test_the_checks_take_40_minutes_and_are_there():
    assert sum(check.seconds for check in CHECKS) <= 40 * 60
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        for word in check.command:
            assert not word.startswith("tests/") or (REPOSITORY / word).is_file(), word
        if "--config" in check.command:
            assert check.command[check.command.index("--config") + 1] in shipped.recipe_names()


@pytest.mark.slow
def test_what_fails_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    found = [
        Check("good", "that it prints", 60, [*PYTHON, "print('a figure')"]),
        Check("bad one", "that it fails", 60, [*PYTHON, "print('why'); raise SystemExit(3)"]),
        Check("slow", "that it ends", 1, [*PYTHON, "import time; time.sleep(60)"]),
        Check("shared", "its variable", 60, [*PYTHON, "import os; print(os.environ['TESTS_ON_GPU'])"], True),
    ]
    monkeypatch.setattr(checks, "CHECKS", found)
    assert checks.main(["--out", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr().out
    assert "== good: that it prints\na figure\n" in printed
    assert [line.rpartition("  ")[0].rstrip() for line in printed.splitlines()[-4:]] == [
        "good     passed",
        "bad one  failed with status 3",
        "slow     ran out of time",
        "shared   passed",
    ]
    assert (tmp_path / "out" / "bad_one.log").read_text().endswith("why\n")
    assert "most recent call first" in (tmp_path / "out" / "slow.log").read_text()  # of stacks
    assert checks.main(["--only", "good,shared", "--out", str(tmp_path / "out")]) == 0
    assert checks.main(["--only", "unknown"]) == 2


@pytest.mark.slow
def test_tests_share_the_gpu_and_measurements_do_not(tmp_path, monkeypatch, capsys):
    """Each writes when it began and ended; what is not a test is alone, and has all threads."""
    code = "import os, time; begin = time.time(); time.sleep(1); "
    code += "print(os.environ.get('OMP_NUM_THREADS'), begin, time.time())"
    words = {"first": ["pytest"], "measured": [], "second": ["pytest"], "measured too": []}
    monkeypatch.setattr(checks, "CHECKS", [Check(name, "", 60, [*PYTHON, code, *more]) for name, more in words.items()])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert checks.main(["--jobs", "2", "--out", str(tmp_path)]) == 0
    spans = {}
    for name in words:
        *_, threads, begin, end = (tmp_path / f"{name.replace(' ', '_')}.log").read_text().split()
        assert threads == ("None" if "measured" in name else str(max(1, len(os.sched_getaffinity(0)) // 2)))
        spans[name] = float(begin), float(end)
    assert "first: " in capsys.readouterr().out
    assert max(spans[name][0] for name in ("first", "second")) < min(spans[name][1] for name in ("first", "second"))
    assert max(spans[name][1] for name in ("first", "second")) < spans["measured"][0]
    assert spans["measured"][1] < spans["measured too"][0]
    with pytest.raises(SystemExit, match="2"):
        checks.main(["--jobs", "0"])


@pytest.mark.slow
def test_benches_take_their_options(capsys):
    """As far as they can be checked without a GPU: what they are asked is a recipe and variants that there are."""
    for check in CHECKS:
        if "bench" in check.command:
            words = check.command[check.command.index("bench") + 2 :]
            overrides = [word for word in words if "=" in word]
            config = words[words.index("--config") + 1]
            assert cli.main(["train", "--dry-run", "--config", config, *overrides]) == 0
            variants = words[words.index("--variants") + 1]
            help_text = subprocess.run(
                [sys.executable, "-m", "bigsgan", "bench", "train", "--help"], capture_output=True, text=True
            ).stdout.replace("\n", " ")
            for name in variants.replace("+", ",").split(","):
                assert name in help_text


COLLECT = """
import json, sys
import pytest

class Collected:
    def pytest_collection_finish(self, session):
        self.found = [item.nodeid for item in session.items]

result = []
for arguments in json.load(sys.stdin):
    collected = Collected()
    pytest.main(["--collect-only", "-qq", *arguments], plugins=[collected])
    result.append(collected.found)
print("\\n" + json.dumps(result))
"""


@pytest.mark.slow
def test_each_check_selects_tests_and_each_of_its_words_some():
    """A word of -k that selects nothing is a claim without a proof."""
    asked = []
    for check in CHECKS:
        if "pytest" in check.command:
            options = check.command[check.command.index("pytest") + 1 :]
            asked.append((check, options))
            if "-k" in options:
                at = options.index("-k") + 1
                words = re.split(" or | and ", options[at])
                asked += [(check, [*options[:at], word]) for word in words]
    assert len(asked) > len(CHECKS)
    arguments = json.dumps([options for _, options in asked])
    done = subprocess.run([*PYTHON, COLLECT], input=arguments, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    for (check, options), found in zip(asked, json.loads(done.stdout.splitlines()[-1]), strict=True):
        print(f"{check.name}: {len(found)} of {' '.join(options[6:])}")
        assert found, f"{check.name} selects nothing by {options}"


@pytest.mark.parametrize("on_gpu, share, agrees", [("0", 1.0, 1), ("0", 5.0, 0), ("1", 5.0, 1), ("1", 10.5, 0)])
def test_a_gpu_may_differ_from_the_reference_on_a_cpu_by_ten_times_as_much(monkeypatch, on_gpu, share, agrees):
    monkeypatch.setenv("TESTS_ON_GPU", on_gpu)
    monkeypatch.setattr(agreement, "differences", lambda *arguments: [[(share + 1, "there"), (share, "there")]])
    if agrees:
        agreement.check_updates(None, [], {}, 1)
    else:
        with pytest.raises(AssertionError, match="update 0 differs"):
            agreement.check_updates(None, [], {}, 1)


@pytest.mark.parametrize(
    "check", [check for check in CHECKS if "doctor" in check.command], ids=lambda check: check.name
)
def test_the_doctor_takes_its_options(check, capsys):
    words = check.command[check.command.index("doctor") + 1 :]
    assert words[0] == "--only"
    assert words[1] in [each.name for each in registry.CHECKS]
    assert cli.main(["train", "--dry-run", *words[2:]]) == 0


def test_times_of_variants_are_printed(capsys):
    """On a CPU of small shapes, and attention as it is in float32 but for bf16's roundings."""
    assert variants.main() == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert "bfloat16" in first
    times = [re.fullmatch(r"Convolution(.*): ([.0-9]+) without cudnn.benchmark, ([.0-9]+) with it", x) for x in lines]
    assert len([each for each in times if each and min(map(float, each.groups()[1:])) > 0]) == 2
    attention = [re.fullmatch(r"Attention(.*), (written out|flash): ([.0-9]+), (.*) off", line) for line in lines]
    assert [each[2] for each in attention if each and float(each[3]) > 0 and 1e-4 < float(each[4]) < 1e-2] == [
        "written out", "flash",
    ]  # fmt: skip
    assert sum("efficient: not here" in line for line in lines) == 1


def test_times_of_kernels_are_printed(capsys):
    """On a CPU both are torch's operations."""
    kernels.each_kernel(2, 8, 4, torch.device("cpu"))
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("(2, 8, 4, 4): copy ")
    times = [re.fullmatch(r"  .*: torch (.*), kernel (.*); backward: torch (.*), kernel (.*)", line) for line in lines]
    assert [len(each.groups()) for each in times if each and min(map(float, each.groups())) > 0] == [4] * 7


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("_spread", "pooling, upsampling"),
        ("void at::native::avg_pool2d_backward_out_cuda_frame_nhwc<c10::BFloat16>", "pooling, upsampling"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("fmha_cutlassB_bf16_aligned_64x64_k64_seqaligned_sm80", "attention"),
        ("sm90_xmma_dgrad_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc", "convolutions"),
        ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized>", "convolutions"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8", "products"),
        ("void at::native::batch_norm_collect_statistics_channels_last_kernel", "norms"),
        ("_divide", "others"),
    ],
)
def test_a_kernels_group_follows_from_its_name(name, group):
    assert kernels.group_of(name) == group


@pytest.mark.parametrize("words", [["--list"], ["--only", "graphs", "--list"]])
def test_the_list_says_what_is_proved(words, capsys):
    assert checks.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == (1 if "--only" in words else len(CHECKS))
    assert lines[-1].split("  ")[0] == "graphs"
