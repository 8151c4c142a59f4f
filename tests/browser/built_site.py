"""The built site in a browser: explorer and engine by clicks, keys and touch, on a desk and on a phone, light and dark.

`make site-test` builds the site and runs this file, whose name keeps it out of `make test`: it needs Chromium. With
`--screenshots FOLDER` it leaves a picture of each page that it looks at.
"""

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from twinattn.course.exercises import predict

ROOT = Path(__file__).parent.parent.parent
CELLS = [json.loads(path.read_text())["cells"] for path in (ROOT / "notebooks").glob("*.ipynb")]
QUESTIONS = sum(len(predict.questions(cells)) for cells in CELLS)
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
HOW_TO_INSTALL = (
    "no Chromium: `apt install chromium` on Debian, `snap install chromium` on Ubuntu, `brew install chromium` on "
    "a Mac, or say CHROMIUM=/path/to/it"
)
PHONE = dict(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True, device_scale_factor=2)
DESK = dict(viewport={"width": 1280, "height": 900})
SCREENS = {"desk-light": DESK, "desk-dark": DESK, "phone-light": PHONE, "phone-dark": PHONE}
PAGES = {  # with some of each kind
    "home": "index.html",
    "explorer": "explorer/index.html",
    "cascade": "explorer/index.html#lens=2,13;1,15;3,11&shared=8",
    "played": "explorer/engine.html",
    "state": "explorer/state.html#step=3",
    "one-sm": "explorer/one_sm.html#first=20",
    "sm": "ladder/sm.html",
    "ladder": "ladder/decode.html",
    "path": "paths/sliding_window.html",
    "notebook": "notebooks/05_sliding_window.html",
    "written": "notebooks/02_paged_cache.html",
    "benchmark": "proof/benchmark.html",
}


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", folder]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="session")
def browser():
    assert CHROMIUM, HOW_TO_INSTALL
    with sync_playwright() as playwright:
        # --no-sandbox: in a container, root has no other way; the pages are our own.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=["desk-light", "phone-dark"])
def page(request, browser, site):
    """Open a page on a desk or a phone, light or dark; nothing may be wrong in its console when the test is over."""
    context = browser.new_context(
        **SCREENS[request.param], color_scheme=request.param.split("-")[1], reduced_motion="reduce", offline=True
    )
    page = context.new_page()
    page.set_default_timeout(20_000)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    yield page
    context.close()
    assert not wrong


