"""Workloads of FlashInfer-Bench: read as batches of the kit, replayed, and refused where they say too little."""

import json

import pytest
import torch
from safetensors.torch import save_file

from twinattn.kit import __main__ as command
from twinattn.kit import traces
from twinattn.kit.example import Example
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


def test_it_is_replayed(tmp_path, capsys):
    """Timed, and checked, in the type that it says; only with --time."""
    (const, inputs, lengths, scale), _ = KNOWN["gqa_ragged_prefill_causal_h4_kv2_d64"]
    file = write(tmp_path, "gqa_ragged_prefill_causal_h4_kv2_d64", const, inputs, lengths, scale)
    report = time_kernel("refattn.varlen", calls=3, trace=file)
    assert [(x.property, x.outcome, x.dtype) for x in report.findings] == [("8f2c", "honoured", "float16")]
    assert command.main(["refattn.varlen", f"--trace={file}"]) == 2
    assert "--trace: expected --time" in capsys.readouterr().err
