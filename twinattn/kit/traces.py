"""Shapes of real servers, as FlashInfer-Bench records them, as batches of the kit.

A data set has `definitions/<op_type>/<name>.json`, the constant axes and the inputs of an operation, and
`workloads/<op_type>/<name>.jsonl`, a line per call. A line names its definition; its lengths are tensors in files of
safetensors, whose paths begin at the folder of the data set. Numbers of queries, keys and values are drawn anew here.
"""

import json
import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from twinattn.kit.example import Example

HEADER = 8  # bytes of a file of safetensors that say how long its description is
INTEGERS = {"I32": torch.int32, "I64": torch.int64}
TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PATH_OF = {"ckv_cache": "mla", "k_cache": "chunked_prefill", "k": "varlen"}  # by an input that only it has
Values = Mapping[str, Any]


def read(file: Path, path: str) -> tuple[dict[str, Example], torch.dtype]:
    """Read the workloads of a file of FlashInfer-Bench.

    Args:
        file: one line of JSON per workload or trace, in the folder of a data set, beside `definitions`.
        path: which path is to compute them.

    Returns:
        The batches by uuid, and the type of their queries.

    Raises:
        ValueError: naming the line, and what is missing or is no attention of this path.
    """
    if not file.is_file():
        raise ValueError(f"--trace: expected a file, got {str(file)!r}")
    root = next((folder for folder in file.resolve().parents if (folder / "definitions").is_dir()), None)
    if root is None:
        raise ValueError(f"--trace: expected a folder `definitions` beside or above {file}, there is none")
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
            last = _tensor(root, workload, "kv_last_page_len")[: len(pages)]  # some are as long as the ends
        keys = [(n - 1) * page + rest if n else 0 for n, rest in zip(pages, last, strict=True)]
    queries = _lengths(root, workload, "qo_indptr") if "qo_indptr" in inputs else [1] * len(keys)
    lens = tuple(zip(queries, keys, strict=True))
    scale = workload["inputs"].get("sm_scale", {"type": "random"})
    usual = None if path == "mla" else sizes["head_size"] ** -0.5  # over latents none is
    if scale["type"] == "scalar" and (usual is None or not math.isclose(scale["value"], usual, rel_tol=1e-6)):
        return Example(path, lens, **sizes, options={"softmax_scale": scale["value"]})
    return Example(path, lens, **sizes)


def _lengths(root: Path, workload: Values, name: str) -> list[int]:
    """Return what lies between the ends of each sequence and the one before."""
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
