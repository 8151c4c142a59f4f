"""What vLLM's attention interface is, read from its sources: signatures, how it calls a backend, what it reads.

    python -m tests.helpers.vllm_interface FOLDER      FOLDER is the package `vllm`, installed or unpacked from a wheel

writes the entry of that version into `vllm_interface.json`. Sources are parsed, never imported, so that a wheel for
another machine will do. The table holds names, orders and counts alone:

    signatures      of the classes and functions that the backend inherits, defines again or calls
    fields          of a step's metadata
    members         of the enumerations
    calls           of a backend's methods: how many arguments by position, which by name, and in which files
    extras          names that models and layers add to the arguments of a layer's attention
    reads           attributes that vLLM's layers read from a layer's attention and from a step's metadata
"""

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_suffix(".json")
BACKEND, LAYERS = "v1/attention/backend.py", "model_executor/layers/attention"
MLA, RANKS = f"{LAYERS}/mla_attention.py", "distributed/parallel_state.py"
CLASSES = ("AttentionBackend", "AttentionMetadataBuilder", "AttentionImplBase", "AttentionImpl", "MLAAttentionImpl")
ELSEWHERE = {  # name in the table: file, and class if it is a method
    "AttentionImpl.do_kv_cache_update": ("v1/attention/backends/flash_attn.py", "FlashAttentionImpl"),
    "MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size": (MLA, "MLACommonMetadataBuilder"),
    "split_kv_b_proj": (MLA, None),
    "split_decodes_and_prefills": ("v1/attention/backends/utils.py", None),
    "register_backend": ("v1/attention/backends/registry.py", None),
    "get_dcp_world_size_and_rank": (RANKS, None),
    "get_dcp_group": (RANKS, None),
    "GroupCoordinator.all_gather": (RANKS, "GroupCoordinator"),
    "GroupCoordinator.reduce_scatter": (RANKS, "GroupCoordinator"),
}
RECEIVERS = {  # what stands before the dot, or is called, where vLLM calls a backend
    r"(.*\.)?(self\.|attn_layer\.|layer\.|attn\.)impl": "impl",
    r"(.*\.)?get_metadata_builder\(.*\)|(.*\.)?(attn_)?builder|.*attn_metadata_builder": "AttentionMetadataBuilder",
    r"(.*\.)?(attn_)?backend|.*attn_backends\[0\]": "AttentionBackend",
}
CONSTRUCTORS = {r"impl_cls": "impl", r"builder_cls|.*\.get_builder_cls\(\)": "AttentionMetadataBuilder"}
# Where vLLM calls whichever backend is chosen, and models that bring a backend of their own, which they call.
CALLERS = (f"{LAYERS}/", "v1/worker/", "v1/spec_decode/", "model_executor/models/", "models/", "compilation/")
WITH_OWN = (
    "models/minimax_m3/",
    "model_executor/models/extract_hidden_states.py",
    "v1/spec_decode/extract_hidden_states.py",
)
WORDS = re.compile(r"impl\b|impl_cls|builder|backend|\bAttention\(")


def read(folder: Path) -> dict[str, Any]:
    """Return the interface of the vLLM in a folder."""
    trees = {name: ast.parse((folder / name).read_text()) for name in {BACKEND, *(x for x, _ in ELSEWHERE.values())}}
    signatures, names = {}, {}
    for kind in (_find(trees[BACKEND], name) for name in CLASSES):
        names[kind.name] = sorted(_bound(kind))
        for method in (x for x in kind.body if isinstance(x, ast.FunctionDef)):
            signatures[f"{kind.name}.{method.name}"] = _signature(method)
    for name, (file, kind) in ELSEWHERE.items():
        body = trees[file] if kind is None else _find(trees[file], kind)
        signatures[name] = _signature(_find(body, name.rpartition(".")[2]))
    calls, extras, reads = _uses(folder, {name.rpartition(".")[2] for name in signatures})
    enumerations = ("AttentionType", "AttentionCGSupport")
    return dict(
        signatures=signatures,
        names=names,
        fields=[x.target.id for x in _find(trees[BACKEND], "CommonAttentionMetadata").body if _is_field(x)],
        members={
            name: [x.targets[0].id for x in _find(trees[BACKEND], name).body if isinstance(x, ast.Assign)]
            for name in enumerations
        },
        calls=calls,
        extras=extras,
        reads=reads,
    )


def version_of(folder: Path) -> str:
    """Return the version in a folder, without what stands past a plus."""
    text = (folder / "_version.py").read_text()
    return re.search(r"version = '([\d.]+)", text)[1]


def stored() -> dict[str, dict[str, Any]]:
    """Return the table: interfaces by version, oldest first."""
    return json.loads(TABLE.read_text())


def signature(text: str) -> inspect.Signature:
    """Return a signature of the table as Python's; each default is its text."""
    arguments = ast.parse(f"def f{text}: pass").body[0].args
    kinds = inspect.Parameter
    plain = [(x.arg, kinds.POSITIONAL_OR_KEYWORD) for x in arguments.args]
    defaults = [inspect.Parameter.empty] * (len(plain) - len(arguments.defaults)) + [
        *map(ast.unparse, arguments.defaults)
    ]
    found = [kinds(name, kind, default=x) for (name, kind), x in zip(plain, defaults, strict=True)]
    if arguments.vararg:
        found.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for x, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(kinds(x.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else ast.unparse(default)))
    if arguments.kwarg:
        found.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(found)


def _find(body: Any, name: str) -> Any:
    return next(x for x in body.body if getattr(x, "name", None) == name)


