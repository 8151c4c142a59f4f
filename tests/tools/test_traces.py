"""Workloads of FlashInfer-Bench: read as batches of the kit, replayed, and refused where they say too little."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from twinattn import bench
from twinattn.bench.traced import rows_of_trace
from twinattn.kit import __main__ as command
from twinattn.kit import traces
from twinattn.kit.example import Example
from twinattn.kit.reference import expected
from twinattn.kit.timed import time_kernel

GQA = dict(num_qo_heads=4, num_kv_heads=2, head_dim=64)
MLA = dict(num_qo_heads=4, head_dim_ckv=64, head_dim_kpe=32)
PAGED = {"q": "bfloat16", "k_cache": "bfloat16", "v_cache": "bfloat16"}
RAGGED = {"q": "float16", "k": "float16", "v": "float16"}
LATENTS = {"q_nope": "bfloat16", "q_pe": "bfloat16", "ckv_cache": "bfloat16", "kpe_cache": "bfloat16"}
DECODE, PROMPT = {"kv_indptr": [0, 7, 7, 12]}, {"qo_indptr": [0, 3, 3, 5], "kv_indptr": [0, 7, 7, 12]}
LAST = {"kv_last_page_len": [5, 0, 16, 0]}  # some are padded

KNOWN = {  # constant axes, inputs, lengths, scale, and the batch
    "gqa_paged_decode_h4_kv2_d64_ps1": (
        (GQA | dict(page_size=1), PAGED, DECODE, 0.125),
        Example("chunked_prefill", ((1, 7), (1, 0), (1, 5)), (4, 2), 64, 0, 1),
    ),
    "gqa_paged_prefill_causal_h4_kv2_d64_ps16": (
        (GQA | dict(page_size=16), PAGED, PROMPT | LAST, 0.25),
        Example("chunked_prefill", ((3, 101), (0, 0), (2, 80)), (4, 2), 64, 0, 16, options={"softmax_scale": 0.25}),
    ),
    "gqa_ragged_prefill_causal_h4_kv2_d64": (
        (GQA, RAGGED, PROMPT, 0.125),
        Example("varlen", ((3, 7), (0, 0), (2, 5)), (4, 2), 64),
    ),
    "mla_paged_decode_h4_ckv64_kpe32_ps1": (
        (MLA | dict(page_size=1), LATENTS, DECODE, 0.07),
        Example("mla", ((1, 7), (1, 0), (1, 5)), (4, 1), 96, 64, 1, options={"softmax_scale": 0.07}),
    ),
}


def write(folder, name, const, inputs, lengths, scale):
    """Write a definition and a workload as FlashInfer-Bench has them, and return the file of the workload."""
    op_type = "_".join(name.split("_")[:2])
    for kind in ("definitions", "workloads", "blob"):
        (folder / kind / op_type).mkdir(parents=True, exist_ok=True)
    axes = {axis: {"type": "const", "value": size} for axis, size in const.items()}
    specs = {word: {"shape": ["total_q"], "dtype": dtype} for word, dtype in inputs.items()}
    specs |= {word: {"shape": ["len_indptr"], "dtype": "int32"} for word in lengths}
    definition = dict(name=name, op_type=op_type, axes=axes, inputs=specs, outputs={}, reference="def run(): ...")
    (folder / "definitions" / op_type / f"{name}.json").write_text(json.dumps(definition))
    blob = f"./blob/{op_type}/{name}.safetensors"
    save_file({word: torch.tensor(x, dtype=torch.int32) for word, x in lengths.items()}, folder / blob)
    given = {word: {"type": "random"} for word in inputs}
    given |= {word: {"type": "safetensors", "path": blob, "tensor_key": word} for word in lengths}
    given["sm_scale"] = {"type": "scalar", "value": scale}
    workload = dict(uuid="8f2c", axes={"len_indptr": 4}, inputs=given)
    file = folder / "workloads" / op_type / f"{name}.jsonl"
    file.write_text(json.dumps(dict(definition=name, workload=workload, solution=None, evaluation=None)) + "\n")
    return file


@pytest.mark.parametrize("name", KNOWN)
def test_a_workload_is_a_batch(name, tmp_path):
    (const, inputs, lengths, scale), batch = KNOWN[name]
    file = write(tmp_path, name, const, inputs, lengths, scale)
    dtype = torch.float16 if batch.path == "varlen" else torch.bfloat16
    assert traces.read(file, batch.path) == ({"8f2c": batch}, dtype)


SMALL = """
import torch
from refattn import varlen
from twinattn.kit import claims

