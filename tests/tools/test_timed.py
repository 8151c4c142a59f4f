"""`twinattn prove --time`: what was timed is what was checked. A kernel that cheats is refused, an honest one timed."""

import json
import re
import threading
import time
from xml.etree import ElementTree

import pytest
import torch

from tests.helpers import by_hand
from twinattn import progress
from twinattn.kit import __main__ as command
from twinattn.kit import claims
from twinattn.kit.kernel import BadKernelError
from twinattn.kit.report import as_junit, as_text
from twinattn.kit.timed import WARM_UPS, time_kernel

CALLS = 6
ONE_SIZE = claims(dtypes=(torch.float32,), heads=((4, 2),), head_sizes=((64, 64),), block_sizes=(16,))


def attend(query, key_cache, value_cache, seq_lens, block_table):
    """Attend in decodes, honestly."""
    starts = torch.arange(len(query) + 1, dtype=torch.int32)
    return by_hand.paged(query, key_cache, value_cache, starts, seq_lens, block_table, 1, int(seq_lens.max()))


def remembers(key):
    """Return a kernel that attends once for each key of its queries."""
    known = {}

    def kernel(query, key_cache, value_cache, seq_lens, block_table):
        if key(query) not in known:
            known[key(query)] = attend(query, key_cache, value_cache, seq_lens, block_table)
        return known[key(query)].clone()

    return kernel


def gives_up_after(calls, give_up):
    """Return a kernel that is right in its first calls."""
    count = 0

    def kernel(query, key_cache, value_cache, seq_lens, block_table):
        nonlocal count
        count += 1
        return (give_up if count > calls else attend)(query, key_cache, value_cache, seq_lens, block_table)

    return kernel


def zeros(query, *others):
    """Compute nothing."""
    return torch.zeros_like(query)


def whatever_is_there(query, *others):
    """Return memory in which a right output may still lie."""
    return torch.empty_like(query)


def wider(query, *others):
    """Return another type than before."""
    return attend(query, *others).double()


class Lazy(torch.Tensor):
    """A tensor that could compute when it is looked at."""


def lazy(query, key_cache, value_cache, seq_lens, block_table):
    """Return a tensor of a class of its own."""
    return attend(query, key_cache, value_cache, seq_lens, block_table).as_subclass(Lazy)


def later(query, key_cache, value_cache, seq_lens, block_table):
    """Compute in a thread, and return before it is done."""
    out = torch.zeros_like(query)
    given = [x.clone() for x in (query, key_cache, value_cache, seq_lens, block_table)]

    def compute():
        time.sleep(0.02)
        out.copy_(attend(*given))

    threading.Thread(target=compute).start()
    return out


def shares_memory():
    """Return a kernel that has memory for one output."""
    memory = torch.empty(0)

    def kernel(query, key_cache, value_cache, seq_lens, block_table):
        memory.resize_(query.shape).copy_(attend(query, key_cache, value_cache, seq_lens, block_table))
        return memory.view(query.shape)

    return kernel


def takes_back():
    """Return a kernel that clears what it returned before."""
    before = torch.empty(0)

    def kernel(query, key_cache, value_cache, seq_lens, block_table):
        nonlocal before
        before.zero_()
        before = attend(query, key_cache, value_cache, seq_lens, block_table)
        return before

    return kernel


CHEATS = {
    "remembers by address": (lambda: remembers(lambda query: query.data_ptr()), "max error"),
    "remembers by shape": (lambda: remembers(lambda query: query.shape), "max error"),
    "zeros in the timed calls": (lambda: gives_up_after(1 + WARM_UPS, zeros), "max error"),
    "zeros in the last call": (lambda: gives_up_after(WARM_UPS + CALLS, zeros), "max error"),
    "leaves memory unwritten": (lambda: gives_up_after(1 + WARM_UPS, whatever_is_there), "out: "),
    "another type when timed": (lambda: gives_up_after(1 + WARM_UPS, wider), "expected out [4, 4, 64] float32, as"),
    "a thread computes later": (
        lambda: gives_up_after(1 + WARM_UPS, later),
        "out: ",
    ),
    "the same memory": (shares_memory, "return the same memory"),
    "the output of the call before": (takes_back, "call 0 was still writing when the clock stopped, or a later call"),
    "a class of tensors": (lambda: lazy, "expected a plain tensor, got Lazy"),
}


