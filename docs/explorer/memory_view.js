// The page of memory.js: pick or paste a model, pick a GPU, and see what a token, a conversation and a step take.

"use strict"

;(() => {
  const app = document.getElementById("memory-app")
  const PAGES = {
    full: ["chunked_prefill", "sees everything"], window: ["sliding_window", "sees a window"], chunk: ["local", "sees its chunk"],
    latent: ["mla", "keeps latents"], shared: ["differential", "reads another layer's pool"], state: ["index", "keeps a state, and no keys"],
  }
  const el = (name, attributes = {}, ...children) => {
    const made = Object.assign(document.createElement(name), attributes)
    made.append(...children)
    return made
  }
  const size = (bytes) => {
    const [unit, by] = bytes >= 1e9 ? ["GB", 1e9] : bytes >= 1e6 ? ["MB", 1e6] : bytes >= 1e3 ? ["kB", 1e3] : ["bytes", 1]
    return `${Number((bytes / by).toPrecision(3)).toLocaleString("en-US")} ${unit}`
  }
  const count = (number) => (number < 100 ? Number(number.toPrecision(2)) : Math.round(number)).toLocaleString("en-US")
  const DEFAULTS = { model: "Llama-3-8B", gpu: "NVIDIA H100 SXM", tokens: 8192, batch: 16, dtype: "bfloat16", weightBytes: 2 }

  const choose = (names) => el("select", {}, ...names.map((name) => el("option", { value: name }, name)))
  const number = (min) => el("input", { type: "number", min, step: "any" })
  const fields = {
    model: choose([...Object.keys(memory.MODELS), "pasted below"]), gpu: choose(Object.keys(memory.GPUS)),
    tokens: number(1), batch: number(1), dtype: choose(Object.keys(memory.DTYPES)), weightBytes: choose(["2", "1", "0.5"]),
    parameters: number(0), active: number(0),
  }
  const LABELS = {
    model: "model", gpu: "GPU", tokens: "tokens in a conversation", batch: "conversations in a step", dtype: "keys and values",
    weightBytes: "bytes per weight", parameters: "billions of weights", active: "of which a token uses",
  }
  const paste = el("textarea", { rows: 4, spellcheck: false, placeholder: '{"num_hidden_layers": 32, "num_attention_heads": 32, ...}' })
  const out = el("div", { className: "found" })
  out.setAttribute("aria-live", "polite")

  function take(name) {
    const known = memory.MODELS[name]
    if (!known) return
    fields.parameters.value = known[1]
    fields.active.value = known[2] ?? known[1]
    paste.value = JSON.stringify(known[0].layer_types ? { ...known[0], layer_types: known[0].layer_types } : known[0])
  }

  function show() {
    const value = (name) => Number(fields[name].value)
    try {
      const config = JSON.parse(paste.value)
      const how = {
        gpu: fields.gpu.value, dtype: fields.dtype.value, tokens: Math.max(1, Math.round(value("tokens"))), batch: Math.max(1, Math.round(value("batch"))),
        parameters: value("parameters"), active: value("active") || value("parameters"), weightBytes: value("weightBytes"),
      }
      const refusal = memory.refusal(config, how.dtype)
      if (refusal) throw new Error(refusal)
      draw(memory.kinds(config, how.dtype), memory.fit(config, how), how)
    } catch (error) {
      out.replaceChildren(el("p", { className: "wrong" }, `${error.message}`))
    }
    const state = Object.fromEntries(Object.entries(fields).map(([name, field]) => [name, field.value]))
    if (state.model !== "pasted below") {
      delete state.parameters
      delete state.active
      const changed = Object.entries(state).filter(([name, now]) => String(DEFAULTS[name]) !== now)
      history.replaceState(null, "", changed.length ? `#${new URLSearchParams(changed)}` : location.pathname + location.search)
    }
  }

  function draw(lines, found, how) {
    const perToken = lines.reduce((total, line) => total + line.all, 0)
    const rows = lines.map((line) => el("tr", {},
      el("td", {}, el("a", { href: `../paths/${PAGES[line.kind][0]}.html` }, line.kind), line.reach ? ` of ${line.reach.toLocaleString("en-US")}` : ""),
      el("td", {}, PAGES[line.kind][1]), el("td", {}, String(line.count)), el("td", {}, size(line.each)), el("td", {}, size(line.all))))
    const head = el("tr", {}, ...["layers", "", "how many", "bytes per token, each", "all"].map((text) => el("th", {}, text)))
    const total = found.of_weights + found.of_keys
    const bar = (name, bytes) => el("div", { className: "share" }, el("span", {}, name), el("meter", { value: bytes / total, max: 1, ariaLabel: name }), `${size(bytes)}, ${Math.round((100 * bytes) / total)} %`)
    const strong = (text) => el("strong", {}, text)
    out.replaceChildren(
      el("p", { className: "headline" }, strong(count(found.fits)), ` conversations of ${how.tokens.toLocaleString("en-US")} tokens fit on one ${how.gpu}, `,
        `${size(found.kept)} each. The weights take ${size(found.weights)}.`,
        found.fits ? "" : " They leave no room: take a larger GPU, several, or fewer bytes per weight."),
      el("h3", {}, "A token"),
      el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows)),
      el("p", {}, strong(size(perToken)), " per token while nothing has left a window; a window or a chunk keeps no more than its own length."),
      el("h3", {}, `A decode step of ${how.batch.toLocaleString("en-US")}`),
      bar("weights", found.of_weights), bar("keys and values", found.of_keys),
      el("p", {}, "Reading that takes at least ", strong(`${(1000 * found.seconds).toPrecision(3)} ms`), `, so at most ${count(found.perSecond)} tokens per second. `,
        `Keys and values are as many bytes as all weights from ${count(found.even)} conversations on.`,
        how.batch > found.fits ? ` (Only ${count(found.fits)} fit.)` : ""),
      el("p", {}, `The linear layers become compute-bound at about ${count(found.rows)} rows in a step. Below that, drafted tokens are nearly free: for `,
        `${how.batch.toLocaleString("en-US")} requests, about ${Math.max(0, Math.floor(found.rows / how.batch) - 1).toLocaleString("en-US")} each (`,
        el("a", { href: "../notebooks/14_speculation.html" }, "notebook 14"), "). A prefix that all of them share would be read once instead of ",
        `${how.batch.toLocaleString("en-US")} times (`, el("a", { href: "../paths/cascade.html" }, "cascade"), ")."))
  }

  const copy = el("button", { type: "button", className: "md-button" }, "Copy link")
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(location.href)
      copy.textContent = "Copied"
    } catch {
      copy.textContent = "The address bar has it"
    }
    setTimeout(() => { copy.textContent = "Copy link" }, 2000)
  })
  const form = el("form", { onsubmit: () => false }, ...Object.entries(fields).map(([name, field]) => el("label", {}, LABELS[name], field)))
  const given = { ...DEFAULTS, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) }
  for (const [name, field] of Object.entries(fields)) if (given[name] !== undefined) field.value = given[name]
  take(fields.model.value)
  fields.model.addEventListener("change", () => { take(fields.model.value); show() })
  paste.addEventListener("input", () => { fields.model.value = "pasted below"; show() })
  form.addEventListener("input", (event) => { if (event.target !== fields.model) show() })
  app.replaceChildren(form, el("details", {}, el("summary", {}, "config.json: paste yours"), paste), out, copy)
  show()
})()
