"""Read and write data sets of FlashInfer-Bench, shapes of calls recorded from servers, as batches of the kit.

A data set has `definitions/<op_type>/<name>.json`, the constant axes and the inputs of an operation, and
`workloads/<op_type>/<name>.jsonl`, a line per call. A line names its definition; its lengths are tensors in safetensors
files, with paths relative to the folder of the data set. The elements of queries, keys and values are drawn anew.
"""

import json
import math
import uuid
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from twinattn.kit.cases import build
from twinattn.kit.example import Example

HEADER = 8  # bytes of a safetensors file that hold the length of its JSON header
INTEGERS = {"I32": torch.int32, "I64": torch.int64}
TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PATH_OF = {"ckv_cache": "mla", "k_cache": "chunked_prefill", "k": "varlen"}  # by an input that only this path has
Values = Mapping[str, Any]
REFERENCE = """import torch


def run({inputs}):
    out = torch.zeros_like({query})
    for b in range(len(kv_indptr) - 1):
        first, last = qo_indptr[b : b + 2].tolist()
        begin, end = kv_indptr[b : b + 2].tolist()
{rows}
        rows, s, n = {queries}[first:last].float(), len(key), last - first
        group = rows.shape[1] // key.shape[1]
        key, value = (x.float().repeat_interleave(group, dim=1) for x in (key, value))
        scores = torch.einsum("thd,shd->hts", rows, key) * sm_scale
        at = torch.arange(s - n, s, device=out.device)[:, None]
        sees = torch.arange(s, device=out.device) <= at
        weights = scores.masked_fill(~sees, -torch.inf).softmax(-1).nan_to_num(0.0)
        out[first:last] = torch.einsum("hts,shd->thd", weights, value).to(out.dtype)
    return out
"""
PAGES = """        pages = kv_indices[begin:end].long()
        length = (len(pages) - 1) * {pool}.shape[1] + int(kv_last_page_len[b]) if len(pages) else 0
"""
ROWS = {  # how a reference finds the keys and the values of a sequence, [s, hk, d]
    "varlen": "        key, value = k[begin:end], v[begin:end]",
    "chunked_prefill": PAGES.format(pool="k_cache")
    + "        key, value = (x[pages].flatten(0, 1)[:length] for x in (k_cache, v_cache))",
    "mla": PAGES.format(pool="ckv_cache")
    + "        value, rotary = (x[pages].flatten(0, 1)[:length, None] for x in (ckv_cache, kpe_cache))\n"
    + "        key = torch.cat([value, rotary], dim=-1)",
}
SHAPES: dict[str, dict[str, list[str]]] = {  # the axes of the inputs, the query first
    "varlen": {
        "q": ["total_q", "num_qo_heads", "head_dim"],
        **{word: ["total_kv", "num_kv_heads", "head_dim"] for word in ("k", "v")},
    },
    "chunked_prefill": {
        "q": ["total_q", "num_qo_heads", "head_dim"],
        **{word: ["num_pages", "page_size", "num_kv_heads", "head_dim"] for word in ("k_cache", "v_cache")},
    },
    "mla": {
        "q_nope": ["total_q", "num_qo_heads", "head_dim_ckv"],
        "q_pe": ["total_q", "num_qo_heads", "head_dim_kpe"],
        "ckv_cache": ["num_pages", "page_size", "head_dim_ckv"],
        "kpe_cache": ["num_pages", "page_size", "head_dim_kpe"],
    },
}
OP_TYPES = {"varlen": "gqa_ragged", "chunked_prefill": "gqa_paged", "mla": "mla_paged"}


def read(file: Path, path: str) -> tuple[dict[str, Example], torch.dtype]:
    """Read the workloads of a file of FlashInfer-Bench.

    Args:
        file: one line of JSON per workload or trace, in the folder of a data set, beside `definitions`.
        path: which path computes them.

    Returns:
        The batches by uuid, and the type of their queries.

    Raises:
        ValueError: naming the line, and what is missing or does not belong to this path.
    """
    root = _root(file)
    batches: dict[str, Example] = {}
    dtypes = set()
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if line.strip():
            where = f"--trace: {file.name}, line {number}"
            try:
                trace = json.loads(line)
                definition = _definition(root, trace["definition"])
                dtypes.add(_dtype(definition))
                batches[trace["workload"]["uuid"]] = _batch(root, definition, trace["workload"], path)
            except KeyError as error:
                raise ValueError(f"{where}: expected {error}, there is none") from None
            except (TypeError, AttributeError, OSError, ValueError) as error:
                raise ValueError(f"{where}: {error}") from None
    if len(dtypes) != 1:
        raise ValueError(f"--trace: expected workloads of one type in {file}, got {len(dtypes)}")
    return batches, dtypes.pop()


