// Exercises that are written in a page: the code of a box becomes an editor, and Run checks it. Python is loaded when Run
// is pressed for the first time, in a worker (python.mjs); what was written is remembered in this browser.

"use strict"

{
  const SECONDS = 20 // that a check may take, once Python is there
  const assets = new URL(".", document.currentScript.src)
  const { element, recall, remember } = reader
  let worker = null
  let isLoaded = false
  let running = null // the box that waits for an answer

  function start() {
    isLoaded = false
    worker = new Worker(new URL("python.mjs", assets), { type: "module" })
    worker.addEventListener("message", ({ data }) => {
      if (data.loaded) {
        isLoaded = true
        running?.runs()
      } else {
        finish(data.outcome ?? { state: "failed", reason: `Python could not be loaded: ${data.failed}` })
      }
    })
    worker.addEventListener("error", (event) => {
      stop()
      finish({ state: "failed", reason: `Python could not be loaded: ${event.message ?? "is this browser too old?"}` })
    })
  }

  function stop() {
    worker.terminate()
    worker = null
  }

  function finish(outcome) {
    const box = running
    running = null
    clearTimeout(box?.timer)
    box?.ends(outcome)
  }

  function run(box, name, source) {
    if (running) return
    running = box
    if (!worker) start()
    worker.postMessage({ source, exercise: new URL(`exercises/${name}.json`, assets).href })
    if (isLoaded) box.runs()
    else box.waits()
  }

  /** Let the keys of an editor work in a text: Tab and Enter indent. After Esc, Tab leaves it again. */
  function editor(source) {
    const area = element("textarea", { value: source, spellcheck: false, autocapitalize: "off", autocomplete: "off", wrap: "off" })
    let leaves = false
    const insert = (text) => {
      area.setRangeText(text, area.selectionStart, area.selectionEnd, "end")
      area.dispatchEvent(new Event("input"))
    }
    const fit = () => {
      area.style.height = "auto"
      area.rows = area.value.split("\n").length + 1
      if (area.scrollHeight > area.clientHeight + 1) area.style.height = `${area.scrollHeight + 24}px` // where lines wrap
    }
    area.addEventListener("input", fit)
    area.addEventListener("keydown", (event) => {
      const line = area.value.slice(0, area.selectionStart).split("\n").at(-1)
      if (event.key === "Tab" && !leaves && !event.ctrlKey && !event.altKey) {
        event.preventDefault()
        if (!event.shiftKey) {
          insert("    ")
        } else if (/^ +$/.test(line)) {
          area.setSelectionRange(area.selectionStart - Math.min(4, line.length), area.selectionEnd)
          insert("")
        }
      } else if (event.key === "Enter" && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
        event.preventDefault()
        insert(`\n${line.match(/^ */)[0]}${line.trimEnd().endsWith(":") ? "    " : ""}`)
      }
      leaves = event.key === "Escape" || (leaves && event.key === "Shift")
    })
    return { area, fit }
  }

  function make(node) {
    const { name, title } = node.dataset
    const given = node.querySelector("pre code")
    if (location.protocol === "file:") {
      const served = element("code", {}, "python -m http.server --directory site")
      node.querySelector(".elsewhere").before(element("p", { className: "served" },
        "You can write it here, and run it in the page, where the site is served: Python does not start from a file. ", served,
        " serves it at http://localhost:8000."))
      return
    }
    const stub = given.textContent.trimEnd() + "\n"
    const before = recall("exercises")[name]
    const { area, fit } = editor(before?.source ?? stub)
    area.setAttribute("aria-label", `${title}: your code`)
    const button = element("button", { type: "button", className: "md-button md-button--primary" }, "Run")
    const again = element("button", { type: "button", className: "md-button" }, "Start again")
    const says = element("output", {})
    const result = element("div", { className: "result" })
    const keep = (state) => {
      const all = recall("exercises")
      all[name] = { source: area.value, state: state ?? all[name]?.state ?? "begun" }
      remember("exercises", all)
    }

    function show({ state, trials, says: tried, call, reason, shown, mistake, printed }) {
      const part = (head, text) => element("p", {}, element("strong", {}, `${head}: `), text)
      result.replaceChildren()
      if (tried) result.append(part("Tried", tried), element("pre", {}, call))
      if (reason) result.append(part(state === "failed" ? "Not run" : "Wrong", reason))
      if (shown) result.append(element("pre", {}, shown))
      if (mistake) result.append(element("p", { className: "mistake" }, element("strong", {}, "Probably: "), `${mistake.replace(/\.$/, "")}.`))
      if (printed) result.append(part("It printed", ""), element("pre", {}, printed))
      says.textContent = state === "done" ? `✓ All ${trials} trials are right.` : state === "to do" ? `Write ${name} where it says raise.`
        : state === "wrong" ? `✗ Trial ${trials} is wrong.`.replace("Trial 0 is wrong", "It does not run") : ""
    }

    const box = {
      waits: () => {
        const since = Date.now()
        const tell = () => { says.textContent = `Loading Python, 13 MB the first time … ${Math.round((Date.now() - since) / 1000)} s` }
        tell()
        box.timer = setInterval(tell, 1000)
      },
      runs: () => {
        clearTimeout(box.timer)
        says.textContent = "Running …"
        box.timer = setTimeout(() => {
          stop()
          finish({ state: "wrong", trials: 0, reason: `it was not done after ${SECONDS} seconds; is there a loop that never ends?` })
        }, SECONDS * 1000)
      },
      ends: (outcome) => {
        button.disabled = false
        show(outcome)
        if (outcome.state === "failed") return
        const state = outcome.state === "done" ? "right" : "tried"
        keep(state)
        node.dataset.state = state
      },
    }
    button.addEventListener("click", () => {
      if (running) {
        says.textContent = "Another exercise is running."
        return
      }
      button.disabled = true
      result.replaceChildren()
      run(box, name, area.value)
    })
    again.addEventListener("click", () => {
      area.value = stub
      area.dispatchEvent(new Event("input"))
      result.replaceChildren()
      says.textContent = ""
      keep()
    })
    area.addEventListener("change", () => keep())
    area.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) button.click() })
    given.closest(".highlight").replaceWith(area, element("div", { className: "bar" }, button, again, says), result)
    fit()
    if (before && before.state !== "begun") {
      node.dataset.state = before.state
      if (before.state === "right") says.textContent = "✓ You wrote it."
    }
  }

  document.querySelectorAll(".exercise[data-name]").forEach(make)
}
