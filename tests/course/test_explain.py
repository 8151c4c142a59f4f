"""A folded kernel computes what the kernel computes, bit by bit, and has no more in it than its call needs."""

import importlib.util
import re
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes for Linux only")

from fastattn.kernels.triton.launch import INTERPRETED
from refattn.keys import Latents, Pages, QuantizedPages, Rows
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.scales import Fp8Scales, Int8Scales
from refattn.steps import make_batch
from tests.helpers.pages import ROOT
from twinattn import cli
from twinattn.course import explain
from twinattn.course.folded import fold_kernel

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the command prepares its calls for the interpreter")
HEADER = """
import triton
import triton.language as tl
"""
LENS = {"decodes": ([1, 1], [6, 9]), "prompts": ([3, 5], [7, 5])}


def small(name: str) -> explain.Call:
    """Return a call of the same kind, small, and with numbers in it."""
    torch.manual_seed(0)
    query_lens, seq_lens = LENS["prompts" if name in ("prefill", "window", "rows", "interval") else "decodes"]
    batch = make_batch(query_lens, seq_lens, [[3, 1, -1], [2, 0, 4]])
    plan = Plan(batch, 4, True, (2, 0) if name == "window" else (-1, -1))
    options = AttentionOptions(softcap=3.0, sinks=torch.randn(4)) if name == "sinks" else AttentionOptions()
    query, pools = torch.randn(sum(query_lens) + 1, 4, 16), torch.randn(2, 5, 4, 2, 16)
    keys = Pages(*pools)
    if name == "int8":
        scales = Int8Scales(torch.rand(5, 4, 2), torch.rand(2, 16))
        keys = QuantizedPages(*(50 * pools).to(torch.int8), scales)
    elif name == "fp8":
        keys = QuantizedPages(*pools.to(torch.float8_e4m3fn), Fp8Scales(0.5, 2.0))
    elif name == "mla":
        query, keys = torch.randn(3, 4, 48), Latents(torch.randn(5, 4, 48), 32)
    elif name == "rows":
        keys, plan = Rows(*torch.randn(2, sum(seq_lens), 2, 16)), Plan(batch)
    elif name == "interval":
        last = torch.tensor([4, 5, 3, 0, 1, 2, 3, 4, 0], dtype=torch.int32)
        plan = Plan(batch, 4, False, first_visible=last // 2, last_visible=last)
    return explain.Call(query, keys, plan, options)


def computed(kernel, grid, arguments, given):
    out = arguments["out"]
    for tensor in out:
        tensor.fill_(torch.nan)
    kernel[grid](*(given[name] for name in given))
    return [tensor.clone() for tensor in out]


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("name", [name for name in explain.CALLS if name != "split"])
def test_what_is_folded_computes_the_same(name, tmp_path, monkeypatch):
    kernel, grid, arguments = explain.launch_of(small(name))
    folded = fold_kernel(kernel, arguments)
    functions = [f"@triton.jit\n{each.source()}" for each in reversed(folded.functions)]
    file = tmp_path / f"folded_{name}.py"
    classes = [f"from {each.__module__} import {each.__name__} as {name}" for name, each in folded.classes.items()]
    file.write_text("\n\n".join([HEADER, "\n".join(classes), *functions]))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, module)
    spec.loader.exec_module(module)
    whole = computed(kernel, grid, arguments, arguments)
    parameters = {parameter: arguments[parameter] for parameter in folded.functions[0].parameters}
    part = computed(module.attend, grid, arguments, parameters)
    assert not whole[0].isnan().any()
    assert all(map(torch.equal, whole, part))


@pytest.mark.usefixtures("shapes_unchecked")
def test_only_the_functions_of_the_call_are_left():
    decode, window, latents = map(explain.folded, ("decode", "window", "mla"))
    names = [{function.name for function in kernel.functions} for kernel in (decode, window, latents)]
    assert {"find_in_pages", "load_keys", "visible_in_window", "fill_padding_rows"} <= names[0]
    assert "load_latents" in names[2] and "load_values" not in names[2]
    assert decode.called["mask.look"].fn.__name__ == "look_in_window"
    assert decode.functions[0].num_lines < 36 and len(decode.read) < 22 < decode.num_fields
    source = decode.functions[0].source()
    assert not re.search(r"slopes|sinks|softcap|TILE|\bphase\b|is not None", source)
    assert "mask.left" in set(window.read) and "mask.left" not in decode.read


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("name", explain.CALLS)
def test_the_command_prints_python(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["twinattn", "explain", "--source", name])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and printed.startswith(f"# {name}: ")
    compile(printed, name, "exec")
    assert max(map(len, printed.splitlines())) <= 120
    assert all((ROOT / file).is_file() for file in re.findall(r"^# (fastattn/\S+\.py):\d+$", printed, re.MULTILINE))


def test_another_name_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["twinattn", "explain", "--source", "encode"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2 and "--source: expected one of decode, " in capsys.readouterr().err
