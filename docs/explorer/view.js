// The explorer's page: controls, three panes and a cost, drawn anew from `explorer.everything` at every change. The state
// is in the address, after the #. Colours, words and shapes are those of twinattn.course.drawing.
;(() => {
  "use strict"

  const COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"] // of the requests
  const ON_COLOURS = ["#fff", "#000", "#000", "#000", "#000", "#000"] // 5 : 1 and more
  const SHARED = "#F0E442"
  const SYSTEM = "You are a kind and patient museum guide".split(" ")
  const WORDS = ["Why is the sky blue", "Why do cats purr ? They like", "Name three colours"].map((text) => text.split(" "))
  const NAMES = "abcdef"
  const CELL = 22 // of a mask, in pixels
  const LARGE = { keys: 40, queries: 24, blocks: 40 } // what is drawn cell by cell
  const MASK_NAMES = { causal: "causal", window: "window", chunk: "chunks", tree: "tree", full: "everything" }

  const root = document.getElementById("explorer-app")
  let state = explorer.fromHash(location.hash)
  let shown = explorer.everything(state)

  // --- elements ---

  const chip = (request) => el("span", { class: "chip", style: paint(request) }, NAMES[request])
  const paint = (request) => `--fill: ${COLOURS[request]}; --on: ${ON_COLOURS[request]}`
  const paintBlock = (readers) => (readers.length > 1 ? `--fill: ${SHARED}; --on: #000` : paint(readers[0]))
  const range = (count) => Array.from({ length: count }, (_, i) => i)

  /** Return the token at a position of a request: a word, while it has some, else a number. */
  function token(request, position) {
    const text = [...SYSTEM.slice(0, Math.min(state.shared, SYSTEM.length)), ...(WORDS[request] ?? [])]
    return position < 0 ? "–" : (text[position] ?? String(position))
  }

  const number = (x, digits = 3) => (x === -Infinity ? "−∞" : x.toFixed(digits).replace("-", "−"))
  const whole = (n) => n.toLocaleString("en")
  const count = (n, noun) => `${whole(n)} ${noun}${n === 1 ? "" : "s"}`

  function unit(x, units, base = 1000) {
    let i = 0
    while (x >= base && i < units.length - 1) (x /= base), i++
    return `${x >= 100 || x === Math.round(x) ? Math.round(x) : x.toPrecision(3)} ${units[i]}`
  }
  const bytes = (x) => unit(x, ["B", "kB", "MB", "GB", "TB"])
  const seconds = (x) => unit(x * 1e9, ["ns", "µs", "ms", "s"])

  // --- state ---

  function set(changes) {
    state = explorer.legal({ ...state, ...changes })
    const hash = explorer.toHash(state)
    history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search)
    draw()
  }

  addEventListener("hashchange", () => {
    state = explorer.fromHash(location.hash)
    draw()
    if (root.getBoundingClientRect().bottom < innerHeight) root.scrollIntoView() // the link stands below the explorer
  })

  // --- controls ---

  let refreshers = [] // what puts the state into the controls that are there
  let built = "" // for which state these were made

  /** Make the controls if they are for other requests or another mask, else put the numbers into them. */
  function refresh() {
    const needed = `${state.lens.length} ${state.mask}`
    if (built !== needed) {
      refreshers = []
      form.replaceChildren(...controls())
      built = needed
    }
    for (const each of refreshers) each()
  }

  /** A number with a button on either side, for fingers; `get` and `step` read the state. */
  function stepper(label, get, change, { min = 0, max, step = () => 1, text = label, key }) {
    const input = el("input", {
      type: "number", inputmode: "numeric", min, max, "aria-label": label, "data-key": key,
      onchange: () => change(input.value === "" ? min : Number(input.value)),
    })
    const button = (sign, by, says) =>
      el("button", {
        type: "button", "aria-label": `${says} ${label}`, "data-key": `${key} ${says}`,
        onclick: () => change(Math.min(max, Math.max(min, get() + by * step()))),
      }, sign)
    refreshers.push(() => {
      input.value = get()
    })
    return el("div", { class: "field" }, el("span", { "aria-hidden": "true" }, text),
      el("span", { class: "stepper" }, button("−", -1, "less:"), input, button("+", 1, "more:")))
  }

  function controls() {
    const size = (name, label, max, { min = 1, step } = {}) =>
      stepper(label, () => state[name], (value) => set({ [name]: value }), { min, max, step, key: name })
    const length = (request, place, label, max, text) => {
      const change = (value) =>
        set({ lens: state.lens.map((pair, i) => (i === request ? pair.map((x, k) => (k === place ? value : x)) : pair)) })
      return stepper(`${label} ${NAMES[request]}`, () => state.lens[request][place], change, { max, text, key: `${text} ${request}` })
    }
    const requests = state.lens.map((_, i) =>
      el("div", { class: "request" },
        chip(i),
        length(i, 0, "new tokens of", explorer.MOST.queries, "new"),
        length(i, 1, "all tokens of", explorer.MOST.keys, "of"),
        el("button", {
          type: "button", class: "remove", "aria-label": `remove request ${NAMES[i]}`, "data-key": `remove ${i}`,
          disabled: state.lens.length === 1 ? "" : null,
          onclick: () => set({ lens: state.lens.filter((_, k) => k !== i) }),
        }, "×")))
    const add = el("button", {
      type: "button", class: "add", "data-key": "add", disabled: state.lens.length === explorer.MOST.requests ? "" : null,
      onclick: () => set({ lens: [...state.lens, [1, 6]] }),
    }, "+ a request")
    const dtypes = el("select", {
      "aria-label": "type of the numbers in the cache", "data-key": "dtype", onchange: () => set({ dtype: dtypes.value }),
    }, Object.keys(explorer.DTYPES).map((dtype) => el("option", {}, dtype)))
    const masks = explorer.MASKS.map((mask) =>
      el("label", { class: "choice" },
        el("input", {
          type: "radio", name: "mask", value: mask, "data-key": `mask ${mask}`, checked: state.mask === mask ? "" : null,
          onchange: () => set({ mask }),
        }),
        el("span", {}, MASK_NAMES[mask])))
    const tree = el("input", {
      "aria-label": "the parent of each node of the tree, −1 for a root", "data-key": "tree",
      onchange: () => set({ tree: (tree.value.match(/-?\d+/g) ?? []).map(Number) }),
    })
    refreshers.push(() => {
      dtypes.value = state.dtype
      tree.value = state.tree.join(" ")
    })
    const ofMask = {
      causal: () => el("p", { class: "field note" }, "itself and everything before it"),
      window: () => size("window", "keys in a window", explorer.MOST.keys),
      chunk: () => size("chunk", "tokens in a chunk", explorer.MOST.keys, { step: () => state.block }),
      tree: () => el("div", { class: "field" }, el("span", { "aria-hidden": "true" }, "parents of nodes"), tree),
      full: () => el("p", { class: "field note" }, "every key of its request"),
    }[state.mask]
    const group = (title, ...children) => el("fieldset", {}, el("legend", {}, title), children)
    return [
      group("Requests: new tokens, of all", requests, add),
      group("Who may see whom", el("div", { class: "choices" }, masks), ofMask()),
      group("Where keys are",
        size("block", "tokens in a block", 256),
        size("shared", "shared leading tokens", explorer.MOST.keys, { min: 0, step: () => state.block }),
        size("splits", "splits of the keys", 16)),
      group("A layer",
        size("heads", "query heads", 128, { step: () => state.kv }),
        size("kv", "KV heads", 128),
        size("size", "head size", 576, { step: () => 16 }),
        el("div", { class: "field" }, el("span", { "aria-hidden": "true" }, "cache of"), dtypes)),
    ]
  }

  // --- where are the keys? ---

  /** Return the requests that have each block. */
  function readersOf() {
    const readers = new Map()
    shown.tables.forEach((blocks, i) => blocks.forEach((block) => readers.set(block, [...(readers.get(block) ?? []), i])))
    return readers
  }

  function where() {
    const readers = readersOf()
    const first = state.mask === "window" ? shown.sequences.map((each) => each.first / state.block) : []
    const most = shown.pool > 1000 ? 6 : 12 // numbers of four digits need more room
    const rows = shown.tables.map((blocks, request) =>
      el("tr", {}, el("th", { scope: "row" }, chip(request)),
        el("td", { class: "blocks" }, blocks.slice(0, most).map((block, k) =>
          el("span", { class: k < (first[request] ?? 0) ? "block gone" : "block", style: paintBlock(readers.get(block)) }, String(block))),
        blocks.length > most ? ` … ${count(blocks.length, "block")}` : ""),
        el("td", { class: "numbers" }, list(shown.slots[request]))))
    return [
      el("p", {}, `${poolLine()} Key j of a request is in row j mod ${state.block} of its block j div ${state.block}.`),
      scroller("block tables", el("table", { class: "table" },
        el("thead", {}, el("tr", {}, ["", "block table", "slots written in this step"].map((t) => el("th", { scope: "col" }, t)))),
        el("tbody", {}, rows))),
      pool(readers),
      ...runsOver(),
    ]
  }

  const list = (values) => (values.length > 6 ? `${values.slice(0, 3).join(" ")} … ${values[values.length - 1]}` : values.join(" "))

  function poolLine() {
    const used = new Set(shown.tables.flat()).size
    return `${count(used, "block")} of ${whole(shown.pool)} ${used === 1 ? "is" : "are"} taken, wherever there was room.`
  }

  /** The pool, a row per block; new tokens have a bold frame, and their slot as a title. */
  function pool(readers) {
    if (shown.pool > LARGE.blocks || state.block > 16) return el("p", { class: "note" }, `A pool of ${count(shown.pool, "block")} is not drawn.`)
    return el("div", { class: "pool", role: "img", "aria-label": `the pool: ${poolLine()}` },
      range(shown.pool).map((block) => {
        const request = readers.get(block)?.[0]
        const place = request === undefined ? 0 : shown.tables[request].indexOf(block)
        const cells = range(state.block).map((row) => {
          const position = place * state.block + row
          if (request === undefined || position >= state.lens[request][1]) return el("span", { class: "cell" })
          const slot = block * state.block + row
          const isNew = shown.slots[request].includes(slot)
          return el("span", { class: isNew ? "cell taken new" : "cell taken", style: paintBlock(readers.get(block)), title: `slot ${slot}` },
            token(request, position))
        })
        return el("div", { class: "row" }, el("span", { class: "name" }, String(block)), cells)
      }))
  }

  /** The table of what attention runs over: virtual batches, trimmed tables, levels of a cascade. */
  function runsOver() {
    const head = (...titles) => el("thead", {}, el("tr", {}, titles.map((title) => el("th", { scope: "col" }, title))))
    if (shown.levels.length > 1) {
      const rows = shown.levels.flatMap((groups, level) => groups.map(({ first, last, begin, end }) =>
        el("tr", {}, [
          level < shown.levels.length - 1 ? `${level}, shared` : `${level}, their own`,
          range(last - first).map((k) => chip(first + k)),
          begin < end ? `${begin} to ${end - 1}` : "none",
        ].map((cell) => el("td", {}, cell)))))
      return [el("h4", {}, "Levels of a cascade"), el("p", {}, "Each level reads the keys of a group once, for the queries of all its requests."),
        scroller("levels of a cascade", el("table", { class: "table" }, head("level", "requests", "keys"), el("tbody", {}, rows)))]
    }
    if (state.mask !== "window" && state.mask !== "chunk") return []
    const [title, text] = state.mask === "window"
      ? ["Trimmed tables", "Blocks at the front that no query can see are removed. Nothing else changes: a window depends only on distances."]
      : ["Virtual batches", "Each chunk with new tokens becomes a sequence of its own, with causal attention."]
    const rows = shown.sequences.slice(0, 40).map((each, i) =>
      el("tr", {}, [String(i), [chip(each.request)], String(each.queries), String(each.keys), String(each.first), list(each.blocks)]
        .map((cell) => el("td", {}, cell))))
    return [el("h4", {}, title), el("p", {}, text),
      scroller(title, el("table", { class: "table" }, head("sequence", "of", "new", "keys", "first key at", "blocks"), el("tbody", {}, rows)))]
  }

  const scroller = (label, child) => el("div", { class: "scroller", tabindex: "0", role: "group", "aria-label": label }, child)

  // --- who may see whom? ---

  const says = el("p", { class: "says", "aria-live": "polite" })

  function who() {
    const grids = state.lens.map((lens, request) =>
      lens[1] <= LARGE.keys && lens[0] <= LARGE.queries ? grid(lens, request) : overview(lens, request))
    const choose = (event) => {
      const [request, row] = state.query
      const moves = { ArrowDown: 1, ArrowUp: -1, ArrowRight: 1, ArrowLeft: -1 }
      if (!(event.key in moves)) return
      event.preventDefault()
      const all = state.lens.flatMap(([queries], i) => range(queries).map((k) => [i, k]))
      const at = all.findIndex(([i, k]) => i === request && k === row) + moves[event.key]
      if (all[at]) set({ query: all[at], step: 0 })
    }
    says.textContent = sentence(...state.query)
    return [
      el("p", {}, "Each row is a new token and sees the filled keys. Select a row to see its numbers below."),
      state.mask === "tree" ? tree() : null,
      el("div", { class: "masks", role: "listbox", "aria-label": "queries", onkeydown: choose }, grids),
      says,
    ]
  }

  /** The tree that is typed as parents: a node below the one that it follows, roots at the top. */
  function tree() {
    const depths = [], columns = []
    let widest = 0
    state.tree.forEach((parent, node) => {
      depths.push(parent < 0 ? 0 : depths[parent] + 1)
      const first = state.tree.indexOf(parent) === node // a first child stands below its parent, others beside it
      columns.push(first && parent >= 0 ? columns[parent] : node ? ++widest : 0)
    })
    const x = (node) => 16 + columns[node] * 34, y = (node) => 16 + depths[node] * 34
    const [width, height] = [Math.max(...columns) * 34 + 32, Math.max(...depths) * 34 + 32]
    const says = state.tree.map((parent, node) => (parent < 0 ? `${node} is a root` : `${node} follows ${parent}`)).join(", ")
    return el("svg", { class: "tree", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `The tree of drafted tokens: node ${says}.` },
      state.tree.map((parent, node) => (parent < 0 ? null : el("line", { x1: x(parent), y1: y(parent), x2: x(node), y2: y(node) }))),
      state.tree.map((_, node) => [el("circle", { cx: x(node), cy: y(node), r: 12 }), el("text", { x: x(node), y: y(node) + 4 }, String(node))]))
  }

  function sentence(request, row, key = null) {
    const lens = state.lens[request]
    if (!lens[0]) return `${NAMES[request]} has no new token.`
    const runs = explorer.runs(state, lens, row)
    const name = `${NAMES[request]}, query “${token(request, lens[1] - lens[0] + row)}” at position ${whole(shown.positions[request][row])}`
    if (key !== null) return `${name}, ${explorer.sees(runs, key) ? "sees" : "does not see"} key ${key} “${token(request, key)}”.`
    const total = runs.reduce((sum, [begin, end]) => sum + end - begin, 0)
    const text = runs.map(([begin, end]) => (end - begin === 1 ? whole(begin) : `${whole(begin)} to ${whole(end - 1)}`)).join(" and ")
    return total ? `${name}, sees ${whole(total)} of ${count(lens[1], "key")}: ${text}.` : `${name}, sees nothing and answers 0.`
  }

  /** A mask cell by cell, under the boxes of its blocks. */
  function grid([queries, keys], request) {
    const label = 8 + 8 * Math.max(3, ...range(queries).map((i) => token(request, keys - queries + i).length))
    const top = 46
    const cut = state.mask === "window" ? shown.sequences[request].first / state.block : 0
    const readers = readersOf()
    const boxes = shown.tables[request].map((block, k) => {
      const style = paintBlock(readers.get(block))
      const width = (Math.min((k + 1) * state.block, keys) - k * state.block) * CELL
      return el("g", { transform: `translate(${label + k * state.block * CELL} 22)` },
        el("rect", { class: k < cut ? "box gone" : "box", width: width - 2, height: CELL - 2, rx: 2, style }),
        el("text", { class: k < cut ? "quiet" : "on", x: width / 2 - 1, y: 14, style }, String(block)))
    })
    const rows = range(queries).map((i) => {
      const runs = explorer.runs(state, [queries, keys], i)
      const chosen = state.query[0] === request && state.query[1] === i
      return el("g", {
        class: chosen ? "query chosen" : "query", role: "option", "aria-selected": String(chosen), tabindex: chosen ? 0 : -1,
        "aria-label": sentence(request, i), "data-key": `query ${request} ${i}`, transform: `translate(0 ${top + i * CELL})`,
        onclick: () => set({ query: [request, i], step: 0 }),
        onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") event.preventDefault(), set({ query: [request, i], step: 0 }) },
        onpointermove: (event) => {
          const key = event.target.dataset.column
          says.textContent = sentence(request, i, key === undefined ? null : Number(key))
        },
        onpointerleave: () => (says.textContent = sentence(...state.query)),
      },
      el("rect", { class: "hit", x: 0, y: 0, width: label + keys * CELL, height: CELL }),
      el("text", { class: "label", x: label - 6, y: 15 }, token(request, keys - queries + i)),
      range(keys).map((key) =>
        el("rect", {
          class: explorer.sees(runs, key) ? "seen" : "unseen", x: label + key * CELL + 1, y: 1, width: CELL - 3, height: CELL - 3,
          style: paint(request), "data-column": key,
        })))
    })
    const ends = state.mask === "chunk" ? range(Math.ceil(keys / state.chunk)).slice(1) : []
    const cuts = ends.map((k) => {
      const x = label + k * state.chunk * CELL - 1
      return el("line", { class: "cut", x1: x, x2: x, y1: 20, y2: top + queries * CELL })
    })
    const numbers = range(keys).map((key) => el("text", { class: "column", x: label + (key + 0.5) * CELL - 1, y: 14 }, String(key)))
    const [width, height] = [label + keys * CELL + 2, top + queries * CELL + 2]
    return el("div", { class: "mask", role: "group", "aria-label": `request ${NAMES[request]}` }, chip(request),
      el("div", { class: "scroller", role: "presentation" },
        el("svg", { role: "presentation", width, height, viewBox: `0 0 ${width} ${height}` }, numbers, boxes, rows, cuts)))
  }

  /** A mask too large for cells: sampled rows, and the whole to scale. */
  function overview([queries, keys], request) {
    const width = 280
    const height = Math.max(16, Math.min(queries, 140))
    const scale = width / Math.max(1, keys)
    const lines = range(queries ? height : 0).map((y) => {
      const row = Math.min(queries - 1, Math.floor((y * queries) / height))
      const bar = ([begin, end]) => `M${begin * scale} ${y}h${(end - begin) * scale}v1h${-(end - begin) * scale}z`
      return explorer.runs(state, [queries, keys], row).map(bar).join("")
    })
    const chosen = state.query[0] === request
    const choose = (event) => {
      const box = event.currentTarget.getBoundingClientRect()
      const row = event.clientY ? Math.floor(((event.clientY - box.top) / box.height) * queries) : 0
      set({ query: [request, row], step: 0 })
    }
    return el("div", { class: "mask", role: "group", "aria-label": `request ${NAMES[request]}` }, chip(request),
      el("svg", {
        width: width + 2, height: height + 2, viewBox: `-1 -1 ${width + 2} ${height + 2}`, class: chosen ? "query chosen" : "query",
        role: "option", "aria-selected": String(chosen), tabindex: chosen ? 0 : -1, "data-key": `query ${request} ${chosen ? state.query[1] : 0}`,
        "aria-label": `${count(queries, "query").replace("querys", "queries")} over ${count(keys, "key")}`, onclick: choose,
      }, el("rect", { class: "unseen", width, height }), el("path", { class: "seen", d: lines.join(""), style: paint(request) })),
      el("span", { class: "note" }, `${queries.toLocaleString("en")} × ${keys.toLocaleString("en")}`))
  }

  // --- how do partial outputs combine? ---

  function how() {
    const [request, row] = state.query
    if (!state.lens[request][0]) return stepBar.show(-1, 0), [el("p", {}, `${NAMES[request]} has no new token.`)]
    const { parts, query, out, lse, shares } = shown.answer
    const tiles = parts.flatMap((part, p) => part.tiles.map((tile, t) => ({ part, p, tile, t })))
    const at = Math.min(state.step, tiles.length - 1)
    const word = token(request, state.lens[request][1] - state.lens[request][0] + row)
    const name = (part, p) => {
      const names = shown.levels.length > 1 ? [`level ${part.level}`] : []
      if (state.splits > 1) names.push(`split ${(p % state.splits) + 1}`)
      return names.join(", ") || "all keys"
    }
    const vector = (x) => x.map((v) => number(v)).join("  ")
    const keysOf = ({ begin, end }) => (begin < end ? `${begin} to ${end - 1}` : "none")
    const head = (...titles) => el("thead", {}, el("tr", {}, titles.map((title) => el("th", { scope: "col" }, title))))
    const cells = (values) => values.map((value) => el("td", { class: "numbers" }, value))

    const from = Math.max(0, Math.min(at - 3, tiles.length - 8))
    const softmax = tiles.slice(from, from + 8).map(({ part, p, tile, t }, k) =>
      el("tr", { class: from + k === at ? "now" : from + k > at ? "later" : null, "aria-current": from + k === at ? "step" : null },
        cells([
          tiles.length && parts.length > 1 ? name(part, p) : "",
          tile.keys.length > 1 ? `${tile.begin} to ${tile.begin + tile.keys.length - 1}` : String(tile.begin),
          number(tile.max, 2), t ? number(tile.rescale) : "–", number(tile.sum), vector(tile.acc),
        ])))
    const now = tiles[at]
    stepBar.show(at, tiles.length)
    const merged = parts.slice(0, 24).map((part, p) =>
      el("tr", {}, el("td", {}, name(part, p)), cells([keysOf(part), number(part.lse), vector(part.out), number(shares[p])])))
    const total = number(shares.reduce((a, b) => a + b, 0))
    const whole = parts.length > 1
      ? el("tr", { class: "total" }, el("td", {}, "merged"), cells(["", number(lse), vector(out), total]))
      : null
    return [
      el("p", {}, `Query “${word}” of ${NAMES[request]} is [${query.map((v) => number(v, 1)).join(", ")}]. `,
        "Toy keys have four numbers and values two; a tile is a block of keys. The online softmax processes one tile after the other."),
      now ? bars(now.tile, request) : el("p", {}, "No visible key: the answer is 0, with a log-sum-exp of −∞."),
      now ? formula(now, tiles[at - 1]) : null,
      scroller("online softmax", el("table", { class: "table softmax" },
        head(parts.length > 1 ? "part" : "", "keys", "row_max", "rescale", "row_sum", "acc"), el("tbody", {}, softmax))),
      el("h4", {}, parts.length > 1 ? `${parts.length} partial outputs, merged` : "The answer"),
      scroller("merge", el("table", { class: "table merge" },
        head("part", "keys", "LSE", "out = acc / row_sum", "share = exp(LSE − all)"), el("tbody", {}, merged, whole))),
    ]
  }

  /** The bar that goes through the tiles. It stays where it is, so that a finger that drags it does not lose it. */
  const stepBar = (() => {
    let last = 0
    const go = (step) => set({ step: Math.max(0, Math.min(last, step)) })
    const slider = el("input", { type: "range", min: 0, "aria-label": "tile of the online softmax", oninput: () => go(Number(slider.value)) })
    const button = (sign, by, label) => el("button", { type: "button", "aria-label": label, onclick: () => go(Number(slider.value) + by) }, sign)
    const text = el("output", {})
    return {
      node: el("div", { class: "steps" }, button("‹", -1, "tile before"), slider, button("›", 1, "next tile"), text),
      show(at, number) {
        last = Math.max(0, number - 1)
        slider.max = last
        slider.value = Math.max(0, at)
        text.value = number ? `tile ${at + 1} of ${number}` : "no tile"
        slider.setAttribute("aria-valuetext", text.value)
      },
    }
  })()

  /** The scores of a tile, and the weights that they have so far. */
  function bars(tile, request) {
    const keys = tile.keys.slice(0, 16)
    return el("div", { class: "bars" }, keys.map((key, i) =>
      el("div", { class: key.visible ? "bar" : "bar hidden" },
        el("span", { class: "column", style: `${paint(request)}; height: ${(key.visible ? tile.weights[i] : 0) * 3}rem` }),
        el("span", { class: "word" }, token(request, key.key)),
        el("span", { class: "numbers" }, key.visible ? number(key.score, 2) : "masked"))),
      tile.keys.length > 16 ? el("p", { class: "note" }, `and ${tile.keys.length - 16} more`) : null)
  }

  function formula({ tile, t, p }, before) {
    if (!tile.keys.some((key) => key.visible)) return el("p", { class: "says numbers" }, "No key of this tile is visible: nothing changes.")
    const added = number(tile.weights.reduce((a, b) => a + b, 0))
    const text = t && before?.p === p && before.tile.sum
      ? `row_sum ${number(before.tile.sum)} × ${number(tile.rescale)} + ${added} = ${number(tile.sum)}, ` +
        `as the largest score went from ${number(before.tile.max, 2)} to ${number(tile.max, 2)}`
      : `row_sum ${number(tile.sum)}: the sum of exp(score − ${tile.max < 0 ? `(${number(tile.max, 2)})` : number(tile.max, 2)})`
    return el("p", { class: "says numbers" }, text)
  }

  // --- what does it cost? ---

  function cost() {
    const { bytes: moved, all, apart, intensity, flops } = shown.cost
    const { linear } = shown.cost
    const chosen = Math.min(state.machine, machines.length - 1)
    const at = machines[chosen]
    const around = explorer.floor(linear, at)
    const floor = explorer.floor(shown.cost, at)
    const most = Math.max(all, moved.queries + moved.outputs, moved.partials, 1)
    const bar = (label, value) =>
      el("div", { class: "amount" }, el("span", {}, label), el("span", { class: "numbers" }, bytes(value)),
        el("span", { class: "track" }, el("span", { style: `width: ${(100 * value) / most}%` })))
    return [
      el("p", {}, "For one layer: the least that has to be moved and computed, and the shortest time in which the machine can do it."),
      el("div", { class: "amounts" },
        bar("keys and values of all tokens", all),
        bar("those that any query sees", apart),
        bar("with what is shared once", moved.keys),
        bar("queries and outputs", moved.queries + moved.outputs),
        bar("partial outputs, written and read", moved.partials)),
      el("div", { class: "field" }, el("span", { "aria-hidden": "true" }, "machine"),
        el("select", { "aria-label": "machine", "data-key": "machine", onchange: (event) => set({ machine: Number(event.target.value) }) },
          machines.map((each, i) => el("option", { value: i, selected: i === chosen ? "" : null }, `${each.name}, ${each.dtype}`)))),
      el("p", { class: "floor" }, el("strong", {}, seconds(floor.seconds)), ` at least, for ${floor.limit}: `,
        `${seconds(floor.memory)} to move ${bytes(shown.cost.moved)} as fast as memory is read, `,
        `${seconds(floor.arithmetic)} for ${unit(flops, ["", "k", "M", "G", "T", "P"]).trim()} operations. `,
        `That is ${number(intensity, intensity < 10 ? 1 : 0)} operations per byte.`,
        floor.seconds < 5e-6 ? " (To launch a kernel alone takes a few microseconds, so a step as small as this waits for its launches.)" : ""),
      el("p", { class: "linear" }, "The matrices around it, ", el("strong", {}, bytes(linear.moved)), " of weights in 16 bits, are read once for ",
        `${count(linear.intensity, "row")}, so ${linear.intensity.toLocaleString("en")} operations per byte: ${seconds(around.seconds)} at least, `,
        around.limit === "memory" ? "memory-bound. More requests in the step would cost them nothing." : "compute-bound."),
      roofline(at, intensity, linear.intensity),
      el("p", { class: "note" }, `Large dot: this attention. Ring: the matrices around it. Small dots: rows of our benchmark, whose rates the roofs are, products in ${at.dtype}. `,
        "Nothing here is a measurement of this step."),
    ]
  }

  /** The roofline of a machine: its measured rows, and the dot of this step on the roof. */
  function roofline({ read, product, points, name }, intensity, ofLinear) {
    const [width, height] = [520, 240]
    const x = (v) => 62 + (Math.log10(Math.min(Math.max(v, 0.1), 1e4)) + 1) * ((width - 92) / 5)
    const top = Math.ceil(Math.log10(product))
    const y = (v) => 12 + (top - Math.log10(v)) * ((height - 50) / 5)
    const roof = (v) => Math.min(v * read, product)
    const floor = 10 ** (top - 5)
    const start = Math.max(0.1, floor / read)
    const ticks = range(6).map((k) => 10 ** (k - 1))
    return el("svg", {
      class: "roofline", viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `roofline of ${name}: ${number(intensity, 1)} operations per byte, at most ` +
        `${unit(roof(intensity), ["", "k", "M", "G", "T"])} operations per second; the ridge is at ${Math.round(product / read)}`,
    },
    ticks.map((tick) => el("g", {}, el("line", { class: "grid", x1: x(tick), x2: x(tick), y1: 12, y2: height - 38 }),
      el("text", { class: "tick", x: x(tick), y: height - 22 }, tick < 1 ? String(tick) : tick.toLocaleString("en")))),
    range(6).map((k) => el("text", { class: "tick left", x: 56, y: y(10 ** (top - k)) + 4 }, unit(10 ** (top - k), ["", "k", "M", "G", "T", "P"]))),
    el("path", { class: "roof", d: `M${x(start)} ${y(roof(start))}L${x(product / read)} ${y(product)}L${x(1e4)} ${y(product)}` }),
    points.filter(([, each, rate]) => rate > floor && each >= 0.1).map(([row, each, rate]) =>
      el("circle", { class: "row", cx: x(each), cy: y(rate), r: 2.5 }, el("title", {}, row))),
    el("text", { class: "tick", x: width / 2, y: height - 4 }, "operations per byte"),
    el("text", { class: "tick", style: "text-anchor: start", x: 68, y: 26 }, "operations per second"),
    ofLinear ? el("circle", { class: "ring", r: 6, cx: x(ofLinear), cy: y(Math.max(floor, roof(Math.max(ofLinear, start)))) }) : null,
    intensity ? el("circle", { class: "dot", r: 7, cx: x(intensity), cy: y(Math.max(floor, roof(Math.max(intensity, start)))) }) : null)
  }

  // --- the page ---

  const pane = (title, id, above = []) => {
    const body = el("div", {})
    root.append(el("section", { class: `pane ${id}`, "aria-label": title }, el("h3", {}, title), above, body))
    return body
  }
  const presets = el("nav", { class: "presets", "aria-label": "presets" })
  const form = el("form", { class: "controls", onsubmit: (event) => event.preventDefault() })
  root.replaceChildren(presets, form)
  const panes = [
    [pane("Where are the keys?", "where"), where],
    [pane("Who may see whom?", "who"), who],
    [pane("How do partial outputs combine?", "how", stepBar.node), how],
    [pane("What does it cost?", "cost"), cost],
  ]

  /** Draw everything anew, and leave the focus and the scrolled places where they were. */
  function draw() {
    shown = explorer.everything(state)
    const focused = document.activeElement?.dataset?.key
    const wasQuery = focused?.startsWith("query ")
    const scrolled = [...root.querySelectorAll(".scroller")].map((node) => node.scrollLeft)
    const now = explorer.toHash(state)
    presets.replaceChildren(...Object.entries(explorer.PRESETS).map(([name, hash]) =>
      el("a", { href: `#${hash}`, "aria-current": hash === now ? "true" : null }, name)))
    refresh()
    for (const [body, content] of panes) body.replaceChildren(...content().filter((child) => child !== null))
    root.querySelectorAll(".scroller").forEach((node, i) => (node.scrollLeft = scrolled[i] ?? 0))
    const key = wasQuery ? `query ${state.query.join(" ")}` : focused
    if (key) root.querySelector(`[data-key="${key}"]`)?.focus({ preventScroll: true })
  }

  draw()
})()
