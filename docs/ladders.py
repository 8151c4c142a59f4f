"""The pages of the ladders: times, and for each rung the idea, the change, a question, and what was measured of it.

Everything measured comes from docs/results/ladder, a file per ladder and machine, which `twinattn ladder --json`
writes. Until there is one, the page says so, the columns are empty and a question is text; what is known of the last
rungs comes from docs/results/tried, where the kernels of `fastattn` were timed when they were made.
"""

import base64
import difflib
import html
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from twinattn.bench.report import duration
from twinattn.course.batches import BATCHES, Batch
from twinattn.course.ladder import Rung, rungs

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs/results/ladder"
COMPILED = RESULTS / "compiled"
DRAWINGS = ROOT / "docs/ladder/drawings"
TRIED = ROOT / "docs/results/tried"
ASKED = {  # the batch that shows a rung, by its number; of all others the first
    "decode": {8: "1 x 131072", 9: "60 x 2048 and 4 x 65536"},
    "prefill": dict.fromkeys((5, 7), "64 x 1 of 2048, 16 x 512 and 1 x 8192"),
    "states": {**dict.fromkeys((2, 3, 9, 10, 11), "64 x 1"), 8: "8 x 1024"},
    "latents": {7: "1 x 131072, 16 heads", 11: "64 x 8192, 16 heads"},
}
KNOWN = {  # ladders with trials: the path of these, the workload of each batch, and how the design of a rung begins
    "prefill": (
        "chunked_prefill",
        {"prefill-2x8192": "2 x 8192", "chunk-4x512-of-16896": "4 x 512 of 16896"},
        {11: "Triton:", 12: "Gluon:"},
    )
}
FACTORS = {  # how many times as fast as the rung before, up to a factor
    0.95: "slower",
    1.05: "within 5 %",
    1.5: "1.05 to 1.5 times",
    3.0: "1.5 to 3 times",
    10.0: "3 to 10 times",
    float("inf"): "more than 10 times",
}

SCRIPTS = "\n".join(f'<script src="{file}"></script>' for file in ("roof.js", "../explorer/el.js", "roof_view.js"))

WORDS = {  # words of the glossary, by their places there: linked where the rungs of a page first have them
    "warp": r"\bwarps?\b",
    "tensor-core": r"\btensor cores?\b",
    "coalescing": r"\bcoalesc(?:ed|ing)\b",
    "occupancy": r"\boccupancy\b",
    "register-pressure": r"\bspill(?:s|ed)?\b",
    "stage": r"\bstages?\b(?!`)",
    "wgmma": r"`wgmma`",
    "tma": r"\bTMA\b",
    "mbarrier": r"(?<!named )\bbarriers?\b",
    "named-barrier": r"\bnamed barriers?\b",
    "ping-pong": r"\bping-pong\b",
    "warpgroup": r"\bwarpgroups?\b",
    "tf32": r"\bTF32\b",
    "warp-specialization": r"\bwarp specialisation\b|\broles for warps\b",
    "persistent-program": r"\bpersistent program\b",
    "programmatic-launch": r"\bprogrammatic launch\b",
    "cuda-graph": r"\bCUDA graph\b",
}

MOVES = (
    "**Move the roof.** The sliders set a batch, and the lines are what it needs at least at the rates of this card: "
    "its bytes, and its operations."
)

UNTIMED = (
    "**These rungs have not been timed yet**: no machine with a GPU has written a result. So the questions below have "
    "no measured answer."
)


def results(ladder: str) -> list[dict[str, Any]]:
    """Return the results of a ladder, one per machine, in reverse alphabetical order."""
    files = sorted(RESULTS.glob("*.json"), reverse=True)
    return [found for found in (json.loads(file.read_text()) for file in files) if found["ladder"] == ladder]


def of_rung(found: dict[str, Any], batch: str, rung: Rung) -> dict[str, Any] | None:
    """Return the results of a rung on a batch, or None."""
    rows = next((each["rungs"] for each in found["batches"] if each["name"] == batch), [])
    return next((row for row in rows if row["name"] == rung.name), None)


