"""Exercises over lists: solutions, and the known mistakes, for the check in the pages of the site."""

import json

from twinattn.course.exercises import in_page, lists

ROWS = "[[{} for j in range(seq_len)] for i in range(seq_len - query_len, seq_len)]"

# What replaces `raise` in the exercises whose solution for the terminal is over tensors.
OVER_LISTS = {
    "write": """
    for token, slot in enumerate(slot_mapping):
        if slot >= 0:
            block, row = divmod(slot, len(key_cache[0]))
            key_cache[block][row] = key[token]
            value_cache[block][row] = value[token]
""",
    "gather": "return [cache[blocks[j // len(cache[0])]][j % len(cache[0])] for j in range(seq_len)]",
    "causal_mask": f"return {ROWS.format('j <= i')}",
    "online_softmax": """
    from math import exp, inf, log
    row_max, row_sum, acc = -inf, 0.0, None
    for scores, values in tiles:
        new_max = max(row_max, *scores)
        if new_max == -inf:
            continue
        acc = [0.0] * len(values[0]) if acc is None else acc
        rescale, weights = exp(row_max - new_max), [exp(score - new_max) for score in scores]
        row_sum = row_sum * rescale + sum(weights)
        acc = [x * rescale + sum(w * v[i] for w, v in zip(weights, values)) for i, x in enumerate(acc)]
        row_max = new_max
    return [x / row_sum for x in acc], row_max + log(row_sum)
""",
    "window_mask": f"return {ROWS.format('i - window < j <= i')}",
    "chunk_mask": f"return {ROWS.format('j <= i and i // chunk_size == j // chunk_size')}",
    "tree_mask": """
    visible = [[False] * len(parents) for _ in parents]
    for i, parent in enumerate(parents):
        visible[i] = list(visible[parent]) if parent >= 0 else visible[i]
        visible[i][i] = True
    return visible
""",
    "span_mask": "return "
    + ROWS.format("(j <= i or any(a <= i <= b and a <= j <= b for a, b in spans)) and i - j < window"),
    "fold": """
    faded = [[decay * x for x in row] for row in state]
    answers = [sum(x * k for x, k in zip(row, key)) for row in faded]
    return [[x + beta * (v - answer) * k for x, k in zip(row, key)] for row, v, answer in zip(faded, value, answers)]
""",
    "rms_norm": """
    roots = [(sum(x * x for x in row) / len(row) + eps) ** 0.5 for row in x]
    return [[a / root * w for a, w in zip(row, weight)] for row, root in zip(x, roots)]
""",
    "rotate": """
    from math import cos, sin
    half = len(x[0][0]) // 2
    speeds = [base ** (-i / half) for i in range(half)]
    def turn(head, position):
        a, b, angles = head[:half], head[half:], [position * speed for speed in speeds]
        first = [u * cos(angle) - v * sin(angle) for u, v, angle in zip(a, b, angles)]
        return first + [v * cos(angle) + u * sin(angle) for u, v, angle in zip(a, b, angles)]
    return [[turn(head, position) for head in token] for token, position in zip(x, positions)]
""",
    "sample": """
    from math import exp
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if temperature == 0:
        return order[0]
    weights = [exp(logits[token] / temperature) for token in order]
    kept, total = 0, 0.0
    while kept < len(order) and total < top_p * sum(weights):
        total += weights[kept]
        kept += 1
    running = 0.0
    for token, weight in zip(order[:kept], weights):
        running += weight
        if running > u * total:
            return token
""",
}


def replay(exercise, answers):
    """Return the function that answers each trial as it is written down."""

    def as_text(arguments):
        plain = {name: lists.plain(value) for name, value in arguments.items()}
        once = {name: {"once": value.items} for name, value in plain.items() if isinstance(value, in_page.Once)}
        return json.dumps(plain | once)

    known = {json.dumps(trial["arguments"]): each for trial, each in zip(exercise["trials"], answers, strict=True)}

    def function(**arguments):
        answer = known[as_text(arguments)]
        if answer is None:
            raise IndexError("as the mistake does")
        for name in exercise["changes"]:
            arguments[name][:] = answer[name]
        parts = list(answer.values())
        return None if exercise["changes"] else parts if exercise["parts"] else parts[0]

    return function


def named_in_page(page, says):
    """Return in which trial the page finds a known mistake, and what it takes it for."""
    answers = next(each["answers"] for each in page["mistakes"] if each["says"] == says)
    outcome = in_page.check(page, replay(page, answers))
    raised = answers[outcome["trials"] - 1] is None  # then there is no answer to know it by
    return outcome["trials"], says if raised else outcome["mistake"]