def path_of(file: Path) -> str:
    """Return which path computes the workloads of a file, by the definition of the first one.

    Raises:
        ValueError: if there is no workload, or no path for it.
    """
    root = _root(file)
    first = next((line for line in file.read_text().splitlines() if line.strip()), None)
    if first is None:
        raise ValueError(f"--trace: expected a workload in {file}, it is empty")
    try:
        definition = _definition(root, json.loads(first)["definition"])
        path = next((path for word, path in PATH_OF.items() if word in definition["inputs"]), None)
    except KeyError as error:
        raise ValueError(f"--trace: {file.name}, line 1: expected {error}, there is none") from None
    except (TypeError, AttributeError, OSError, ValueError) as error:
        raise ValueError(f"--trace: {file.name}, line 1: {error}") from None
    if path is None:
        raise ValueError(f"--trace: {definition['name']}: expected attention over rows, pages or latents")
    return path


def _root(file: Path) -> Path:
    """Return the folder of the data set that a file is in.

    Raises:
        ValueError: if there is no such file, or no such folder.
    """
    if not file.is_file():
        raise ValueError(f"--trace: expected a file, got {str(file)!r}")
    root = next((folder for folder in file.resolve().parents if (folder / "definitions").is_dir()), None)
    if root is None:
        raise ValueError(f"--trace: expected a folder `definitions` beside or above {file}, there is none")
    return root


def _definition(root: Path, name: str) -> Values:
    found = sorted((root / "definitions").rglob(f"{name}.json"))
    if not found:
        raise ValueError(f"expected definitions/**/{name}.json in {root}, there is none")
    definition: Values = json.loads(found[0].read_text())
    return definition


def _dtype(definition: Values) -> torch.dtype:
    said = definition["inputs"]["q_nope" if "q_nope" in definition["inputs"] else "q"]["dtype"]
    if said not in TYPES:
        raise ValueError(f"expected queries of {', '.join(TYPES)}, got {said}")
    return TYPES[said]


def _batch(root: Path, definition: Values, workload: Values, path: str) -> Example:
    """Return the batch of a workload."""
    inputs, name = definition["inputs"], definition["name"]
    its_path = next((of for word, of in PATH_OF.items() if word in inputs), None)
    if its_path != path:
        raise ValueError(f"{name}: expected a definition for --path {path}, got {its_path or 'another operation'}")
    if "qo_indptr" in inputs and "causal" not in name:
        raise ValueError(f"{name}: expected causal attention, by its name")
    const = {axis: x["value"] for axis, x in definition["axes"].items() if x["type"] == "const"}
    sizes: dict[str, Any] = dict(heads=(const["num_qo_heads"], 1))
    if path == "mla":
        rank = const["head_dim_ckv"]
        sizes |= dict(head_size=rank + const["head_dim_kpe"], value_head_size=rank)
    else:
        sizes |= dict(heads=(const["num_qo_heads"], const["num_kv_heads"]), head_size=const["head_dim"])
    pages = _lengths(root, workload, "kv_indptr")
    keys, page = pages, 1
    if path != "varlen":
        page = sizes["block_size"] = const["page_size"]
        last = [1] * len(pages)
        if page > 1:
            last = _tensor(root, workload, "kv_last_page_len")[: len(pages)]  # some have one entry more
        keys = [(n - 1) * page + rest if n else 0 for n, rest in zip(pages, last, strict=True)]
    queries = _lengths(root, workload, "qo_indptr") if "qo_indptr" in inputs else [1] * len(keys)
    lens = tuple(zip(queries, keys, strict=True))
    scale = workload["inputs"].get("sm_scale", {"type": "random"})
    usual = None if path == "mla" else sizes["head_size"] ** -0.5  # latents have no usual scale
    if scale["type"] == "scalar" and (usual is None or not math.isclose(scale["value"], usual, rel_tol=1e-6)):
        return Example(path, lens, **sizes, options={"softmax_scale": scale["value"]})
    return Example(path, lens, **sizes)


