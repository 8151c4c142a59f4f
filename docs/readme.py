"""Write what docs/results and the repository's address say onto pages and into the README, between two marks.

`make readme` runs it.
"""

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import address
import behind

from twinattn.bench import clocks, report, roofline
from twinattn.course.drawing import animation
from twinattn.course.exercises import learner
from twinattn.course.exercises.exercise import Exercise
from twinattn.course.exercises.functions import EXERCISES
from twinattn.engine import demo_model
from twinattn.engine.cache_kinds import KINDS
from twinattn.kit import field

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs/results"
LOADS = RESULTS / "load"
CITATION = ROOT / "CITATION.cff"
STEP = ROOT / "docs/assets/step.svg"
TOLD = dict(first="first token", between="between tokens")  # times of a load that a server may tell
GRAPHS = dict(eager="eager", piecewise="in pieces", full="decodes whole", compiled="compiled")  # modes of vllm-gpu-test
TWINS = ("fastattn", "refattn")
FIELD = ROOT / "docs/proof/conformance.md"
BENCHMARK = ROOT / "docs/proof/benchmark.md"
TASKS = ROOT / "docs/exercises.md"
LINK_TO_EXERCISE = re.compile(r"\(exercises/\d\d_(\w+)\.py\)")
SHOWN = {  # rows of the benchmark, by device, and what to call them
    "cuda": {
        ("chunked_prefill", "prefill-2x8192"): "two prompts of 8192 tokens",
        ("chunked_prefill", "chunk-4x512-of-16896"): "4 chunks of 512 tokens, 16384 tokens of context",
        ("chunked_prefill", "decode-64x8192"): "64 decodes, 8192 tokens of context",
        ("chunked_prefill", "decode-256x1024"): "256 decodes, 1024 tokens of context",
        ("sliding_window", "decode-64x16384-window-1024"): "64 decodes, a window of 1024 in 16384 tokens",
        ("local", "prefill-65536-chunk-8192"): "a prompt of 65536 tokens in local chunks of 8192",
        ("cascade", "decode-64-prefix-8192-own-256"): "64 decodes, 8192 tokens shared and 256 of their own",
        ("differential", "decode-64x8192"): "64 differential decodes, 8192 tokens of context",
        ("mla", "decode-64x8192-heads-128"): "64 MLA decodes of 128 heads, 8192 tokens of context",
        ("mla", "prefill-2x1024-of-33792"): "2 MLA chunks of 1024 tokens, 32768 tokens of context",
        ("quantized", "decode-64x8192-fp8"): "64 decodes, 8192 tokens of context in fp8",
        ("speculative", "tree-64x8192-drafts-16"): "64 trees of 16 drafted tokens, 8192 tokens of context",
        ("context_parallel", "decode-1x1048576"): "a decode of 1048576 tokens of context, on two GPUs",
        ("sparse", "select-64x131072"): "for 64 queries, the best 2048 of 131072 keys",
        ("recurrent", "decode-64x32-heads"): "64 decodes over a state (gated delta rule), 32 heads",
        ("engine", "decode-32x64"): "SmolLM2-135M, 64 tokens for each of 32 prompts",
    },
    "cpu": {
        ("chunked_prefill", "prefill-4096"): "a prompt of 4096 tokens",
        ("chunked_prefill", "decode-16x4096"): "16 decodes, 4096 tokens of context",
        ("cascade", "decode-16-prefix-4096-own-64"): "16 decodes, 4096 tokens shared and 64 of their own",
        ("mla", "decode-8x2048"): "8 MLA decodes, 2048 tokens of context",
        ("quantized", "decode-16x4096-fp8"): "16 decodes, 4096 tokens of context in fp8",
        ("speculative", "tree-4x4096-drafts-16"): "4 trees of 16 drafted tokens, 4096 tokens of context",
        ("engine", "decode-8x23"): "SmolLM2-135M, 23 tokens for each of 8 prompts",
        ("engine", "decode-8x23-packed"): "the same, with packed weights (`twinattn.engine.pack`)",
    },
}


def tables() -> str:
    """Make a table for each kind of machine."""
    files = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    found = {
        (run["device"], row["path"], row["workload"]): (run, row)
        for file in files
        for run in file["runs"]
        for row in run["rows"]
    }
    parts = []
    for device, shown in SHOWN.items():
        rows = [(name, *found[device, *key]) for key, name in shown.items() if (device, *key) in found]
        if rows:
            dates = sorted({run["date"][:10] for _, run, _ in rows})
            machine = rows[0][1]
            days = " to ".join([dates[0], dates[-1]] if len(dates) > 2 else dates)
            head = f"{machine['machine']['name']}, {machine['dtype']}, {days}"
            is_timed = any(reference(row) for _, _, row in rows)
            titles = [head, "fastattn / peer", "fastattn", "its time", "fastest peer", "path", *["refattn"] * is_timed]
            lines = [f"| {' | '.join(titles)} |", "|---|--:|--:|--:|---|---|" + "--:|" * is_timed]
            lines += [line(name, row, is_timed) for name, _, row in rows]
            files = sorted(LOADS.glob(f"{device}-*.json"))
            parts.append("\n".join([*lines, *(line for file in files for line in loaded(file, is_timed))]))
    return "\n\n".join(parts)


