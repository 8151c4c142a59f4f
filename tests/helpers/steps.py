"""Steps of a fixed size: the room that their buffers have, and a recorder of them."""

from collections.abc import Callable

import torch

ROOM = dict(columns=21, max_query_len=6, max_seq_len=300)


def record(step: Callable[[], torch.Tensor], device: str) -> Callable[[], torch.Tensor]:
    """Capture a step as a CUDA graph, and return what replays it; on a CPU the step itself."""
    if device != "cuda":
        return step
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay
