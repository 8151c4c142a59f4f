"""Batches that a property of the kit asks for."""

from hypothesis import HealthCheck, Phase, given, seed, settings

from twinattn.kit import check


def drawn_batches(kernel, prop):
    """Return the landmarks of a property, and a few batches that it draws."""
    found = list(prop.in_type(kernel, 0) if prop.in_type is not None else prop.landmarks(kernel))

    @settings(
        max_examples=3,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @seed(check.SEED)
    @given(check._batches(prop, kernel))
    def draw(example):
        found.append(example)

    if prop.examples != 0:
        draw()
    return found
