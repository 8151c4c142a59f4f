// The roof of a ladder: what a batch has to read, write and multiply at least, and how long that takes at the rates of a
// card. No page, so that the tests can run it.
//
//     decode, prefill ── Pages       latents ── Latents       states ── States       (twinattn.course.batches)
//
// All sequences of a batch are alike here: `count` of them, each with `queries` new tokens among its `keys`.

"use strict"

var roof = (() => {
  const SLIDERS = { // by ladder: what can be set, and its bounds
    decode: { count: [1, 512], keys: [128, 262144] },
    prefill: { count: [1, 64], keys: [128, 131072], queries: [1, 131072] },
    latents: { count: [1, 512], keys: [128, 262144], heads: [1, 128] },
    states: { count: [1, 512], keys: [1, 131072] },
  }
  const blocks = ({ count, keys, block_size }) => count * Math.ceil(keys / block_size) * 4 + count * 4

  const COUNTED = {
    Pages: (x) => {
      const rows = x.count * x.queries * x.heads * x.size * 2
      const pairs = x.count * (x.queries * (x.keys - x.queries) + (x.queries * (x.queries + 1)) / 2)
      return { reads: 4 * x.count * x.keys * x.kv_heads * x.size + rows + blocks(x), writes: rows, flops: 4 * pairs * x.heads * x.size }
    },
    Latents: (x) => {
      const projections = x.heads * x.rank * (x.nope + x.value_size)
      return {
        reads: 2 * (x.count * x.keys * (x.rank + x.rope) + projections + x.count * x.heads * (x.nope + x.rope)) + blocks(x),
        writes: 2 * x.count * x.heads * x.value_size,
        flops: 2 * x.heads * (x.count * x.keys * (2 * x.rank + x.rope) + x.count * x.rank * (x.nope + x.value_size)),
      }
    },
    States: (x) => {
      const tokens = x.count * x.queries
      const state = 4 * x.heads * x.size ** 2
      const before = x.keys > x.queries ? x.count * state : 0
      return {
        reads: tokens * (2 * (2 * x.key_heads + x.heads) * x.size + 8 * x.heads) + before,
        writes: 2 * tokens * x.heads * x.size + x.count * state,
        flops: 6 * tokens * x.heads * x.size ** 2,
      }
    },
  }

  /** Return the batch of some settings. Of states, one token is a decode, and more are a prompt without a state. */
  function batch(ladder, fixed, { queries, ...settings }) {
    if (ladder === "states") return { ...fixed, ...settings, queries: settings.keys, keys: Math.max(settings.keys, 2) }
    return { ...fixed, ...settings, queries: Math.min(queries ?? 1, settings.keys) }
  }

  /** Return the seconds that bytes and operations take at some rates, and which of them is the floor. */
  function floor(kind, given, { read, copy, product }) {
    const { reads, writes, flops } = COUNTED[kind](given)
    const copied = Math.min(reads, writes) + writes
    const bytes = copied / copy + Math.max(reads - writes, 0) / read
    const operations = flops / product
    return { reads, writes, flops, bytes, operations, seconds: Math.max(bytes, operations), limit: bytes > operations ? "bytes" : "operations" }
  }

  /** Return the place of a number on a slider of 1000 steps between two bounds, or the number of a place: powers. */
  const toPlace = ([low, high], x) => Math.round((1000 * Math.log(x / low)) / Math.log(high / low))
  const fromPlace = ([low, high], place) => Math.round(low * (high / low) ** (place / 1000))

  return { SLIDERS, COUNTED, batch, floor, toPlace, fromPlace }
})()