def _lengths(root: Path, workload: Values, name: str) -> list[int]:
    """Return the lengths of all sequences from their cumulative ends."""
    ends = _tensor(root, workload, name)
    lengths = [after - before for before, after in pairwise(ends)]
    if not ends or ends[0] != 0 or min(lengths, default=0) < 0:
        raise ValueError(f"{name}: expected numbers that begin with 0 and do not fall, got {ends[:8]}")
    return lengths


def _tensor(root: Path, workload: Values, name: str) -> list[int]:
    """Read the integers of an input of a workload."""
    said = workload["inputs"][name]
    if said["type"] != "safetensors":
        raise ValueError(f"{name}: expected a tensor of safetensors, got {said['type']}: lengths cannot be drawn")
    file, key = root / said["path"], said["tensor_key"]
    data = file.read_bytes()
    begin = HEADER + int.from_bytes(data[:HEADER], "little")
    about = json.loads(data[HEADER:begin])[key]
    if about["dtype"] not in INTEGERS or len(about["shape"]) != 1:
        raise ValueError(f"{name}: expected integers [n], got {about['dtype']} {about['shape']}")
    first, last = about["data_offsets"]
    if first == last:
        return []
    numbers = torch.frombuffer(bytearray(data[begin + first : begin + last]), dtype=INTEGERS[about["dtype"]])
    integers: list[int] = numbers.tolist()
    return integers


def write(folder: Path, batches: Mapping[str, Example], dtype: torch.dtype) -> list[Path]:
    """Write batches as a data set of FlashInfer-Bench: definitions with a reference, workloads, and their lengths.

    Args:
        folder: of the data set; files of the same names are replaced.
        batches: of the paths that `read` reads, without padding, with no option but a softmax scale.
        dtype: of queries, keys and values.

    Returns:
        The files of workloads.

    Raises:
        ValueError: if the format cannot express a batch; nothing is written then.
    """
    for batch in batches.values():
        other = [name for name in batch.options if name != "softmax_scale"]
        is_of_two_sizes = batch.path != "mla" and batch.value_size != batch.head_size
        if batch.path not in OP_TYPES or other or is_of_two_sizes or batch.padding_rows:
            paths = ", ".join(OP_TYPES)
            expected = f"expected a path of {paths}, one head size, no padding, with no option but softmax_scale"
            raise ValueError(f"--write-trace: {expected}, got {batch}")
    lines: dict[Path, list[str]] = {}
    for batch in batches.values():
        definition, op_type = _defined(batch, dtype), OP_TYPES[batch.path]
        name = definition["name"]
        for kind in ("definitions", "workloads", f"blob/workloads/{op_type}"):
            (folder / kind / (name if kind.startswith("blob") else op_type)).mkdir(parents=True, exist_ok=True)
        (folder / "definitions" / op_type / f"{name}.json").write_text(json.dumps(definition, indent=2) + "\n")
        own = str(uuid.uuid4())
        blob = f"./blob/workloads/{op_type}/{name}/{name}_{own}.safetensors"
        tables = _tables(batch)
        _save(folder / blob, tables)
        inputs: dict[str, Any] = {word: {"type": "random"} for word in SHAPES[batch.path]}
        inputs |= {word: {"type": "safetensors", "path": blob, "tensor_key": word} for word in tables}
        usual = 0.1 if batch.path == "mla" else batch.head_size**-0.5  # the kit's default
        inputs["sm_scale"] = {"type": "scalar", "value": batch.options.get("softmax_scale", usual)}
        axes = {"total_q": batch.num_tokens, "len_indptr": len(batch.lens) + 1}
        if batch.path == "varlen":
            axes["total_kv"] = sum(s for _, s in batch.lens)
        else:
            pages = len(tables["kv_indices"])
            axes |= dict(num_pages=max(tables["kv_indices"], default=0) + 1, num_kv_indices=pages)
            axes["batch_size"] = len(batch.lens)
        workload = dict(uuid=own, axes=axes, inputs=inputs)
        line = json.dumps(dict(definition=name, workload=workload, solution=None, evaluation=None))
        lines.setdefault(folder / "workloads" / op_type / f"{name}.jsonl", []).append(line)
    for file, texts in lines.items():
        file.write_text("\n".join(texts) + "\n")
    return list(lines)


