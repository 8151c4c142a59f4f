// Predictions: a field below each question of a notebook. What a reader types, chooses or paints is compared with the
// stored answer before that unfolds, and remembered in this browser; the start page shows how far they are.
//
//   predictions.judge(question, guess)    [right parts, parts], as twinattn.course.exercises.predict.judge
//   predictions.numbers(text)             the numbers in what was typed
//
// The first part computes and knows nothing of a page, so that the tests can run it.

"use strict"

const predictions = (() => {
  function judge({ right, choose, mask, within = 0 }, guess) {
    if (choose) return [guess === right ? 1 : 0, 1]
    if (mask) {
      const [mine, theirs] = [guess.join(""), right.join("")]
      return [[...mine].filter((cell, i) => cell === theirs[i]).length, theirs.length]
    }
    if (guess.length !== right.length) return [0, right.length]
    const isClose = (a, b) => Math.abs(a - b) <= within * Math.abs(b) + 1e-9
    return [guess.filter((a, i) => isClose(a, right[i])).length, right.length]
  }

  // "1 073 741 824" and "1,073,741,824" are one number, "0, 2, 3" are three.
  function numbers(text) {
    const joined = text.replace(/(?<=\d)[ \u202f,](?=\d{3}(?!\d))(?<!\d{4}.)/g, "")
    return (joined.match(/-?(?:\d+(?:\.\d+)?|\.\d+)(?:e-?\d+)?/gi) ?? []).map(Number)
  }

  return { judge, numbers }
})()