@pytest.mark.parametrize(("make", "says"), CHEATS.values(), ids=list(CHEATS))
def test_a_cheat_is_refused(make, says):
    report = time_kernel(ONE_SIZE(make()), "chunked_prefill", calls=CALLS, only=["decode"])
    [finding] = report.findings
    assert (finding.outcome, report.times) == ("wrong", {})
    assert says in finding.detail


def test_an_honest_kernel_is_timed(monkeypatch):
    """By the clock of the kit, whatever a kernel makes of those of Python."""

    def sleeps(query, key_cache, value_cache, seq_lens, block_table):
        monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
        time.sleep(0.01)
        return attend(query, key_cache, value_cache, seq_lens, block_table)

    report = time_kernel(ONE_SIZE(sleeps), "chunked_prefill", calls=CALLS)
    assert [(x.property, x.outcome) for x in report.findings] == [("decode", "honoured")]  # it takes no prompts
    times = report.times["decode"]
    assert times["held"] == times["calls"] == len(times["samples"]) == CALLS
    assert 0.01 < times["seconds"]["low"] <= times["seconds"]["median"] <= times["seconds"]["high"]
    assert times["reference"]["median"] > 0
    assert f"{CALLS} of {CALLS} outputs held to it" in as_text(report)
    case = ElementTree.fromstring(as_junit(report)).find("testcase")
    assert float(case.get("time")) == times["seconds"]["median"]


def test_what_is_no_attention_is_not_timed():
    with pytest.raises(BadKernelError, match="--time: expected a path of attention"):
        time_kernel("refattn.merge")


def test_a_refusal_is_none_of_a_cheat():
    def kernel(query, key_cache, value_cache, seq_lens, block_table):
        raise NotImplementedError("decodes only on Tuesdays")

    [finding] = time_kernel(ONE_SIZE(kernel), "chunked_prefill", only=["decode"]).findings
    assert (finding.outcome, finding.detail) == ("refused", "decodes only on Tuesdays")


STRANGER = """
import os, torch
from refattn import varlen
from refattn.batch import Batch
from twinattn.kit import claims

count = 0

@claims(dtypes=(torch.float32,), heads=((2, 1),), head_sizes=((64, 64),))
def honest(query, key, value, batch, causal=True):
    return varlen.attention(query, key, value, varlen.plan(batch, causal=causal))

@claims(dtypes=(torch.float32,), heads=((2, 1),), head_sizes=((64, 64),))
def dies(query, key, value, batch, causal=True):
    global count
    count += 1
    return os._exit(9) if count == 7 else honest(query, key, value, batch, causal)
"""


def test_in_a_process_of_its_own(tmp_path, capsys, monkeypatch):
    """The command times each workload, or says in which one the process of the kernel ended; and how far it is."""
    monkeypatch.setattr(progress, "REPEAT", 0.01)
    (tmp_path / "timed_stranger.py").write_text(STRANGER)
    asked = ["--path=varlen", "--time", "--examples=5", f"--json={tmp_path / 'a.json'}"]
    assert command.main([f"{tmp_path / 'timed_stranger.py'}:honest", *asked]) == 0
    written = json.loads((tmp_path / "a.json").read_text())
    assert list(written["times"]) == ["decode", "prompt", "mixed"]
    printed, said = capsys.readouterr()
    assert "5 of 5 outputs held to it" in printed and "calls timed" not in printed
    assert ": comparing the outputs of prompt with the reference, " in said and re.search(r": \d+ calls timed, ", said)
    assert command.main([f"{tmp_path / 'timed_stranger.py'}:dies", *asked]) == 1
    outcomes = [x["outcome"] for x in json.loads((tmp_path / "a.json").read_text())["findings"]]
    assert outcomes == ["crashed", "not reached", "not reached"]


def test_what_does_not_go_with_it(capsys):
    assert command.main(["refattn.varlen", "--time", "--property=answer"]) == 2
    assert "--time: expected one kernel" in capsys.readouterr().err
