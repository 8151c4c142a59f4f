// The page of sm.js: sliders for what a program takes, and bars for what an SM has. The settings are in the address,
// after the #.

"use strict"

;(() => {
  const LABELS = {
    registers: "registers of a thread", warps: "warps of a program", shared: "shared memory of a program, bytes",
    launched: "programs in the launch", latency: "nanoseconds until a load arrives",
  }
  const BUDGETS = { registers: "registers", shared: "shared memory", threads: "threads", programs: "places for programs" }
  const PRESETS = {
    "one key at a time": "registers=29&shared=16", "keys in registers": "registers=255&shared=4096", "tensor cores": "registers=80&shared=13312",
    "three stages": "", "one long request": "launched=8", "a tile too large": "shared=120000&registers=200",
  }
  const root = document.getElementById("sm-app")
  let state = sm.fromHash(location.hash)

  const percent = (share) => `${Math.round(100 * share)} %`
  const kb = (bytes) => `${(bytes / 1024).toPrecision(3)} KB`
  const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`

  function set(changes) {
    state = sm.legal({ ...state, ...changes })
    const hash = sm.toHash(state)
    history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search)
    draw()
  }

  function field(name) {
    const [low, high] = sm.BOUNDS[name]
    const give = (event) => set({ [name]: Number(event.target.value) })
    return el("label", { class: "field" }, LABELS[name], el("input", { type: "number", min: low, max: high, value: state[name], onchange: give, "aria-label": LABELS[name] }))
  }

  const chooser = () => el("label", { class: "field" }, "GPU", el("select", { onchange: (event) => set({ gpu: Number(event.target.value) }), "aria-label": "GPU" },
    sm.GPUS.map((gpu, i) => el("option", { value: i, selected: i === state.gpu }, `${gpu.name}, ${gpu.sms} SMs`))))

  function sentence(found) {
    const { name, sms } = sm.GPUS[state.gpu]
    if (!found.perSm) return `One program does not fit on an SM of this GPU: it takes more ${found.limits.map((x) => BUDGETS[x]).join(" and ")} than there is.`
    const waves = found.waves === 1 ? `All ${count(state.launched, "program")} run at once` : `${count(state.launched, "program")} run in ${found.waves} waves of ${found.atOnce.toLocaleString("en")}`
    const idle = found.waves === 1 && state.launched < sms ? `, and ${count(sms - state.launched, "SM")} of the ${name} ${sms - state.launched === 1 ? "has" : "have"} nothing to do` : ""
    const tail = found.waves > 1 ? `; the last wave has ${found.last.toLocaleString("en")}` : ""
    return `An SM runs ${count(found.perSm, "program")} at once, limited by ${found.limits.map((x) => BUDGETS[x]).join(" and ")}. ${waves}${idle}${tail}.`
  }

  const bar = (name, found) => el("tr", {}, el("th", { scope: "row" }, BUDGETS[name]),
    el("td", { style: "width: 60%" }, el("div", { class: "filled thin" }, el("div", { class: "part", style: `--fill: ${found.limits.includes(name) ? "#D55E00" : "#0072B2"}; flex-basis: ${Math.min(100, (100 * found.perSm) / Math.max(found.rooms[name], 1))}%` }),
      el("div", { class: "rest", style: "flex-grow: 1" }))), el("td", {}, `room for ${found.rooms[name]}`))

  function draw() {
    const found = sm.launch(state)
    const focus = document.activeElement?.getAttribute("aria-label")
    const bigs = {
      "programs per SM": found.perSm, "occupancy": percent(found.occupancy), "waves": found.waves, "places that are used": percent(found.busy),
      "bytes on their way that an SM needs": kb(found.needed), "shared memory for them": kb(found.held),
    }
    root.replaceChildren(
      el("nav", { class: "wide presets", "aria-label": "presets" }, Object.entries(PRESETS).map(([name, hash]) => el("a", { href: `#${hash || "gpu=3"}`, "aria-current": sm.toHash(sm.fromHash(hash)) === sm.toHash(state) ? "true" : null }, name))),
      el("div", { class: "wide controls" }, chooser(), Object.keys(LABELS).map(field)),
      el("p", { class: "wide says", "aria-live": "polite" }, sentence(found)),
      el("div", { class: "wide bigs" }, Object.entries(bigs).map(([name, value]) => el("div", { class: "big" }, el("strong", {}, String(value)), el("span", {}, name)))),
      el("table", { class: "wide", style: "width: 100%" }, el("tbody", {}, Object.keys(BUDGETS).map((name) => bar(name, found)))),
    )
    if (focus) root.querySelector(`[aria-label="${focus}"]`)?.focus()
  }

  addEventListener("hashchange", () => { state = sm.fromHash(location.hash); draw() })
  draw()
})()