def page(ladder: str, folder: str) -> str:
    """Make the page of a ladder, below its introduction and its table of the rungs' changes.

    Args:
        ladder: its name.
        folder: the way from the page to the pages of its files.
    """
    found = results(ladder)
    shown = [f"{table(ladder, each)}\n\n{bars(ladder, each)}\n\n{roof(ladder, each)}" for each in found]
    shown = shown or [f"{table(ladder, None)}\n\n{roof(ladder, None)}"]
    shown += [known(ladder)] if ladder in KNOWN and not found else []
    title = "All times, which give the predictions below away" if found else "All rungs, and what is known of them"
    parts = [*([] if found else [UNTIMED]), folded(title, "\n\n".join(shown))]
    before: Rung | None = None
    unseen = dict(WORDS)
    for rung in rungs(ladder):
        parts.append(part(rung, before, found, folder, unseen))
        before = rung
    return "\n\n".join([*parts, SCRIPTS])


def about(found: dict[str, Any]) -> str:
    """Return the machine, date, commit and versions of a result."""
    versions = ", ".join(f"{name} {found['versions'][name]}" for name in ("torch", "triton"))
    commit = f"commit {(found['commit'] or 'unknown')[:7]}"
    if "ladder_commit" in found:  # measured before the files of the rungs were committed
        commit += f" with the rungs of {found['ladder_commit'][:7]}"
    return f"{found['machine']['name']}, {found['date'][:10]}, {commit}; {versions}"


def table(ladder: str, found: dict[str, Any] | None) -> str:
    """Make the table of all rungs on one machine; without one its columns are empty."""
    batches = BATCHES[ladder]
    heads = [*batches, "registers", "spills", "shared memory", "programs per SM", "CPU per call"]
    lines = [f"| rung | {' | '.join(heads)} |", "|---|" + "--:|" * len(heads)]
    if found is not None:
        floors = {each["name"]: each["floor"] for each in found["batches"]}
        cells = [f"{duration(floors[name])}" if name in floors else "" for name in batches] + [""] * 5
        lines.append(f"| *floor* | {' | '.join(cells)} |")
    compiled = {} if found else compiled_rungs(ladder)
    for rung in rungs(ladder):
        cells = [""] * len(batches) + [*sizes_of(compiled.get("rungs", {}).get(rung.name)), ""]
        cells = cells_of(rung, found) if found else cells
        lines.append(f"| [{rung.number} · {rung.title}](#{anchor(rung)}) | {' | '.join(cells)} |")
    if found:
        head = about(found)
    elif compiled:
        head = f"Compiled for {compiled['gpu']} without a GPU, and not run: Triton {compiled['versions']['triton']}."
    else:
        head = "Not run."
    return head + "\n\n" + "\n".join(lines)


def bars(ladder: str, found: dict[str, Any]) -> str:
    """Draw a bar per rung, its share of the floor on the first batch; the line is the roof, where the floor is all."""
    batch, left, width, step = next(iter(BATCHES[ladder])), 230, 400, 20
    lines, height = [], step * len(rungs(ladder))
    for place, rung in enumerate(rungs(ladder)):
        row = of_rung(found, batch, rung)
        share = row["share_of_floor"] if row and is_timed(row) else 0.0
        says = f"{share:.1%}" if share else "not timed"
        y = step * place + 14
        long, at_end = share * width, left + min(share, 0.85) * width + 4
        lines.append(f'<text x="0" y="{y}">{rung.number} · {html.escape(rung.name.replace("_", " "))}</text>')
        lines.append(f'<rect x="{left}" y="{y - 11}" width="{long:.1f}" height="14" opacity="0.3"/>')
        lines.append(f'<text x="{at_end:.1f}" y="{y}">{says}</text>')
    lines.append(f'<rect x="{left + width}" y="0" width="1.5" height="{height}"/>')
    says = f"Share of the floor by rung, {batch}, {found['machine']['name']}"
    head = f'<svg viewBox="0 0 {left + width + 10} {height}" fill="currentColor" font-size="12" role="img"'
    return f'<figure>{head} aria-label="{says}">{"".join(lines)}</svg><figcaption>{says}</figcaption></figure>'