@pytest.fixture(scope="session")
def served(site):
    """Serve the site on this machine, where Python starts: from a file it does not."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=site)
    handler.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def visited(browser, served):
    """Open a page of the served site; nothing may be asked for elsewhere. `asked` are the addresses of its files."""
    context = browser.new_context(**DESK)
    page = context.new_page()
    page.set_default_timeout(120_000)  # for a browser that starts Python on a machine with other work
    page.asked, elsewhere = [], []
    context.on("request", lambda request: (page.asked if served in request.url else elsewhere).append(request.url))
    yield page
    context.close()
    assert not [address for address in elsewhere if not address.startswith(("blob:", "data:"))]


def look(page: Page, site: Path, address: str) -> None:
    page.goto("about:blank")  # or an address that differs after its # alone would not be opened anew
    page.goto(f"{site.as_uri()}/{address}")


def press(page: Page, name: str, role: str = "button") -> None:
    """Press a button with a finger on a phone, and with a mouse on a desk."""
    button = page.get_by_role(role, name=name, exact=True)
    button.tap() if page.viewport_size["width"] < 600 else button.click()


def address(page: Page) -> str:
    return page.url.partition("#")[2]


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("page", SCREENS, indirect=True)
def test_a_page_fits_its_screen(page, site, name, request):
    look(page, site, PAGES[name])
    page.wait_for_timeout(200)
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "it scrolls to the side"
    folder = request.config.getoption("--screenshots")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}-{request.node.callspec.params['page']}.png", full_page=True)


def test_three_requests_are_what_it_begins_with(page, site):
    look(page, site, "explorer/index.html")
    expect(page.locator(".where tbody tr").first).to_contain_text("39 8")
    expect(page.locator(".who .says")).to_have_text("b, query “like” at position 6, sees 7 of 7 keys: 0 to 6.")
    expect(page.locator(".how .says")).to_contain_text("row_sum")
    expect(page.locator(".cost .floor")).to_contain_text("for memory")
    assert address(page) == ""


def test_the_roof_of_a_ladder_moves_and_its_bars_stay(page, site):
    """From one measured batch to another both change; a slider moves the roof alone."""
    look(page, site, "ladder/decode.html")
    page.locator("details", has=page.locator(".roof")).evaluate("fold => { fold.open = true }")
    roof = page.locator(".roof").first

    def times():
        """Return the times of the bars, and those of the two lines below them."""
        texts = [text for text in roof.locator("svg text").all_text_contents() if text.endswith(("µs", "ms", " s"))]
        return texts[:-2], texts[-2:]

    bars, lines = times()
    assert len(bars) == 12
    roof.get_by_label("keys of each").fill("100")
    expect(roof.locator(".says")).to_contain_text("The bars are still those of 64 x 8192, as measured.")
    assert times()[0] == bars and times()[1] != lines
    press(page, "1 x 131072")
    expect(roof.locator(".says")).to_contain_text("The bars are of this batch.")
    assert times()[0] != bars


def test_a_preset_changes_everything_at_once(page, site):
    look(page, site, "explorer/index.html")
    before = [page.locator(f".{name}").inner_text() for name in ("where", "who", "how", "cost")]
    press(page, "chunks", role="link")
    expect(page.locator(".where")).to_contain_text("Virtual batches")
    assert all(
        page.locator(f".{name}").inner_text() != old
        for name, old in zip(("where", "who", "how", "cost"), before, strict=True)
    )
    assert address(page) == "mask=chunk"
    page.go_back()
    expect(page.locator(".where")).not_to_contain_text("Virtual batches")


def test_a_question_below_sets_what_it_asks_about(page, site):
    look(page, site, "explorer/index.html")
    press(page, "A window of three", role="link")
    assert address(page) == "mask=window"
    expect(page.locator(".presets")).to_be_in_viewport()


def test_numbers_are_changed_by_buttons_and_by_typing(page, site):
    look(page, site, "explorer/index.html")
    press(page, "more: tokens in a block")
    assert address(page) == "block=5"
    expect(page.locator(".who .says")).to_contain_text("sees 7 of 7")
    block = page.get_by_role("spinbutton", name="tokens in a block")
    block.fill("2")
    block.press("Tab")  # leaves the field, which takes what is in it, and goes on to the next
    assert address(page) == "block=2"
    expect(page.get_by_role("button", name="more: tokens in a block")).to_be_focused()
    block.fill("")
    block.press("Enter")
    expect(block).to_have_value("1")


def test_a_request_comes_and_goes(page, site):
    look(page, site, "explorer/index.html")
    press(page, "+ a request")
    expect(page.locator(".masks [role=group]")).to_have_count(4)
    press(page, "remove request a")
    assert address(page) == "lens=1,7;3,3;1,6"
    expect(page.get_by_role("spinbutton", name="all tokens of a")).to_have_value("7")


def test_a_query_is_chosen_by_a_click_and_by_keys(page, site):
    look(page, site, "explorer/index.html")
    row = page.locator(".masks").get_by_role("option").nth(0)
    row.tap(force=True) if page.viewport_size["width"] < 600 else row.click()
    expect(page.locator(".who .says")).to_contain_text("a, query “sky”")
    assert address(page) == "query=0,0"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert address(page) == "", "the one that it begins with"
    expect(page.locator(".masks").get_by_role("option", selected=True)).to_be_focused()
    expect(page.locator(".how")).to_contain_text("Query “like”")


def test_a_mask_takes_its_number(page, site):
    look(page, site, "explorer/index.html")
    page.get_by_role("radio", name="window").check(force=True)
    window = page.get_by_role("spinbutton", name="keys in a window")
    expect(window).to_have_value("3")
    expect(page.locator(".who .says")).to_contain_text("sees 3 of 7 keys: 4 to 6")
    page.get_by_role("radio", name="window").press("ArrowRight")
    expect(page.get_by_role("radio", name="chunks")).to_be_focused()
    assert address(page) == "mask=chunk"


def test_a_tree_is_typed(page, site):
    look(page, site, "explorer/index.html#lens=4,9&mask=tree&query=0,3")
    expect(page.locator(".who .says")).to_contain_text("0 to 6 and 8")
    tree = page.get_by_role("textbox", name="the parent of each node")
    tree.fill("-1 0 1 2")
    tree.press("Enter")
    expect(page.locator(".who .says")).to_contain_text("sees 9 of 9 keys: 0 to 8")


def test_an_online_softmax_goes_step_by_step(page, site):
    look(page, site, "explorer/index.html#lens=1,24&splits=3&query=0,0")
    expect(page.locator(".how .merge tbody tr")).to_have_count(4)
    first = page.locator(".how .bars").inner_text()
    press(page, "next tile")
    expect(page.locator(".how output")).to_have_text("tile 2 of 6")
    assert page.locator(".how .bars").inner_text() != first
    expect(page.locator(".how .says")).to_contain_text("row_sum")
    slider = page.get_by_role("slider")
    slider.focus()
    slider.press("End")
    expect(page.locator(".how output")).to_have_text("tile 6 of 6")
    expect(slider).to_be_focused()
    assert address(page).endswith("step=5")


def test_nothing_jumps(page, site):
    """What is above the change stays where it is, and a step of the softmax moves nothing at all."""
    look(page, site, "explorer/index.html#lens=1,24&splits=3&query=0,0")
    places = (
        "[...document.querySelectorAll('.explorer .pane')].map((pane) => pane.getBoundingClientRect().top + scrollY)"
    )
    before = page.evaluate(places)
    for _ in range(5):
        press(page, "next tile")
        assert page.evaluate(places) == before


def test_large_steps_are_drawn_in_time(page, site):
    look(page, site, "explorer/index.html#lens=8192,32768;1,32768&block=16&splits=8")
    expect(page.locator(".cost .floor")).to_contain_text("for arithmetic")
    taken = page.evaluate(
        """() => {
          const start = performance.now()
          document.querySelector("[data-key='splits more:']").click()
          return performance.now() - start
        }"""
    )
    assert taken < 1500, "milliseconds"


def test_the_floor_is_of_the_machine_that_is_chosen(page, site):
    look(page, site, "explorer/index.html#lens=1,8192;1,20000;1,32768&block=16&splits=8")
    fast = page.locator(".cost .floor strong").inner_text()
    page.get_by_role("combobox", name="machine").select_option(index=1)
    assert page.locator(".cost .floor strong").inner_text() != fast


@pytest.mark.parametrize("address", ["explorer/index.html#mask=tree", "explorer/engine.html", "explorer/one_sm.html"])
def test_every_control_has_a_name(page, site, address):
    look(page, site, address)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll(".explorer :is(input, button, select, svg[role=img])")]
          .filter((each) => !(each.ariaLabel || each.textContent.trim() || each.closest("label")))
          .map((each) => each.outerHTML)"""
    )
    assert nameless == []