def loaded(file: Path, is_timed: bool) -> Iterator[str]:
    """Make the line of the last round of many requests, whose times are of another day than the table's.

    There is none for a load that no peer served.
    """
    found = json.loads(file.read_text())
    if any(one["server"] == "nano-vllm" for one in found["rounds"]):
        ours, peer = (last_round(found, server) for server in ("this engine", "nano-vllm"))
        name = f"nano-vllm's benchmark: 256 requests, {ours['tokens']} tokens ({found['date'][:10]})"
        cells = [name, f"{ours['seconds'] / peer['seconds']:.2f}", f"**{duration(ours['seconds'])}**"]
        cells += [duration(peer["seconds"]), "nano-vllm", "engine"]
        yield f"| {' | '.join([*cells, *[''] * is_timed])} |"


def last_round(found: dict[str, Any], server: str) -> dict[str, Any]:
    """Return the last round of a server, which has drawn its tokens at a temperature, and nothing left to compile."""
    rounds: list[dict[str, Any]] = found["rounds"]
    return max((one for one in rounds if one["server"] == server), key=lambda one: (one["temperature"], one["number"]))


def load() -> str:
    """Make a table of all rounds of many requests, for each machine."""
    parts = []
    for file in sorted(LOADS.glob("*.json"), key=lambda file: file.stem):
        found = json.loads(file.read_text())
        of_model = f"{found['model']}{of_cache(found)}, " if "model" in found else ""
        head = f"{found['machine']['name']}, {found['date'][:10]}, {of_model}torch {found['versions']['torch']}"
        titles = [head, "temperature", "round", "tokens/s", "seconds", "first token", "99 %", "between tokens", "99 %"]
        lines = [f"| {' | '.join(titles)} |", "|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
        for one in found["rounds"]:
            cells = [one["server"], f"{one['temperature']}", f"{one['number'] + 1}"]
            cells += [f"{one['tokens'] / one['seconds']:,.0f}", f"{one['seconds']:.2f}"]
            cells += [duration(seconds) for seconds in (*one["first"], *one["between"])]
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def served(server: str) -> str:
    """Make the tables of servers under one load: one with each attention backend, this engine, nano-vllm."""
    parts = []
    for file in sorted((RESULTS / server.lower()).glob("*.json")):
        found = json.loads(file.read_text())
        head = f"{found['machine']['name']}, {found['date'][:10]}, {server} {found['versions'][server.lower()]}"
        parts.append(served_speed(head, found["speed"]) if "speed" in found else served_rounds(head, found))
    return "\n\n".join(parts)


def inside() -> str:
    """Make a table of the errors inside vLLM: of log-probabilities against float32, by ours and by vLLM's own."""
    parts = []
    for file in sorted((RESULTS / "vllm_gpu").glob("*.json")):
        found = json.loads(file.read_text())
        groups: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
        for row in found["rows"]:
            more = [row["cache"]] * (row["cache"] != "auto") + [row["dtype"]] * (row["dtype"] != "bfloat16")
            where = "ranks on one GPU" if row.get("one_card") else "GPUs"
            stages = row.get("stages", 1)  # as older results have none
            more += [f"{row['ranks'] * stages} {where}"] * (row["ranks"] * stages > 1)
            more += [f"layers over {stages}"] * (stages > 1)
            more += [f"keys over {row['context_ranks']}, by {row['interleave']}"] * (row["context_ranks"] > 1)
            groups.setdefault((row["model"], *more), {})[row["mode"]] = row
        head = f"{found['machine']['name']}, {found['date'][:10]}, vLLM {found['versions']['vllm']}"
        titles = [head, "its own, eager", *(f"ours, {name}" for name in GRAPHS.values())]
        lines = [f"| {' | '.join(titles)} |", "|---|" + "--:|" * (len(titles) - 1)]
        for name, modes in groups.items():
            cells = [f"{next(iter(modes.values()))['its_rms']:.4f}"]
            cells += [f"{modes[mode]['rms']:.4f}" if mode in modes else "" for mode in GRAPHS]
            lines.append(f"| {' | '.join([', '.join(name), *cells])} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def of_cache(found: dict[str, Any]) -> str:
    """Return the type of a quantized KV cache, as the title of a table of loads names it; nothing for a plain one."""
    cache = found.get("kv_cache_dtype", "auto")  # as older results have none
    return f", cache of {cache}" if cache != "auto" else ""


def served_speed(head: str, speed: list[dict[str, Any]]) -> str:
    """Make a table of tokens per second inside vLLM alone."""
    lines = [f"| {head} | CUDA graphs | tokens per second, median of three rounds |", "|---|---|--:|"]
    for row in speed:
        rates = sorted(one["tokens"] / one["seconds"] for one in row["rounds"])
        lines.append(f"| {row['backend']} | {row['graphs']} | {rates[len(rates) // 2]:,.0f} |")
    return "\n".join(lines)


def served_rounds(head: str, found: dict[str, Any]) -> str:
    """Make a table of all servers, the fastest first: medians of the rounds past the first, greedy ones."""
    greedy = min(one["temperature"] for one in found["rounds"])
    rounds: dict[str, list[dict[str, Any]]] = {}
    for one in found["rounds"]:
        if one["temperature"] == greedy and one["number"]:
            rounds.setdefault(one["server"], []).append(one)
    rates = {server: median(one["tokens"] / one["seconds"] for one in its) for server, its in rounds.items()}
    told = [key for key in TOLD if any(one[key] for its in rounds.values() for one in its)]
    titles = [f"{head}, {found['model']}{of_cache(found)}", "tokens/s"]
    titles += [title for key in told for title in (TOLD[key], "99 %")]
    lines = [f"| {' | '.join(titles)} |", f"|---|{'--:|' * (len(titles) - 1)}"]
    for server in sorted(rates, key=lambda name: -rates[name]):
        its = rounds[server]
        kinds = [(key, i) for key in told for i in (0, 1)]
        times = [duration(median(one[key][i] for one in its)) if its[0][key] else "" for key, i in kinds]
        lines.append(f"| {' | '.join([server, f'{rates[server]:,.0f}', *times])} |")
    return "\n".join(lines)


def line(name: str, row: dict[str, Any], is_timed: bool) -> str:
    """Make the line of a row; with the time of the reference where others of the table have one."""
    peer = fastest_peer(row)
    pair = clocks.pair(row, peer or row["contenders"][0])
    of_peer = [share(row, peer), duration(pair.its), peer["name"]] if peer else ["", "", ""]
    cells = [name, of_peer[0], f"**{duration(pair.ours)}**", *of_peer[1:], row["path"].replace("_", " ")]
    return f"| {' | '.join([*cells, *[reference(row)] * is_timed])} |"


def share(row: dict[str, Any], peer: dict[str, Any]) -> str:
    """Return the time of fastattn over that of a peer, if one clock took both that counts no launches, or the clock."""
    pair = clocks.pair(row, peer)
    if not clocks.has_ratios(row):
        return "by events"
    return f"{1 / pair.ratio:.2f}{' by events' if pair.clock == 'events' else ''}"


def reference(row: dict[str, Any]) -> str:
    """Return the time of the reference, if it was taken."""
    timed = [entry for entry in row["contenders"] if "median" in entry and entry["name"].startswith("refattn")]
    return duration(timed[0]["median"]) if timed else ""


def fastest_peer(row: dict[str, Any]) -> dict[str, Any] | None:
    """Return the fastest contender of a row that is not ours, or None."""
    timed = [entry for entry in row["contenders"] if "median" in entry]
    peers = [entry for entry in timed if not entry["name"].startswith((*TWINS, "without", "plain", "a chain"))]
    if "median" not in row["contenders"][0]:
        return min(peers, key=lambda entry: entry["median"], default=None)
    return min(peers, key=lambda entry: clocks.pair(row, entry).ratio, default=None)


def duration(seconds: float) -> str:
    """Write a time with three digits and its unit, on one line."""
    return report.duration(seconds).replace(" ", "\u00a0")


def honoured() -> str:
    """Show what kernels honour on each machine, the GPU first, and fold what they do not with the smallest batches."""
    parts = []
    for file in sorted(RESULTS.glob("conformance/*.json"), reverse=True):
        found = json.loads(file.read_text())
        parts += [f"## {found['machine']}", field.tables(found)]
        if list(field.failures(found)):
            parts += ['<details markdown="1"><summary>Where, and on which batch</summary>']
            parts += [field.list_failures(found), "</details>"]
        parts += ['<details markdown="1"><summary>What was not claimed, and why</summary>']
        parts += [field.list_not_claimed(found), "</details>"]
    return "\n\n".join(parts)


def exercise_of(cell: dict[str, Any]) -> Exercise:
    """Return the exercise that a cell of a notebook with the tag `exercise` links to."""
    name = LINK_TO_EXERCISE.findall("".join(cell["source"]))[0]
    return next(exercise for exercise in EXERCISES if exercise.name == name)


@functools.cache
def places() -> dict[str, str]:
    """Return the notebook of each exercise: where its idea appears."""
    return {
        exercise_of(cell).name: path.stem
        for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
        for cell in json.loads(path.read_text())["cells"]
        if "exercise" in cell["metadata"].get("tags", ())
    }


def exercises() -> str:
    """List the exercises: the name leads to the file, what it is about to its place in a notebook."""
    lines = ["| function | what it is about | effort |", "|---|---|---|"]
    for i, path in enumerate(learner.files(ROOT / "notebooks/exercises"), 1):
        task = EXERCISES[i - 1]
        about = f"[{learner.title(path)}](../notebooks/{places()[task.name]}.ipynb#write-{task.name})"
        effort = f"{'●' * task.level}{'○' * (3 - task.level)} {task.minutes} min{' ✎' * task.in_page}"
        lines.append(f"| {i} · [`{task.name}`](../notebooks/exercises/{path.name}) | {about} | {effort} |")
    return "\n".join(lines)


def puzzles() -> str:
    """List the puzzles."""
    lines = ["| puzzle | what it is about |", "|---|---|"]
    for i, path in enumerate(learner.files(ROOT / "notebooks/exercises/puzzles"), 1):
        name = f"[`{path.stem[3:]}`](../notebooks/exercises/puzzles/{path.name})"
        lines.append(f"| p{i} · {name} | {learner.title(path)} |")
    return "\n".join(lines)


def machines() -> str:
    """Write a script of the rates of the measured machines, and the rows under their roofs, for the explorer."""
    found = [
        {
            "name": machine.name,
            "dtype": machine.dtype,
            "read": float(f"{machine.read:.4g}"),
            "product": float(f"{machine.product:.4g}"),
            "points": [[row, float(f"{x:.4g}"), float(f"{rate:.4g}")] for row, x, rate in machine.points],
        }
        for machine in reversed(roofline.measured(RESULTS).machines)  # the GPU first
    ]
    return (
        "// Made by docs/readme.py from docs/results: rates per second, and of each row its operations\n"
        f"// per byte and per second.\nvar machines = {json.dumps(found, indent=1)}\n"
    )


def caches() -> str:
    """Make a table of the kinds of caches, and of what has to be there for a request to go on."""
    lines = ["| kind | in | what has to be there at position `p` | who may write it |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {x.name} | {x.unit} | {x.needed} | {x.writer} |" for x in KINDS)])


