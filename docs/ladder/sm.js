// What fits on an SM: how many programs of a kernel run at once, what limits them, in how many waves a launch runs, and
// how many bytes have to be on their way. No page, so that the tests can run it.
//
//     room ── programs_per_sm      what a program takes, against what an SM has      (twinattn.course.ladder)
//
// Limits are those of the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; SMs and rates of
// memory are those that NVIDIA publishes for each card.

"use strict"

var sm = (() => {
  const KB = 1024
  const GPUS = [
    { name: "A100", capability: "8.0", sms: 108, threads: 2048, programs: 32, shared: 164 * KB, most: 163 * KB, rate: 2.039e12 },
    { name: "RTX 4090", capability: "8.9", sms: 128, threads: 1536, programs: 24, shared: 100 * KB, most: 99 * KB, rate: 1.008e12 },
    { name: "H100", capability: "9.0", sms: 132, threads: 2048, programs: 32, shared: 228 * KB, most: 227 * KB, rate: 3.35e12 },
    { name: "H200", capability: "9.0", sms: 132, threads: 2048, programs: 32, shared: 228 * KB, most: 227 * KB, rate: 4.8e12 },
    { name: "B200", capability: "10.0", sms: 148, threads: 2048, programs: 32, shared: 228 * KB, most: 227 * KB, rate: 8e12 },
    { name: "RTX 5090", capability: "12.0", sms: 170, threads: 1536, programs: 24, shared: 100 * KB, most: 99 * KB, rate: 1.792e12 },
  ]
  const REGISTERS = 65536 // of an SM
  const STEP = 8 // registers of a thread are handed out in steps of 8
  const RESERVED = KB // shared memory of each program that the system takes
  const DEFAULTS = {
    gpu: 3,
    registers: 79, // of a thread
    warps: 4, // of a program
    shared: 37888, // bytes of a program
    launched: 512, // programs of the launch
    latency: 700, // nanoseconds until a load arrives
  }
  const BOUNDS = { gpu: [0, GPUS.length - 1], registers: [16, 255], warps: [1, 16], shared: [0, 227 * KB], launched: [1, 100000], latency: [200, 2000] }

  /** Return whole, legal settings: numbers out of range become the nearest in it, and what is missing the default. */
  function legal(given) {
    const settings = {}
    for (const [name, [low, high]] of Object.entries(BOUNDS)) {
      const number = Number.isFinite(given[name]) ? Math.round(given[name]) : DEFAULTS[name]
      settings[name] = Math.min(Math.max(number, low), high)
    }
    return settings
  }

  /** Write settings as the text after the # of an address: only what is not as by default. */
  const toHash = (s) => Object.keys(DEFAULTS).filter((name) => s[name] !== DEFAULTS[name]).map((name) => `${name}=${s[name]}`).join("&")

  /** Read settings from the text after a #; what is not understood is left as by default. */
  function fromHash(hash) {
    const items = hash.replace(/^#/, "").split("&").map((item) => item.split("="))
    return legal(Object.fromEntries(items.filter(([name, value]) => name in DEFAULTS && value).map(([name, value]) => [name, Number(value)])))
  }

  /** Return for how many programs an SM has registers, shared memory, threads and places. */
  function room({ gpu, registers, warps, shared }) {
    const { threads, programs, shared: has, most } = GPUS[gpu]
    const each = Math.ceil(registers / STEP) * STEP * 32 * warps
    return {
      registers: Math.floor(REGISTERS / each),
      shared: shared > most ? 0 : Math.floor(has / (shared + RESERVED)),
      threads: Math.floor(threads / (32 * warps)),
      programs,
    }
  }

  /** Return what a launch does on a GPU: programs and warps at once, waves, the share of the last one, bytes in flight. */
  function launch(settings) {
    const { sms, threads, rate } = GPUS[settings.gpu]
    const rooms = room(settings)
    const perSm = Math.min(...Object.values(rooms))
    const limits = Object.keys(rooms).filter((name) => rooms[name] === perSm)
    const atOnce = perSm * sms
    const waves = atOnce ? Math.ceil(settings.launched / atOnce) : 0
    const last = atOnce ? settings.launched - (waves - 1) * atOnce : 0
    return {
      rooms, perSm, limits, atOnce, waves, last,
      occupancy: (perSm * settings.warps * 32) / threads,
      busy: waves ? settings.launched / (waves * atOnce) : 0, // of all places in all waves
      needed: Math.round((rate * settings.latency * 1e-9) / sms), // bytes that an SM has to have on their way
      held: perSm * settings.shared, // bytes of shared memory that loads can fill at once
    }
  }

  return { GPUS, DEFAULTS, BOUNDS, legal, toHash, fromHash, room, launch }
})()