def test_it_opens_from_a_clone_without_a_site(page, site):
    page.goto(f"{(ROOT / 'docs/explorer/explorer.html').as_uri()}#mask=window")
    expect(page.locator(".where")).to_contain_text("Trimmed tables")
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]


def test_a_path_leads_into_the_explorer_in_its_state(page, site):
    look(page, site, "paths/sliding_window.html")
    press(page, "a window of three", role="link")
    expect(page.locator(".where")).to_contain_text("Trimmed tables")


def test_the_engine_is_played_step_by_step(page, site):
    look(page, site, "explorer/engine.html")
    expect(page.locator(".step .says")).to_contain_text("A prefix hit: the first 32 tokens of c")
    press(page, "step forward")
    assert address(page) == "step=5"
    expect(page.locator(".transport output").first).to_have_text("step 6 of 39")
    slider = page.get_by_role("slider", name="step", exact=True)
    slider.focus()
    slider.press("End")
    expect(page.locator(".feel")).to_contain_text("20 of 20")
    page.get_by_role("group", name="timeline").press("ArrowLeft")
    assert address(page) == "step=37"
    press(page, "play")
    expect(page.locator(".transport output").first).to_have_text("step 39 of 39")
    expect(page.get_by_role("button", name="play", exact=True)).to_be_visible()


def test_a_request_of_the_engine_is_preempted_and_comes_back(page, site):
    look(page, site, "explorer/engine.html")
    press(page, "preemption", role="link")
    expect(page.locator(".step .says")).to_contain_text("c, the youngest, is preempted")
    expect(page.locator(".pool-pane .kept[title*='what c wrote']")).to_have_count(3)
    slider = page.get_by_role("slider", name="step", exact=True)
    for _ in range(13):
        slider.press("ArrowRight")
    expect(page.locator(".step .says")).to_contain_text("b and c are back")
    page.get_by_role("spinbutton", name="blocks in the pool").fill("19")
    page.get_by_role("spinbutton", name="blocks in the pool").press("Enter")
    expect(page.locator(".pool-pane")).to_contain_text("0 preemptions")