def roof(ladder: str, found: dict[str, Any] | None) -> str:
    """Return the data of docs/ladder/roof_view.js: the measured rungs, and the rates of the GPU for the roof.

    A ladder that was not timed has the rates of another one, measured on the same kind of machine. Batches of different
    sequences are left out: two sliders do not say how long these are.
    """
    of_rates = found or next((json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))), None)
    if of_rates is None:
        return ""
    batches = []
    for name, batch in BATCHES[ladder].items():
        if len(set(batch.lens)) > 1:
            continue
        rows = [] if found is None else [of_rung(found, name, rung) for rung in rungs(ladder)]
        timed = [{x: row[x] for x in ("number", "name", "median")} for row in rows if row and is_timed(row)]
        batches.append({"name": name, "settings": settings_of(ladder, batch), "rungs": timed})
    if not batches:
        return ""
    first = next(iter(BATCHES[ladder].values()))
    fixed = {x: y for x, y in asdict(first).items() if x not in ("lens", "rows", "ring", *batches[0]["settings"])}
    data = {"ladder": ladder, "kind": type(first).__name__, "fixed": fixed, "batches": batches}
    data |= {"machine": of_rates["machine"]["name"], "rates": of_rates["ceilings"]}
    bars = " Bars are as measured." if any(each["rungs"] for each in batches) else ""
    return f'{MOVES}{bars}\n\n<div class="roof explorer engine" data-roof="{html.escape(json.dumps(data))}"></div>'


def settings_of(ladder: str, batch: Batch) -> dict[str, int]:
    """Return a batch as sliders have it, whose sequences are all alike: their number and lengths, and the heads."""
    queries, keys = batch.lens[0]
    settings = {"count": len(batch.lens), "keys": queries if ladder == "states" else keys}
    more = {"prefill": {"queries": queries}, "latents": {"heads": batch.heads}}
    return settings | more.get(ladder, {})


def compiled_rungs(ladder: str) -> dict[str, Any]:
    """Return the compiler's report on a ladder, written by `tests.helpers.compile_rungs`; empty if there is none."""
    files = sorted(COMPILED.glob(f"{ladder}-*.json"))
    return json.loads(files[0].read_text()) if files else {}


def known(ladder: str) -> str:
    """Show the times of the last rungs, and of what else was timed beside them, when the kernels were made."""
    path, batches, rungs_of = KNOWN[ladder]
    shown = []
    for file in sorted(TRIED.glob("*.json"), reverse=True):
        runs = [each for each in json.loads(file.read_text())["runs"] if each["path"] == path]
        runs = [each for each in runs if each["workload"] in batches]
        for commit in dict.fromkeys(each["commit"] for each in runs):
            rows = [each for each in runs if each["commit"] == commit]
            others = [x["design"] for x in rows[0]["designs"] if not x["design"].startswith(tuple(rungs_of.values()))]
            heads = [*(f"rung {number}" for number in rungs_of), *others]
            lines = [f"| batch | {' | '.join(heads)} |"]
            lines.append("|---|" + "--:|" * len(heads))
            for row in rows:
                times = [
                    next((duration(x["median"]) for x in row["designs"] if x["design"].startswith(begin)), "")
                    for begin in (*rungs_of.values(), *others)
                ]
                lines.append(f"| {batches[row['workload']]} | {' | '.join(times)} |")
            versions = ", ".join(f"{name} {rows[0]['versions'][name]}" for name in ("torch", "triton"))
            where = f"{rows[0]['machine']['name']}, {rows[0]['date'][:10]}, commit {commit}; {versions}"
            shown.append(f"The last rungs, timed in turns when they were made: {where}\n\n" + "\n".join(lines))
    return "\n\n".join(shown)


def cells_of(rung: Rung, found: dict[str, Any]) -> list[str]:
    """Write what was measured of a rung: its times and shares of the floors, and its first kernel."""
    rows = {name: of_rung(found, name, rung) for name in BATCHES[found["ladder"]]}
    cells = [cell_of(row) for row in rows.values()]
    first = next((row for row in rows.values() if row and is_timed(row)), None)
    kernel = next(iter(first["kernels"]), None) if first else None
    return [*cells, *sizes_of(kernel), duration(first["cpu"]) if first else ""]


