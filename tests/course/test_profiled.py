"""What the profiler says of a rung, and of kernels side by side: `ncu` is a stand-in, and no GPU is needed."""

import importlib
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes for Linux only")

from tests.helpers import ncu_results
from twinattn.course import ladder, profiled
from twinattn.course.batches import BATCHES

ROOT = Path(__file__).parent.parent.parent
HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)
KERNELS = {  # a decode in splits: what the two kernels of a call read, how long they take, and their shares
    "attend": ("2,154,823,680", "533,440", "86.42", "31.05"),
    "reduce": ("33,816,576", "18,560", "40.00", "12.50"),
}
METRICS = {profiled.BYTES: "byte", profiled.SECONDS: "ns", profiled.MEMORY: "%", profiled.SM: "%"}
DENIED = (
    "==PROF== Connected to process 4242 (/usr/bin/python3.12)\n"
    "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the "
    "target device 0. For instructions on enabling permissions see https://developer.nvidia.com/ERR_NVGPUCTRPERM\n"
)


def printed(kernels=KERNELS, metrics=METRICS):
    """Return the output of `ncu --csv` for kernels."""
    lines = ["==PROF== Connected to process 4242 (/usr/bin/python3.12)"]
    lines += [f'==PROF== Profiling "{name}" - {i}: 0%....50%....100% - 2 passes' for i, name in enumerate(kernels)]
    lines += ["==PROF== Disconnected from process 4242", HEAD]
    for i, (name, values) in enumerate(kernels.items()):
        begin = f'"{i}","4242","python3.12","127.0.0.1","{name}","1","7","(128, 1, 1)","(64, 8, 1)","0","9.0"'
        for (metric, unit), value in zip(metrics.items(), values, strict=True):
            lines.append(f'{begin},"Command line profiler metrics","{metric}","{unit}","{value}"')
    return "\n".join(lines) + "\n"


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Put a command `ncu` into the path; returns what sets the text that it prints, and its arguments."""
    says, asked, code = tmp_path / "says", tmp_path / "asked", tmp_path / "code"
    command = tmp_path / "bin/ncu"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {asked}\ncat {says}\nexit $(cat {code})\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")

    def say(text, exit_code=0):
        says.write_text(text)
        code.write_text(str(exit_code))

    say(printed())
    return say, lambda: asked.read_text().splitlines()


def test_a_call_is_the_sum_of_its_kernels():
    found = profiled.parse(printed())
    assert found.bytes_read == 2_154_823_680 + 33_816_576
    assert found.memory == pytest.approx((0.8642 * 533440 + 0.4 * 18560) / 552000)
    assert found.sm == pytest.approx((0.3105 * 533440 + 0.125 * 18560) / 552000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no kernel"),
        ("==WARNING== No kernels were profiled.\n", "no kernel"),
        (printed({}), "no kernel"),
        (printed({"attend": ("1", "2", "n/a", "3")}), f"no {profiled.MEMORY}"),
        (printed({"attend": ("1", "2", "3")}, dict(list(METRICS.items())[:3])), f"no {profiled.SM}"),
    ],
)
def test_what_is_missing_is_an_error_and_no_zero(text, message):
    with pytest.raises(profiled.NotProfiledError, match=message):
        profiled.parse(text)


def test_the_call_is_profiled_and_nothing_before_it(ncu):
    _, asked = ncu
    assert profiled.is_there() and profiled.profile("decode", 8, "64 x 8192") == profiled.parse(printed())
    *options, python, module, name, of_ladder, number, batch = asked()
    assert (python, module, name) == (sys.executable, "-m", "twinattn.course.profiled")
    assert (of_ladder, number, batch) == ("decode", "8", "64 x 8192")
    assert options[options.index("--profile-from-start") + 1] == "off"
    assert options[options.index("--metrics") + 1].split(",") == list(METRICS)


def test_the_second_call_alone_is_for_the_profiler(monkeypatch):
    events = []
    monkeypatch.setattr(profiled, "call_of", lambda rung, batch, inputs: lambda: events.append(rung.number))
    monkeypatch.setattr(type(BATCHES["decode"]["64 x 8192"]), "make_inputs", lambda self, device: {})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("wait"))
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: events.append(name))
    profiled.call_twice("decode", 4, "64 x 8192")
    assert events == [4, "wait", "start", 4, "wait", "stop"]


def measured(rows):
    """Return results of a ladder, with rungs of the given numbers and clocks on the first batch."""
    names = {rung.number: rung.name for rung in ladder.rungs("decode")}
    timed = [{"number": number, "name": names[number], "clock": clock, "median": 1e-3} for number, clock in rows]
    return {"ladder": "decode", "batches": [{"name": "64 x 8192", "rungs": timed}]}


def test_rungs_of_triton_are_profiled(ncu):
    found, lines = measured([(0, "events"), (1, "graph"), (2, "graph")]), []
    profiled.add_to(found, lines.append)
    rows = found["batches"][0]["rungs"]
    assert "profile" not in rows[0]
    assert rows[1]["profile"] == rows[2]["profile"] == profiled.parse(printed())._asdict()
    least = BATCHES["decode"]["64 x 8192"].reads()
    assert f"2189 MB{f'{2_188_640_256 / least:.0%}':>14}" in lines[1] and len(lines) == 3


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        (DENIED, 1, "==ERROR== ERR_NVGPUCTRPERM"),
        ("Traceback ...\nValueError: x", 1, "ValueError: x"),
        ("", 0, "no kernel"),
    ],
)
def test_what_ncu_refuses_is_said_once(ncu, text, code, message):
    ncu[0](text, code)
    found, lines = measured([(1, "graph"), (2, "graph")]), []
    profiled.add_to(found, lines.append)
    assert len(lines) == 2 and lines[1].startswith("no more of it: ") and message in lines[1]
    assert not any("profile" in row for row in found["batches"][0]["rungs"])


def test_without_ncu_it_is_said(monkeypatch):
    monkeypatch.setenv("PATH", "")
    found, lines = measured([(1, "graph")]), []
    profiled.add_to(found, lines.append)
    assert lines == [f"\n{profiled.NO_NCU}."] and "profile" not in found["batches"][0]["rungs"][0]


def test_a_page_says_what_the_profiler_found(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    pages = importlib.import_module("ladders")
    row = {"profile": profiled.parse(printed())._asdict()}
    said = pages.profile_of("decode", row, "64 x 8192")
    assert "reads 2189 MB from memory, 102% of the least; memory is at 85% of its peak, the SMs are at 30%." in said
    assert pages.profile_of("decode", {}, "64 x 8192") == ""
    shares = {0.0004: "0.04% of", 0.95: "95% of", 1.02: "102% of", 105.4: "105 times"}
    assert {share: pages.share_of(share) for share in shares} == shares


# --- profiles of kernels beside others, docs/results/profiled ---

DESIGNS = [{"head": "ours", "design": "as it is"}, {"head": "FA3", "design": "FA3"}]


def detailed(launches=2, without=None, text="7.50"):
    """Return the output of `ncu --set full --page details --csv`, in which each metric is the same number."""
    said = {
        "HighPipeUtilization": "Shared is the highest-utilized pipeline (75.7%) based on elapsed cycles. It's "
        "dominated by its Tensor (FP) sub-pipeline. By instructions, the highest utilized pipeline (39.1%) is XU. ",
        "MemoryCacheAccessPattern": "The pattern for global stores to L1TEX: only 16.0 of the 32 bytes per sector.",
        "FPInstructions": "This kernel executes 71 fused and 139 non-fused FP32 instructions.",
        "UncoalescedGlobalAccess": "resulting in a total of 42 excessive sectors (30% of the total 139 sectors).",
        "SOLBottleneck": "Look at the 3 sections.",
    }
    lines = ["==PROF== Connected to process 4242 (/usr/bin/python3.12)", f'{HEAD},"Rule Name","Rule Description"']
    for i in range(launches):
        begin = f'"{i}","4242","python3.12","127.0.0.1","attend_{i}","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0"'
        for section, names in ncu_results.KEPT.items():
            kept = [name for name in names if (section, name) != without]
            lines += [f'{begin},"{section}","{name}","unit","{text}","",""' for name in [*kept, "Another"]]
        lines += [f'{begin},"Rules","","","","{rule}","{sentence}"' for rule, sentence in said.items()]
    return "\n".join(lines) + "\n"


def test_a_run_has_the_numbers_of_ncu_and_no_others():
    run = ncu_results.run_of(detailed(text="1,234,567"), {"path": "varlen", "designs": DESIGNS})
    assert run["path"] == "varlen" and "designs" not in run
    assert [(x["head"], x["design"], x["kernel"]) for x in run["kernels"]] == [
        ("ours", "as it is", "attend_0"),
        ("FA3", "FA3", "attend_1"),
    ]
    for kernel in run["kernels"]:
        assert {section: tuple(found) for section, found in kernel["metrics"].items()} == ncu_results.KEPT
        assert {value for found in kernel["metrics"].values() for value in found.values()} == {1234567}
        assert kernel["said"] == {
            **{"pipeline": "Shared", "pipeline_percent": 75.7, "dominated_by": "Tensor (FP)"},
            **{"by_instructions": "XU", "by_instructions_percent": 39.1, "stored_bytes_per_sector": 16.0},
            **{"fp32_fused": 71, "fp32_not_fused": 139, "excessive_sectors": 42, "sectors": 139},
        }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 launches, and 2 designs"),
        (detailed(3), "3 launches, and 2 designs"),
        (detailed(without=("Occupancy", "Achieved Occupancy")), "launch 0 has no Achieved Occupancy in Occupancy"),
    ],
)
def test_a_run_that_is_not_whole_is_an_error(text, message):
    with pytest.raises(ValueError, match=message):
        ncu_results.run_of(text, {"designs": DESIGNS})


HEADS = ["ID", "Kernel Name"]


def raw(launches=2):
    """Return the output of `ncu --page raw --csv`: names, units, and a row for each launch."""
    names = [*ncu_results.COUNTED.values(), "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio", "other"]
    lines = ["==PROF== Connected to process 4242 (/usr/bin/python3.12)", ",".join(f'"{x}"' for x in HEADS + names)]
    lines.append(",".join('"unit"' for _ in HEADS + names))
    for i in range(launches):
        lines.append(",".join(f'"{x}"' for x in (i, f"attend_{i}", "1,234", "20", "30", "40", "0.40", "7")))
    return "\n".join(lines) + "\n"


def test_what_warps_wait_for_is_read_from_the_raw_page():
    run = ncu_results.stalls_of(raw(), {"path": "varlen", "designs": DESIGNS})
    counted = {"cycles": 1234, "instructions": 20, "read_bytes": 30, "written_bytes": 40, "stalls": {"barrier": 0.4}}
    assert run == {
        "path": "varlen",
        "kernels": [{**design, "kernel": f"attend_{i}", **counted} for i, design in enumerate(DESIGNS)],
    }
    with pytest.raises(ValueError, match="3 launches, and 2 designs"):
        ncu_results.stalls_of(raw(3), {"designs": DESIGNS})


def test_a_page_has_a_column_for_each_profiled_launch(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    profiles = importlib.import_module("profiles")
    shown = profiles.tables("chunked_prefill").splitlines()
    assert "| | the product of d3f8ca40 | trial, shared slots | trial, own slots | FlashAttention-3 |" in shown
    cycles, waits = [line for line in shown if line.startswith("| cycles |")]
    found = json.loads((ROOT / "docs/results/profiled/cuda-nvidia-h200.json").read_text())["runs"][0]["kernels"]
    counted = [x["metrics"]["GPU Speed Of Light Throughput"]["Elapsed Cycles"] for x in found]
    assert [1000 * int(x.replace(",", "")) for x in re.findall(r"([\d,]+) thousand", cycles)] == [
        round(x, -3) for x in counted
    ]
    assert waits == "| cycles | 2,766 thousand | 2,799 thousand | 2,621 thousand |"
    assert "| at a barrier of warps | 228 million | 240 million | 148 million |" in shown
    assert profiles.tables("merge") == ""