def test_the_budget_of_the_engine_is_dragged(page, site):
    look(page, site, "explorer/engine.html")
    press(page, "a long prompt stalls decodes", role="link")
    expect(page.locator(".feel .big").nth(2)).to_contain_text(re.compile(r"2\d\d ms"))  # at rates that were measured
    budget = page.get_by_role("slider", name="chunk budget")
    budget.focus()
    for _ in range(10):
        budget.press("ArrowLeft")
    expect(page.locator(".budget output")).to_have_text("512 tokens per step")
    expect(page.locator(".feel")).to_contain_text(re.compile(r"worst inter-token latency 14\.\d ms\."))
    expect(page.get_by_role("link", name="the same in chunks")).to_have_attribute("aria-current", "true")


def test_a_request_is_dropped_onto_the_timeline_and_dragged(page, site):
    look(page, site, "explorer/engine.html")
    timeline = page.locator(".timeline svg")
    timeline.click(position={"x": 150, "y": 8})
    expect(page.locator(".arrival")).to_have_count(6)
    arrival = page.get_by_role("spinbutton", name="arrival of f")
    before = float(arrival.input_value())
    box = page.locator(".arrival").nth(5).bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2 + 60, box["y"] + 10, steps=4)
    page.mouse.up()
    assert float(arrival.input_value()) > before + 5
    expect(page.locator(".arrival")).to_have_count(6)
    press(page, "remove request f")
    expect(page.locator(".arrival")).to_have_count(5)
    press(page, "Copy link")
    expect(page.locator(".copy")).not_to_have_text("Copy link")


def test_one_sm_is_played(page, site):
    """Roles, slots and presets change the microseconds; one slot is a deadlock, which ends nothing."""
    look(page, site, "explorer/one_sm.html")
    app, times = page.locator("#one-sm-app"), page.locator("#one-sm-app .big strong")
    expect(times.nth(0)).to_have_text("347 µs")
    expect(times.nth(1)).to_have_text("345 µs")
    assert app.locator("svg .label").all_text_contents()[1:3] == ["slot 0", "slot 1"]
    app.get_by_label("roles of the warps").select_option("together")
    expect(times.nth(0)).to_have_text("572 µs")
    expect(app.get_by_label("it waits for the next keys")).to_be_disabled()
    assert address(page) == "roles=together" and "slot 0" not in app.locator("svg .label").all_text_contents()
    press(page, "one slot", "link")
    expect(times.nth(0)).to_have_text("never")
    expect(app.locator(".says")).to_contain_text("deadlock")
    app.get_by_label("slots (stages)").fill("3")
    expect(times.nth(0)).to_have_text("347 µs")
    expect(app.locator(".says")).to_contain_text("3 slots take 296 KB")
    expect(app.get_by_label("slots (stages)")).to_be_focused()
    assert address(page) == "slots=3"


def test_a_path_leads_into_the_engine_in_its_state(page, site):
    look(page, site, "paths/engine.html")
    press(page, "a request is preempted", role="link")
    expect(page.locator(".step .says")).to_contain_text("is preempted")


def test_an_answer_is_closed_until_it_is_opened(page, site):
    look(page, site, "notebooks/05_sliding_window.html")
    answer = page.locator("details.question").first
    expect(answer.locator(".output")).to_be_hidden()
    summary = answer.locator("summary")
    summary.tap() if page.viewport_size["width"] < 600 else summary.click()
    expect(answer.locator(".output")).to_be_visible()


def test_the_search_works_from_a_file(page, site):
    look(page, site, "index.html")
    if page.viewport_size["width"] < 1200:
        page.locator("header label.md-header__button[for=__search]").tap()
    page.get_by_role("textbox", name="Search").press_sequentially("explorer")
    expect(page.locator(".md-search-result__item").first).to_contain_text("Explorer", ignore_case=True)