def _defined(batch: Example, dtype: torch.dtype) -> dict[str, Any]:
    """Return the definition of a batch."""
    (h, hk), d, page = batch.heads, batch.head_size, batch.block_size
    rank, word = batch.value_size, str(dtype).removeprefix("torch.")
    if batch.path == "mla":
        const = dict(num_qo_heads=h, head_dim_ckv=rank, head_dim_kpe=batch.rope_size, page_size=page)
        name = f"mla_paged_prefill_causal_h{h}_ckv{rank}_kpe{batch.rope_size}_ps{page}"
    else:
        const = dict(num_qo_heads=h, num_kv_heads=hk, head_dim=d)
        const |= {} if batch.path == "varlen" else dict(page_size=page)
        name = f"{OP_TYPES[batch.path]}_prefill_causal_h{h}_kv{hk}_d{d}"
        name += "" if batch.path == "varlen" else f"_ps{page}"
    shapes = dict(SHAPES[batch.path])
    query, *_ = shapes
    ends = ["qo_indptr", "kv_indptr"]
    variable = ["total_q", "len_indptr"]
    inputs: dict[str, Any] = {of: dict(shape=shape, dtype=word) for of, shape in shapes.items()}
    inputs |= {of: dict(shape=["len_indptr"], dtype="int32") for of in ends}
    constraints = ["total_q == qo_indptr[-1].item()"]
    if batch.path == "varlen":
        variable.append("total_kv")
        constraints.append("total_kv == kv_indptr[-1].item()")
    else:
        variable += ["num_pages", "num_kv_indices", "batch_size"]
        constraints.append("num_kv_indices == kv_indptr[-1].item()")
        inputs["kv_indices"] = dict(shape=["num_kv_indices"], dtype="int32")
        inputs["kv_last_page_len"] = dict(shape=["batch_size"], dtype="int32")
    inputs["sm_scale"] = dict(shape=None, dtype="float32")
    queries = "torch.cat([q_nope, q_pe], dim=-1)" if batch.path == "mla" else "q"
    code = REFERENCE.format(inputs=", ".join(inputs), query=query, queries=queries, rows=ROWS[batch.path].rstrip())
    axes: dict[str, Any] = {axis: dict(type="const", value=size) for axis, size in const.items()}
    axes |= {axis: dict(type="var") for axis in variable}
    outputs = {"output": dict(shape=shapes[query], dtype=word)}
    about = dict(name=name, op_type=OP_TYPES[batch.path], axes=axes, inputs=inputs, outputs=outputs)
    return about | dict(constraints=constraints, reference=code)


def _tables(batch: Example) -> dict[str, list[int]]:
    """Return the lengths and the pages of a batch."""
    page = 1 if batch.path == "varlen" else batch.block_size
    pages = [-(-s // page) for _, s in batch.lens]
    ends = {"qo_indptr": [q for q, _ in batch.lens], "kv_indptr": pages}
    tables = {name: [0, *accumulate(lengths)] for name, lengths in ends.items()}
    if batch.path != "varlen":
        drawn = build(replace(batch, heads=(1, 1), head_size=1, value_head_size=1), seed=batch.seed).batch.block_table
        assert drawn is not None
        tables["kv_indices"] = [x for row, n in zip(drawn.tolist(), pages, strict=True) for x in row[:n]]
        tables["kv_last_page_len"] = [
            s - (n - 1) * page if n else 0 for (_, s), n in zip(batch.lens, pages, strict=True)
        ]
    return tables


def _save(file: Path, tables: Mapping[str, list[int]]) -> None:
    """Write tables of int32 as a file of safetensors."""
    about, data = {}, b""
    for name, numbers in tables.items():
        rows = b"".join(x.to_bytes(4, "little", signed=True) for x in numbers)
        about[name] = dict(dtype="I32", shape=[len(numbers)], data_offsets=[len(data), len(data) + len(rows)])
        data += rows
    text = json.dumps(about).encode()
    text += b" " * (-len(text) % HEADER)
    file.write_bytes(len(text).to_bytes(HEADER, "little") + text + data)
