"""The modules of both twins that have the operations of the kit."""

MODULES = {
    "kv_cache": ("gather", "copy_blocks", "swap_blocks"),
    "sparse": ("index_write", "index_scores"),
    "quantized": (
        *("fp8_write", "int8_write", "int4_write", "nvfp4_write"),
        *("int8_attention", "int4_attention", "nvfp4_attention"),
    ),
    "mla": ("mla_write", "mla_prefill"),
    "compressed": ("compress", "compressed"),
    "recurrent": ("convolve", "state_map", "compose"),
    "replay": ("replay", "cursors"),
    "merge": ("add_sinks",),
    "context_parallel": ("context_parallel",),
    "metadata": (
        "make_batch", "positions", "slot_mapping", "advance", "order_decodes_first", "split_decodes_and_prefills"
    ),
    "speculative": ("accept", "accept_sampled", "compact"),
}  # fmt: skip