def sizes_of(kernel: dict[str, Any] | None) -> list[str]:
    """Write what the compiler says of a kernel, and how many of its programs an SM has room for."""
    if kernel is None:
        return [""] * 4
    sizes = str(kernel["registers"]), str(kernel["spills"]), f"{kernel['shared_bytes']:,}"
    return [*sizes, str(kernel["programs_per_sm"])]


def is_timed(row: dict[str, Any]) -> bool:
    """Return whether there is a time in the results of a rung: a machine may lack what it needs."""
    return "median" in row


def cell_of(row: dict[str, Any] | None) -> str:
    """Write the time of a rung and its share of the floor, or what the machine lacks for it."""
    if row is None:
        return ""
    return f"{time_of(row)}<br>{row['share_of_floor']:.1%}" if is_timed(row) else f"needs {row['missing']}"


def time_of(row: dict[str, Any]) -> str:
    """Write a time, and the clock if it is not that of a CUDA graph."""
    return duration(row["median"]) + (" by events" if row["clock"] == "events" else "")


def anchor(rung: Rung) -> str:
    """Return the place of a rung on its page."""
    return f"rung-{rung.number}"


def drawing(rung: Rung) -> str | None:
    """Return the drawing of a rung's idea, from docs/ladder/drawings; None for the formula."""
    text = (DRAWINGS / f"{rung.file.parent.name}.txt").read_text()
    drawn = {
        int(each.partition("\n")[0]): each.partition("\n")[2].rstrip()
        for each in re.split(r"^# ", text, flags=re.M)[1:]
    }
    return f"```text\n{drawn[rung.number]}\n```" if rung.number in drawn else None


def linked(text: str, unseen: dict[str, str]) -> str:
    """Link words to the glossary, each where it first occurs; those that were found are taken from `unseen`."""
    found = {place: match for place, word in unseen.items() if (match := re.search(word, text))}
    for place, match in sorted(found.items(), key=lambda item: -item[1].start()):
        del unseen[place]
        text = f"{text[: match.start()]}[{match[0]}](../glossary.md#{place}){text[match.end() :]}"
    return text


def part(rung: Rung, before: Rung | None, found: list[dict[str, Any]], folder: str, unseen: dict[str, str]) -> str:
    """Make the part of a rung: its idea, what has changed, the question, and the answer.

    Args:
        rung: the rung.
        before: the one below; None for the first.
        found: the results of the ladder.
        folder: the way from the page to the pages of its files.
        unseen: words of the glossary that the page has not had yet.
    """
    idea, gain, source = rung.about
    idea, gain = linked(idea, unseen), linked(gain, unseen)
    file = f"[`{rung.file.name}`]({folder}/{rung.file.name}.md)"
    lines = [f"## {rung.number} · {rung.title} {{ #{anchor(rung)} }}", idea, f"{file} · {source}"]
    drawn = drawing(rung)
    if drawn is not None:
        lines.insert(2, drawn)
    if before is None:
        return "\n\n".join([*lines, code(rung)])
    lines.append(code(rung) if is_other(before) or is_other(rung) else diff(before, rung))
    lines.append(question(rung, before, found))
    measured = [sentence(each, rung, before) for each in found]
    return "\n\n".join([*lines, folded("What do you think? Open the answer", "\n\n".join([gain, *measured]))])


def is_other(rung: Rung) -> bool:
    """Return whether a rung is no change of a file, but a call of the package."""
    return "@triton.jit" not in rung.file.read_text()


def code_of(rung: Rung) -> list[str]:
    """Return the lines of a file below its docstring."""
    return rung.file.read_text().split('"""', 2)[2].strip().splitlines()


def code(rung: Rung) -> str:
    """Show a file."""
    shown = "\n".join(code_of(rung))
    return f'```{{.python title="{rung.file.name}"}}\n{shown}\n```'


