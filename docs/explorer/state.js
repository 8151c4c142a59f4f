// A state beside the pages: which slots a request reads and writes, which states are kept, and where another request
// can begin. No page, so that the tests can run it.
//
//     play ── StatePool      the slots of layers that keep a state      (twinattn.engine.state_pool.StatePool)
//
// The class is that of refattn, and has the names of its methods; tests/tools/test_state_played.py compares every step
// with the Python one. Request a computes its prompt in chunks, then its output, with drafts. When it has ended, request
// b arrives, whose prompt begins with the same tokens. No block of keys is ever short: those of a stay.

"use strict"

var states = (() => {
  const DEFAULTS = {
    prompt: 22, // tokens of a's prompt
    output: 9, // tokens of its output
    budget: 9, // most tokens in a step
    block: 4, // tokens in a block
    drafts: 2, // drafted tokens of a decode
    accepted: 1, // of which so many are accepted
    kept: 5, // slots for kept states, beside those of the request that runs
    shared: 14, // tokens that b begins with as a
    second: 20, // tokens of b's prompt
    step: 1, // the step that is looked at
  }
  const BOUNDS = {
    prompt: [1, 64], output: [1, 32], budget: [1, 64], block: [1, 16], drafts: [0, 4], accepted: [0, 4], kept: [0, 8], shared: [0, 64],
    second: [1, 64], step: [0, 200],
  }
  // Of one layer: 8 KV heads in 16 bits; 32 value heads, float32.
  const SIZES = { kvHeads: 8, keySize: 128, keyBytes: 2, valueHeads: 32, valueSize: 128, stateBytes: 4 }

  /** Return whole, legal settings: numbers out of range become the nearest in it, and what is missing the default. */
  function legal(given) {
    const s = {}
    for (const [name, [low, high]] of Object.entries(BOUNDS)) {
      const number = Number.isFinite(given[name]) ? Math.round(given[name]) : DEFAULTS[name]
      s[name] = Math.min(Math.max(number, low), high)
    }
    s.accepted = Math.min(s.accepted, s.drafts)
    s.shared = Math.min(s.shared, s.second, s.prompt + s.output)
    return s
  }

  /** Write settings as the text after the # of an address: only what is not as by default. */
  const toHash = (s) => Object.keys(DEFAULTS).filter((name) => s[name] !== DEFAULTS[name]).map((name) => `${name}=${s[name]}`).join("&")

  /** Read settings from the text after a #; what is not understood is left as by default. */
  function fromHash(hash) {
    const items = hash.replace(/^#/, "").split("&").map((item) => item.split("="))
    return legal(Object.fromEntries(items.filter(([name, value]) => name in DEFAULTS && value).map(([name, value]) => [name, Number(value)])))
  }

  class StatePool {
    constructor(numKept, blockSize, decodeLen) {
      Object.assign(this, { numKept, blockSize, decodeLen, numSlots: 1 + decodeLen + numKept, pending: 0 })
      this.free = Array.from({ length: this.numSlots }, (_, slot) => slot) // the next one to be taken first
      this.users = Array(this.numSlots).fill(0)
      this.contents = new Map() // of the slots of kept states
      this.kept = new Map() // those slots, by content
    }

    /** Return after how many of some full blocks a request can begin. */
    usable(contents) {
      return Math.max(0, ...contents.map((content, i) => (this.kept.has(content) ? i + 1 : 0)))
    }

    /** Let a request begin after some blocks: it reads the state after the last one. */
    share(request, contents) {
      Object.assign(request, { first: contents.length * this.blockSize, start: null, targets: [], checkpoint: null, latest: null })
      if (!contents.length) return
      request.start = this.kept.get(contents[contents.length - 1])
      this.users[request.start] += 1
      this.free = this.free.filter((slot) => slot !== request.start)
    }

    /** Take the slots that a step writes to, and one for the state at the last end of a block in it. */
    hold(request, queryLen, seqLen) {
      while (request.targets.length < (queryLen <= this.decodeLen ? queryLen : 1)) request.targets.push(this.take())
      const last = Math.floor((seqLen - (seqLen === request.prompt ? 1 : 0)) / this.blockSize)
      if (!request.checkpoint && last * this.blockSize > request.first && this.pending < this.numKept) {
        request.checkpoint = [last - 1, this.take()]
        this.pending += 1
      }
    }

    /** Take note of how many tokens are computed now: the state after the last of them is the request's. */
    settle(request) {
      const count = request.computed - request.first
      if (count) {
        const before = request.start
        ;[request.start] = request.targets.splice(Math.min(count, request.targets.length) - 1, 1)
        if (before !== null) this.release(before)
      }
      request.targets.forEach((slot) => this.release(slot))
      if (request.checkpoint) {
        const [block, slot] = request.checkpoint
        if ((block + 1) * this.blockSize <= request.computed) this.keep(request, block, slot)
        this.release(slot)
        this.pending -= 1
      }
      Object.assign(request, { first: request.computed, targets: [], checkpoint: null })
    }

    /** Free the slot of a request that has ended. */
    stop(request) {
      this.settle(request)
      if (request.start !== null) this.release(request.start)
    }

    /** Let a state be found, unless there is another one; of an output only the latest one stays. */
    keep(request, block, slot) {
      const content = request.contents[block]
      if (!this.kept.has(content)) {
        this.kept.set(content, slot)
        this.contents.set(slot, content)
      }
      if ((block + 1) * this.blockSize <= request.prompt) return
      if (request.latest !== null && this.kept.has(request.latest)) this.forget(this.kept.get(request.latest))
      request.latest = content
    }

    take() {
      const slot = this.free.shift()
      this.forget(slot)
      this.users[slot] = 1
      return slot
    }

    forget(slot) {
      if (this.contents.has(slot)) this.kept.delete(this.contents.get(slot))
      this.contents.delete(slot)
      if (this.free.includes(slot)) this.free = [slot, ...this.free.filter((other) => other !== slot)]
    }

    release(slot) {
      this.users[slot] -= 1
      if (this.users[slot]) return
      if (this.contents.has(slot)) this.free.push(slot)
      else this.free.unshift(slot)
    }
  }

  /** Return the bytes that a layer keeps of a request: of its keys and values, and of its state. */
  const bytes = (tokens) => ({
    keys: tokens * 2 * SIZES.kvHeads * SIZES.keySize * SIZES.keyBytes,
    state: SIZES.valueHeads * SIZES.valueSize * SIZES.keySize * SIZES.stateBytes,
  })

  /** Play both requests until b has computed its prompt; a step shows what it reads and writes, and what is there after it. */
  function play(settings) {
    const s = legal(settings)
    const pool = new StatePool(s.kept, s.block, 1 + s.drafts)
    const registered = new Set() // full blocks of keys that can be found
    const content = (name, i) => ((i + 1) * s.block <= s.shared ? `${i}` : `${name}${i}`) // equal where the tokens are
    const steps = []
    const start = (name, prompt) => {
      const whole = Math.floor((prompt - 1) / s.block) // the last token has to go through the model
      const found = Array.from({ length: whole }, (_, i) => content(name, i))
      const missing = found.findIndex((each) => !registered.has(each))
      const ofKeys = missing < 0 ? whole : missing
      const ofStates = pool.usable(found.slice(0, ofKeys))
      const request = { name, prompt, computed: ofStates * s.block, tokens: prompt, contents: found.slice(0, ofStates) }
      pool.share(request, request.contents)
      return [request, { keys: ofKeys * s.block, state: ofStates * s.block }]
    }
    const step = (request, count, drafts, accepted) => {
      const first = request.computed
      pool.hold(request, count - drafts, first + count - drafts)
      if (drafts) pool.hold(request, count, first + count) // once they are drafted
      const { start: reads, targets, checkpoint } = request
      const made = {
        name: request.name, first, count, drafts, accepted, isPrompt: first < request.prompt, reads, writes: [...targets],
        keeps: checkpoint && { slot: checkpoint[1], after: (checkpoint[0] + 1) * s.block },
      }
      request.computed += count - drafts + accepted
      for (let i = request.contents.length; i < Math.floor(request.computed / s.block); i++) request.contents.push(content(request.name, i))
      request.contents.forEach((each) => registered.add(each))
      pool.settle(request)
      if (made.keeps && made.keeps.after > request.computed) made.keeps.isLost = true // it has a rejected draft in it
      const written = made.writes.includes(request.start)
      Object.assign(made, {
        computed: request.computed, state: request.start, isMoved: written, free: [...pool.free],
        kept: [...pool.contents].map(([slot, each]) => ({ slot, of: each[0] === "b" ? "b" : "a", after: (Number(each.replace(/^\D/, "")) + 1) * s.block })),
      })
      steps.push(made)
    }
    const [a] = start("a", s.prompt)
    while (a.computed < a.prompt) step(a, Math.min(s.budget, a.prompt - a.computed), 0, 0)
    for (a.tokens += 1; a.tokens < s.prompt + s.output; ) {
      const drafts = Math.min(s.drafts, s.prompt + s.output - a.tokens - 1)
      const accepted = Math.min(s.accepted, drafts)
      step(a, 1 + drafts, drafts, accepted)
      a.tokens += 1 + accepted
    }
    pool.stop(a)
    const [b, hit] = start("b", s.second)
    const first = steps.length
    while (b.computed < b.prompt) step(b, Math.min(s.budget, b.prompt - b.computed), 0, 0)
    return { settings: s, numSlots: pool.numSlots, steps, hit, ofB: first }
  }

  return { DEFAULTS, BOUNDS, SIZES, legal, toHash, fromHash, bytes, play }
})()