@claims(dtypes=(torch.float32,), heads=((2, 1),), head_sizes=((64, 64),))
def attend(query, key, value, batch, causal=True, softmax_scale=None):
    return varlen.attention(query, key, value, varlen.plan(batch, causal=causal))
"""


WRONG = {
    "another path": ({}, "mla", "expected a definition for --path mla, got chunked_prefill"),
    "drawn lengths": ({"kv_indptr": None}, "chunked_prefill", "line 1: expected 'kv_indptr', there is none"),
    "falling": ({"kv_indptr": [0, 7, 5]}, "chunked_prefill", "expected numbers that begin with 0 and do not fall"),
}


@pytest.mark.parametrize(("lengths", "path", "says"), WRONG.values(), ids=list(WRONG))
def test_what_says_too_little_is_refused(lengths, path, says, tmp_path):
    name = "gqa_paged_decode_h4_kv2_d64_ps1"
    const, inputs, known, scale = KNOWN[name][0]
    lengths = {word: x for word, x in (known | lengths).items() if x is not None}
    with pytest.raises(ValueError, match=says):
        traces.read(write(tmp_path, name, const, inputs, lengths, scale), path)


def test_pages_say_how_full_the_last_one_is(tmp_path):
    name = "gqa_paged_decode_h4_kv2_d64_ps16"
    file = write(tmp_path, name, GQA | dict(page_size=16), PAGED, DECODE, 0.125)
    with pytest.raises(ValueError, match="expected 'kv_last_page_len', there is none"):
        traces.read(file, "chunked_prefill")


def test_without_a_causal_name(tmp_path):
    file = write(tmp_path, "gqa_ragged_prefill_h4_kv2_d64", GQA, RAGGED, PROMPT, 0.125)
    with pytest.raises(ValueError, match="expected causal attention, by its name"):
        traces.read(file, "varlen")


def test_without_definitions(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("{}\n")
    with pytest.raises(ValueError, match="expected a folder `definitions` beside or above"):
        traces.read(file, "varlen")


WRITTEN = {
    "paged": Example("chunked_prefill", ((3, 40), (1, 16), (2, 17)), (4, 2), 64, 0, 16, seed=1),
    "ragged": Example("varlen", ((3, 7), (0, 0), (2, 5)), (4, 2), 64),
    "latents": Example("mla", ((1, 20), (2, 33)), (4, 1), 96, 64, 16, options={"softmax_scale": 0.07}),
}


@pytest.mark.parametrize("batch", WRITTEN.values(), ids=list(WRITTEN))
def test_what_is_written_is_read_and_its_reference_is_right(batch, tmp_path):
    [file] = traces.write(tmp_path, {"one": batch}, torch.float32)
    trace = json.loads(file.read_text())
    read, dtype = traces.read(file, batch.path)
    assert ([replace(x, seed=batch.seed) for x in read.values()], dtype) == ([batch], torch.float32)
    definition = json.loads(next(tmp_path.rglob(f"definitions/*/{trace['definition']}.json")).read_text())
    for spec in (definition["inputs"] | definition["outputs"]).values():
        assert set(spec["shape"] or ()) <= set(definition["axes"])
    variable = {axis for axis, x in definition["axes"].items() if x["type"] == "var"}
    assert set(trace["workload"]["axes"]) == variable
    assert set(trace["workload"]["inputs"]) == set(definition["inputs"])

    arguments = batch.tensors(torch.float32)
    given = {"sm_scale": trace["workload"]["inputs"]["sm_scale"]["value"]}
    [blob] = tmp_path.rglob("*.safetensors")
    given |= load_file(blob)
    if batch.path == "mla":
        rank, size = batch.value_size, batch.head_size
        for words, x in ((("q_nope", "q_pe"), arguments["query"]), (("ckv_cache", "kpe_cache"), arguments["cache"])):
            given |= dict(zip(words, (x[..., :rank], x[..., rank:size]), strict=True))
    else:
        names = {"query": "q", "key": "k", "value": "v", "key_cache": "k_cache", "value_cache": "v_cache"}
        given |= {its: arguments[ours] for ours, its in names.items() if ours in arguments}
    code = {}
    exec(definition["reference"], code)
    wide, _ = expected(batch, arguments)
    torch.testing.assert_close(code["run"](**given).double(), wide["out"].double(), rtol=1e-4, atol=1e-5)


def test_what_it_has_no_words_for_is_not_written(tmp_path):
    batch = Example("chunked_prefill", ((1, 5),), options={"window_size": (3, 0)})
    with pytest.raises(ValueError, match="with no option but softmax_scale"):
        traces.write(tmp_path, {"one": batch}, torch.float32)
    assert not list(tmp_path.iterdir())


def test_it_is_replayed(tmp_path, capsys):
    """Timed, and checked, in the type that it says; only with --time."""
    (const, inputs, lengths, scale), _ = KNOWN["gqa_ragged_prefill_causal_h4_kv2_d64"]
    file = write(tmp_path, "gqa_ragged_prefill_causal_h4_kv2_d64", const, inputs, lengths, scale)
    report = time_kernel("refattn.varlen", calls=3, trace=file)
    assert [(x.property, x.outcome, x.dtype) for x in report.findings] == [("8f2c", "honoured", "float16")]
    assert command.main(["refattn.varlen", f"--trace={file}"]) == 2
    assert "--trace: expected --time" in capsys.readouterr().err


def test_what_the_command_times_it_writes(tmp_path, capsys):
    """And times what it has written."""
    (tmp_path / "small.py").write_text(SMALL)
    asked = [f"{tmp_path / 'small.py'}:attend", "--path=varlen", "--time", "--examples=2"]
    assert command.main([*asked, f"--write-trace={tmp_path / 'set'}"]) == 0
    [file] = (tmp_path / "set").rglob("*.jsonl")
    assert len(file.read_text().splitlines()) == 3
    assert command.main([*asked, f"--trace={file}"]) == 0
    assert capsys.readouterr().out.count("2 of 2 outputs held to it") == 6


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("name", KNOWN)
def test_the_benchmark_takes_a_workload_as_a_row(name, device_type, tmp_path):
    """With its lengths, its sizes and its scale; a peer that only takes sequences of one length is left out."""
    (const, inputs, lengths, scale), batch = KNOWN[name]
    (row,) = rows_of_trace(write(tmp_path, name, const, inputs, lengths, scale), device_type)
    assert str(row).startswith(f"{batch.path}/") and str(row).endswith("-8f2c")
    taken = "lens", "heads", "head_size", "value_size", "block_size"
    assert [getattr(row.work, field) for field in taken] == [getattr(batch, field) for field in taken]
    assert row.work.softmax_scale == batch.options.get("softmax_scale")
    names = [contender.name for contender in row.contenders]
    assert names[0] == "fastattn" and ("refattn" in names) == (device_type == "cpu")
    assert not any("ATen" in name for name in names)


def test_the_benchmark_measures_a_file_of_workloads(tmp_path):
    lens = {"even": ((1, 48), (1, 48)), "ragged": ((1, 48), (1, 7))}
    batches = {name: Example("chunked_prefill", x, (4, 2), 16, 0, 16) for name, x in lens.items()}
    (file,) = traces.write(tmp_path, batches, torch.float32)
    records = bench.run(trace=file, quick=True)
    for record, count in zip(records, (3, 2), strict=True):
        assert len(record["contenders"]) == count and all(x["median"] > 0 for x in record["contenders"])
    with pytest.raises(ValueError, match="--trace: expected a file, got"):
        bench.run(trace=tmp_path / "none.jsonl", quick=True)
