// The time line of fastattn/kernels/triton/latents_hopper.py on one SM: warps that load, warps that multiply, the tensor
// cores, and slots for keys with a barrier full and one empty. No page, so that the tests can run it.
//
//     TRIALS ── durations ── play       the order of waits and signals is that of `bring` and of consumers in step
//
// Times are microseconds. Those of the trials are stored in docs/results/tried/cuda-nvidia-h200.json, the rate of
// products in docs/results/ladder/latents-cuda-nvidia-h200.json: a test compares them.

"use strict"

var oneSm = (() => {
  const TRIALS = { together: 572.1, before: 395, after: 345, nothing: 279.7 }
  const PRODUCT = 687.905 // operations of a large matrix product, millions per microsecond
  const SMS = 132
  const SIZES = { rows: 64, keys: 64, rank: 512, rope: 64, steps: 128 } // 8192 keys, 64 at a time
  const SHARED = 227 * 1024 // bytes that a program may have
  const ROLES = ["together", "apart", "turn"]
  const WAITS = ["after", "before"]
  const DEFAULTS = { roles: "apart", slots: 2, wait: "after", loads: 1, first: 0 }
  const BOUNDS = { slots: [1, 4], loads: [0, 1], first: [0, SIZES.steps - 4] }

  /** Return legal settings: numbers out of range become the nearest in it, and what is missing or unknown the default. */
  function legal(given) {
    const settings = { ...DEFAULTS }
    for (const [name, [low, high]] of Object.entries(BOUNDS)) {
      if (Number.isFinite(given[name])) settings[name] = Math.min(Math.max(Math.round(given[name]), low), high)
    }
    if (ROLES.includes(given.roles)) settings.roles = given.roles
    if (WAITS.includes(given.wait)) settings.wait = given.wait
    return settings
  }

  /** Write settings as the text after the # of an address: only what is not as by default. */
  const toHash = (s) => Object.keys(DEFAULTS).filter((name) => s[name] !== DEFAULTS[name]).map((name) => `${name}=${s[name]}`).join("&")

  /** Read settings from the text after a #; what is not understood is left as by default. */
  function fromHash(hash) {
    const items = hash.replace(/^#/, "").split("&").map((item) => item.split("=")).filter(([name, value]) => name in DEFAULTS && value)
    return legal(Object.fromEntries(items.map(([name, value]) => [name, name in BOUNDS ? Number(value) : value])))
  }

  /**
   * Return how long each part of a step takes. Products: at the rate of a large product. The others solve three trials for
   * the time of a step, in which the tensor cores or the warps that load are never free:
   *
   *     nothing is loaded:        softmax + values + scores
   *     waited for before:        values + convert
   *     waited for after:         load + convert
   */
  function durations() {
    const { rows, keys, rank, rope, steps } = SIZES
    const product = (columns) => (2 * rows * keys * columns) / (1e6 * (PRODUCT / SMS))
    const scores = product(rank + rope)
    const values = product(rank)
    const convert = TRIALS.before / steps - values
    return { scores, values, softmax: TRIALS.nothing / steps - scores - values, convert, load: TRIALS.after / steps - convert }
  }

  /** Return the bytes of shared memory of a program: queries, weights, and keys; where all warps load, slots are of fp8. */
  function sharedBytes({ roles, slots }) {
    const { rows, keys, rank, rope } = SIZES
    const tile = keys * (rank + rope)
    return 2 * (rows * (rank + rope) + rows * keys) + (roles === "together" ? 2 * tile + slots * tile : slots * 2 * tile)
  }

  /**
   * Run agents in order of time. An agent is a generator that yields the event that it waits for, and is resumed with the
   * time. An event is `{ at }`: its time, undefined until it is known. Returns whether all agents came to their end.
   */
  function simulate(agents) {
    const waiting = agents.map((agent) => ({ agent, now: 0, event: { at: 0 } }))
    while (waiting.length) {
      const ready = waiting.filter(({ event }) => event.at !== undefined)
      if (!ready.length) return false // each waits for another
      ready.forEach((one) => { one.now = Math.max(one.now, one.event.at) })
      const next = ready.reduce((a, b) => (b.now < a.now ? b : a))
      const { done, value } = next.agent.next(next.now)
      if (done) waiting.splice(waiting.indexOf(next), 1)
      else next.event = value
    }
    return true
  }

  /** Play all steps; returns the bars of each lane, and when all is done: null if each waits for another, for ever. */
  function play(given) {
    const settings = legal(given)
    const { roles, slots, wait, loads } = settings
    const { steps } = SIZES
    const takes = durations()
    const bars = []
    const stuck = new Set() // waits that have not ended
    const full = Array.from({ length: steps }, () => ({ at: loads ? undefined : 0 }))
    const empty = Array.from({ length: steps }, () => ({ at: undefined }))
    const free = { at: 0 } // the tensor cores
    const bar = (lane, kind, step, start, end) => { if (end > start) bars.push({ lane, kind, step, start, end }) }

    /** Let warps be busy, and return the event of their end. */
    function work(lane, kind, step, now, time = takes[kind]) {
      bar(lane, kind, step, now, now + time)
      return { at: now + time }
    }

    /** Issue a product; it begins when those that were issued before have ended. */
    function product(kind, step, now) {
      const start = Math.max(free.at, now)
      free.at = start + takes[kind]
      bar("tensor cores", kind, step, start, free.at)
      return { at: free.at }
    }

    /** Wait for an event, and draw the time until then; if it never comes, that is what `stuck` keeps. */
    function* until(lane, kind, step, now, event) {
      const wait = { lane, kind, step, start: now }
      stuck.add(wait)
      const then = yield event
      stuck.delete(wait)
      bar(lane, kind, step, now, then)
      return then
    }

    /** `bring`: loads into registers, then waits for an empty slot, converts into it, and marks it full. */
    function* bring() {
      let now = 0
      for (let step = 0; step < steps; step++) {
        now = yield work("loading warps", "load", step, now)
        if (step >= slots) now = yield* until("loading warps", "wait: empty", step, now, empty[step - slots])
        now = yield work("loading warps", "convert", step, now)
        full[step].at = now
      }
    }

    /** `_multiply`: the values of a step and the scores of the next are under way together. */
    function* multiply() {
      const lane = "multiplying warps"
      let now = yield* until(lane, "wait: full", 0, 0, full[0])
      now = yield* until(lane, "wait: product", 0, now, product("scores", 0, now))
      for (let step = 0; step < steps; step++) {
        now = yield work(lane, "softmax", step, now)
        const next = step + 1
        if (next < steps && wait === "before") now = yield* until(lane, "wait: full", next, now, full[next])
        const values = product("values", step, now)
        if (next < steps && wait === "after") now = yield* until(lane, "wait: full", next, now, full[next])
        const scores = next < steps ? product("scores", next, now) : values
        now = yield* until(lane, "wait: product", step, now, values)
        empty[step].at = now
        now = yield* until(lane, "wait: product", next, now, scores)
      }
    }

    /** A group of two that have every second step each: one is at its softmax while the products of the other run. */
    function* inTurn(group) {
      const lane = `multiplying warps ${"AB"[group]}`
      let now = 0
      for (let step = group; step < steps; step += 2) {
        now = yield* until(lane, "wait: full", step, now, full[step])
        now = yield* until(lane, "wait: product", step, now, product("scores", step, now))
        now = yield work(lane, "softmax", step, now)
        now = yield* until(lane, "wait: product", step, now, product("values", step, now))
        empty[step].at = now
      }
    }

    /** All warps do everything: with two slots the loads of the next step are under way while this one is multiplied. */
    function* together() {
      const lane = "all warps"
      const start = (step, now) => (loads ? work("loads", "load", step, now) : { at: now })
      let now = 0
      let loaded = start(0, 0)
      for (let step = 0; step < steps; step++) {
        now = yield* until(lane, "wait: loads", step, now, loaded)
        if (loads) now = yield work(lane, "convert", step, now)
        if (slots > 1 && step + 1 < steps) loaded = start(step + 1, now)
        now = yield* until(lane, "wait: product", step, now, product("scores", step, now))
        now = yield work(lane, "softmax", step, now)
        now = yield* until(lane, "wait: product", step, now, product("values", step, now))
        if (slots === 1 && step + 1 < steps) loaded = start(step + 1, now)
      }
    }

    const agents = roles === "together" ? [together()] : [...(loads ? [bring()] : []), ...(roles === "apart" ? [multiply()] : [inTurn(0), inTurn(1)])]
    const isDone = simulate(agents)
    const total = Math.max(...bars.map(({ end }) => end))
    for (const { lane, kind, step, start } of stuck) bar(lane, kind, step, start, 2 * total)
    if (roles !== "together" && loads) {
      for (const { step, start, end } of bars.filter(({ kind }) => kind === "convert")) {
        bar(`slot ${step % slots}`, "filled", step, start, end)
        bar(`slot ${step % slots}`, "full", step, end, empty[step].at ?? 2 * total)
      }
    }
    const lanes = {
      together: [...(loads ? ["loads"] : []), "all warps", "tensor cores"],
      apart: ["multiplying warps", "tensor cores"],
      turn: ["multiplying warps A", "multiplying warps B", "tensor cores"],
    }[roles]
    if (roles !== "together" && loads) lanes.unshift("loading warps", ...Array.from({ length: slots }, (_, i) => `slot ${i}`))
    const busy = (lane) => bars.filter((one) => one.lane === lane && !one.kind.startsWith("wait")).reduce((sum, { start, end }) => sum + end - start, 0) / total
    return { settings, bars, lanes, total: isDone ? total : null, shared: sharedBytes(settings), busy: Object.fromEntries(lanes.map((lane) => [lane, busy(lane)])) }
  }

  /** Return the trial that settings are, or null if none of the stored ones is. */
  function trial({ roles, slots, wait, loads }) {
    if (roles === "together") return loads && slots > 1 ? "together" : null
    if (roles === "turn") return null
    if (!loads) return wait === "after" ? "nothing" : null
    return slots === 2 ? wait : null
  }

  return { TRIALS, PRODUCT, SMS, SIZES, SHARED, DEFAULTS, BOUNDS, legal, toHash, fromHash, durations, play, trial }
})()
