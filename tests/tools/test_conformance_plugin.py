"""The fixture `prove`, in another repository."""

import tomllib
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from twinattn.kit import mistakes

pytest_plugins = ("pytester",)
THEIRS = """
import torch
from twinattn.kit import claims

def right(outs, lses):
    top = torch.stack(list(lses)).amax(0)
    base = torch.where(top == -torch.inf, 0.0, top)
    weights = [torch.exp(x - base) for x in lses]
    total = sum(weights)
    parts = [torch.where((w == 0)[..., None], 0.0, o.float() * w[..., None]) for o, w in zip(outs, weights)]
    out = sum(parts) / torch.where(total == 0, 1.0, total)[..., None]
    return out.to(outs[0].dtype), total.log() + base

def averages(outs, lses):
    return sum(outs) / len(outs), torch.stack(list(lses)).logsumexp(0)

def refuses(outs, lses):
    raise NotImplementedError("no merge on this card")

def test_right(prove):
    prove(right, "merge", examples=2, dtypes=[torch.float32])

def test_averages(prove):
    prove(averages, "merge", examples=2, dtypes=[torch.float32], only=["answer"])

def test_nothing(prove):
    prove(refuses, "merge", examples=2, dtypes=[torch.float32], only=["answer"])

def only_shapes(attention):
    query, ends = torch.zeros(3, 1, 64), torch.tensor([0, 3], dtype=torch.int32)
    assert attention(query, query, query, ends).shape == query.shape

def small(query, key, value, cu_seqlens_q):
    raise NotImplementedError

def test_vacuous(vacuous):
    vacuous(only_shapes, "varlen", like=small, allowed=["causal-top-left"])
"""


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_stranger_proves_a_kernel(pytester, monkeypatch):
    some = [x for x in mistakes.KNOWN if x.__module__ == mistakes.merge.__name__ or x.__name__.startswith("Causal")]
    monkeypatch.setattr(mistakes, "KNOWN", some)
    pytester.makepyfile(THEIRS)
    loaded = [] if entry_points(group="pytest11", name="twinattn") else ["-p", "twinattn.kit.plugin"]
    result = pytester.runpytest_inprocess(*loaded, "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=3)
    result.stdout.fnmatch_lines(["*probably merge-averages*", "*nothing was checked*"])
    result.stdout.fnmatch_lines(["* mistakes in varlen pass this check"])


def test_the_entry_point_is_the_plugin():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (name,) = project["entry-points"]["pytest11"].values()
    assert hasattr(import_module(name), "prove")
