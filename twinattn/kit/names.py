"""What other libraries call the arguments of a path, and a function that calls a kernel with such names."""

import inspect
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

# By the names of other libraries, in lower case: ours, of which a path has at most one. Windows are not among them, as
# `sliding_window` counts the query and `window_size` does not.
OTHER_NAMES = {
    "q": ("query",),
    "k": ("key", "key_cache"),
    "v": ("value", "value_cache"),
    **dict.fromkeys(("k_cache", "kcache", "k_pool"), ("key_cache",)),
    **dict.fromkeys(("v_cache", "vcache", "v_pool"), ("value_cache",)),
    **dict.fromkeys(("kv_cache", "kv_c_cache"), ("cache",)),
    **dict.fromkeys(("cu_seqlens", "cu_seqlen_q", "qo_indptr", "query_start_loc"), ("cu_seqlens_q",)),
    **dict.fromkeys(("cu_seqlen_k", "cu_seqlens_kv", "kv_indptr"), ("cu_seqlens_k",)),
    **dict.fromkeys(("max_seqlen_q", "max_q_len"), ("max_query_len",)),
    **dict.fromkeys(("max_seqlen_k", "max_seqlen_kv", "max_kv_len"), ("max_seq_len",)),
    **dict.fromkeys(("cache_seqlens", "seqused_k", "seqlens_k", "seqlens", "seq_lens_k", "kv_lens"), ("seq_lens",)),
    **dict.fromkeys(("block_tables", "page_table", "page_tables"), ("block_table",)),
    **dict.fromkeys(("sm_scale", "scale", "scaling"), ("softmax_scale",)),
    **dict.fromkeys(("logits_soft_cap", "logit_cap", "soft_cap", "logits_softcap"), ("softcap",)),
    "s_aux": ("sinks",),
    "is_causal": ("causal",),
    "page_size": ("block_size",),
    **dict.fromkeys(("return_softmax_lse", "return_attn_probs"), ("return_lse",)),
}
VARIABLE = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
SHOWN = bool, int, float, str, tuple, type(None)  # types of defaults that stand in code as they are printed


def unknown_words(parameters: Mapping[str, inspect.Parameter], words: Sequence[str]) -> dict[str, str]:
    """Return the parameters that a path has no argument for, each with a suggestion, or ""."""
    unknown = [name for name, one in parameters.items() if name not in words and one.kind not in VARIABLE]
    meant = {name: _our_name(name, words) for name in unknown}
    return {name: f"; did you mean {ours}?" if ours else "" for name, ours in meant.items()}


def _our_name(name: str, words: Sequence[str]) -> str:
    """Return the argument of a path that a parameter probably stands for, or ""."""
    close = get_close_matches(name, words, 1) or get_close_matches(name.replace("_", ""), words, 1)
    return next((ours for ours in (*OTHER_NAMES.get(name.lower(), ()), *close) if ours in words), "")


def wrong_names(kernel: str, path: str, parameters: Mapping[str, inspect.Parameter], words: Sequence[str]) -> str:
    """Name the required parameters of a kernel that a path has no argument for, and say how to call the kernel.

    The message is empty if there are none.

    Args:
        kernel: the name of the kernel, `file.py:function` for example.
        path: the name of the path or operation.
        parameters: those of the kernel.
        words: the names that a path has arguments for.
    """
    unknown = {
        name: hint
        for name, hint in unknown_words(parameters, words).items()
        if parameters[name].default is inspect.Parameter.empty
    }
    if not unknown:
        return ""
    lines = [
        f"{kernel} has a parameter {name!r} that {path} has no argument for{hint}" for name, hint in unknown.items()
    ]
    lines += [f"Arguments are passed by name: {', '.join(words)}."]
    code = caller_of(kernel.rpartition(":")[2], parameters, words)
    if code:
        return "\n".join((*lines, "If those were meant, check this function instead, below yours:", "", code))
    return "\n".join((*lines, "A function of a few lines with these names can call yours in any other way."))


def caller_of(function: str, parameters: Mapping[str, inspect.Parameter], words: Sequence[str]) -> str:
    """Return the code of a function with the names of a path that calls a kernel; "" if a required parameter has none.

    Optional parameters without a counterpart keep their defaults.
    """
    required: dict[str, str] = {}  # by our name, as it stands in the signature
    optional: dict[str, str] = {}
    passed = []
    for name, one in parameters.items():
        ours = name if name in words else _our_name(name, words)
        is_known = bool(ours) and ours not in required | optional and one.kind not in VARIABLE
        if one.default is inspect.Parameter.empty:
            if not is_known:
                return ""
            required[ours] = ours
        elif is_known and isinstance(one.default, SHOWN):
            optional[ours] = f"{ours}={one.default!r}"
        else:
            continue
        passed.append(ours if one.kind is inspect.Parameter.POSITIONAL_ONLY else f"{name}={ours}")
    if not function.isidentifier():
        return ""
    signature = ", ".join((*required.values(), *optional.values()))
    return f"def {function}_by_name({signature}):\n    return {function}({', '.join(passed)})"
