// The page of engine.js: a timeline of requests, and of the step that is looked at what is scheduled, the pool, the time
// and the latency so far. The state is in the address, after the #. Colours are those of the explorer.

"use strict"

;(() => {
  const COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#9467BD", "#8C9B2F", "#B0703C", "#5DA5A5", "#C44E52", "#8090B0"]
  const SHARED = "#F0E442"
  const NAMES = "abcdefghijkl"
  const TEXTS = ["its own", "● text 1", "■ text 2", "▲ text 3"]
  const MARKS = ["", "●", "■", "▲"]
  const PARTS = { weights: "#808080", keys: "#C2185B", computation: "#6A4FC0" } // of the time of a step
  const SAYS = { weights: "reading weights", keys: "reading keys and values", computation: "computing" }
  const BUDGETS = Array.from({ length: 15 }, (_, k) => 2 ** k).flatMap((each) => (each < 2 || each > 8192 ? [each] : [each, 1.5 * each]))
  const ROW = 22 // of the timeline, in pixels
  const LANE = 26

  const root = document.getElementById("engine-app")
  let state = engine.fromHash(location.hash)
  let trace = engine.play(state)
  let playing = null // a timer
  let dragged = null // while an arrival is dragged: its request, and the scale, which stays
  let droppedAt = -Infinity // when that ended: the click that follows is none

  // --- elements ---

  /** Return black or white, whichever is easier to read on a colour. */
  function on(colour) {
    const [r, g, b] = [1, 3, 5].map((at) => (parseInt(colour.slice(at, at + 2), 16) / 255) ** 2.2)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#000" : "#fff"
  }
  const fill = (colour) => `--fill: ${colour}; --on: ${on(colour)}; --off: ${on(colour) === "#000" ? "#fff" : "#000"}`
  const paint = (i) => fill(COLOURS[i])
  const chip = (i) => el("span", { class: "chip", style: paint(i) }, NAMES[i])
  const names = (list) => list.map((i) => NAMES[i]).join(", ").replace(/, (?=\w$)/, " and ")
  const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`
  const verb = (list, one, many) => (list.length === 1 ? one : many)
  const digits = (x) => (x >= 100 ? Math.round(x).toLocaleString("en") : x >= 10 ? x.toFixed(1) : x.toFixed(2))
  const time = (seconds) => (seconds === null ? "–" : seconds >= 1 ? `${digits(seconds)} s` : seconds >= 1e-3 || seconds === 0 ? `${digits(1e3 * seconds)} ms` : `${digits(1e6 * seconds)} µs`)
  const bytes = (x) => {
    const k = Math.min(4, Math.max(0, Math.floor(Math.log10(Math.max(1, x)) / 3)))
    return `${k ? digits(x / 1000 ** k) : x} ${["bytes", "kB", "MB", "GB", "TB"][k]}`
  }
  const head = (...titles) => el("thead", {}, el("tr", {}, titles.map((title) => el("th", { scope: "col" }, title))))
  const scroller = (label, child) => el("div", { class: "scroller", tabindex: "0", role: "group", "aria-label": label }, child)

  // --- state ---

  const last = () => Math.max(0, trace.steps.length - 1)
  const at = () => Math.min(state.step, last())
  const now = () => trace.steps[at()]

  function set(changes) {
    state = engine.legal({ ...state, ...changes })
    if (Object.keys(changes).some((name) => name !== "step")) trace = engine.play(state)
    const hash = engine.toHash(state)
    history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search)
    draw()
  }

  const go = (step) => set({ step: Math.max(0, Math.min(last(), step)) })
  const change = (i, place, value) =>
    set({ requests: state.requests.map((request, k) => (k === i ? request.map((x, p) => (p === place ? value : x)) : request)) })

  function drop(arrives) {
    const [, prompt, output] = state.requests[state.requests.length - 1] ?? [0, 64, 16]
    set({ requests: [...state.requests, [arrives, prompt, output, 0]] })
  }

  function play(wanted) {
    clearInterval(playing)
    playing = null
    if (wanted) {
      if (at() === last()) go(0)
      playing = setInterval(() => (at() === last() ? play(false) : go(at() + 1)), 700)
    }
    playButton.textContent = playing ? "❚❚" : "▶\uFE0E" // as text, not as a picture
    playButton.setAttribute("aria-label", playing ? "pause" : "play")
  }

  addEventListener("hashchange", () => {
    play(false)
    state = engine.fromHash(location.hash)
    trace = engine.play(state)
    draw()
    if (root.getBoundingClientRect().bottom < innerHeight) root.scrollIntoView() // the link stands below
  })

  // --- what stays: the bar of steps, the budget, the settings ---

  const button = (sign, label, act) => el("button", { type: "button", "aria-label": label, onclick: act }, sign)
  const playButton = button("▶\uFE0E", "play", () => play(!playing))
  const stepSlider = el("input", { type: "range", min: 0, "aria-label": "step", oninput: () => go(Number(stepSlider.value)) })
  const stepSays = el("output", {})
  const transport = el("div", { class: "transport of-steps", role: "group", "aria-label": "steps" },
    button("|‹", "first step", () => go(0)), button("‹", "step back", () => go(at() - 1)), playButton,
    button("›", "step forward", () => go(at() + 1)), stepSlider, stepSays)

  const budgetSlider = el("input", {
    type: "range", min: 0, max: BUDGETS.length - 1, id: "engine-budget", "aria-label": "chunk budget", oninput: () => set({ budget: BUDGETS[budgetSlider.value] }),
  })
  const budgetSays = el("output", { for: "engine-budget" })
  const budget = el("div", { class: "transport budget" }, el("label", { for: "engine-budget" }, "chunk budget"), budgetSlider, budgetSays)

  const copy = el("button", { type: "button", class: "copy", onclick: async () => {
    try {
      await navigator.clipboard.writeText(location.href)
      copy.textContent = "Copied"
    } catch {
      copy.textContent = "The address bar has it"
    }
    setTimeout(() => (copy.textContent = "Copy link"), 2000)
  } }, "Copy link")

  /** A number that takes effect when the field is left, or at Enter. */
  function field(label, get, act, { min = 1, max }) {
    const input = el("input", {
      type: "number", inputmode: "numeric", min, max, "aria-label": label, onchange: () => act(input.value === "" ? min : Number(input.value)),
    })
    refreshers.push(() => (input.value = get()))
    return input
  }

  let refreshers = []
  let built = -1 // for how many requests the controls were made

  function refresh() {
    if (built !== state.requests.length) {
      refreshers = []
      settings.replaceChildren(...controls())
      built = state.requests.length
    }
    for (const each of refreshers) each()
    stepSlider.max = last()
    stepSlider.value = at()
    const step = now()
    stepSays.value = step ? `step ${at() + 1} of ${last() + 1}` : "no step"
    stepSlider.setAttribute("aria-valuetext", stepSays.value)
    const nearest = BUDGETS.reduce((best, each, k) => (Math.abs(Math.log(each / state.budget)) < Math.abs(Math.log(BUDGETS[best] / state.budget)) ? k : best), 0)
    budgetSlider.value = nearest
    budgetSays.value = `${count(state.budget, "token")} per step`
    budgetSlider.setAttribute("aria-valuetext", budgetSays.value)
  }

  function controls() {
    const MOST = engine.MOST
    const rows = state.requests.map((_, i) => {
      const cell = (place, label, options) => el("td", {}, field(`${label} of ${NAMES[i]}`, () => state.requests[i][place], (value) => change(i, place, value), options))
      const text = el("select", { "aria-label": `prompt of ${NAMES[i]} begins with`, onchange: () => change(i, 3, Number(text.value)) },
        TEXTS.map((name, value) => el("option", { value }, name)))
      refreshers.push(() => (text.value = state.requests[i][3]))
      const remove = el("button", {
        type: "button", class: "remove", "aria-label": `remove request ${NAMES[i]}`,
        onclick: () => set({ requests: state.requests.filter((_, k) => k !== i) }),
      }, "×")
      return el("tr", {}, el("th", { scope: "row" }, chip(i)), cell(0, "arrival", { min: 0, max: MOST.arrives }), cell(1, "prompt", { max: MOST.prompt }),
        cell(2, "output", { max: MOST.output }), el("td", {}, text), el("td", {}, remove))
    })
    const add = el("button", {
      type: "button", class: "add", disabled: state.requests.length === MOST.requests ? "" : null,
      onclick: () => drop(Math.round(1000 * (now()?.start ?? 0))),
    }, "+ a request now")
    const size = (name, label, max, min = 1) =>
      el("label", { class: "field" }, label, field(label, () => state[name], (value) => set({ [name]: value }), { min, max }))
    const choose = (name, label, options) => {
      const select = el("select", { "aria-label": label, onchange: () => set({ [name]: name === "machine" ? Number(select.value) : select.value }) },
        options.map(([value, text]) => el("option", { value }, text)))
      refreshers.push(() => (select.value = state[name]))
      return el("label", { class: "field" }, label, select)
    }
    const group = (title, ...children) => el("fieldset", {}, el("legend", {}, title), children)
    return [
      group("Requests", scroller("requests", el("table", { class: "requests" }, head("", "at, ms", "prompt", "output", "begins with", ""), el("tbody", {}, rows))), add),
      group("The server",
        size("blocks", "blocks in the pool", MOST.blocks), size("block", "tokens in a block", MOST.block),
        size("seqs", "requests at once", MOST.requests), size("shared", "tokens of a shared text", MOST.prompt, 0),
        choose("model", "model", engine.MODELS().map((name) => [name, name])),
        choose("machine", "machine", machines.map((each, i) => [i, `${each.name}, ${each.dtype}`]))),
    ]
  }

  // --- the timeline ---

  const KINDS = { waiting: "waits", prompt: "prefill", again: "prefill again", decode: "decode", idle: "no token in this step" }

  function kindOf(step, i) {
    const scheduled = step.scheduled.find((each) => each.i === i)
    if (scheduled) return scheduled.isAgain ? "again" : scheduled.isPrompt ? "prompt" : "decode"
    if (step.waiting.includes(i)) return "waiting"
    return step.running.some((each) => each.i === i) ? "idle" : null
  }

  function timeline() {
    const { steps, requests } = trace
    const width = Math.max(260, timelineBox.clientWidth - 4, Math.min(4000, 5 * steps.length))
    const end = Math.max(steps.length ? steps[last()].end : 0, ...requests.map(({ arrives }) => 1.02 * arrives), 0.01)
    const scale = dragged?.scale ?? (width - 34) / end
    const x = (seconds) => 28 + seconds * scale
    const top = LANE
    const bottom = top + requests.length * ROW
    const height = bottom + 46
    const step = now()
    const rows = requests.map((request, i) => {
      const parts = {}
      const add = (kind, from, to) => (parts[kind] = (parts[kind] ?? "") + shape(kind, x(from), x(to), top + i * ROW))
      for (const each of steps) {
        const kind = kindOf(each, i)
        if (kind) add(kind, each.start, each.end)
        // who comes in the middle of a step waits for its end
        if (each.start < request.arrives && request.arrives < each.end && !request.isRefused) add("waiting", request.arrives, each.end)
      }
      const lost = steps.filter((each) => each.preempted.includes(i)).map((each) =>
        el("path", { class: "lost", d: cross(x(each.start), top + i * ROW + 11) }, el("title", {}, `${NAMES[i]} is preempted`)))
      return el("g", { style: paint(i) },
        el("text", { class: "name", x: 12, y: top + i * ROW + 15 }, NAMES[i]),
        Object.entries(parts).map(([kind, d]) => el("path", { class: kind, d }, el("title", {}, `${NAMES[i]}: ${KINDS[kind]}`))), lost,
        request.isRefused ? el("text", { class: "tick refused-says", x: x(0) + 4, y: top + i * ROW + 15 }, refusal(request)) : null)
    })
    const strip = Object.entries(PARTS).map(([name, colour]) => {
      const d = steps.flatMap((each) => segments(each).filter((part) => part.name === name).map(({ from, to }) =>
        `M${x(from)} ${bottom + 6}H${x(to)}v8H${x(from)}z`)).join("")
      return el("path", { class: "strip", d, style: fill(colour) }, el("title", {}, SAYS[name]))
    })
    const taken = []
    const marks = requests.map((request, i) => el("g", {
      class: request.isRefused ? "arrival refused" : "arrival", transform: `translate(${beside(taken, x(request.arrives))} 0)`, style: paint(i),
      onpointerdown: (event) => {
        event.preventDefault()
        event.stopPropagation()
        dragged = { i, scale, from: event.clientX, arrives: state.requests[i][0] }
      },
    }, el("path", { d: `M0 ${LANE - 2}l-6 -8v-14h12v14z` }), el("text", { x: 0, y: LANE - 13 }, NAMES[i]),
    el("title", {}, `${NAMES[i]} arrives at ${time(request.arrives)}: drag it`)))
    const unit = 10 ** Math.floor(Math.log10(end * 0.6))
    const every = [1, 2, 5, 10].map((k) => k * unit / 10).find((k) => k * scale > 56) ?? unit
    const ticks = Array.from({ length: Math.floor(end / every) + 1 }, (_, k) => k * every)
    const svg = el("svg", {
      width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `timeline of ${count(requests.length, "request")} and ${count(steps.length, "step")}${step ? `, step ${at() + 1} from ${time(step.start)} to ${time(step.end)}` : ""}`,
      onclick: (event) => {
        if (event.target.closest(".arrival") || performance.now() - droppedAt < 300) return
        const box = event.currentTarget.getBoundingClientRect()
        const seconds = (event.clientX - box.left - 28) / scale
        if (event.clientY - box.top < LANE) {
          if (seconds >= 0 && state.requests.length < engine.MOST.requests) drop(Math.round(1000 * seconds))
          return
        }
        const found = steps.findIndex((each) => seconds < each.end)
        if (found >= 0) go(found)
      },
    },
    el("rect", { class: "lane", x: 28, y: 0, width: width - 28, height: LANE - 1 }, el("title", {}, "click: a request arrives here")),
    step ? el("rect", { class: "now", x: x(step.start), y: top, width: Math.max(2, x(step.end) - x(step.start)), height: bottom - top + 16 }) : null,
    rows, strip, marks,
    ticks.map((tick) => el("g", {}, el("line", { class: "grid", x1: x(tick), x2: x(tick), y1: bottom + 16, y2: bottom + 21 }),
      el("text", { class: "tick", x: x(tick), y: bottom + 36 }, tick === 0 ? "0 ms" : `${Number((1000 * tick).toPrecision(6)).toLocaleString("en")}`))))
    const left = timelineBox.scrollLeft
    timelineBox.replaceChildren(svg)
    timelineBox.scrollLeft = left
    if (step && !dragged && (x(step.start) < left + 30 || x(step.end) > left + timelineBox.clientWidth - 10)) {
      timelineBox.scrollLeft = x(step.start) - timelineBox.clientWidth / 2
    }
  }

  const refusal = ({ prompt, output }) => `refused: needs ${Math.ceil((prompt + output - 1) / state.block)} blocks of ${state.blocks}`

  /** A step in the row of a request: full for a prefill, a lower bar for a decode, a line for who waits. */
  function shape(kind, from, to, y) {
    const gap = to - from > 4 ? 1 : 0
    const box = (above, height) => `M${from} ${y + above}H${to - gap}v${height}H${from}z`
    return { prompt: box(2, 18), again: box(2, 18), decode: box(7, 8), waiting: box(10, 2), idle: box(10, 2) }[kind]
  }

  /** Return where a mark goes that belongs to x: there, or right of those that are there. */
  function beside(taken, x) {
    while (taken.some((other) => Math.abs(other - x) < 13)) x += 1
    taken.push(x)
    return x
  }

  const cross = (x, y) => `M${x - 5} ${y - 5}l10 10m0 -10l-10 10`

  /** Where the time of a step goes: first its matrices, then its attention. */
  function segments({ start, end, cost: { linear, attention } }) {
    const middle = start + linear.seconds
    return [
      { name: linear.limit === "memory" ? "weights" : "computation", from: start, to: middle },
      { name: attention.limit === "memory" ? "keys" : "computation", from: middle, to: end },
    ]
  }

  addEventListener("pointermove", (event) => {
    if (dragged) change(dragged.i, 0, dragged.arrives + (1000 * (event.clientX - dragged.from)) / dragged.scale)
  })
  for (const name of ["pointerup", "pointercancel"]) {
    addEventListener(name, () => {
      if (!dragged) return
      dragged = null
      droppedAt = performance.now()
      draw()
    })
  }

  // --- this step ---

  const says = el("p", { class: "says", "aria-live": "polite" })

  /** Say what happens in a step, in sentences. */
  function sentence(step) {
    const text = []
    const starts = step.started
    if (step.arrived.length) text.push(`${names(step.arrived)} ${verb(step.arrived, "has", "have")} arrived.`)
    for (const i of step.preempted) {
      const back = trace.steps.findIndex((each, k) => k >= at() && each.started.some((one) => one.i === i))
      text.push(`The free blocks do not suffice, so ${NAMES[i]}, the youngest, is preempted: it gives up its blocks, keeps its tokens, and waits`
        + `${back > at() ? ` until step ${back + 1}` : ""}.`)
    }
    for (const { i, tokens, blocks } of starts.filter((each) => each.blocks)) {
      text.push(`A prefix hit: the first ${count(tokens, "token")} of ${NAMES[i]} are in ${count(blocks, "block")} of the pool already.`)
    }
    const again = step.scheduled.filter((each) => each.isAgain).map((each) => each.i)
    if (again.length) text.push(`${names(again)} ${verb(again, "is", "are")} back, and what was lost is computed again.`)
    const prompts = step.scheduled.filter((each) => each.isPrompt)
    const decodes = step.scheduled.filter((each) => !each.isPrompt).map((each) => each.i)
    if (decodes.length) text.push(`${names(decodes)} ${verb(decodes, "decodes", "decode")}, one token each.`.replace("decodes, one token each", "decodes one token"))
    for (const { i, count: tokens, first } of prompts) {
      const { prompt, times } = trace.requests[i]
      const all = prompt + times.filter((each) => each <= step.start).length
      text.push(`${NAMES[i]} computes ${count(tokens, "token")}${all > prompt ? ", prompt and output so far" : " of its prompt"}${first + tokens < all ? `; ${count(all - first - tokens, "token")} are left for later steps` : ""}.`)
    }
    const stalled = step.running.map((each) => each.i).filter((i) => !step.scheduled.some((each) => each.i === i))
    if (stalled.length) text.push(`The budget is spent before ${names(stalled)} ${verb(stalled, "gets", "get")} a token.`)
    if (step.waiting.length && !step.preempted.length) text.push(`${names(step.waiting)} ${verb(step.waiting, "waits", "wait")} for ${reason(step)}.`)
    if (step.finished.length) text.push(`After this step ${names(step.finished)} ${verb(step.finished, "is", "are")} done.`)
    return text.join(" ")
  }

  function reason(step) {
    if (step.running.length === state.seqs) return "a request to end"
    return step.cost.rows >= state.budget ? "room in the budget" : "free blocks"
  }

  function scheduled() {
    const step = now()
    const rows = step.cost.rows
    const parts = step.scheduled.map(({ i, count: tokens, isPrompt }) =>
      el("span", { class: isPrompt ? "part prompt" : "part", style: `${paint(i)}; flex-grow: ${tokens}`, title: `${NAMES[i]}: ${count(tokens, "token")}` },
        `${NAMES[i]} ${tokens.toLocaleString("en")}`))
    const queue = (title, list, none) => el("div", { class: "queue" }, el("span", { class: "title" }, title),
      list.length ? list.map((i) => member(step, i)) : el("span", { class: "note" }, none))
    return [
      says,
      el("h4", {}, "Scheduled: ", el("span", { class: "numbers" }, `${rows.toLocaleString("en")} of ${count(state.budget, "token")}`)),
      el("div", { class: "filled", role: "img", "aria-label": step.scheduled.map(({ i, count: tokens }) => `${NAMES[i]} ${count(tokens, "token")}`).join(", ") },
        parts, state.budget > rows ? el("span", { class: "rest", style: `flex-grow: ${state.budget - rows}` }) : null),
      queue("running, oldest first", step.running.map((each) => each.i), "none"),
      queue("waiting, next first", step.waiting, "none"),
    ]
  }

  /** A request in a queue, and how much of its tokens have their keys in the pool when this step is over. */
  function member(step, i) {
    const { prompt, output } = trace.requests[i]
    const part = step.scheduled.find((each) => each.i === i)
    const done = part ? part.first + part.count : step.running.some((each) => each.i === i) ? computedBefore(i) : 0
    const all = prompt + output - 1
    return el("span", { class: "member", title: `${NAMES[i]}: the keys of ${done} of ${count(all, "token")} are in the pool` }, chip(i),
      el("span", { class: "gauge", style: paint(i) }, el("span", { style: `width: ${(100 * done) / all}%` }),
        el("i", { style: `left: ${(100 * prompt) / all}%` })))
  }

  function computedBefore(i) {
    for (let k = at(); k >= 0; k--) {
      const part = trace.steps[k].scheduled.find((each) => each.i === i)
      if (part) return part.first + part.count
    }
    return 0
  }

  // --- the pool ---

  function pool() {
    const step = now()
    const owners = new Map()
    for (const { i, blocks } of step.running) {
      const done = computedBefore(i)
      const part = step.scheduled.find((each) => each.i === i)
      blocks.forEach((block, k) => {
        const found = owners.get(block) ?? { readers: [], filled: 0, isNew: false }
        found.readers.push(i)
        found.filled = Math.max(found.filled, Math.min(state.block, done - k * state.block))
        found.isNew ||= Boolean(part) && (k + 1) * state.block > part.first && k * state.block < part.first + part.count
        found.from = k * state.block
        owners.set(block, found)
      })
    }
    const kept = new Set(step.cached)
    const next = step.free[0]
    const cells = Array.from({ length: state.blocks }, (_, block) => {
      const owner = owners.get(block)
      if (owner) {
        const isShared = owner.readers.length > 1
        const share = (100 * Math.max(0, owner.filled)) / state.block
        const text = isShared ? (owner.readers.length > 2 ? `×${owner.readers.length}` : owner.readers.map((i) => NAMES[i]).join("")) : NAMES[owner.readers[0]]
        return el("span", {
          class: `cell owned${owner.isNew ? " new" : ""}`, style: `${fill(isShared ? SHARED : COLOURS[owner.readers[0]])}; --share: ${share}%`,
          title: `block ${block}: ${names(owner.readers)}, tokens ${owner.from} to ${owner.from + state.block - 1}, ${owner.filled} written`,
        }, text)
      }
      if (kept.has(block)) {
        const i = step.writers[block]
        return el("span", { class: "cell kept", style: paint(i), title: `block ${block}: free, but still holds what ${NAMES[i]} wrote` }, NAMES[i])
      }
      return el("span", { class: "cell", title: `block ${block}: free${block === next ? ", and handed out next" : ""}` })
    })
    const free = step.free.length
    const cached = step.free.filter((block) => kept.has(block)).length
    const line = `${count(state.blocks - free, "block")} in use, ${free} free; of these ${cached} still ${cached === 1 ? "holds" : "hold"} cached tokens.`
    return [
      el("p", {}, line),
      el("div", { class: state.blocks > 64 ? "blocks-of-pool small" : "blocks-of-pool", role: "img", "aria-label": `the pool: ${line}` }, cells),
      el("p", { class: "legend" },
        legend("owned", "in use", COLOURS[0]), legend("owned", "by several requests", SHARED), legend("owned new", "written in this step", COLOURS[0]),
        legend("kept", "free, still cached", COLOURS[0]), legend("", "free")),
      el("p", { class: "note" }, `So far: ${count(step.counters.cached_blocks, "block")} hit (${count(step.counters.cached_tokens, "token")} not computed), `,
        `${count(step.counters.preemptions, "preemption")}.`),
    ]
  }

  const legend = (kind, text, colour) =>
    el("span", { class: "key" }, el("span", { class: `cell ${kind}`, style: colour ? `${fill(colour)}; --share: 100%` : null }), text)

  // --- where the time goes ---

  function timeOf() {
    const step = now()
    const { linear, attention, rows } = step.cost
    const of = engine.shares([step])
    const total = engine.shares(trace.steps.slice(0, at() + 1))
    const all = Object.values(total).reduce((a, b) => a + b, 0)
    const bar = (label, found) => {
      const whole = Object.values(found).reduce((a, b) => a + b, 0)
      return el("div", { class: "amount" }, el("span", {}, label), el("span", { class: "numbers" }, time(whole)),
        el("div", { class: "filled thin", role: "img", "aria-label": Object.entries(found).map(([name, part]) => `${SAYS[name]} ${time(part)}`).join(", ") },
          Object.entries(found).filter(([, part]) => part).map(([name, part]) =>
            el("span", { class: "part", style: `${fill(PARTS[name])}; flex-grow: ${part / whole}`, title: `${SAYS[name]}: ${time(part)}` }))))
    }
    const bound = (part) => (part.limit === "memory" ? "memory-bound" : "compute-bound")
    return [
      bar("this step", of), bar("all steps so far", total),
      el("p", { class: "legend" }, Object.keys(PARTS).map((name) => legend("owned", `${SAYS[name]} ${Math.round((100 * total[name]) / all)} %`, PARTS[name]))),
      el("p", {}, "Matrices: ", el("strong", {}, bytes(linear.bytes)), ` of weights, read once for ${count(rows, "row")}: `, el("strong", {}, time(linear.seconds)),
        `, ${bound(linear)}. Attention: `, el("strong", {}, bytes(attention.bytes)), " of keys and values: ", el("strong", {}, time(attention.seconds)), `, ${bound(attention)}.`),
      roofline(machines[state.machine], linear, attention),
      el("p", { class: "note" }, "Ring: the matrices of this step. Dot: its attention. Both stand on the roof: times are lower bounds at the rates that our benchmark measured, ",
        "without launches and activations. Nothing here is a measurement."),
    ]
  }

  function roofline({ read, product, name }, ...parts) {
    const [width, height] = [520, 216]
    const x = (v) => 62 + (Math.log10(Math.min(Math.max(v, 0.1), 1e4)) + 1) * ((width - 92) / 5)
    const top = Math.ceil(Math.log10(product))
    const y = (v) => 12 + (top - Math.log10(v)) * ((height - 64) / 4)
    const roof = (v) => Math.max(10 ** (top - 4), Math.min(v * read, product))
    const start = Math.max(0.1, 10 ** (top - 4) / read)
    const power = (k) => `${10 ** (k % 3)} ${["", "k", "M", "G", "T", "P"][Math.floor(k / 3)]}`
    const [linear, attention] = parts.map((part) => part.flops / part.bytes)
    const mark = (v, attributes) => el("circle", { cx: x(v), cy: y(roof(v)), ...attributes })
    return el("svg", {
      class: "roofline", viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `roofline of ${name}: the ridge is at ${Math.round(product / read)} operations per byte; matrices at ${digits(linear)}, attention at ${digits(attention)}`,
    },
    [0.1, 1, 10, 100, 1000, 10000].map((tick) => el("g", {}, el("line", { class: "grid", x1: x(tick), x2: x(tick), y1: 12, y2: height - 52 }),
      el("text", { class: "tick", x: x(tick), y: height - 30 }, tick.toLocaleString("en")))),
    [0, 1, 2, 3, 4].map((k) => el("text", { class: "tick left", x: 56, y: y(10 ** (top - k)) + 4 }, power(top - k))),
    el("path", { class: "roof", d: `M${x(start)} ${y(roof(start))}L${x(product / read)} ${y(product)}L${x(1e4)} ${y(product)}` }),
    el("text", { class: "tick", x: width / 2, y: height - 4 }, "operations per byte"),
    el("text", { class: "tick", style: "text-anchor: start", x: 68, y: 26 }, "operations per second"),
    mark(linear, { class: "ring", r: 8 }), mark(attention, { class: "dot", r: 6 }))
  }

  // --- what users feel ---

  function latency() {
    const step = now()
    const rows = trace.requests.map((request) => {
      const found = engine.latency(request, step.end)
      const doing = request.isRefused ? refusal(request) : request.arrives > step.start ? "to come"
        : found.tokens === request.output ? "done" : KINDS[kindOf(step, request.i)]
      return el("tr", {}, el("th", { scope: "row" }, chip(request.i)), el("td", {}, doing), el("td", { class: "numbers" }, `${found.tokens} of ${request.output}`),
        [found.ttft, found.mean, found.worst].map((value) => el("td", { class: "numbers" }, time(value))))
    })
    const all = trace.requests.map((request) => engine.latency(request, step.end))
    const ttfts = all.map(({ ttft }) => ttft).filter((value) => value !== null)
    const worst = Math.max(0, ...all.map((each) => each.worst ?? 0))
    const big = (value, text) => el("div", { class: "big" }, el("strong", {}, value), el("span", {}, text))
    const { counters } = step
    const end = trace.steps[last()].end
    const whole = trace.requests.map((request) => engine.latency(request, end)).filter(({ tokens }) => tokens)
    const mean = whole.reduce((total, { ttft }) => total + ttft, 0) / whole.length
    return [
      el("div", { class: "bigs" },
        big(digits(engine.throughput(trace.requests, step.end)), "output tokens per second: throughput"),
        big(ttfts.length ? time(ttfts.reduce((a, b) => a + b, 0) / ttfts.length) : "–", "to the first token, on average: TTFT"),
        big(worst ? time(worst) : "–", "between two tokens, at worst: inter-token latency (ITL)")),
      el("p", {}, trace.isCut ? "After the last of these steps: " : "When all are done: ", el("strong", {}, `${digits(engine.throughput(trace.requests, end))} tokens per second`), ", mean TTFT ", el("strong", {}, time(mean)),
        ", worst inter-token latency ", el("strong", {}, time(Math.max(0, ...whole.map((each) => each.worst ?? 0)))), "."),
      scroller("latency of the requests", el("table", { class: "table latency" },
        head("", "now", "tokens", "TTFT", "ITL, mean", "ITL, worst"), el("tbody", {}, rows))),
      el("p", { class: "note" }, `After ${time(step.end)} and ${count(at() + 1, "step")}: ${count(counters.computed_tokens, "token")} went through the model, `,
        `${counters.cached_tokens.toLocaleString("en")} did not have to; ${count(counters.chunks, "chunk")} of prompts; `,
        `${counters.key_reads.toLocaleString("en")} keys read per layer.`),
      trace.isCut ? el("p", { class: "note" }, `Only the first ${count(engine.MOST.steps, "step")} are played.`) : null,
    ]
  }

  // --- the page ---

  const presets = el("nav", { class: "presets", "aria-label": "presets" })
  const settings = el("form", { class: "controls", onsubmit: (event) => event.preventDefault() })
  const timelineBox = el("div", { class: "timeline scroller", tabindex: "0", role: "group", "aria-label": "timeline" })
  const timelinePane = el("section", { class: "pane wide", "aria-label": "Timeline" },
    el("h3", {}, "Timeline"), el("p", {}, "A step is as wide as it is long. Click into the upper lane to drop a request, drag it to another time, click a step to look at it."), timelineBox,
    el("p", { class: "legend" },
      ["prompt", "decode", "waiting", "again"].map((kind) => el("span", { class: "key" },
        el("svg", { width: 22, height: 20, style: paint(0) }, el("path", { class: kind, d: shape(kind, 1, 21, 0) })), KINDS[kind])),
      el("span", { class: "key" }, el("svg", { width: 16, height: 20 }, el("path", { class: "lost", d: cross(8, 11) })), "preempted"),
      el("span", { class: "key" }, "lowest line:"), Object.keys(PARTS).map((name) => legend("owned", SAYS[name], PARTS[name]))))
  root.replaceChildren(presets, el("div", { class: "dock" }, transport, budget), timelinePane)
  const pane = (title, id) => {
    const body = el("div", {})
    root.append(el("section", { class: `pane ${id}`, "aria-label": title }, el("h3", {}, title), body))
    return body
  }
  const panes = [
    [pane("This step", "step"), scheduled],
    [pane("The pool", "pool-pane"), pool],
    [pane("What users feel", "feel"), latency],
    [pane("Where the time goes", "time"), timeOf],
  ]
  root.append(el("section", { class: "pane wide", "aria-label": "Settings" }, el("h3", {}, "Requests and server"), settings, copy))

  function draw() {
    const hash = engine.toHash({ ...state, step: 0 })
    presets.replaceChildren(...Object.entries(engine.PRESETS).map(([name, preset]) =>
      el("a", { href: `#${preset}`, "aria-current": engine.toHash({ ...engine.fromHash(preset), step: 0 }) === hash ? "true" : null }, name)))
    refresh()
    timeline()
    const step = now()
    says.textContent = step ? sentence(step) : ""
    for (const [body, content] of panes) {
      body.replaceChildren(...(step ? content().filter((child) => child !== null) : [el("p", {}, trace.requests.length ? "Every request is refused: the pool is too small for it." : "No request yet. Drop a request onto the timeline.")]))
    }
  }

  root.addEventListener("keydown", (event) => {
    if (event.target.matches("input, select, button, textarea, a")) return
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key]
    if (move) go(at() + move)
    else if (event.key === " ") play(!playing)
    else return
    event.preventDefault()
  })
  addEventListener("resize", timeline)
  draw()
})()
