"""The properties that test each convention, by row of docs/proof/conventions.md.

A kernel may break a convention that no property tests, and still pass.
"""

PREFILL, STATES = "chunked_prefill", "recurrent"

STATED: dict[str, dict[str, tuple[str, ...]]] = {  # question of the row -> path -> properties
    "Where is query $i$?": {PREFILL: ("mask", "many queries", "upper bounds", "more queries than keys")},
    "What does a window mean?": {
        "local": ("window",),
        PREFILL: ("window", "far windows", "more queries than keys"),
        "sliding_window": ("mask",),
    },
    "What does a local chunk mean?": {"local": ("mask", "chunk sizes", "outside the chunk")},
    "What does an interval mean?": {"interval": ("mask", "outside the interval")},
    "Which of equal scores are selected?": {
        "select": ("ties", "kinds of scores", "few keys", "many scores", "order"),
        "sparse": ("listed twice", "long lists"),
    },
    "Which scale?": {
        PREFILL: ("answer", "scale", "options at shapes", "sizes of models"),
        "mla": ("scale",),
        STATES: ("read scale",),
    },
    "In which order?": {PREFILL: ("softcap", "together", "options at shapes", "options past tiles")},
    "ALiBi?": {PREFILL: ("alibi", "slopes", "root of the distance", "strides of options", "more queries than keys")},
    "Sinks?": {PREFILL: ("sinks", "strides of options"), "cascade": ("sinks",)},
    "Which log-sum-exp?": {PREFILL: ("lse",), "merge": ("lse", "float64"), "cascade": ("lse",)},
    "A fully masked query?": {PREFILL: ("empty rows",), "merge": ("empty parts",)},
    "Entries past a sequence's last block?": {PREFILL: ("table",)},
    "Memory that no query may see?": {
        PREFILL: ("blocks", "tail", "outside the window", "padding", "gaps"),
        "sparse": ("not selected",),
        STATES: ("free slots", "entries unused"),
    },
    "NaN that a query sees?": {
        PREFILL: ("nan", "nan without weight", "infinite value"),
        "quantized": ("nan",),
        "merge": ("nan",),
        STATES: ("nan before",),
    },
    "Scores that are all `-inf`, of an infinite query or key?": {PREFILL: ("infinite key",)},
    "Which strides?": {
        PREFILL: ("strides", "last stride", "strides of options", "far rows", "offsets", "out strides"),
        "merge": ("strides", "last stride"),
        STATES: ("strides", "last stride", "far rows", "offsets"),
        "varlen_backward": ("strides", "last stride", "strides of the gradient", "far rows"),
    },
    "A quantized key or value?": {
        "quantized": (
            "answer",
            "scales",
            "scales per head",
            "scales per sequence",
            "scales mixed",
            "format",
            "bytes",
            "query scale",
        )
    },
    "A quantized latent?": {"mla": ("fp8 latents", "query scale")},
    "Slot `-1`?": {
        "kv_cache": ("padding", "holes", "any slots", "far slots", "rows past the slots"),
        STATES: ("padding slot",),
    },
    "`out=`?": {PREFILL: ("out", "out strides", "out over the query", "out beside the query", "no sequences")},
    "Which lengths are legal?": {PREFILL: ("empty rows", "more queries than keys"), STATES: ("no tokens",)},
    "Where is a drafted token?": {"speculative": ("mask", "window", "alibi", "growing trees", "large trees")},
    "A block table that changes after `plan`?": {PREFILL: ("again",)},
    "Which compute type?": {PREFILL: ("answer", "products", "sizes of values", "slopes", "sinks")},
    "Autocast, the default type of the process?": {PREFILL: ("autocast", "process"), STATES: ("autocast", "process")},
    "Gradients?": {"varlen_backward": ("mask", "gradients", "sinks", "slopes gradient", "empty rows", "padding")},
    "`batch_invariant=True`?": {PREFILL: ("batch invariance", "invariant tokens")},
}

NOT_ASKED = {  # conventions that no property tests, and why
    "Tables of a plan?": "a strided table is refused when a plan is made, before there is a kernel",
    "Keys of a sequence on several ranks?": "no path of the kit has ranks",
}
