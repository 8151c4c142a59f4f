"""The calls that `twinattn explain` knows, listed where Triton is not installed, too."""

HEADS, KV_HEADS, SIZE = 32, 8, 128
CALLS = {
    "decode": "64 requests of 8192 keys, a query each, in pages of 16",
    "split": "one request of 131072 keys: they are split, and a second kernel merges the parts",
    "prefill": "2 prompts of 8192 tokens, causal, in pages of 128",
    "window": "2 prompts of 8192 tokens in a window of 4096, in pages of 128",
    "rows": "2 prompts of 8192 tokens, causal, without pages",
    "interval": "2 prompts of 8192 tokens, a range of keys for each query, in pages of 128",
    "mla": "64 decodes over 8192 latents, 16 heads",
    "int8": "64 decodes over 8192 keys in int8, a scale per key",
    "fp8": "64 decodes over 8192 keys in fp8, e4m3",
    "sinks": "64 decodes with sinks and a softcap",
}


def list_calls() -> str:
    """Return the names of the calls, each with its sizes, and how to see one, as text."""
    calls = [f"  {name:<9} {what}" for name, what in CALLS.items()]
    sizes = f"{HEADS} query heads, {KV_HEADS} KV heads of {SIZE} if not said otherwise; bfloat16, on an NVIDIA H200."
    return "\n".join(["twinattn explain --source CALL shows the kernel of one of these calls:", "", *calls, "", sizes])
