// What the explorer computes, without a page: settings in, numbers out. The definitions are those of refattn, and
// tests/tools/test_explorer.py holds them against it over hundreds of random settings.
//
//     settings ─┬─ tables, slots     where are the keys?       runs ── who may see whom?
//               ├─ sequences         trimmed tables, virtual batches      (refattn.sliding_window, refattn.local)
//               ├─ levels            what requests share, read once       (refattn.cascade)
//               ├─ answer            how do partial outputs combine?      (refattn.merge)
//               └─ cost              bytes, operations, floor
//
// A request is [query_len, seq_len]: its new tokens, and all its tokens. Query i stands at seq_len - query_len + i.
// A classic script, so that it runs from a file and in a bare engine: it defines `explorer` and touches nothing else.

var explorer = (() => {
  "use strict"

  const MASKS = ["causal", "window", "chunk", "tree", "full"]
  const DTYPES = { float32: 4, bfloat16: 2, fp8: 1, int4: 0.5, nvfp4: 0.5 } // bytes of a number in the cache
  // Bytes of the scales of a key or a value of some size: with its zero point, or a byte for 16 numbers.
  const SCALES = { int4: () => 4, nvfp4: (size) => size / 16 }
  const MULTIPLES = { int4: 2, nvfp4: 16 } // of which the size of a head has to be one
  const DEFAULTS = {
    lens: [[2, 5], [1, 7], [3, 3]], // the three requests of the notebooks
    mask: "causal", // one of MASKS
    window: 3, // keys that a query sees at most, with mask "window"
    chunk: 4, // tokens in a chunk, with mask "chunk": a multiple of `block`
    tree: [-1, 0, 0, 1], // with mask "tree", the node that each node follows; -1 for a root
    block: 4, // tokens in a block of the pool
    shared: 0, // leading tokens that requests have in the same blocks, as far as these are full and old
    splits: 1, // parts that the keys of a query are cut into
    heads: 32, // query heads
    kv: 8, // KV heads, a divisor of `heads`
    size: 128, // numbers of a key, of a value
    dtype: "bfloat16", // of the cache
    query: [1, 0], // the query that is looked at: its request, and its row there
    step: 0, // how far its online softmax has come, in tiles
    machine: 0, // whose rates the costs are at: a place in machines.js
  }
  const PRESETS = {
    "three requests": "",
    "window": "mask=window",
    "chunks": "mask=chunk",
    "shared prefix": "lens=2,13;1,15;3,11&shared=8",
    "split keys": "lens=1,24&splits=3&query=0,0",
    "drafted tree": "lens=4,9;4,13&mask=tree&query=0,3",
    "long prompt": "lens=8192,8192&block=16&query=0,0",
    "long decodes": "lens=1,8192;1,20000;1,32768&block=16&splits=8",
  }
  const MOST = { requests: 6, queries: 8192, keys: 32768, draft: 12 }

  // --- settings, and the text after the # of an address ---

  const clamp = (number, low, high) => Math.min(Math.max(number, low), high)
  const whole = (number, low, high, instead) => (Number.isFinite(number) ? clamp(Math.round(number), low, high) : instead)

  /** Return whole, legal settings: numbers out of range become the nearest in it, and what is missing the default. */
  function legal(given) {
    const s = { ...DEFAULTS, ...given }
    const number = (name, low, high) => whole(s[name], low, high, DEFAULTS[name])
    const lens = s.lens
      .filter((pair) => pair.length === 2 && pair.every(Number.isFinite))
      .slice(0, MOST.requests)
      .map(([queries, keys]) => [whole(queries, 0, MOST.queries), whole(keys, 0, MOST.keys)])
    if (!lens.length) lens.push(...DEFAULTS.lens)
    s.lens = lens
    s.mask = MASKS.includes(s.mask) ? s.mask : DEFAULTS.mask
    s.dtype = s.dtype in DTYPES ? s.dtype : DEFAULTS.dtype
    s.block = number("block", 1, 256)
    s.window = number("window", 1, MOST.keys)
    s.chunk = number("chunk", 1, MOST.keys)
    if (s.mask === "chunk") s.chunk = Math.ceil(s.chunk / s.block) * s.block
    s.shared = number("shared", 0, MOST.keys)
    s.splits = number("splits", 1, 16)
    s.kv = number("kv", 1, 128)
    s.heads = Math.ceil(number("heads", 1, 128) / s.kv) * s.kv
    const multiple = MULTIPLES[s.dtype] ?? 1
    s.size = Math.ceil(number("size", 1, 576) / multiple) * multiple
    s.tree = s.tree.slice(0, MOST.draft).map((parent, i) => whole(parent, -1, i - 1, -1))
    const request = whole(s.query[0], 0, s.lens.length - 1, 0)
    s.query = [request, whole(s.query[1], 0, Math.max(0, s.lens[request][0] - 1), 0)]
    s.step = number("step", 0, MOST.keys)
    s.machine = number("machine", 0, 9)
    return s
  }

  /** Write settings as the text after the # of an address: only what is not as by default, and easy to read. */
  function toHash(settings) {
    const text = (value) => (Array.isArray(value?.[0]) ? value.join(";") : String(value)) // lists join with commas
    return Object.keys(DEFAULTS)
      .filter((name) => text(settings[name]) !== text(DEFAULTS[name]))
      .map((name) => `${name}=${text(settings[name])}`)
      .join("&")
  }

  /** Read settings from the text after a #; what is not understood is left as by default. */
  function fromHash(hash) {
    const given = {}
    const numbers = (text) => (text === "" ? [] : text.split(",").map(Number))
    for (const item of decodeURIComponent(hash.replace(/^#/, "")).split("&")) {
      const [name, value = ""] = item.split("=")
      if (name === "lens") given.lens = value.split(";").map(numbers)
      else if (name === "tree") given.tree = numbers(value)
      else if (name === "query" && numbers(value).length === 2) given.query = numbers(value)
      else if (name === "mask" || name === "dtype") given[name] = value
      else if (name in DEFAULTS && value !== "" && name !== "query") given[name] = Number(value)
    }
    return legal(given)
  }

  // --- where are the keys? ---

  const ORDER = [9, 2, 4, 7, 1, 5, 0, 3, 6, 8] // in which blocks are handed out: neighbours in a text are none in memory
  const blockOf = (number) => 10 * Math.floor(number / 10) + ORDER[number % 10]
  const ceilDiv = (a, b) => Math.ceil(a / b)

  /** Return how many of its first blocks a request shares: full ones, older than its queries. */
  function sharedBlocks(s, [queries, keys]) {
    return Math.floor(Math.min(s.shared, Math.max(0, keys - queries)) / s.block)
  }

  /** Return the block table: the blocks of each request, in order. */
  function tables(s) {
    let taken = 0
    const own = s.lens.map((lens) =>
      Array.from({ length: ceilDiv(lens[1], s.block) - sharedBlocks(s, lens) }, () => blockOf(taken++)),
    )
    const count = Math.max(...s.lens.map((lens) => sharedBlocks(s, lens)))
    const common = Array.from({ length: count }, () => blockOf(taken++))
    return s.lens.map((lens, i) => [...common.slice(0, sharedBlocks(s, lens)), ...own[i]])
  }

  /** Return the number of blocks in the pool: tens, as many as the tables need. */
  function poolSize(allTables) {
    return 10 * (1 + Math.floor(Math.max(0, ...allTables.map((blocks) => Math.max(0, ...blocks))) / 10))
  }

  const slotOf = (s, blocks, position) => blocks[Math.floor(position / s.block)] * s.block + (position % s.block)

  /** Return the slot that each new token of a request is written to; -1 for positions below 0. */
  function slots(s, [queries, keys], blocks) {
    const positions = Array.from({ length: queries }, (_, i) => keys - queries + i)
    return positions.map((position) => (position < 0 ? -1 : slotOf(s, blocks, position)))
  }

  // --- who may see whom? ---

  /** Return whether the last tokens of a request are the nodes of a tree: it has to have as many. */
  const drafts = (s, [, keys]) => s.mask === "tree" && keys >= s.tree.length

  /** Return the keys that query i of a request sees, as runs [begin, end): a window is one run, a branch has several. */
  function runs(s, [queries, keys], i) {
    const position = keys - queries + i
    const node = i - (queries - s.tree.length) // of the tree
    if (drafts(s, [queries, keys]) && node >= 0) {
      const first = keys - s.tree.length // the key of node 0
      const path = []
      for (let at = node; at >= 0; at = s.tree[at]) path.unshift(first + at)
      return joined([[0, first], ...path.map((key) => [key, key + 1])])
    }
    let begin = 0
    if (s.mask === "window") begin = Math.max(0, position - s.window + 1)
    if (s.mask === "chunk") begin = Math.max(0, Math.floor(position / s.chunk) * s.chunk)
    const end = s.mask === "full" ? keys : position + 1
    return begin < end ? [[begin, end]] : []
  }

  function joined(parts) {
    const result = []
    for (const [begin, end] of parts) {
      const last = result[result.length - 1]
      if (last && last[1] === begin) last[1] = end
      else if (begin < end) result.push([begin, end])
    }
    return result
  }

  const sees = (itsRuns, key) => itsRuns.some(([begin, end]) => begin <= key && key < end)

  /** Return the position of each query of a request, for its rotary embedding: in a tree its depth counts. */
  function positions(s, [queries, keys]) {
    const depths = []
    for (const parent of s.tree) depths.push(parent < 0 ? 0 : depths[parent] + 1)
    return range(0, queries).map((i) => {
      const node = i - (queries - s.tree.length)
      return drafts(s, [queries, keys]) && node >= 0 ? keys - s.tree.length + depths[node] : keys - queries + i
    })
  }

  // --- what a plan makes of it ---

  /** Return the sequences that attention runs over: requests, requests without blocks that no query sees, or chunks. */
  function sequences(s, allTables) {
    return s.lens.flatMap(([queries, keys], request) => {
      const blocks = allTables[request]
      const piece = (count, begin, end) => ({
        request,
        queries: count,
        keys: end - begin,
        first: begin, // the position of its first key
        blocks: blocks.slice(begin / s.block, ceilDiv(end, s.block)),
      })
      if (s.mask === "window") {
        const cut = Math.floor(Math.max(0, keys - queries - s.window + 1) / s.block)
        return [piece(queries, cut * s.block, keys)]
      }
      if (s.mask !== "chunk") return [piece(queries, 0, keys)]
      const chunks = []
      for (let position = keys - queries; position < keys; ) {
        const begin = Math.floor(position / s.chunk) * s.chunk
        const end = Math.min(begin + s.chunk, keys)
        chunks.push(piece(end - position, Math.max(0, begin), Math.max(0, end)))
        position = end
      }
      return chunks
    })
  }

  /** Return every prefix [first, last, end) that neighbouring requests have in the same blocks, outer ones first. */
  function prefixes(s, allTables) {
    const full = s.lens.map(([queries, keys]) => Math.floor(Math.max(0, keys - queries) / s.block))
    const shared = s.lens.slice(1).map((_, i) => {
      let count = 0
      while (count < Math.min(full[i], full[i + 1]) && allTables[i][count] === allTables[i + 1][count]) count++
      return count
    })
    const split = (first, last, above) => {
      if (last - first < 2) return []
      const count = Math.min(...shared.slice(first, last - 1))
      const cuts = [first, ...range(first, last - 1).filter((i) => shared[i] === count).map((i) => i + 1), last]
      const inner = cuts.slice(1).flatMap((cut, k) => split(cuts[k], cut, count))
      return count > above ? [[first, last, count * s.block], ...inner] : inner
    }
    return split(0, s.lens.length, 0)
  }

  /** Return the levels of a cascade: groups of requests and the keys [begin, end) that each group reads once. */
  function levels(s, allTables) {
    const found = s.mask === "causal" || s.mask === "window" ? prefixes(s, allTables) : []
    const encloses = (a, b) => a !== b && a[0] <= b[0] && b[1] <= a[1] && a[2] < b[2]
    const depth = (prefix) => found.filter((other) => encloses(other, prefix)).length
    const begins = s.lens.map(() => 0)
    const result = []
    for (let level = 0; found.some((prefix) => depth(prefix) === level); level++) {
      const groups = found.filter((prefix) => depth(prefix) === level)
      result.push(groups.map(([first, last, end]) => ({ first, last, begin: begins[first], end })))
      for (const [first, last, end] of groups) begins.fill(end, first, last)
    }
    return [...result, s.lens.map(([, keys], i) => ({ first: i, last: i + 1, begin: begins[i], end: keys }))]
  }

  // --- how do partial outputs combine? ---

  const TOY = { keys: 4, values: 2 } // numbers of a key and of a value here: few enough to be read

  /** Return numbers between -2 and 2 with one decimal that depend on a seed alone. */
  function numbers(seed, count) {
    return Array.from({ length: count }, (_, i) => {
      let x = Math.imul(seed * 31 + i + 1, 0x9e3779b1)
      x = Math.imul(x ^ (x >>> 15), 0x85ebca6b)
      x = Math.imul(x ^ (x >>> 13), 0xc2b2ae35)
      return (((x ^ (x >>> 16)) >>> 0) % 41) / 10 - 2
    }).map((x) => Math.round(10 * x) / 10)
  }

  // What lies in a slot is a key and a value, for every reader.
  const keyAt = (slot) => numbers(2 * slot, TOY.keys)
  const valueAt = (slot) => numbers(2 * slot + 1, TOY.values)
  const queryAt = (request, i) => numbers(1e6 + MOST.queries * request + i, TOY.keys)
  const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0)

  /** Return a softmax that has seen nothing: the largest score, the sum of the weights, the weighted sum of values. */
  const nothing = () => ({ max: -Infinity, sum: 0, acc: Array(TOY.values).fill(0) })

  /** Show a softmax one more tile: what it has is rescaled to the new largest score, and the tile is added. */
  function online(state, scores, values) {
    const max = Math.max(state.max, ...scores)
    if (max === -Infinity) return { ...state, rescale: 1, weights: scores.map(() => 0) }
    const rescale = Math.exp(state.max - max)
    const weights = scores.map((score) => Math.exp(score - max))
    const sum = state.sum * rescale + weights.reduce((a, b) => a + b, 0)
    const acc = state.acc.map((x, k) => x * rescale + weights.reduce((a, weight, i) => a + weight * values[i][k], 0))
    return { max, sum, acc, rescale, weights }
  }

  /** Return the answer of a softmax and its log-sum-exp; 0 and -Infinity if it has seen nothing. */
  function finish({ max, sum, acc }) {
    return { out: acc.map((x) => (sum ? x / sum : 0)), lse: sum ? max + Math.log(sum) : -Infinity }
  }

  /** Merge partial outputs over disjoint keys, each with its share: exp(lse_i - lse). */
  function merge(parts) {
    const max = Math.max(...parts.map((part) => part.lse))
    if (max === -Infinity) return { out: parts[0].out.map(() => 0), lse: max, shares: parts.map(() => 0) }
    const lse = max + Math.log(parts.reduce((sum, part) => sum + Math.exp(part.lse - max), 0))
    const shares = parts.map((part) => Math.exp(part.lse - lse))
    return { out: parts[0].out.map((_, k) => dot(shares, parts.map((part) => part.out[k]))), lse, shares }
  }

  /**
   * Answer one query: its keys in parts (a part per level of a cascade, each in splits of whole blocks), every part tile
   * by tile with an online softmax, and the parts merged.
   */
  function answer(s, allTables, itsLevels, [request, i]) {
    const lens = s.lens[request]
    const query = queryAt(request, i)
    const visible = lens[0] ? runs(s, lens, i) : []
    const parts = itsLevels.flatMap((groups, level) => {
      const group = groups.find(({ first, last }) => first <= request && request < last)
      return group ? pieces(s, group).map(([begin, end]) => ({ level, begin, end })) : []
    })
    for (const part of parts) {
      let state = nothing()
      part.tiles = []
      for (let begin = part.begin; begin < part.end; begin += s.block) {
        const keys = range(begin, Math.min(begin + s.block, part.end)).map((key) => {
          const slot = slotOf(s, allTables[request], key)
          const score = dot(query, keyAt(slot)) / Math.sqrt(TOY.keys)
          return { key, slot, score, value: valueAt(slot), visible: sees(visible, key) }
        })
        const scores = keys.map((each) => (each.visible ? each.score : -Infinity))
        state = online(state, scores, keys.map((each) => each.value))
        part.tiles.push({ begin, keys, ...state })
      }
      Object.assign(part, finish(state))
    }
    return { query, parts, ...merge(parts) }
  }

  const range = (begin, end) => Array.from({ length: end - begin }, (_, i) => begin + i)

  /** Cut keys [begin, end) at ends of blocks into as many parts as there are to be, as even as blocks allow. */
  function pieces(s, { begin, end }) {
    const count = ceilDiv(end - begin, s.block)
    const edge = (split) => Math.min(begin + Math.floor((count * split) / s.splits) * s.block, end)
    return range(0, s.splits).map((split) => [edge(split), edge(split + 1)])
  }

  // --- what it costs ---

  /**
   * Count what a step reads, writes and computes at least, for one layer.
   *
   * `keys` are bytes of the keys and values that some query sees, those of a level of a cascade once; `apart` if each
   * request reads its own; `all` if no block were left out. Partial outputs are written and read in float32.
   */
  function cost(s, allTables, itsLevels) {
    const perKey = 2 * s.kv * (s.size * DTYPES[s.dtype] + (SCALES[s.dtype]?.(s.size) ?? 0))
    const perQuery = s.heads * s.size * Math.max(2, DTYPES[s.dtype]) // queries and outputs have 16 bits at least
    let pairs = 0
    let queries = 0
    const seen = s.lens.map((lens) => {
      let first = Infinity
      let last = 0
      for (let i = 0; i < lens[0]; i++) {
        for (const [begin, end] of runs(s, lens, i)) {
          pairs += end - begin
          first = Math.min(first, begin)
          last = Math.max(last, end)
        }
      }
      queries += lens[0]
      return [first, last]
    })
    const overlap = ([first, last], { begin, end }) => Math.max(0, Math.min(last, end) - Math.max(first, begin))
    const once = itsLevels.flat().map((group) => {
      const members = seen.slice(group.first, group.last)
      const union = [Math.min(...members.map((m) => m[0])), Math.max(...members.map((m) => m[1]))]
      return overlap(union, group)
    })
    const total = (counts) => counts.reduce((a, b) => a + b, 0)
    const parts = itsLevels.length * s.splits
    const bytes = {
      queries: queries * perQuery,
      keys: total(once) * perKey,
      outputs: queries * perQuery,
      partials: parts > 1 ? 2 * parts * queries * s.heads * (s.size + 1) * 4 : 0,
    }
    const moved = total(Object.values(bytes))
    const flops = 4 * s.size * s.heads * pairs
    return {
      bytes,
      apart: total(seen.map((each) => overlap(each, { begin: 0, end: Infinity }))) * perKey,
      all: total(s.lens.map(([, keys]) => keys)) * perKey,
      moved,
      flops,
      pairs,
      intensity: moved ? flops / moved : 0,
      linear: linear(s, queries),
    }
  }

  /**
   * Count the matrices around this attention, of a Llama whose hidden size is that of all heads and whose MLP is 3.5
   * times as wide, as in Llama-3-8B: their weights have 16 bits and are read once for all rows of the step.
   */
  function linear({ heads, kv, size }, rows) {
    const hidden = heads * size
    const parameters = hidden * (2 * hidden + 2 * kv * size) + 3 * 3.5 * hidden * hidden
    return { moved: 2 * parameters, flops: 2 * parameters * rows, intensity: rows }
  }

  /** Return the shortest time in seconds in which a machine moves these bytes and computes these operations. */
  function floor({ moved, flops }, { read, product }) {
    const [memory, arithmetic] = [moved / read, flops / product]
    return { memory, arithmetic, seconds: Math.max(memory, arithmetic), limit: memory >= arithmetic ? "memory" : "arithmetic" }
  }

  /** Compute all that the page shows, except what depends on a machine. */
  function everything(settings) {
    const s = legal(settings)
    const allTables = tables(s)
    const itsLevels = levels(s, allTables)
    return {
      settings: s,
      tables: allTables,
      pool: poolSize(allTables),
      slots: s.lens.map((lens, i) => slots(s, lens, allTables[i])),
      positions: s.lens.map((lens) => positions(s, lens)),
      sequences: sequences(s, allTables),
      levels: itsLevels,
      answer: answer(s, allTables, itsLevels, s.query),
      cost: cost(s, allTables, itsLevels),
    }
  }

  return {
    DEFAULTS, DTYPES, MASKS, MOST, PRESETS, TOY,
    legal, toHash, fromHash, everything, floor, runs, sees, answer, keyAt, valueAt, queryAt, slotOf,
  }
})()
