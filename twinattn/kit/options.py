"""The options of a layer: the scale, the cap, biases and sinks, one by one and in any combination."""

from twinattn.kit import combinations, landmarks, numbers
from twinattn.kit.checks import combined, everything, scaled
from twinattn.kit.draws import CAPS, SCALES, in_combination, sinks_over_many_keys, with_option, with_options
from twinattn.kit.example import Example
from twinattn.kit.kernel import Kernel
from twinattn.kit.property import ATTENDS, Property


def all_together(kernel: Kernel) -> list[Example]:
    """Return landmarks with all options that a kernel takes at once, and batches that cover all pairs of choices."""
    numbers = dict(softmax_scale=0.3, softcap=5.0, alibi_slopes=True, sinks=True)
    at_once = landmarks.long(**{name: x for name, x in numbers.items() if kernel.takes(name)})(kernel)
    return at_once + combinations.every_pair(kernel)


PROPERTIES = (
    Property(
        "scale",
        "Any finite softmax_scale is used, also 0 and negative ones.",
        with_options("softmax_scale"),
        scaled,
        ("softmax_scale",),
        ATTENDS,
        landmarks=landmarks.both(landmarks.each(softmax_scale=SCALES), landmarks.long(softmax_scale=0.3)),
    ),
    Property(
        "softcap",
        "The cap bounds scaled scores, before the mask, also those whose exp is infinite.",
        with_options("softcap"),
        scaled,
        ("softcap",),
        ATTENDS,
        examples=12,
        landmarks=landmarks.both(landmarks.each(softcap=CAPS), landmarks.long(softcap=5.0)),
    ),
    Property(
        "alibi",
        "ALiBi is -slope * |distance|, after the scale.",
        with_options("alibi_slopes"),
        everything,
        ("alibi_slopes",),
        ATTENDS,
        landmarks=landmarks.long(alibi_slopes=True),
    ),
    Property(
        "sinks",
        "A sink is one more logit in the denominator, counted once.",
        sinks_over_many_keys,
        numbers.options_in_compute_type,
        ("sinks",),
        ATTENDS,
        landmarks=landmarks.of_sinks,
    ),
    Property(
        "together",
        "All options can be combined, any two of them, with any layout and however the kernel is called.",
        in_combination,
        combined,
        paths=ATTENDS,
        landmarks=all_together,
    ),
    Property(
        "scales",
        "Keys and values have separate scales.",
        with_options("scales"),
        everything,
        paths=("quantized",),
        landmarks=landmarks.long(scales=(0.5, 0.25)),
    ),
    Property(
        "format",
        "Quantized values may be e5m2, too.",
        with_option("format", "e5m2"),
        everything,
        paths=("quantized",),
    ),
)
