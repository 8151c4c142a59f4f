// What a model keeps for each token, from its config.json: no page, no model, so that the tests can run it.
//
//   memory.layers(config)               how each layer keeps its keys: kind, elements per token, how far it looks back
//   memory.poolBytes(config, sizes)     bytes of all pools of an engine, as twinattn.engine.Engine.pool_bytes
//   memory.conversation(config, how)    bytes that one conversation takes
//   memory.fit(config, how)             conversations that fit, bytes that a step reads, and from where on it is what
//   memory.refusal(config, dtype)       why an engine keeps no such cache of the model; an empty text if it does

"use strict"

var memory = (() => {
  const DTYPES = { bfloat16: 2, fp8: 1, int8: 1, int4: 0.5, nvfp4: 0.5 } // bytes of an element
  const DIVISORS = { int4: 2, nvfp4: 16 } // what has to divide the size of a head
  // From their data sheets: bytes, bytes per second, and operations per second in 16 bits without sparsity.
  const GPUS = {
    "NVIDIA H200": [141e9, 4.8e12, 989e12],
    "NVIDIA H100 SXM": [80e9, 3.35e12, 989e12],
    "NVIDIA B200": [180e9, 8e12, 2250e12],
    "NVIDIA A100 80 GB": [80e9, 2.04e12, 312e12],
    "NVIDIA L4": [24e9, 0.3e12, 121e12],
    "NVIDIA RTX 4090": [24e9, 1.01e12, 165e12],
    "AMD MI300X": [192e9, 5.3e12, 1307e12],
  }
  const alternating = (count, every) => Array.from({ length: count }, (_, i) => ((i + 1) % every ? "sliding_attention" : "full_attention"))
  const gqa = (layers, heads, kv, size, rest = {}) => ({ num_hidden_layers: layers, num_attention_heads: heads, num_key_value_heads: kv, head_dim: size, ...rest })
  // Parameters in billions: all, and those that one token uses. The rest is what stands in the config.json of each.
  const MODELS = {
    "Llama-3-8B": [gqa(32, 32, 8, 128), 8.03],
    "Llama-3-70B": [gqa(80, 64, 8, 128), 70.6],
    "Llama-2-7B": [gqa(32, 32, 32, 128), 6.74],
    "Mistral-7B-v0.1": [gqa(32, 32, 8, 128, { sliding_window: 4096 }), 7.24],
    "Mixtral-8x7B": [gqa(32, 32, 8, 128), 46.7, 12.9],
    "Qwen2.5-7B": [gqa(28, 28, 4, 128), 7.62],
    "Qwen3-8B": [gqa(36, 32, 8, 128), 8.19],
    "Qwen3-32B": [gqa(64, 64, 8, 128), 32.8],
    "Gemma-2-9B": [gqa(42, 16, 8, 256, { sliding_window: 4096, layer_types: alternating(42, 2) }), 9.24],
    "Gemma-3-27B": [gqa(62, 32, 16, 128, { sliding_window: 1024, layer_types: alternating(62, 6) }), 27.4],
    "Phi-3-mini-4k": [gqa(32, 32, 32, 96, { sliding_window: 2047 }), 3.82],
    "gpt-oss-20b": [gqa(24, 64, 8, 64, { sliding_window: 128, layer_types: alternating(24, 2) }), 20.9, 3.6],
    "gpt-oss-120b": [gqa(36, 64, 8, 64, { sliding_window: 128, layer_types: alternating(36, 2) }), 117, 5.1],
    "DeepSeek-V2-Lite": [gqa(27, 16, 16, 128, { kv_lora_rank: 512, qk_rope_head_dim: 64 }), 15.7, 2.4],
    "DeepSeek-V3": [gqa(61, 128, 128, 128, { kv_lora_rank: 512, qk_rope_head_dim: 64 }), 671, 37],
    "SmolLM2-135M": [gqa(30, 9, 3, 64), 0.135],
  }

  const first = (config, ...names) => names.map((name) => config[name]).find((value) => value !== undefined && value !== null)

  /** Return how each layer keeps its keys: { kind, elements, heads, reach }; reach is 0 where it sees everything. */
  function layers(given) {
    const config = given.text_config ?? given
    const count = first(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    const heads = first(config, "num_attention_heads", "n_head", "n_heads")
    if (!count || !heads) throw new Error("config.json: expected num_hidden_layers and num_attention_heads")
    const kv = first(config, "num_key_value_heads", "num_kv_heads") ?? heads
    const size = config.head_dim ?? first(config, "hidden_size", "n_embd", "d_model") / heads
    const window = config.use_sliding_window === false ? 0 : config.sliding_window ?? 0
    const types = config.layer_types ?? Array(count).fill(window ? "sliding_attention" : "full_attention")
    const shared = count - (config.num_kv_shared_layers ?? 0)
    return types.map((type, i) => {
      if (i >= shared) return { kind: "shared", elements: 0, heads: 0, reach: 0 }
      if (type === "linear_attention" || type === "mamba" || type === "conv") return { kind: "state", elements: 0, heads: 0, reach: 0 }
      if (config.kv_lora_rank) return { kind: "latent", elements: config.kv_lora_rank + config.qk_rope_head_dim, heads: 0, reach: 0 }
      const found = { elements: 2 * kv * size, heads: kv }
      if (type === "sliding_attention" && window) return { kind: "window", ...found, reach: window }
      if (type === "chunked_attention") return { kind: "chunk", ...found, reach: config.attention_chunk_size }
      return { kind: "full", ...found, reach: 0 }
    })
  }

  // Bytes of the scales of a token in a layer. Keys of int8 have one of four bytes per head; keys and values of int4
  // one each, whose last bits are the zero point; nvfp4 has one byte for 16 elements.
  const SCALES = { int8: (layer) => 4 * layer.heads, int4: (layer) => 8 * layer.heads, nvfp4: (layer) => layer.elements / 16 }

  /** Return the bytes of a token in a layer, its scales included. */
  const bytesPerToken = (layer, dtype) => layer.elements * DTYPES[dtype] + (SCALES[dtype]?.(layer) ?? 0)

  /** Return why an engine keeps no cache of a type for a model, or an empty text. */
  function refusal(config, dtype) {
    const all = layers(config)
    if (dtype in SCALES && all.some((layer) => layer.kind === "latent")) return `${dtype}: there is none for latents`
    const sizes = all.filter((layer) => layer.heads).map((layer) => layer.elements / (2 * layer.heads))
    const other = sizes.find((size) => size % (DIVISORS[dtype] ?? 1))
    return other ? `${dtype}: heads have ${other} elements, no multiple of ${DIVISORS[dtype]}` : ""
  }

  /** Return the blocks of a layer's pool, as twinattn.engine.layers.Layer.pool_blocks. */
  function poolBlocks(layer, { blocks, block, maxTokens, maxSeqs }) {
    if (!layer.reach) return blocks
    const seen = Math.min(maxSeqs, blocks) * (layer.reach - 1 + 2 * block - 2)
    return Math.min(blocks, Math.floor((seen + maxTokens) / block))
  }

  const sum = (numbers) => numbers.reduce((total, each) => total + each, 0)

  function poolBytes(config, sizes) {
    return sum(layers(config).map((layer) => poolBlocks(layer, sizes) * sizes.block * bytesPerToken(layer, sizes.dtype)))
  }

  /** Return the bytes of one conversation, and of one step those of its keys and values that are read. */
  function conversation(config, { tokens, dtype, block = 16 }) {
    const whole = Math.ceil(tokens / block)
    const kept = (layer) => Math.min(whole, layer.reach ? Math.floor((layer.reach - 1 + 2 * block - 2 + 1) / block) : whole) * block
    const all = layers(config)
    return {
      kept: sum(all.map((layer) => kept(layer) * bytesPerToken(layer, dtype))),
      read: sum(all.map((layer) => Math.min(tokens, layer.reach || tokens) * bytesPerToken(layer, dtype))),
    }
  }

  /**
   * Return what fits on a GPU and what a decode step reads. `weights` are all bytes of them, `active` those that are
   * read for one token; with many tokens a mixture of experts reads all.
   */
  function fit(config, { gpu, tokens, dtype, batch, parameters, active = parameters, weightBytes = 2 }) {
    const [room, read, product] = GPUS[gpu]
    const { kept, read: perRequest } = conversation(config, { tokens, dtype })
    const weights = 1e9 * parameters * weightBytes
    const free = 0.9 * room - weights
    const of_weights = Math.min(weights, 1e9 * active * weightBytes * batch)
    const num_bytes = of_weights + batch * perRequest
    return {
      weights, kept, perRequest, of_weights, of_keys: batch * perRequest,
      fits: Math.max(0, Math.floor(free / kept)),
      seconds: num_bytes / read,
      perSecond: (batch * read) / num_bytes,
      even: weights / perRequest, // conversations whose keys are as many bytes as the weights
      rows: (product * weightBytes) / (2 * read), // rows of a step from which on its linear layers are compute-bound
    }
  }

  /** Return one line per kind of layer: how many, and bytes per token of each and of all. */
  function kinds(config, dtype) {
    const found = new Map()
    for (const layer of layers(config)) {
      const line = found.get(layer.kind) ?? { kind: layer.kind, count: 0, each: bytesPerToken(layer, dtype), reach: layer.reach }
      line.count += 1
      found.set(layer.kind, line)
    }
    return [...found.values()].map((line) => ({ ...line, all: line.count * line.each }))
  }

  return { DTYPES, GPUS, MODELS, layers, kinds, bytesPerToken, refusal, poolBytes, conversation, fit }
})()