def diff(before: Rung, rung: Rung) -> str:
    """Show what has changed, with three lines around it."""
    lines = list(difflib.unified_diff(code_of(before), code_of(rung), lineterm="", n=2))[2:]
    shown = "\n".join("…" if line.startswith("@@") else line for line in lines)
    return f'```{{.diff title="{before.file.name} → {rung.file.name}"}}\n{shown}\n```'


def batch_of(rung: Rung) -> str:
    """Return the batch that shows a rung."""
    ladder = rung.file.parent.name
    return ASKED[ladder].get(rung.number, next(iter(BATCHES[ladder])))


def factor(found: dict[str, Any], rung: Rung, before: Rung) -> float | None:
    """Return how many times as fast as the one before a rung is."""
    batch = batch_of(rung)
    now, then = of_rung(found, batch, rung), of_rung(found, batch, before)
    return then["median"] / now["median"] if now and then and is_timed(now) and is_timed(then) else None


def gain(ladder: str, number: int) -> str:
    """Return how many times as fast as the one before a rung is, on the batch that shows it; "" if it was not timed."""
    found = results(ladder)
    before, rung = rungs(ladder)[number - 1 : number + 1]
    times = factor(found[0], rung, before) if found else None
    return "" if times is None else f"{times:.2f} times, on {batch_of(rung)}"


def bucket(times: float) -> str:
    """Name a factor as the choices do."""
    return next(name for limit, name in FACTORS.items() if times < limit)


def question(rung: Rung, before: Rung, found: list[dict[str, Any]]) -> str:
    """Ask by how much a rung helps; a field judges where it was measured."""
    batch = batch_of(rung)
    of_what = f"with {batch} keys" if rung.file.parent.name == "decode" else f"on {batch}"
    asked = f"**By how much is it faster than rung {before.number}, {of_what}?**"
    times = factor(found[0], rung, before) if found else None
    if times is None:
        return f"{asked} ({'; '.join(FACTORS.values())})"
    data = {"number": f"{rung.file.parent.name}.{rung.number}", "right": bucket(times)}
    data |= {"choose": sorted(FACTORS.values())}
    encoded = base64.b64encode(json.dumps(data).encode()).decode()
    return f'{asked}\n\n<div class="predict" id="predict-{data["number"]}" data-question="{encoded}"></div>'


def sentence(found: dict[str, Any], rung: Rung, before: Rung) -> str:
    """Return the sentence of what a machine took for a rung."""
    batch = batch_of(rung)
    now, then, times = of_rung(found, batch, rung), of_rung(found, batch, before), factor(found, rung, before)
    if now is None or then is None or times is None:
        needed = f": it needs {now['missing']}" if now and not is_timed(now) else ""
        return f"Not measured on {found['machine']['name']}{needed}."
    return (
        f"Measured on {found['machine']['name']}: {time_of(then)} before, {time_of(now)} now, {times:.2f} times as "
        f"fast; the floor is {share_of(now['share_of_floor'])} it.{profile_of(found['ladder'], now, batch)}"
    )


def share_of(share: float) -> str:
    """Write a share before what it is of: in percent, to the digit that a small one has, or as a multiple."""
    if share >= 10:
        return f"{share:.0f} times"
    return f"{share:.0%} of" if share >= 0.01 else f"{share:.2%} of"


def profile_of(ladder: str, row: dict[str, Any], batch: str) -> str:
    """Return the sentence of what the profiler found of a rung on a batch; "" where there was none."""
    if "profile" not in row:
        return ""
    seen, least = row["profile"], BATCHES[ladder][batch].reads()
    return (
        f" By the profiler it reads {seen['bytes_read'] / 1e6:.0f} MB from memory, "
        f"{share_of(seen['bytes_read'] / least)} the least; memory is at {seen['memory']:.0%} of its peak, "
        f"the SMs are at {seen['sm']:.0%}."
    )


def folded(title: str, text: str) -> str:
    """Make a part of a page that is closed until the reader opens it."""
    indented = "\n".join(f"    {line}" if line else "" for line in text.splitlines())
    return f'??? question "{title}"\n\n{indented}'