def test_a_mask_is_painted_and_opens_the_answer(page, site):
    look(page, site, "notebooks/01_ragged_batch.html")
    asked = page.locator("#predict-1\\.5")
    answer = page.locator("#predict-1\\.5 ~ details.question").first
    expect(answer).not_to_have_attribute("open", "")
    cells = asked.locator(".cell")
    expect(cells).to_have_count(10)
    first, last = cells.nth(0).bounding_box(), cells.nth(4).bounding_box()
    cells.nth(0).scroll_into_view_if_needed()
    for i in range(10):  # by keys, one after the other
        cells.nth(i).focus()
        page.keyboard.press(" ")
    asked.get_by_role("button", name="Check").click()
    expect(asked.locator("output")).to_have_text("9 of 10 are right.")
    expect(answer).to_have_attribute("open", "")
    cells.nth(4).click()
    asked.get_by_role("button", name="Check").click()
    expect(asked.locator("output")).to_have_text("✓ Right.")
    assert first["x"] < last["x"]


def test_a_prediction_is_remembered(page, site):
    look(page, site, "notebooks/01_ragged_batch.html")
    asked = page.locator("#predict-1\\.3")
    asked.get_by_role("textbox").fill("0 2 3")
    asked.get_by_role("button", name="Check").click()
    expect(asked.locator("output")).to_have_text("Type 4 numbers.")
    asked.get_by_role("textbox").fill("[0, 2, 3, 6]")
    asked.get_by_role("textbox").press("Enter")
    expect(asked.locator("output")).to_have_text("✓ Right.")
    page.locator("#predict-1\\.7").get_by_label("yes").check()
    page.locator("#predict-1\\.7").get_by_role("button", name="Check").click()
    expect(page.locator("#predict-1\\.7 output")).to_have_text("Not quite.")
    page.reload()
    expect(asked.get_by_role("textbox")).to_have_value("0, 2, 3, 6")
    expect(asked.locator("output")).to_have_text("✓ Right.")
    look(page, site, "index.html")
    expect(page.locator(".progress")).to_contain_text(f"2 of {QUESTIONS} predictions made, 1 right.")
    expect(page.locator(".progress li").first).to_contain_text("2 / 8")


def test_an_exercise_is_written_in_the_page(visited, served):
    """A likely mistake is named, the solution is right and remembered; Python is loaded when Run is pressed."""
    visited.goto(f"{served}/notebooks/02_paged_cache.html")
    box = visited.locator("#write-slot")
    editor, run, says = box.get_by_role("textbox"), box.get_by_role("button", name="Run"), box.locator("output")
    stub = editor.input_value()
    assert not [address for address in visited.asked if "pyodide" in address]
    editor.fill(stub.replace("raise NotImplementedError", "return blocks[0] * block_size + position % block_size"))
    run.click()
    expect(says).to_have_text("✗ Trial 1 is wrong.", timeout=120_000)
    expect(box.locator(".result")).to_contain_text("expected 9\ngot      37")
    expect(box.locator(".mistake")).to_have_text(
        "Probably: the block of a token is blocks[position // block_size], and not always the first."
    )
    assert [address for address in visited.asked if address.endswith("pyodide.asm.wasm")]
    right = "return blocks[position // block_size] * block_size + position % block_size"
    editor.fill(stub.replace("raise NotImplementedError", right))
    run.click()
    expect(says).to_have_text("✓ All 6 trials are right.")
    visited.reload()
    expect(says).to_have_text("✓ You wrote it.")
    assert right in editor.input_value()
    visited.goto(f"{served}/index.html")
    expect(visited.locator(".progress")).to_contain_text("1 of 22 functions written in the pages.")


def test_a_loop_that_never_ends_is_ended(visited, served):
    visited.clock.install()
    visited.goto(f"{served}/notebooks/02_paged_cache.html")
    box = visited.locator("#write-slot")
    box.get_by_role("textbox").fill("def slot(position, blocks, block_size):\n    while True: pass\n")
    box.get_by_role("button", name="Run").click()
    expect(box.locator("output")).to_have_text("Running …", timeout=120_000)
    visited.clock.fast_forward(20_000)
    expect(box.locator(".result")).to_contain_text("is there a loop that never ends?")
    box.get_by_role("button", name="Start again").click()
    assert "raise NotImplementedError" in box.get_by_role("textbox").input_value()


def test_an_exercise_says_where_it_runs_when_it_is_opened_as_a_file(page, site):
    look(page, site, "notebooks/02_paged_cache.html")
    expect(page.locator("#write-slot .served")).to_contain_text("Python does not start from a file")
    expect(page.locator("#write-slot button", has_text="Run")).to_have_count(0)
    look(page, site, "notebooks/03_merge.html")
    expect(page.locator("#write-merge .elsewhere")).to_contain_text("It needs PyTorch")
