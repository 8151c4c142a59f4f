"""Every puzzle can be broken and mended; a harmless case and the bug itself are refused."""

from pathlib import Path

import pytest

from twinattn.course.exercises import __main__ as command
from twinattn.course.exercises import learner
from twinattn.course.exercises.puzzles import PUZZLES

ROOT = Path(__file__).parent.parent.parent
STUBS, SOLUTIONS = ROOT / "notebooks" / "exercises" / "puzzles", Path(__file__).parent / "solutions" / "puzzles"
TODO = "    raise NotImplementedError\n"
HARMLESS = {  # cases that the bug does not show on
    "window": dict(query_len=1, seq_len=3, window=3),
    "padding": dict(num_slots=4, slots=[-1, 3, 0]),
    "empty_parts": dict(lses=[[float("-inf")], [1.0]]),
    "log_base": dict(prefix_len=8, suffix_len=8),
    "silent_rows": dict(query_lens=[1, 1, 0]),
    "stale_memory": dict(seq_len=8, block_size=4, stale=float("nan")),
    "chunk_ends": dict(query_len=3, seq_len=8, chunk_size=4),
    "prefix_reach": dict(query_lens=[4, 4], seq_lens=[8, 8], block_tables=[[5, 0], [5, 1]], block_size=4),
    "sink_per_split": dict(num_keys=8, num_splits=1, sink=0.0),
    "softcap_order": dict(query_len=1, seq_len=5, softcap=1.0),
    "one_scale": dict(key_scale=0.25, value_scale=0.25),
    "rank_lengths": dict(context_len=4, new_len=3, rank=1, num_ranks=2, interleave=2),
    "block_or_slot": dict(blocks=[3, 1, 0], seq_len=3, block_size=1),
    "frozen_splits": dict(captured_len=8, replayed_len=8, num_splits=2),
    "draft_stayed": dict(num_tokens=3, accepted=3),
    "kept_states": dict(num_cached=9, kept=[8], block_size=4),
    "tied_scores": dict(scores=[0.0, 2.0, 0.0], topk=3, slots=[4, 2, 8]),
    "span_or_window": dict(seq_len=6, first=1, last=3, window=9),
}

each_puzzle = pytest.mark.parametrize("puzzle", PUZZLES, ids=lambda puzzle: puzzle.name)


@pytest.fixture(autouse=True)
def as_a_learner_runs_them(shapes_unchecked):
    """Shapes are not checked there: an answer of the wrong shape is for the check to refuse."""


def check(puzzle, folder):
    return command.PuzzleTask("p1", puzzle, learner.file_of(folder, puzzle.name)).check()


def solve(puzzle, folder, *, case=None, mended=None):
    """Write a file into a folder whose functions are a stub's, less those that are given."""
    stub = learner.file_of(STUBS, puzzle.name)
    before_case, after_case, after_mended = stub.read_text().split(TODO)
    bodies = [TODO if body is None else body for body in (case, mended)]
    (folder / stub.name).write_text(before_case + bodies[0] + after_case + bodies[1] + after_mended)


def the_bug_of(puzzle):
    """Return the body of `mended` that calls `broken`."""
    arguments = ", ".join(f"{name}={name}" for name in puzzle.arguments(**HARMLESS[puzzle.name]))
    return f"    return broken({arguments})\n"


def the_case_of(puzzle):
    module = learner.load(learner.file_of(SOLUTIONS, puzzle.name))
    return f'    inf = nan = float("nan")\n    inf = float("inf")\n    return {module.failing_case()}\n'


@each_puzzle
def test_it_is_mended(puzzle):
    outcome = check(puzzle, SOLUTIONS)
    assert outcome.state == "done", outcome.reason
    assert outcome.trials == len(puzzle.contract) >= 3


@each_puzzle
def test_the_stub_is_to_do(puzzle):
    assert check(puzzle, STUBS).state == "to do"


@each_puzzle
def test_it_is_broken(puzzle, tmp_path):
    solve(puzzle, tmp_path, case=the_case_of(puzzle))
    outcome = check(puzzle, tmp_path)
    assert outcome.state == "found" and outcome.reason


@each_puzzle
def test_the_bug_does_not_keep_the_contract(puzzle, tmp_path):
    solve(puzzle, tmp_path, case=the_case_of(puzzle), mended=the_bug_of(puzzle))
    assert check(puzzle, tmp_path).state == "wrong"


@each_puzzle
def test_a_harmless_case_is_refused(puzzle, tmp_path):
    harmless = f'    nan, inf = float("nan"), float("inf")\n    return {HARMLESS[puzzle.name]}\n'
    solve(puzzle, tmp_path, case=harmless, mended=the_bug_of(puzzle))
    outcome = check(puzzle, tmp_path)
    assert outcome.state == "wrong" and "broken gives the right answer" in outcome.reason


@each_puzzle
def test_the_bug_is_the_same_everywhere(puzzle):
    stub, solution = (learner.file_of(folder, puzzle.name).read_text() for folder in (STUBS, SOLUTIONS))
    assert stub.partition("def failing_case")[0] == solution.partition("def failing_case")[0]
    assert "Reported: " in stub


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("    return None\n", "expected a dict of query_len, seq_len, window; got None"),
        ("    return dict(query_len=1)\n", "expected a dict of query_len, seq_len, window"),
        ("    return dict(query_len=5, seq_len=2, window=1)\n", "not a valid case: query len is more than seq len"),
        ("    return dict(query_len=1, seq_len=2, window='x')\n", "TypeError"),
    ],
)
def test_a_bad_case_is_named(case, says, tmp_path):
    solve(PUZZLES[0], tmp_path, case=case)
    outcome = check(PUZZLES[0], tmp_path)
    assert outcome.state == "wrong" and says in outcome.reason


def test_files_are_numbered_in_the_order_of_the_puzzles():
    names = [f"{i:02}_{puzzle.name}" for i, puzzle in enumerate(PUZZLES, 1)]
    assert [file.stem for file in learner.files(STUBS)] == names
    assert [file.stem for file in learner.files(SOLUTIONS)] == names
    assert list(HARMLESS) == [puzzle.name for puzzle in PUZZLES]


def test_keys_may_be_split_in_any_way(tmp_path):
    """The last split may take the rest: nothing asks for splits of one size."""
    puzzle = next(puzzle for puzzle in PUZZLES if puzzle.name == "frozen_splits")
    body = (
        "    size = replayed_len // num_splits\n"
        "    ends = [size * i for i in range(1, num_splits)] + [replayed_len]\n"
        "    return list(zip([0, *ends[:-1]], ends))\n"
    )
    solve(puzzle, tmp_path, case=the_case_of(puzzle), mended=body)
    assert check(puzzle, tmp_path).state == "done"


def test_nothing_hides_a_broken_model(tmp_path):
    """NaN of a part that counts has to come out; only what is made of nothing, as -inf - -inf, may be removed."""
    puzzle = next(puzzle for puzzle in PUZZLES if puzzle.name == "empty_parts")
    body = "    out, lse = broken(outs, lses)\n    return out.nan_to_num(0), lse.nan_to_num(float('-inf'))\n"
    solve(puzzle, tmp_path, case=the_case_of(puzzle), mended=body)
    outcome = check(puzzle, tmp_path)
    assert outcome.state == "wrong" and "where NaN went in" in outcome.reason