if (typeof document !== "undefined") {
  const { element: el } = reader

  /** Return the answer that a question opens: the next folded one. */
  function answerBelow(node) {
    for (let next = node.nextElementSibling; next; next = next.nextElementSibling) {
      if (next.matches("details.question")) return next
      if (next.matches(".predict, h2")) return null
    }
    return null
  }

  /** Make a mask of cells to be painted, by a pointer that is drawn over them or by keys; returns how to read it. */
  function painted(mask, given) {
    let paint = null
    const cells = mask.rows.map((row, i) => mask.columns.map((column, j) => {
      const cell = el("button", { type: "button", className: "cell" })
      cell.setAttribute("aria-label", `${row} sees ${column}`)
      const set = (on) => cell.setAttribute("aria-pressed", on)
      set(given?.[i]?.[j] === "1")
      const isOn = () => cell.getAttribute("aria-pressed") === "true"
      cell.addEventListener("pointerdown", (event) => {
        paint = !isOn()
        set(paint)
        if (cell.hasPointerCapture(event.pointerId)) cell.releasePointerCapture(event.pointerId) // a finger paints, too
      })
      cell.addEventListener("pointerenter", (event) => { if (event.buttons && paint !== null) set(paint) })
      cell.addEventListener("keydown", (event) => {
        if (event.key === " " || event.key === "Enter") { set(!isOn()); event.preventDefault() }
      })
      return { cell, isOn }
    }))
    const rows = cells.map((row, i) => el("tr", {}, el("th", { scope: "row" }, mask.rows[i]), ...row.map(({ cell }) => el("td", {}, cell))))
    const head = el("tr", {}, el("th"), ...mask.columns.map((name) => el("th", { scope: "col" }, name)))
    const table = el("table", { className: "paint" }, el("thead", {}, head), el("tbody", {}, ...rows))
    return { node: el("div", { className: "paint-box" }, table), read: () => cells.map((row) => row.map(({ isOn }) => (isOn() ? "1" : "0")).join("")) }
  }

  function field(node) {
    const bytes = Uint8Array.from(atob(node.dataset.question), (letter) => letter.charCodeAt(0))
    const question = JSON.parse(new TextDecoder().decode(bytes))
    const before = reader.recall("predictions")[question.number]
    const says = el("output", {})
    const form = el("form", {})
    const form_of = { choose: choices, mask: mask, numbers: line }
    const read = form_of[question.choose ? "choose" : question.mask ? "mask" : "numbers"]()

    function choices() {
      const name = `choice-${question.number}`
      const inputs = question.choose.map((text) => el("input", { type: "radio", name, value: text, checked: before?.guess === text }))
      form.append(el("fieldset", {}, el("legend", {}, "Your prediction"),
        ...inputs.map((input) => el("label", {}, input, input.value.replaceAll("`", "")))))
      return () => inputs.find((input) => input.checked)?.value
    }

    function mask() {
      const { node: table, read: cells } = painted(question.mask, before?.guess)
      form.append(el("p", { className: "legend" }, "Your prediction: paint the cells that are seen (a row per query, a column per key)"), table)
      return cells
    }

    function line() {
      const count = question.right.length
      const input = el("input", { type: "text", autocomplete: "off", value: before?.guess?.join(", ") ?? "" })
      const what = question.says ?? (count === 1 ? "a number" : `${count} numbers`)
      form.append(el("label", { className: "line" }, `Your prediction: ${what} `, input))
      return () => {
        const found = predictions.numbers(input.value)
        return found.length === count ? found : undefined
      }
    }

    function show({ same, count }) {
      node.dataset.state = same === count ? "right" : "tried"
      says.textContent = same === count ? "✓ Right." : count > 1 ? `${same} of ${count} are right.` : "Not quite."
    }

    form.append(el("button", { type: "submit", className: "md-button" }, "Check"), says)
    form.addEventListener("submit", (event) => {
      event.preventDefault()
      const guess = read()
      if (guess === undefined) {
        const count = question.right.length
        says.textContent = question.choose ? "Choose one." : count === 1 ? "Type a number." : `Type ${count} numbers.`
        return
      }
      const [same, count] = predictions.judge(question, guess)
      const all = reader.recall("predictions")
      all[question.number] = { guess, same, count }
      reader.remember("predictions", all)
      show({ same, count })
      const answer = answerBelow(node)
      if (answer) answer.open = true
    })
    node.replaceChildren(form)
    if (before) show(before)
  }

  function progress(node) {
    const books = JSON.parse(node.dataset.notebooks)
    const all = reader.recall("predictions")
    const exercises = reader.recall("exercises")
    const lines = books.map(({ title, url, numbers, exercises: names }) => {
      const tried = numbers.filter((number) => all[number])
      const right = tried.filter((number) => all[number].same === all[number].count)
      const written = names.filter((name) => exercises[name]?.state === "right").length
      return { title, url, total: numbers.length, tried: tried.length, right: right.length, exercises: names.length, written }
    })
    const sum = (name) => lines.reduce((total, each) => total + each[name], 0)
    const next = lines.find((each) => each.tried < each.total)
    const bar = (each) => el("progress", { max: each.total, value: each.tried, ariaLabel: `${each.title}: ${each.tried} of ${each.total} questions` })
    const counts = (each) => el("span", {}, `${each.tried} / ${each.total}`,
      each.exercises ? el("span", { title: "functions written in the page" }, ` · ✎ ${each.written} / ${each.exercises}`) : "")
    const rows = lines.map((each) => el("li", {}, el("a", { href: each.url }, each.title), bar(each), counts(each)))
    const begun = `${sum("tried")} of ${sum("total")} predictions made, ${sum("right")} right.`
    const head = el("p", {}, sum("tried") ? begun : `${sum("total")} questions to predict, none answered yet.`)
    if (sum("exercises")) head.append(` ${sum("written")} of ${sum("exercises")} functions written in the pages.`)
    if (next) head.append(" ", el("a", { href: next.url }, `${sum("tried") ? "Continue" : "Begin"} with ${next.title}`), ".")
    node.replaceChildren(head, el("ul", {}, ...rows))
  }

  document.querySelectorAll(".predict[data-question]").forEach(field)
  document.querySelectorAll(".progress[data-notebooks]").forEach(progress)
}