def main() -> None:
    """Put the tables onto their pages, the machines beside the explorer, and the moving picture into its file."""
    STEP.write_text(animation.animation())
    (ROOT / "docs/explorer/machines.js").write_text(machines())
    put(BENCHMARK, "measured", tables())
    for name, text in of_address(address.repository()).items():
        put(ROOT / "README.md", name, text)
    CITATION.write_text(address.citation(address.repository()))
    put(FIELD, "honoured", honoured())
    put(ROOT / "docs/paths/engine.md", "load", load())
    put(ROOT / "docs/paths/going_on.md", "caches", caches())
    for server in ("vLLM", "SGLang"):
        put(ROOT / f"docs/integrations/{server.lower()}.md", "served", served(server))
    put(ROOT / "docs/integrations/vllm.md", "inside", inside())
    put(BENCHMARK, "behind", behind.table())
    put(TASKS, "exercises", exercises())
    put(TASKS, "puzzles", puzzles())
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        path.write_text(with_install_cell(path.read_text(), address.repository()))


def with_install_cell(notebook: str, repository: str) -> str:
    """Return the text of a notebook with the cell that installs what it needs in its second place, and nowhere else."""
    parsed = json.loads(notebook)
    model = demo_model.WHEEL if "model_file()" in notebook else ""
    cell = {
        "cell_type": "code",
        "execution_count": None,
        "id": "install",
        "metadata": {"tags": ["install"]},
        "outputs": [],
        "source": address.install(repository, model=model).splitlines(keepends=True),
    }
    first, *others = (cell for cell in parsed["cells"] if cell["id"] != "install")
    parsed["cells"] = [first, cell, *others]
    return json.dumps(parsed, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def of_address(repository: str) -> dict[str, str]:
    """Return what the README shows of the repository's address, by the names of its marks; nothing without one."""
    return {"badges": address.badges(repository), "clone": address.clone(repository)}


def put(page: Path, name: str, text: str) -> None:
    """Put a text between the two marks of a page."""
    begin, end = f"<!-- {name}: made by docs/readme.py -->", f"<!-- end of {name} -->"
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    shown = f"{text}\n\n" if text else ""
    page.write_text(f"{before}{begin}\n\n{shown}{end}{after}")


if __name__ == "__main__":
    main()
