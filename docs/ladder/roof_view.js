// The picture of roof.js on the page of a ladder: a bar per rung as measured, and the roof of a batch that sliders set.

"use strict"

;(() => {
  const LABELS = {
    count: "sequences", heads: "heads", queries: "new tokens of each, at most all",
    keys: { decode: "keys of each", latents: "keys of each", prefill: "tokens of each", states: "new tokens of each" },
  }
  const MOST = 700, LEAST = 300, LEFT = 130, STEP = 20, ROOM = 70 // of a picture, of its labels, of a row, of a time

  const duration = (s) => (s < 1e-3 ? `${(1e6 * s).toPrecision(3)} µs` : s < 1 ? `${(1e3 * s).toPrecision(3)} ms` : `${s.toPrecision(3)} s`)
  const big = (n) => n.toLocaleString("en")

  function view(root) {
    const { ladder, kind, fixed, machine, rates, batches } = JSON.parse(root.dataset.roof)
    const sliders = roof.SLIDERS[ladder]
    const label = (name) => (typeof LABELS[name] === "string" ? LABELS[name] : LABELS[name][ladder])
    let chosen = batches[0]
    let settings = { ...chosen.settings }

    function choose(batch) {
      chosen = batch
      settings = { ...batch.settings }
      draw()
    }

    const slider = (name) => el("label", { class: "field" }, `${label(name)}: ${big(settings[name])}`, el("input", {
      type: "range", min: 0, max: 1000, value: roof.toPlace(sliders[name], settings[name]), "aria-label": label(name),
      oninput: (event) => { settings = { ...settings, [name]: roof.fromPlace(sliders[name], Number(event.target.value)) }; draw() },
    }))

    const words = (x, y, text) => el("text", { x, y, style: "text-anchor: start" }, text)

    function picture(found) {
      const width = Math.min(MOST, Math.max(LEAST, root.clientWidth))
      const timed = chosen.rungs.filter((rung) => rung.median)
      const all = [...timed.map((rung) => rung.median), found.bytes, found.operations]
      const low = Math.min(...all) / 1.5, high = Math.max(...all) * 1.5
      const x = (s) => LEFT + ((width - ROOM - LEFT) * Math.log(s / low)) / Math.log(high / low)
      const height = STEP * (timed.length + 2)
      const rows = timed.map((rung, i) => {
        const y = STEP * i
        return [
          words(0, y + 14, `${rung.number} · ${rung.name.replaceAll("_", " ")}`),
          el("rect", { x: LEFT, y: y + 3, width: Math.max(x(rung.median) - LEFT, 0), height: 14, opacity: 0.3 }),
          words(x(rung.median) + 4, y + 14, duration(rung.median)),
        ]
      })
      const line = (name, i) => {
        const y = STEP * (timed.length + i)
        const dash = found.limit === name ? null : "3 3"
        return [
          words(0, y + 14, name === found.limit ? `roof: ${name}` : name),
          el("line", { x1: x(found[name]), x2: x(found[name]), y1: 0, y2: height, stroke: "currentColor", "stroke-width": dash ? 1 : 2, "stroke-dasharray": dash }),
          words(x(found[name]) + 4, y + 14, duration(found[name])),
        ]
      }
      const says = `Times of the rungs on ${chosen.name}, and the roof of the batch that is set, on a logarithmic axis`
      return el("svg", { class: "wide", viewBox: `0 0 ${width} ${height}`, style: "width: 100%; height: auto", fill: "currentColor", "font-size": 12, role: "img", "aria-label": says }, rows, line("bytes", 0), line("operations", 1))
    }

    function sentence(found) {
      const mb = `${big(Math.round((found.reads + found.writes) / 1e6))} MB, ${big(Math.round(found.flops / 1e9))} GFLOP`
      const same = Object.keys(settings).every((name) => settings[name] === chosen.settings[name])
      const bars = chosen.rungs.some((rung) => rung.median) ? ` The bars are ${same ? "of this batch" : `still those of ${chosen.name}, as measured`}.` : ""
      const bound = found.limit === "bytes" ? "memory-bound" : "compute-bound"
      return `${mb}: at least ${duration(found.seconds)} on this ${machine}, ${bound}.${bars}`
    }

    function draw() {
      const found = roof.floor(kind, roof.batch(ladder, fixed, settings), rates)
      const focus = document.activeElement?.getAttribute("aria-label")
      root.replaceChildren(
        el("nav", { class: "wide presets", "aria-label": "measured batches" }, batches.map((batch) => el("button", { type: "button", "aria-pressed": batch === chosen ? "true" : "false", onclick: () => choose(batch) }, batch.name))),
        el("div", { class: "wide controls" }, Object.keys(sliders).map(slider)),
        el("p", { class: "wide says", "aria-live": "polite" }, sentence(found)),
        picture(found),
      )
      if (focus) root.querySelector(`[aria-label="${focus}"]`)?.focus()
    }

    draw()
    root.closest("details")?.addEventListener("toggle", draw) // closed, it has no width
  }

  document.querySelectorAll(".roof").forEach(view)
})()
