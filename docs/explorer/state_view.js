// The page of state.js: step by step, the blocks of keys of a request and the slots of its state, and where another
// request begins. The settings are in the address, after the #. Colours are those of the explorer.

"use strict"

;(() => {
  const COLOURS = { a: "#0072B2", b: "#E69F00" }
  const LABELS = {
    prompt: "tokens of a's prompt", output: "tokens of its output", budget: "most tokens in a step", block: "tokens in a block",
    drafts: "drafted tokens of a decode", accepted: "of which are accepted", kept: "slots for kept states", shared: "tokens b begins with as a", second: "tokens of b's prompt",
  }
  const PRESETS = {
    "a prompt in chunks": "", "a rejected draft": "step=3", "a copy that is lost": "accepted=0&step=3", "a prefix hit": "step=7", "nothing is kept": "kept=0&step=7",
    "one long step": "budget=64&step=5",
  }
  const root = document.getElementById("state-app")
  let state = states.fromHash(location.hash)
  let trace = states.play(state)

  const paint = (name) => `--fill: ${COLOURS[name]}; --on: ${name === "a" ? "#fff" : "#000"}; --off: ${name === "a" ? "#000" : "#fff"}`
  const chip = (name) => el("span", { class: "chip", style: paint(name) }, name)
  const count = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`
  const list = (numbers) => numbers.join(", ").replace(/, (?=\d+$)/, " and ")
  const size = (bytes) => (bytes >= 1e6 ? `${(bytes / 1e6).toPrecision(3)} MB` : `${(bytes / 1e3).toPrecision(3)} kB`)
  const last = () => trace.steps.length - 1
  const at = () => Math.min(state.step, last())
  const now = () => trace.steps[at()]

  function set(changes) {
    state = states.legal({ ...state, ...changes })
    trace = states.play(state)
    const hash = states.toHash(state)
    history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search)
    draw()
  }

  // --- what a step does ---

  function sentence(step) {
    const { name, first, drafts, accepted, reads, writes, keeps, computed } = step
    const from = reads === null ? "begins with zeros" : `reads slot ${reads}`
    const into = writes.length > 1 ? `writes the state after each of its tokens to slots ${list(writes)}` : `writes slot ${writes[0]}`
    const what = step.isPrompt ? `computes ${count(step.count, "token")} of its prompt` : drafts ? `decodes, and verifies ${count(drafts, "draft")}` : "decodes one token"
    const parts = [`${name} ${what}: it ${from}, and ${into}.`]
    if (at() === trace.ofB && trace.hit.state) parts.unshift(`b begins after token ${first}, with the state that a kept there.`)
    if (drafts) {
      parts.push(accepted === drafts ? "All are accepted." : `${["None", "One", "Two", "Three"][accepted]} of them ${accepted > 1 ? "are" : "is"} accepted.`,
        `The state is in slot ${step.state} now. Keys of rejected drafts stay in their block, and the next step overwrites them.`)
    }
    if (keeps) {
      parts.push(keeps.isLost ? `The copy at the end of a block, after ${keeps.after} tokens, has a rejected draft in it, and is given back.`
        : `A copy stays in slot ${keeps.slot}: the state after ${keeps.after} tokens, the last end of a block.`)
    }
    return parts.join(" ") + (computed % state.block || keeps ? "" : " No copy is kept here.")
  }

  // --- blocks ---

  function keys(step) {
    const { block } = state
    const { name, first, count: queries, computed } = step
    const cells = Array.from({ length: Math.ceil((first + queries) / block) }, (_, i) => {
      const [begin, end] = [i * block, (i + 1) * block]
      const filled = Math.max(0, Math.min(computed, end) - begin)
      const isNew = end > first && begin < first + queries
      const isHit = name === "b" && end <= trace.hit.keys
      const title = `block ${i}: tokens ${begin} to ${end - 1}, ${filled} of them there` + (isHit ? "; it was in the pool already" : "")
      return el("div", { class: `cell owned${isNew ? " new" : ""}`, style: `${paint(isHit ? "a" : name)}; --share: ${(100 * filled) / block}%`, title }, String(end))
    })
    const again = name === "b" ? Math.max(0, trace.hit.keys - trace.hit.state) : 0
    return [
      el("p", {}, "A row per token. A block is written once, and every longer sequence can use it. In a cell: the token that it goes up to."),
      el("div", { class: "blocks-of-pool", role: "img", "aria-label": `${count(cells.length, "block")} of keys` }, cells),
      el("p", {}, `After ${count(computed, "token")}: `, el("strong", {}, size(states.bytes(computed).keys)), " per layer, and more with each token."),
      again ? el("p", {}, `The keys of ${count(again, "token")} are there, and are computed once more: no state was kept after them.`) : null,
    ]
  }

  // --- slots ---

  function slots(step) {
    const { name, first, reads, writes, keeps, computed } = step
    const kept = new Map(step.kept.map(({ slot, after }) => [slot, after]))
    const owner = new Map(step.kept.map(({ slot, of }) => [slot, of]))
    const cells = Array.from({ length: trace.numSlots }, (_, slot) => {
      const k = writes.indexOf(slot)
      const after = writes.length > 1 ? first + k + 1 : first + step.count
      const [kind, text, says] =
        k >= 0 && slot === step.state ? ["owned new", String(after), "is the state now"]
        : k >= 0 ? ["gone", String(after), after > computed ? "a rejected draft is in it: given back" : "given back"]
        : keeps && keeps.slot === slot && !keeps.isLost && kept.has(slot) ? ["kept new", String(keeps.after), "a copy, kept in this step"]
        : keeps && keeps.slot === slot ? ["gone", String(keeps.after), keeps.isLost ? "a rejected draft is in it: given back" : "the same state is kept already"]
        : kept.has(slot) ? [slot === reads ? "kept read" : "kept", String(kept.get(slot)), slot === reads ? "a copy: read" : "a copy"]
        : slot === reads ? ["gone read", String(first), "read, then given back"] : ["", "", "free"]
      const title = `slot ${slot}: ${text ? `the state after ${text} tokens; ` : ""}${says}`
      return el("div", { class: "slot" }, el("div", { class: `cell ${kind}`, style: `${paint(owner.get(slot) ?? name)}; --share: 100%`, title }, text),
        el("span", { class: "note" }, `${slot}: ${says}`))
    })
    const { state: one } = states.bytes(computed)
    return [
      el("p", {}, "A matrix per head. The next token overwrites it, so what is needed again is a copy."),
      el("div", { class: "slots", role: "group", "aria-label": `${trace.numSlots} slots` }, cells),
      el("p", {}, "In a cell: after how many tokens. A state takes ", el("strong", {}, size(one)), ` per layer, after ${count(computed, "token")} as after a million: as much as the keys of `,
        `${(one / states.bytes(1).keys).toLocaleString("en")} tokens. All ${trace.numSlots} slots: ${size(trace.numSlots * one)}.`),
    ]
  }

  // --- the second request ---

  function second() {
    const { keys: ofKeys, state: ofState } = trace.hit
    const row = (title, text, why) => el("tr", {}, el("th", { scope: "row" }, title), el("td", { class: "numbers" }, text), el("td", {}, why))
    const after = (tokens) => (tokens ? `after ${tokens}` : "at 0")
    const { shared, second: prompt, block } = state
    const found = trace.steps[trace.ofB - 1].kept.map(({ after }) => after).sort((x, y) => x - y)
    return [
      el("p", {}, chip("b"), ` arrives when `, chip("a"), ` has ended. Its prompt has ${count(prompt, "token")}; the first ${shared} are those of `, chip("a"), `. Where can it begin?`),
      el("table", { class: "table" }, el("tbody", {},
        row("attention alone", after(ofKeys), `${count(ofKeys / block, "full block")} of keys ${ofKeys === block ? "is" : "are"} in the pool`),
        row("with states", after(ofState), found.length ? `states were kept after ${list(found)} tokens; one after more than the shared tokens is of no use` : "no state was kept"),
        row("computed again", count(ofKeys - ofState, "token"), ofKeys > ofState ? "their keys are there, but not the state after them" : "nothing is lost"))),
    ]
  }

  // --- the page ---

  const slider = el("input", { type: "range", min: 0, "aria-label": "step", oninput: () => set({ step: Number(slider.value) }) })
  const where = el("output", {})
  const button = (text, label, by) => el("button", { type: "button", "aria-label": label, onclick: () => set({ step: Math.max(0, Math.min(last(), at() + by)) }) }, text)
  const presets = el("nav", { class: "presets", "aria-label": "presets" })
  const says = el("p", { class: "says", "aria-live": "polite" })
  const fields = Object.fromEntries(Object.keys(LABELS).map((name) => [name,
    el("input", { type: "number", min: states.BOUNDS[name][0], max: states.BOUNDS[name][1], onchange: () => set({ [name]: Number(fields[name].value) }) })]))
  const pane = (title, kind = "") => {
    const body = el("div", {})
    root.append(el("section", { class: `pane ${kind}`, "aria-label": title }, el("h3", {}, title), body))
    return body
  }
  root.replaceChildren(presets, el("div", { class: "transport wide" }, button("◀", "the step before", -1), slider, button("▶", "the next step", 1), where), says)
  says.classList.add("wide")
  const panes = [[pane("Keys: blocks"), () => keys(now())], [pane("States: slots"), () => slots(now())], [pane("A second request", "wide"), second]]
  root.append(el("section", { class: "pane wide", "aria-label": "Settings" }, el("h3", {}, "Settings"),
    el("form", { class: "controls", onsubmit: (event) => event.preventDefault() }, Object.entries(fields).map(([name, field]) => el("label", { class: "field" }, LABELS[name], field)))))

  function draw() {
    const hash = states.toHash(state)
    presets.replaceChildren(...Object.entries(PRESETS).map(([name, preset]) => el("a", { href: `#${preset}`, "aria-current": preset === hash ? "true" : null }, name)))
    for (const [name, field] of Object.entries(fields)) field.value = state[name]
    slider.max = last()
    slider.value = at()
    where.textContent = `step ${at() + 1} of ${trace.steps.length}`
    says.textContent = sentence(now())
    for (const [body, content] of panes) body.replaceChildren(...content().filter((child) => child !== null))
  }

  addEventListener("hashchange", () => {
    state = states.fromHash(location.hash)
    trace = states.play(state)
    draw()
  })
  draw()
})()
