"""The exercises, in order: what each function computes, with what it is tried, and what people write instead."""

from twinattn.course.exercises.functions import attention, cache, gradients, merging, states, visibility

EXERCISES = (
    cache.SLOT,
    cache.SLOT_MAPPING,
    cache.WRITE,
    cache.GATHER,
    visibility.CAUSAL_MASK,
    attention.ATTEND,
    attention.ATTEND_HEADS,
    attention.PAGED_ATTENTION,
    merging.MERGE,
    merging.ONLINE_SOFTMAX,
    merging.SPLIT_KV,
    visibility.WINDOW_MASK,
    visibility.TRIM_WINDOW,
    visibility.CHUNK_MASK,
    visibility.VIRTUAL_BATCHES,
    merging.SHARED_PREFIX,
    merging.CASCADE,
    merging.ADD_SINKS,
    cache.QUANTIZE,
    attention.MLA_DECODE,
    visibility.TREE_MASK,
    cache.LOCAL_LEN,
    attention.TRITON_DECODE,
    visibility.SPAN_MASK,
    visibility.SELECT_KEYS,
    states.FOLD,
    states.ROLLBACK,
    gradients.BACKWARD,
)
