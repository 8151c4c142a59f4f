// The page of one_sm.js: a lane for each group of warps, each slot and the tensor cores, and the microseconds beside those
// that were measured. The settings are in the address, after the #. Colours are those of the explorer.

"use strict"

;(() => {
  const CHOICES = {
    roles: ["roles of the warps", { together: "one group does everything", apart: "one loads, one multiplies", turn: "one loads, two multiply in turn" }],
    wait: ["it waits for the next keys", { after: "after it issued values", before: "before it issues values" }],
    loads: ["keys", { 1: "loaded and converted", 0: "none are loaded" }],
  }
  const TRIALS = { "as it was": "roles=together", "roles for warps": "wait=before", "one barrier moved": "", "nothing is loaded": "loads=0" }
  const OTHERS = { "two groups in turn": "roles=turn", "one slot": "slots=1", "in turn, nothing loaded": "roles=turn&loads=0" }
  const COLOURS = {
    load: ["#56B4E9", "#000"], convert: ["#E69F00", "#000"], softmax: ["#CC79A7", "#000"], scores: ["#0072B2", "#fff"], values: ["#00795A", "#fff"],
    filled: ["#F5D08A", "#000"], full: ["#CCCCCC", "#000"],
  }
  const MOST = 1250, LEAST = 300, LANE = 34, AXIS = 18 // of the picture; of a lane; of the line of time
  const root = document.getElementById("one-sm-app")
  let state = oneSm.fromHash(location.hash)

  const us = (time) => `${time.toFixed(time < 10 ? 2 : 0)} µs`
  const percent = (share) => `${Math.round(100 * share)} %`
  const kb = (bytes) => `${Math.round(bytes / 1024)} KB`

  function set(changes) {
    state = oneSm.legal({ ...state, ...changes })
    const hash = oneSm.toHash(state)
    history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search)
    draw()
  }

  const select = (name) => el("label", { class: "field" }, CHOICES[name][0], el("select", {
    "aria-label": CHOICES[name][0], disabled: name === "wait" && state.roles !== "apart" ? "" : null,
    onchange: ({ target }) => set({ [name]: name === "loads" ? Number(target.value) : target.value }),
  }, Object.entries(CHOICES[name][1]).map(([value, text]) => el("option", { value, selected: String(state[name]) === value ? "" : null }, text))))

  const slider = (name, text) => el("label", { class: "field" }, `${text}: ${state[name]}`, el("input", {
    type: "range", min: oneSm.BOUNDS[name][0], max: oneSm.BOUNDS[name][1], value: state[name], "aria-label": text, oninput: ({ target }) => set({ [name]: Number(target.value) }),
  }))

  function sentence(found) {
    if (found.total === null) return "Nothing moves any more. The warps that multiply give a slot back when they have the next keys, and these have no other slot to come into: each waits for the other (a deadlock)."
    const { roles, slots } = state
    const times = `All ${oneSm.SIZES.steps} steps take ${us(found.total)}, ${us(found.total / oneSm.SIZES.steps)} each.`
    const limit = found.lanes.find((lane) => !lane.startsWith("slot") && found.busy[lane] > 0.98)
    const why = limit ? `The ${limit} are never free: only what makes them faster helps.`
      : roles === "apart" && state.loads && state.wait === "before" && slots === 2 ? "A slot is empty only when its values are multiplied, and converting begins then: one waits for the other in each step."
      : `The tensor cores are busy ${percent(found.busy["tensor cores"])} of the time: nothing fills them while these warps ${roles === "together" && state.loads ? "convert, or are at their softmax" : "are at their softmax"}.`
    const fits = [
      found.shared > oneSm.SHARED ? `${slots} slots take ${kb(found.shared)} of shared memory, where a program may have ${kb(oneSm.SHARED)}` : "",
      roles === "turn" ? "two outputs of 64 x 512 elements take 256 KB of registers, all that an SM has" : "",
    ].filter(Boolean)
    return `${times} ${why}${fits.length ? ` No GPU of today runs it so: ${fits.join("; ")}.` : ""}`
  }

  function picture(found) {
    const width = Math.min(MOST, Math.max(LEAST, root.clientWidth))
    const left = width < 600 ? 84 : 150
    const scale = width < 600 ? 36 : 66 // of a microsecond
    const begin = state.first ? found.bars.find((bar) => bar.step === state.first && bar.kind === "scores")?.start ?? 0 : 0
    const end = begin + (width - left) / scale
    const x = (time) => left + (time - begin) * scale
    const bottom = LANE * found.lanes.length
    const short = (lane) => (width < 600 ? lane.replace("multiplying warps", "multiply").replace("loading warps", "load").replace("tensor cores", "tensor") : lane)
    const bar = ({ lane, kind, step, start, end: last }) => {
      const [from, to, y] = [Math.max(x(start), left), Math.min(x(last), width), LANE * found.lanes.indexOf(lane) + 4]
      const isWait = kind.startsWith("wait")
      const [fill, on] = COLOURS[kind] ?? ["none", "currentColor"]
      const text = [`${kind} ${step}`, String(step)].find((one) => one.length * 5.9 < to - from - 2)
      const title = `${lane}: ${kind}${kind === "wait: product" ? "" : `, keys ${step}`}, ${us(start)} to ${us(last)}`
      return el("g", {}, el("title", {}, title),
        el("rect", { class: isWait ? "gone" : null, x: from, y, width: Math.max(to - from, 1), height: LANE - 10, style: isWait ? null : `fill: ${fill}; stroke: ${on === "#000" ? "#0003" : "#fff3"}` }),
        text && !isWait ? el("text", { x: (from + to) / 2, y: y + 16, style: `fill: ${on}` }, text) : el("g", {}))
    }
    const signals = found.bars.filter(({ lane, kind, end: last }) => lane.startsWith("slot") && kind === "filled" && last > begin && last < end)
      .map(({ lane, end: last }) => el("line", { class: "cut", x1: x(last), x2: x(last), y1: LANE * found.lanes.indexOf(lane) + 1, y2: LANE * (found.lanes.indexOf(lane) + 1) - 3 }))
    const ticks = Array.from({ length: Math.floor(end) - Math.ceil(begin) + 1 }, (_, i) => Math.ceil(begin) + i)
    const says = `The first ${us(end - begin)} from step ${state.first}: ${found.lanes.join(", ")}`
    return el("svg", { class: "wide", viewBox: `0 0 ${width} ${bottom + AXIS}`, style: "width: 100%; height: auto; display: block", role: "img", "aria-label": says },
      ticks.map((time) => [el("line", { class: "grid", x1: x(time), x2: x(time), y1: 0, y2: bottom, stroke: "currentColor", opacity: 0.15 }), el("text", { class: "tick", x: x(time), y: bottom + 13 }, time % 2 && width < 600 ? "" : `${time}`)]),
      found.lanes.map((lane, i) => el("text", { class: "label", x: left - 8, y: LANE * i + 20 }, short(lane))),
      found.bars.filter(({ start, end: last }) => last > begin && start < end).map(bar), signals)
  }

  const links = (presets) => Object.entries(presets).map(([name, hash]) => el("a", { href: `#${hash || "slots=2"}`, "aria-current": oneSm.toHash(oneSm.fromHash(hash)) === oneSm.toHash({ ...state, first: 0 }) ? "true" : null }, name))

  const key = ([kind, [fill]]) => el("span", { class: "key" }, el("span", { class: "cell", style: `background: ${fill}; border-color: transparent` }), { filled: "a slot is filled", full: "a slot is full" }[kind] ?? kind)

  function table() {
    const rows = Object.entries(TRIALS).map(([name, hash]) => {
      const settings = oneSm.fromHash(hash)
      const [model, measured] = [oneSm.play(settings).total, oneSm.TRIALS[oneSm.trial(settings)]]
      return el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "numbers" }, us(model)), el("td", { class: "numbers" }, us(measured)),
        el("td", { class: "numbers" }, `${(100 * (model / measured - 1)).toFixed(1).replace(/^-0\.0$/, "0.0")} %`), el("td", {}, oneSm.trial(settings) === "together" ? "predicted" : "fitted"))
    })
    const head = ["design", "model", "measured", "error", ""].map((text) => el("th", { scope: "col" }, text))
    const table = el("table", { class: "table" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows))
    return el("div", { class: "scroller", tabindex: "0", role: "group", "aria-label": "times of the designs" }, table)
  }

  function draw() {
    const found = oneSm.play(state)
    const measured = oneSm.trial(state)
    const focus = document.activeElement?.getAttribute("aria-label")
    const bigs = {
      "all steps, by the model": found.total === null ? "never" : us(found.total),
      "measured, H200": measured ? us(oneSm.TRIALS[measured]) : "no trial",
      "tensor cores busy": found.total === null ? "0 %" : percent(found.busy["tensor cores"]),
      "shared memory": kb(found.shared),
    }
    root.replaceChildren(
      el("nav", { class: "wide presets", "aria-label": "presets" }, links(TRIALS), links(OTHERS)),
      el("form", { class: "wide controls", onsubmit: (event) => event.preventDefault() }, select("roles"), slider("slots", "slots (stages)"), select("wait"), select("loads"), slider("first", "from step")),
      el("p", { class: "wide says", "aria-live": "polite" }, sentence(found)),
      el("div", { class: "wide bigs" }, Object.entries(bigs).map(([name, value]) => el("div", { class: "big" }, el("strong", {}, value), el("span", {}, name)))),
      picture(found),
      el("p", { class: "wide legend" }, Object.entries(COLOURS).map(key), el("span", { class: "key" }, el("span", { class: "cell gone" }), "warps wait"), el("span", {}, "In microseconds. A number in a bar: the step whose keys they are.")),
      el("section", { class: "pane wide", "aria-label": "The trials" }, el("h3", {}, "The trials"), table()),
    )
    if (focus) root.querySelector(`[aria-label="${focus}"]`)?.focus()
  }

  addEventListener("hashchange", () => { state = oneSm.fromHash(location.hash); draw() })
  addEventListener("resize", draw)
  draw()
})()
