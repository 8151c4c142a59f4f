"""Write reports as text, HTML and JUnit XML: the failed properties, their batches and masks, and probable mistakes."""

import html
import re
from collections.abc import Iterator, Sequence
from itertools import islice, zip_longest
from typing import Any
from xml.etree import ElementTree

from twinattn.kit.finding import ENDS, FAILED, Finding, Report

MARKS = {"honoured": "✓", "refused": "–", "not claimed": "·", "not reached": "?"}  # all other outcomes are failures
STYLES = {"✓": "green", "✗": "bold red", "–": "yellow", "·": "dim", "?": "yellow"}
MOST_ROWS = 12  # rows of a mask
MOST_SIZES = 8  # more heads, head sizes or block sizes than these are named by the first and the last
NUMBER = re.compile(r"-?\d[\d.,]*(?:e[+-]?\d+)?|nan|inf")


def mark(outcome: str) -> str:
    """Return the mark of an outcome."""
    return MARKS.get(outcome, "✗")


def as_text(report: Report, *, is_verbose: bool = False) -> str:
    """Write a report as plain text."""
    return "\n".join(text for _, text in lines(report, is_verbose=is_verbose))


def lines(report: Report, *, is_verbose: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the lines of a report, each with its style.

    Properties are named by outcome, and failures with one probable mistake share a heading and the batch of the first.
    A verbose report has a line for each property, and a section for each failure. So has one of times for its
    workloads.
    """
    counts = dict.fromkeys(("honoured", "failed", "refused", "not claimed", "not reached"), 0)
    for finding in report.findings:
        counts["failed" if finding.outcome in FAILED else finding.outcome] += 1
    yield "bold", f"{report.kernel} as {report.path} on {report.device}"
    yield (
        "",
        ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count) + f", {report.seconds:.0f} s",
    )
    for text in of_drawn(report, is_verbose=is_verbose):
        yield "dim", text
    for text in report.notes:
        yield "yellow", text
    failures = [[x] for x in report.failures] if is_verbose else by_cause(report.failures)
    unreached = [x for x in report.not_reached if x.detail in ENDS.values()]
    if unreached:  # the one that matters comes first
        yield from _sections(failures)
        yield "", ""
    if is_verbose or report.times:
        listed = [x for x in report.findings if x not in unreached]
        width = max((len(finding.property) for finding in listed), default=0)
        for finding in listed:
            sign = mark(finding.outcome)
            yield STYLES[sign], f"{sign} {finding.property:{width}}  {_says(finding)}"
    else:
        yield from _by_outcome([x for x in report.findings if x not in unreached])
    if unreached:
        yield STYLES["?"], f"? not reached, {unreached[0].detail}: {len(unreached)} properties"
    else:
        yield from _sections(failures)


def _sections(failures: Sequence[Sequence[Finding]]) -> Iterator[tuple[str, str]]:
    """Yield a section for each group of failures, after an empty line."""
    for group in failures:
        yield "", ""
        yield from _of_failures(group)


def _by_outcome(findings: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    """Yield a line per outcome with the names of its properties; what was refused or not reached, with each reason."""
    named: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        if finding.outcome not in FAILED:
            reason = f", {finding.detail}" if finding.outcome in ("refused", "not reached") and finding.detail else ""
            named.setdefault((mark(finding.outcome), finding.outcome + reason), []).append(finding.property)
    for (sign, outcome), names in named.items():
        yield STYLES[sign], f"{sign} {outcome}: {', '.join(names)}"


def of_drawn(report: Report, *, is_verbose: bool = True) -> list[str]:
    """Return lines about the batches: what was drawn, usual sizes that were not, and how many were refused."""
    if report.drawn is None:
        return []
    refused, tried = (sum(getattr(x, name) for x in report.findings) for name in ("refused", "examples"))
    drawn = report.drawn.line(most=None if is_verbose else MOST_SIZES)
    says = [drawn, report.drawn.missing(), f"refused {refused} of {tried} batches" if refused else ""]
    return [text for text in says if text]


def by_cause(failures: Sequence[Finding]) -> list[list[Finding]]:
    """Group failures with the same probable mistake; those without one by outcome and detail, whatever its numbers."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in failures:
        cause = ("", finding.mistakes[0][0]) if finding.mistakes else (finding.outcome, NUMBER.sub("", finding.detail))
        groups.setdefault(cause, []).append(finding)
    return list(groups.values())


def as_junit(report: Report, *, is_strict: bool = False) -> str:
    """Write a report as JUnit XML, with a case for each property."""
    suite = ElementTree.Element("testsuite", name=f"{report.kernel} as {report.path}", time=str(report.seconds))
    lapses, failed = [x.property for x in report.lapses] if is_strict else [], 0
    for finding in report.findings:
        case = ElementTree.SubElement(suite, "testcase", classname=report.kernel, name=finding.property)
        if finding.property in report.times:
            case.set("time", str(report.times[finding.property]["seconds"]["median"]))
        text = "\n".join(text for _, text in of_failure(finding))
        if finding.outcome in (*FAILED, "not reached") or finding.property in lapses:
            says = finding.detail or finding.outcome
            ElementTree.SubElement(case, "failure", type=finding.outcome, message=says).text = text
            failed += 1
        elif finding.outcome != "honoured":
            ElementTree.SubElement(case, "skipped", message=f"{finding.outcome}: {finding.detail}")
    suite.attrib |= dict(tests=str(len(report.findings)), failures=str(failed))
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _says(finding: Finding) -> str:
    """Return the promise of a property, or the reason why it was not checked."""
    if mark(finding.outcome) not in "✓✗":
        return f"{finding.outcome}: {finding.detail}"
    says = f"{finding.promise} Checked without the LSE." if finding.without_lse else finding.promise
    return f"{says} Refused {finding.refused} of {finding.examples} batches." if finding.refused else says


def _of_failures(group: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    """Yield the lines about failures of one cause: its name, the properties that show it, and the first of them."""
    first, *others = group
    if others and first.mistakes:
        (name, says), *_ = first.mistakes
        yield "bold red", f"✗ probably {name}: {says}"
        yield "", f"  {len(group)} properties show it: {', '.join(finding.property for finding in group)}"
        yield "", f"  {first.property}: {first.promise}"
        yield from _details(first, named=1)
        return
    yield from of_failure(first)
    if others:
        yield "", f"  the same in {len(others)} others: {', '.join(finding.property for finding in others)}"


def of_failure(finding: Finding) -> Iterator[tuple[str, str]]:
    """Yield the lines about one failure."""
    yield "bold red", f"✗ {finding.property}: {finding.promise}"
    yield from _details(finding)


def _details(finding: Finding, named: int = 0) -> Iterator[tuple[str, str]]:
    """Yield the lines below the heading of a failure, which has named the first `named` of the probable mistakes."""
    yield "", f"  {finding.detail}"
    if finding.example:
        yield (
            "",
            f"  smallest batch, {finding.dtype}: {finding.example}" if finding.dtype else f"  on {finding.example}",
        )
    if finding.asked:
        yield "", f"  called with {finding.asked}"
    for i, (want, got) in enumerate(zip(finding.expected, finding.seen, strict=True)):
        if want != got:
            yield "", f"  who sees whom in sequence {i} (X: sees what it should not, o: does not see what it should)"
            for text in side_by_side(want, got):
                yield "", f"    {text}"
    for i, (name, says) in enumerate(finding.mistakes[named:], named):
        yield "bold yellow", f"  {'probably' if not i else 'or'} {name}: {says}"
    if not finding.mistakes and finding.outcome == "wrong":
        lacking = f"; the function has no parameter {finding.lacking}" if finding.lacking else ""
        yield "yellow", f"  no known mistake gives these numbers{lacking}"
    if finding.code:
        yield "dim", f"  {finding.code}"


def side_by_side(want: Sequence[str], got: Sequence[str]) -> Iterator[str]:
    """Yield the rows of two masks side by side, the expected one on the left."""
    width = max(len("expected"), 2 * max(map(len, want), default=0))
    yield f"{'expected':{width}}   seen"
    for row, (expected, seen) in enumerate(zip_longest(want, got, fillvalue="")):
        if row == MOST_ROWS:
            yield f"... {len(want) - row} more rows"
            return
        left = " ".join("1" if x == "1" else "." for x in expected)
        right = " ".join(_cell(x, y) for x, y in zip_longest(expected, seen, fillvalue="0"))
        yield f"{left:{width}}   {right}".rstrip()


def _cell(want: str, got: str) -> str:
    if want == got:
        return "1" if got == "1" else "."
    return "X" if got == "1" else "o"


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark; --text: #222; --page: #fff; --line: #ddd; --faint: #666; --code: #f4f4f4; --ok: #00694f; --bad: #b00020; --one: #0072b2; }}
@media (prefers-color-scheme: dark) {{ :root {{ --text: #ddd; --page: #1b1b1f; --line: #444; --faint: #aaa; --code: #2a2a30; --ok: #4fc3a1; --bad: #ff8a80; --one: #56b4e9; }} }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: var(--text); background: var(--page); overflow-wrap: anywhere; }}
table {{ border-collapse: collapse; width: 100%; }} td, th {{ text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }}
td:nth-child(2) {{ min-width: 6rem; }}
.ok {{ color: var(--ok); }} .bad {{ color: var(--bad); font-weight: 600; }} .none {{ color: var(--faint); }}
.masks {{ display: flex; gap: 2rem; flex-wrap: wrap; overflow-x: auto; }} .mask td {{ width: 1.1rem; min-width: 1.1rem; height: 1.1rem; padding: 0; border: 1px solid #8888; }} .mask {{ width: auto; }}
.one {{ background: var(--one); }} .extra {{ background: #d55e00; }} .missing {{ outline: 3px solid #d55e00; outline-offset: -3px; }}
.key {{ display: inline-block; width: 1rem; height: 1rem; vertical-align: -.15rem; border: 1px solid #8888; }}
pre {{ background: var(--code); padding: .6rem; white-space: pre-wrap; }} section {{ margin: 2rem 0; }}
</style></head><body>
{body}
</body></html>
"""


LEGEND = (
    '<p class="none"><span class="key one"></span> seen, as it should be; <span class="key extra"></span> seen, and should '
    'not be; <span class="key missing"></span> not seen, and should be</p>'
)


def as_html(reports: Sequence[Report], about: dict[str, Any] | None = None) -> str:
    """Write reports as one self-contained HTML page."""
    parts = []
    for report in reports:
        honoured, unclaimed = (sum(x.outcome == kind for x in report.findings) for kind in ("honoured", "not claimed"))
        counts = f"{honoured} honoured, {len(report.failures)} failed, {unclaimed} not claimed"
        parts.append(
            f"<h1>{_safe(report.kernel)}</h1><p>{_safe(report.path)} on {_safe(report.device)}: {counts}</p>"
            f"{''.join(f'<p>{_safe(text)}</p>' for text in of_drawn(report))}<table>"
        )
        for finding in report.findings:
            kind = {"✓": "ok", "✗": "bad"}.get(mark(finding.outcome), "none")
            parts.append(
                f'<tr class="{kind}"><td>{mark(finding.outcome)}</td><td>{_safe(finding.property)}</td><td>{_safe(_says(finding))}</td></tr>'
            )
        parts.append("</table>")
        parts += [_section(finding) for finding in report.failures]
    for name, value in (about or {}).items():
        parts.append(f'<p class="none">{_safe(name)}: {_safe(value)}</p>')
    title = ", ".join(report.kernel for report in reports)
    return PAGE.format(title=_safe(title), body="\n".join(parts))


def _section(finding: Finding) -> str:
    parts = [f'<section><h2 class="bad">{_safe(finding.property)}</h2><p>{_safe(finding.promise)}</p>']
    parts.append(f"<p>{_safe(finding.detail)}</p>")
    for i, (name, says) in enumerate(finding.mistakes):
        parts.append(
            f"<p><strong>{'Probably' if not i else 'Or'}:</strong> {_safe(says)} <code>{_safe(name)}</code></p>"
        )
    for want, got in zip(finding.expected, finding.seen, strict=True):
        if want != got:
            masks = "".join(
                f"<div><p>{name}</p>{_mask(want, rows)}</div>" for name, rows in (("expected", want), ("seen", got))
            )
            left_out = max(len(want), len(got)) - MOST_ROWS
            more = f'<p class="none">{left_out:,} more rows are left out.</p>' if left_out > 0 else ""
            parts.append(f'<div class="masks">{masks}</div>{more}{LEGEND}')
    if finding.example:
        parts.append(
            f"<p>The smallest batch that fails ({_safe(finding.dtype)}):</p><pre>{_safe(finding.example)}</pre>"
        )
    if finding.code:
        parts.append(f"<p>To see it again:</p><pre>{_safe(finding.code)}</pre>")
    return "".join([*parts, "</section>"])


def _mask(want: Sequence[str], rows: Sequence[str]) -> str:
    kinds = {"1": "one", ".": "", "X": "extra", "o": "missing"}
    cells = [
        "".join(f'<td class="{kinds[_cell(x, y)]}"></td>' for x, y in zip_longest(a, b, fillvalue="0"))
        for a, b in islice(zip_longest(want, rows, fillvalue=""), MOST_ROWS)
    ]
    return f'<table class="mask">{"".join(f"<tr>{row}</tr>" for row in cells)}</table>'


def _safe(text: Any) -> str:
    return html.escape(str(text))
