"""FlashAttention, from the packages and libraries that have it, adapted to the conventions of the project."""

NO_CODES = "reads latents in the type of the query, and no codes of fp8: take triton"
NO_POSITIONS = "takes the query rows for the last ones of their sequences, at no other positions: take triton"
NOT_ALIGNED = "loads 16 bytes at a time, from heads that begin at multiples of that, elements side by side: take triton"
