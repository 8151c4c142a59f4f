// The engine, played: requests in, steps out. No page, so that the tests can run it.
//
//     play ─┬─ Scheduler      which tokens of whom go into a step?       (twinattn.engine.scheduler.Scheduler)
//           ├─ BlockPool      whose are the blocks, and which are kept?  (twinattn.engine.block_pool.BlockPool)
//           └─ cost           how long does the step take?               bytes and operations at the rates of a machine
//
// Both classes are those of refattn for layers that see everything, and have the names of their methods.
// tests/tools/test_engine_played.py compares every step with the Python ones, over random traces of requests.
// A request is [arrives, prompt, output, colour]: milliseconds, tokens, tokens, and which shared text its prompt
// begins with (0: its own).

"use strict"

var engine = (() => {
  const MOST = { requests: 12, arrives: 20000, prompt: 16384, output: 1024, blocks: 512, block: 512, budget: 16384, colours: 3, steps: 1000 }
  const DEFAULTS = {
    requests: [[0, 40, 14, 1], [0, 100, 12, 0], [12, 72, 24, 1], [30, 110, 20, 0], [45, 56, 20, 1]],
    shared: 32, // tokens that the prompts of one colour begin with, as far as they are as long
    blocks: 16, // of the pool
    block: 16, // tokens in a block
    budget: 64, // most tokens in a step
    seqs: 12, // most requests that run at once
    model: "Llama-3-8B", // one of memory.js
    machine: 0, // whose rates the times are at: a place in machines.js
    step: 4, // the step that is looked at
  }
  const PRESETS = {
    "a busy server": "",
    "a long prompt stalls decodes": "requests=0,64,60,0;0,96,60,0;0,128,60,0;30,8192,12,0&blocks=80&block=128&budget=16384&step=8",
    "the same in chunks": "requests=0,64,60,0;0,96,60,0;0,128,60,0;30,8192,12,0&blocks=80&block=128&budget=512&step=8",
    "a shared prefix": "requests=0,1100,16,1;60,1100,16,1;60,1100,16,0;80,1060,16,1&shared=1024&blocks=64&block=64&budget=1024&step=12",
    "preemption": "requests=0,8,20,0;0,10,20,0;0,6,16,0&blocks=12&block=4&budget=32&step=7",
    "one at a time": "requests=0,32,20,0;0,32,20,0;0,32,20,0;0,32,20,0;0,32,20,0;0,32,20,0;0,32,20,0;0,32,20,0&blocks=32&budget=512&seqs=1&step=19",
    "batching pays": "requests=0,32,20,0;0,32,20,0;0,32,20,0;0,32,20,0;0,32,20,0;0,32,20,0;0,32,20,0;0,32,20,0&blocks=32&budget=512&step=19",
    "keys beside weights":
      `requests=${Array(12).fill("0,8200,12,1").join(";")}&shared=8192&blocks=64&block=256&budget=16384&step=5`,
  }

  // --- settings, and the text after the # of an address ---

  const whole = (number, low, high, instead) =>
    Number.isFinite(number) ? Math.min(Math.max(Math.round(number), low), high) : instead

  /** Return whole, legal settings: numbers out of range become the nearest in it, and what is missing the default. */
  function legal(given) {
    const s = { ...DEFAULTS, ...given }
    const number = (name, low, high) => whole(s[name], low, high, DEFAULTS[name])
    return {
      requests: s.requests
        .filter((request) => request.length === 4 && request.every(Number.isFinite))
        .slice(0, MOST.requests)
        .map(([arrives, prompt, output, colour]) => [
          whole(arrives, 0, MOST.arrives), whole(prompt, 1, MOST.prompt), whole(output, 1, MOST.output), whole(colour, 0, MOST.colours),
        ]),
      shared: number("shared", 0, MOST.prompt),
      blocks: number("blocks", 1, MOST.blocks),
      block: number("block", 1, MOST.block),
      budget: number("budget", 1, MOST.budget),
      seqs: number("seqs", 1, MOST.requests),
      model: MODELS().includes(s.model) ? s.model : DEFAULTS.model,
      machine: number("machine", 0, machines.length - 1),
      step: number("step", 0, MOST.steps - 1),
    }
  }

  /** Return the models of memory.js whose layers all see everything, and whose weights are all read in a step. */
  const MODELS = () =>
    Object.keys(memory.MODELS).filter((name) => {
      const [config, , active] = memory.MODELS[name]
      return active === undefined && memory.layers(config).every((layer) => layer.kind === "full")
    })

  /** Write settings as the text after the # of an address: only what is not as by default, and easy to read. */
  function toHash(settings) {
    const text = (value) => (Array.isArray(value) ? value.join(";") : String(value)) // the numbers of a request join with commas
    return Object.keys(DEFAULTS)
      .filter((name) => text(settings[name]) !== text(DEFAULTS[name]))
      .map((name) => `${name}=${text(settings[name])}`)
      .join("&")
  }

  /** Read settings from the text after a #; what is not understood is left as by default. */
  function fromHash(hash) {
    const given = {}
    for (const item of decodeURIComponent(hash.replace(/^#/, "")).split("&")) {
      const [name, value = ""] = item.split("=")
      if (name === "requests") given.requests = value === "" ? [] : value.split(";").map((text) => text.split(",").map(Number))
      else if (name === "model") given.model = value
      else if (name in DEFAULTS && value !== "") given[name] = Number(value)
    }
    return legal(given)
  }

  // --- the pool ---

  // Equal prefixes have equal numbers, as in Python equal hashes; but here no two others share one.
  function numbering() {
    const known = new Map()
    return (text) => {
      if (!known.has(text)) known.set(text, known.size)
      return known.get(text)
    }
  }

  class BlockPool {
    constructor(numBlocks, blockSize) {
      this.blockSize = blockSize
      this.users = Array(numBlocks).fill(0)
      this.free = this.users.map((_, block) => block) // next to be handed out first
      this.contents = new Map() // of the blocks that can be found: { parent, tokens, hash }
      this.blockOf = new Map() // those blocks, by hash
      this.number = numbering()
    }

    hash(parent, tokens) {
      return this.number(`${parent ? parent.hash : ""}:${tokens}`)
    }

    /** Find the blocks that hold the start of `tokens`, as many as there are. */
    find(tokens) {
      const blocks = []
      let parent = null
      for (let start = 0; start + this.blockSize <= tokens.length; start += this.blockSize) {
        const block = this.lookUp(parent, tokens.slice(start, start + this.blockSize))
        if (block === null) break
        blocks.push(block)
        parent = this.contents.get(block)
      }
      return blocks
    }

    /** Register a full block for prefix caching, unless another one has the same content; return that content. */
    remember(block, parent, tokens) {
      const same = this.lookUp(parent, tokens)
      if (same !== null) return this.contents.get(same)
      const content = { parent, tokens, hash: this.hash(parent, tokens) }
      if (this.blockOf.has(content.hash)) this.contents.delete(this.blockOf.get(content.hash)) // after another parent object
      this.contents.set(block, content)
      this.blockOf.set(content.hash, block)
      return content
    }

    lookUp(parent, tokens) {
      const block = this.blockOf.get(this.hash(parent, tokens))
      return block !== undefined && this.contents.get(block).parent === parent ? block : null
    }

    /** Count one more user of blocks that were found. */
    share(blocks) {
      for (const block of blocks) {
        this.users[block] += 1
        if (this.users[block] === 1) this.free.splice(this.free.indexOf(block), 1)
      }
    }

    /** Allocate free blocks to write to; they are no longer registered. There must be enough. */
    allocate(count) {
      const blocks = this.free.splice(0, count)
      for (const block of blocks) {
        this.users[block] = 1
        if (this.contents.has(block)) this.blockOf.delete(this.contents.get(block).hash)
        this.contents.delete(block)
      }
      return blocks
    }

    /** Count one user less for each block of a request, the last one first; what can be found is handed out last. */
    release(blocks) {
      for (const block of [...blocks].reverse()) {
        this.users[block] -= 1
        if (this.users[block]) continue
        if (this.contents.has(block)) this.free.push(block)
        else this.free.unshift(block)
      }
    }
  }

  // --- the scheduler ---

  class Scheduler {
    constructor({ blocks, block, budget, seqs }) {
      this.pool = new BlockPool(blocks, block)
      this.blockSize = block
      this.maxNumBatchedTokens = budget
      this.maxNumSeqs = seqs
      this.waiting = [] // oldest first, and all of them younger than those that run
      this.running = [] // oldest first
      this.counters = { steps: 0, computed_tokens: 0, chunks: 0, cached_tokens: 0, cached_blocks: 0, preemptions: 0, key_reads: 0 }
    }

    /** Choose how many tokens of which requests go into this step, and allocate the blocks: [request, count], in rows. */
    schedule() {
      const scheduled = new Map()
      const preemptions = this.counters.preemptions
      const room = () => this.maxNumBatchedTokens - sum([...scheduled.values()])
      for (const request of [...this.running]) { // by age; only the youngest may be a prompt, so decodes go first
        const count = Math.min(pending(request), room())
        if (request.status === "running" && count && this.allocateOrPreempt(request, count)) scheduled.set(request, count)
      }
      while (this.waiting.length && this.running.length < this.maxNumSeqs && this.counters.preemptions === preemptions) {
        const count = room()
        if (!count || !this.start(this.waiting[0])) break
        const request = this.waiting.shift()
        scheduled.set(request, Math.min(pending(request), count))
        this.allocateOrPreempt(request, scheduled.get(request))
      }
      return [...scheduled].sort(([a], [b]) => compare(a.blocks, b.blocks)) // who shares blocks stands together
    }

    /** Give a request the blocks for `count` more tokens, preempting the youngest request while too few are free. */
    allocateOrPreempt(request, count) {
      const needed = this.blocksFor(request.computed + count) - request.blocks.length
      while (needed > this.pool.free.length) {
        const youngest = this.running[this.running.length - 1]
        this.stop(youngest, "waiting")
        this.waiting.unshift(youngest)
        this.counters.preemptions += 1
        if (youngest === request) return false
      }
      request.blocks.push(...this.pool.allocate(Math.max(0, needed)))
      return true
    }

    /** Let a request run after its cached prefix, if there are blocks for all its tokens so far. */
    start(request) {
      const cached = this.pool.find(request.tokens.slice(0, -1)) // the last token has to go through the model: for its logits
      const unused = cached.filter((block) => this.pool.users[block] === 0).length // free so far
      if (this.blocksFor(request.tokens.length) - cached.length > this.pool.free.length - unused) return false
      this.pool.share(cached)
      this.running.push(request)
      request.status = "running"
      request.blocks = cached
      request.cached = cached.length
      request.computed = cached.length * this.blockSize
      request.contents = cached.map((block) => this.pool.contents.get(block))
      this.counters.cached_blocks += cached.length
      this.counters.cached_tokens += request.computed
      return true
    }

    /** Record what a step computed for a request, and register its full blocks for prefix caching. */
    keep(request, count) {
      this.counters.computed_tokens += count
      this.counters.chunks += Number(isPrompt(request))
      request.computed += count
      for (let i = request.contents.length; i < Math.floor(request.computed / this.blockSize); i++) {
        const tokens = request.tokens.slice(i * this.blockSize, (i + 1) * this.blockSize)
        request.contents.push(this.pool.remember(request.blocks[i], request.contents[i - 1] ?? null, tokens))
      }
    }

    /** Take a request out of those that run, and its blocks from it. */
    stop(request, status) {
      this.running.splice(this.running.indexOf(request), 1)
      this.pool.release(request.blocks)
      Object.assign(request, { status, computed: 0, cached: 0, blocks: [], contents: [] })
    }

    blocksFor(tokens) {
      return Math.ceil(tokens / this.blockSize)
    }
  }

  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0)
  const pending = (request) => request.tokens.length - request.computed
  const outputs = (request) => request.tokens.length - request.prompt
  const isPrompt = (request) => pending(request) > 1 || !outputs(request) // or it is computed again

  /** Compare lists as Python does. */
  function compare(a, b) {
    const i = a.findIndex((each, k) => each !== b[k])
    if (i < 0) return a.length - b.length
    return i < b.length ? a[i] - b[i] : 1
  }

  // --- what a step costs ---

  /** Return what `cost` needs of a model: how many parameters, layers, query heads, KV heads, and elements per head. */
  function sizes(name) {
    const [config, billions] = memory.MODELS[name]
    return {
      parameters: billions * 1e9, layers: config.num_hidden_layers, heads: config.num_attention_heads,
      kv: config.num_key_value_heads, size: config.head_dim,
    }
  }

  /**
   * Return the least that a step reads and computes, and the time of both of its parts: matrices, whose weights are read
   * once for all rows, and attention, which reads the keys and values of each request. One follows the other, so the
   * times add up. `lens` are [new tokens, all tokens] of each request. Activations and launches are not counted.
   */
  function cost(lens, model, machine) {
    const itemsize = machine.dtype === "float32" ? 4 : 2
    const rows = sum(lens.map(([queries]) => queries))
    const pairs = sum(lens.map(([queries, keys]) => queries * (keys - queries) + (queries * (queries + 1)) / 2))
    const perKey = 2 * model.kv * model.size * model.layers * itemsize
    const part = (bytes, flops) => {
      const [read, compute] = [bytes / machine.read, flops / machine.product]
      return { bytes, flops, seconds: Math.max(read, compute), limit: read >= compute ? "memory" : "computation" }
    }
    const linear = part(model.parameters * itemsize, 2 * model.parameters * rows)
    const attention = part(sum(lens.map(([, keys]) => keys)) * perKey, 4 * model.heads * model.size * model.layers * pairs)
    return { rows, linear, attention, seconds: linear.seconds + attention.seconds }
  }

  /** Return the seconds of some steps that reading weights takes, reading keys and values, and computation. */
  function shares(steps) {
    const found = { weights: 0, keys: 0, computation: 0 }
    for (const { cost: { linear, attention } } of steps) {
      found[linear.limit === "memory" ? "weights" : "computation"] += linear.seconds
      found[attention.limit === "memory" ? "keys" : "computation"] += attention.seconds
    }
    return found
  }

  // --- step after step ---

  /** Return a token of a request: those of a shared text are the same for all of its colour. */
  function token(s, i, position) {
    const [, prompt, , colour] = s.requests[i]
    return colour && position < Math.min(s.shared, prompt) ? `${colour}.${position}` : `${i}+${position}`
  }

  /** Return whether a request can never have enough blocks; the last token of an output never goes through the model. */
  const isRefused = (s, [, prompt, output]) => Math.ceil((prompt + output - 1) / s.block) > s.blocks

  /**
   * Play until everybody is done, or for MOST.steps. A step shows how things are while the model runs: after the
   * scheduler chose, and before the new tokens are there. Times are in seconds.
   */
  function play(settings) {
    const s = legal(settings)
    const [model, machine] = [sizes(s.model), machines[s.machine]]
    const scheduler = new Scheduler(s)
    const requests = s.requests.map((given, i) => ({
      i, prompt: given[1], arrives: given[0] / 1000, output: given[2], isRefused: isRefused(s, given), status: "to come", times: [],
      tokens: Array.from({ length: given[1] }, (_, position) => token(s, i, position)), computed: 0, cached: 0, blocks: [], contents: [],
    }))
    const toCome = requests.filter((request) => !request.isRefused).sort((a, b) => a.arrives - b.arrives)
    const writers = Array(s.blocks).fill(null) // who wrote what is in a block
    const steps = []
    let clock = 0
    while (steps.length < MOST.steps) {
      if (!scheduler.running.length && !scheduler.waiting.length && toCome.length) clock = Math.max(clock, toCome[0].arrives)
      const arrived = []
      while (toCome.length && toCome[0].arrives <= clock) arrived.push(toCome.shift())
      for (const request of arrived) {
        request.status = "waiting"
        scheduler.waiting.push(request)
      }
      const before = [...scheduler.running]
      const scheduled = scheduler.schedule()
      if (!scheduled.length) break
      const step = {
        start: clock,
        arrived: arrived.map(({ i }) => i),
        started: scheduler.running.filter((request) => !before.includes(request)).map(({ i, computed, cached }) => ({ i, tokens: computed, blocks: cached })),
        preempted: before.filter((request) => request.status === "waiting").map(({ i }) => i),
        scheduled: scheduled.map(([request, count]) => ({
          i: request.i, count, first: request.computed, isPrompt: isPrompt(request), isDue: count >= pending(request),
          isAgain: isPrompt(request) && request.computed < (request.most ?? 0),
        })),
        waiting: scheduler.waiting.map(({ i }) => i),
        running: scheduler.running.map(({ i, blocks }) => ({ i, blocks: [...blocks] })),
        cost: cost(scheduled.map(([request, count]) => [count, request.computed + count]), model, machine),
        finished: [],
      }
      for (const request of scheduler.running) for (const block of request.blocks.slice(request.cached)) writers[block] = request.i
      step.writers = [...writers]
      step.free = [...scheduler.pool.free] // next to be handed out first
      step.cached = [...scheduler.pool.contents.keys()] // blocks that can be found
      step.seconds = step.cost.seconds
      clock += step.seconds
      step.end = clock
      scheduler.counters.key_reads += sum(scheduled.map(([request, count]) => request.computed + count))
      for (const [request, count] of scheduled) {
        const isDue = count >= pending(request)
        scheduler.keep(request, count)
        request.most = Math.max(request.most ?? 0, request.computed)
        if (!isDue) continue
        request.tokens.push(token(s, request.i, request.tokens.length))
        request.times.push(clock)
        if (outputs(request) === request.output) {
          scheduler.stop(request, "finished")
          step.finished.push(request.i)
        }
      }
      scheduler.counters.steps += 1
      step.counters = { ...scheduler.counters }
      steps.push(step)
    }
    return {
      settings: s, steps, isCut: requests.some(({ status, isRefused }) => !isRefused && status !== "finished"),
      requests: requests.map(({ i, arrives, prompt, output, times, isRefused }) => ({ i, arrives, prompt, output, times, isRefused })),
    }
  }

  // --- what users feel ---

  /** Return the latency of a request until some time: to its first token (TTFT), and between tokens; null without. */
  function latency({ arrives, times }, until) {
    const seen = times.filter((time) => time <= until)
    const gaps = seen.slice(1).map((time, k) => time - seen[k])
    return {
      tokens: seen.length,
      ttft: seen.length ? seen[0] - arrives : null,
      mean: gaps.length ? sum(gaps) / gaps.length : null,
      worst: gaps.length ? Math.max(...gaps) : null,
    }
  }

  /** Return the output tokens per second until some time, since the first request arrived. */
  function throughput(requests, until) {
    const asked = requests.filter((request) => !request.isRefused)
    const begin = Math.min(...asked.map(({ arrives }) => arrives))
    const count = sum(asked.map(({ times }) => times.filter((time) => time <= until).length))
    return count ? count / (until - begin) : 0
  }

  return { DEFAULTS, MOST, PRESETS, MODELS, legal, toHash, fromHash, sizes, cost, shares, play, latency, throughput }
})()
