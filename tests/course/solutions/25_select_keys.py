"""25 · The best keys, with a rule for ties."""


def select_keys(scores: list[float], topk: int) -> list[int]:
    """Return the positions of the `topk` highest scores, rising; of equal scores those at lower positions.

    A score of -inf is no key. Where there are fewer keys than `topk`, -1 fills up the list.
    scores [0.0, 2.0, 0.0, 1.0, 0.0], topk 3:   [0, 1, 3]
    scores [-inf, 0.5], topk 3:                 [1, -1, -1]
    """
    keys = [j for j, score in enumerate(scores) if score > float("-inf")]
    best = sorted(keys, key=lambda j: -scores[j])[:topk]  # a stable sort: the lower position stays first
    return sorted(best) + [-1] * (topk - len(best))