def _is_field(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def _bound(kind: ast.ClassDef) -> set[str]:
    """Return the attributes that a class has or declares, those that its `__new__` and `__init__` set included."""
    found = set()
    for node in kind.body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
            if node.name in ("__new__", "__init__"):
                inner = (x for x in ast.walk(node) if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store))
                found |= {x.attr for x in inner if ast.unparse(x.value) == "self"}
        elif _is_field(node):
            found.add(node.target.id)
        elif isinstance(node, ast.Assign):
            found |= {x.id for x in node.targets if isinstance(x, ast.Name)}
    return found


def _signature(function: ast.FunctionDef) -> str:
    """Return the arguments of a function with their defaults, without types."""
    arguments = function.args
    for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if one is not None:
            one.annotation = None
    return f"({ast.unparse(arguments)})"


def _uses(folder: Path, methods: set[str]) -> tuple[list[dict[str, Any]], list[str], dict[str, list[str]]]:
    """Return the calls of a backend's methods, the names that a layer adds, and the attributes that are read."""
    calls: dict[tuple[Any, ...], set[str]] = {}
    extras, given, reads = set(), set(), {"impl": set(), "metadata": set()}
    for path in sorted(folder.rglob("*.py")):
        file = path.relative_to(folder).as_posix()
        text = path.read_text() if file == BACKEND or file.startswith(CALLERS) else ""
        if file.startswith(WITH_OWN) or not WORDS.search(text):
            continue
        with_layers = "class Attention(" not in text  # and not another of that name
        for where, node in _walk(ast.parse(text), ""):
            if isinstance(node, ast.Call):
                target = _target(node, file, where, methods)
                names = [x.arg for x in node.keywords]
                if target:
                    stars = None in names or any(isinstance(x, ast.Starred) for x in node.args)
                    key = (target, len(node.args), tuple(x for x in names if x), stars)
                    calls.setdefault(key, set()).add(file)
                if with_layers and ast.unparse(node.func) == "Attention":
                    given |= {x for x in names if x}
            if file == f"{LAYERS}/attention.py":
                code = ast.unparse(node) if isinstance(node, ast.Subscript | ast.Call) else ""
                extras |= set(re.findall(r"^extra_impl_args(?:\[|\.setdefault\()'(\w+)'", code))
                if isinstance(node, ast.FunctionDef) and where == "Attention.__init__":
                    taken = {x.arg for x in node.args.args}
            if file in (MLA, f"{LAYERS}/attention.py") and isinstance(node, ast.Attribute):
                _read(node, where, reads)
    listed = [
        dict(to=to, positional=count, names=list(names), stars=stars, files=sorted(files))
        for (to, count, names, stars), files in sorted(calls.items())
    ]
    return listed, sorted(extras | given - taken), {kind: sorted(names) for kind, names in reads.items()}


def _walk(node: ast.AST, where: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield each node with the class and the function around it."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        where = f"{where}.{node.name}".lstrip(".")
    yield where, node
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, where)


def _target(call: ast.Call, file: str, where: str, methods: set[str]) -> str | None:
    """Return which method of a backend is called, as `class.method`; None if none is."""
    function, hint = call.func, f"{file} {where} {ast.unparse(call)}"
    if not isinstance(function, ast.Attribute):
        return _named(CONSTRUCTORS, ast.unparse(function), hint, "__init__")
    receiver, method = ast.unparse(function.value), function.attr
    if method not in methods:
        return None
    if file == BACKEND and receiver in ("self", "cls"):
        return f"{where.split('.')[0]}.{method}" if where.split(".")[0] in CLASSES else None
    if file.startswith(LAYERS) and receiver == "super()" and method == "build":
        return "AttentionMetadataBuilder.build"
    return _named(RECEIVERS, receiver, hint, method)


def _named(rules: dict[str, str], text: str, hint: str, method: str) -> str | None:
    """Return `class.method` by the rule that a text fits; a layer over latents shows in where and how it calls."""
    kind = next((kind for rule, kind in rules.items() if re.fullmatch(rule, text)), None)
    if kind == "impl":
        kind = "MLAAttentionImpl" if re.search("mla|deepseek|forward_mqa", hint, re.I) else "AttentionImpl"
    return kind and f"{kind}.{method}"


def _read(node: ast.Attribute, where: str, reads: dict[str, set[str]]) -> None:
    """Note an attribute of a layer's attention, or of a step's metadata, that a layer of vLLM reads."""
    text = ast.unparse(node)
    if where.startswith(("MLACommon", "_")) or not re.fullmatch(r"[\w.]+", text):
        return
    if found := re.fullmatch(r"(?:self|attn_layer)\.impl\.(\w+)", text):
        reads["impl"].add(found[1])
    if found := re.fullmatch(r"attn_metadata\.([\w.]+)", text):
        reads["metadata"].add(found[1])


def _lines(value: Any, indent: str, depth: int) -> str:
    """Return JSON with an item per line, down to a depth; lists of names stand in one line."""
    items = list(value.items() if isinstance(value, dict) else ((None, x) for x in value)) if depth else []
    if not items or isinstance(items[0][1], str) and isinstance(value, list):
        return json.dumps(value)
    inner = f"{indent} "
    made = [("" if k is None else f"{json.dumps(k)}: ") + _lines(x, inner, depth - 1) for k, x in items]
    ends = "{}" if isinstance(value, dict) else "[]"
    return f"{ends[0]}\n{inner}" + f",\n{inner}".join(made) + f"\n{indent}{ends[1]}"


def main(folder: Path) -> None:
    """Write the entry of the vLLM in a folder."""
    table = (stored() if TABLE.exists() else {}) | {version_of(folder): read(folder)}
    oldest_first = dict(sorted(table.items(), key=lambda x: [int(part) for part in x[0].split(".")]))
    TABLE.write_text(_lines(oldest_first, "", 3) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
