"""The table of rules that says which kernel goes first: each row decides something, and says what it rests on."""

import itertools
import json
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

from fastattn.kernels import NAMES, Problem, order
from fastattn.kernels.order import RULES, Rule

ROOT = Path(__file__).parent.parent.parent
FILE = re.compile(r"docs/results/[\w/-]+\.json")
ROW = re.compile(r"\b(\w+/[\w*-]+)")


def some_problems():
    """List problems of all kinds, some of which no caller asks for."""
    for device, operation in itertools.product(("cpu", "mps", "cuda"), ("attend", "merge")):
        heads = 4 if operation == "attend" else 0
        yield Problem(operation, torch.device(device), torch.bfloat16, keys="pages", num_heads=heads, num_kv_heads=2)
    for query_len, num_seqs in ((1, 1), (8192, 1), (8192, 8)):
        yield Problem("recurrent", torch.device("cuda"), torch.bfloat16, max_query_len=query_len, num_seqs=num_seqs)
    for keys, num_seqs, query_len, (h, hk), head_size, block_size, left, tree, even in itertools.product(
        ("rows", "pages", "quantized", "latents", "packed"),
        (1, 64),
        (1, 8, 16, 2048),
        ((128, 1), (32, 8)),
        (96, 128, 192),
        (1, 16, 128),
        (-1, 9),
        (False, True),
        (False, True),
    ):
        yield Problem(
            "attend",
            torch.device("cuda"),
            torch.bfloat16,
            keys=keys,
            tree=tree,
            num_heads=h,
            num_kv_heads=hk,
            head_size=head_size,
            value_head_size=min(head_size, 128),
            block_size=block_size,
            max_query_len=query_len,
            max_seq_len=8192,
            num_seqs=num_seqs,
            num_tokens=num_seqs * query_len,
            window=(left, 0),
            even=even,
        )


@pytest.fixture
def idle(monkeypatch):
    """Return the names of the rules that decide none of some problems."""
    monkeypatch.setattr(order, "num_sms", lambda device: 132)
    monkeypatch.setattr(order, "capability", lambda device: (9, 0))

    def find(rules: tuple[Rule, ...]) -> set[str]:
        monkeypatch.setattr(order, "RULES", rules)
        return {rule.name for rule in rules} - {order.rule_of(problem).name for problem in some_problems()}

    return find


def test_each_rule_decides_something(idle):
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert not idle(RULES)
    shadowed = RULES[-1]._replace(name="prompts", holds=lambda problem: problem.max_query_len > 1)
    assert idle((*RULES, shadowed)) == {"prompts"}, "a rule that never decides has to be found"


@pytest.mark.parametrize(
    ("roles", "changed"),
    [
        (True, {}),
        (False, dict(max_query_len=128)),  # one tile may hold all
        (False, dict(head_size=128, value_head_size=192)),
        (False, dict(value_head_size=192)),
        (False, dict(aligned=False)),
        (False, dict(softcap=True)),
    ],
    ids=str,
)
def test_which_prompts_of_keys_of_192_are_for_warps_with_roles(roles, changed, monkeypatch):
    monkeypatch.setattr(order, "num_sms", lambda device: 132)
    monkeypatch.setattr(order, "capability", lambda device: (9, 0))
    given = dict(num_heads=32, num_kv_heads=32, head_size=192, value_head_size=128, max_query_len=129, max_seq_len=8192)
    given |= dict(keys="rows", num_seqs=64, num_tokens=64 * 129) | changed
    rule = order.rule_of(Problem("attend", torch.device("cuda"), torch.bfloat16, **given))
    assert ("keys of 192" in rule.name) is roles and (rule is RULES[-1]) is not roles


def test_an_explanation_names_the_rule():
    *_, said, chosen = order.explain(Problem("merge", torch.device("cpu"), torch.float32)).splitlines()
    assert (said, chosen) == ("order: native, cpu, torch, triton, by the rule for a CPU", "chosen: torch")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_names_kernels_and_what_it_rests_on(rule):
    """A result file that is committed, and the rows in it; or it says that there is none."""
    assert {*rule.kernels} <= {*NAMES} and len({*rule.kernels}) == len(rule.kernels) > 0
    files = FILE.findall(rule.measured)
    assert files or rule.measured.startswith("not measured")
    for file in files:
        runs = json.loads((ROOT / file).read_text())["runs"]
        rows = {f"{row['path']}/{row['workload']}" for run in runs for row in run["rows"]}
        named = ROW.findall(FILE.sub("", rule.measured))
        assert named, "which rows?"
        assert all(any(fnmatch(row, one) for row in rows) for one in named), named
