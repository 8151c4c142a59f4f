"""The sizes that a check has drawn, and the usual ones that it has not: there a kernel may still be wrong."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from twinattn.kit.example import PACKED, PATHS, Example
from twinattn.kit.operations import OPERATIONS, Case

USUAL_GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 16)  # query heads of a KV head, of models that are served
USUAL_SIZES = (32, 64, 80, 96, 112, 128, 192, 256, 512)  # head sizes
USUAL_BLOCKS = (1, 8, 16, 32, 64, 128, 256, 784)  # tokens in a block
WITHOUT_HEADS = ("select",)


@dataclass
class Drawn:
    """A summary of the batches of a check.

    Attributes:
        path: the path of all batches.
        dtypes: names of types.
        heads: numbers of query heads and KV heads.
        head_sizes: of keys and values.
        block_sizes: tokens in a block.
        longest: keys of the longest sequence.
        most_queries: query rows of the largest batch.
        most_sequences: sequences of the batch that has the most.
        batches: the number of batches.
        largest: for an operation other than attention, the largest value of each size, by name.
        choices: for such an operation, the values of each size and option, by name, as they print.
        pools: what pools hold, such as a type, if it is not that of queries.
    """

    path: str
    dtypes: tuple[str, ...] = ()
    heads: set[tuple[int, int]] = field(default_factory=set)
    head_sizes: set[tuple[int, int]] = field(default_factory=set)
    block_sizes: set[int] = field(default_factory=set)
    longest: int = 0
    most_queries: int = 0
    most_sequences: int = 0
    batches: int = 0
    largest: dict[str, int] = field(default_factory=dict)
    choices: dict[str, set[str]] = field(default_factory=dict)
    pools: set[str] = field(default_factory=set)

    def add(self, example: Example | Case) -> None:
        """Count a batch."""
        self.batches += 1
        if isinstance(example, Case):
            sizes = {name: size for name, size in example.sizes.items() if type(size) is int}
            for name, size in example.sizes.items():
                self.choices.setdefault(name, set()).add(repr(size))
            self.largest |= {name: max(size, self.largest.get(name, size)) for name, size in sizes.items()}
            return
        self.pools.add(_pool_of(example))
        self.heads.add(example.heads)
        self.head_sizes.add((example.head_size, example.value_size))
        self.block_sizes.add(example.block_size)
        self.longest = max([self.longest, *(s for _, s in example.lens)])
        self.most_queries = max(self.most_queries, example.num_tokens)
        self.most_sequences = max(self.most_sequences, len(example.lens))

    def line(self, most: int | None = None) -> str:
        """Describe in a line what was drawn.

        Args:
            most: of more sizes of one kind than these, the first, the last and their number are named; all if None.
        """
        if not self.batches:
            return "drawn: nothing"
        of = [", ".join(self.dtypes)]
        if self.path not in PATHS:
            of += [f"{name} up to {size:,}" for name, size in self.largest.items()]
            named = {name: sorted(x.strip("'") for x in of if x[0] == "'") for name, of in self.choices.items()}
            of += [f"{name} {_listed(names)}" for name, names in named.items() if names]
            return f"drawn: {'; '.join(of)}"
        if self.path not in WITHOUT_HEADS:
            of.append(f"heads {_listed([f'{h}/{hk}' for h, hk in sorted(self.heads)], most)}")
            sizes = sorted(self.head_sizes)
            of.append(f"head sizes {_listed([f'{d}' if d == dv else f'{d}/{dv}' for d, dv in sizes], most)}")
        if PATHS[self.path].pools:
            of.append(f"blocks of {_listed([str(size) for size in sorted(self.block_sizes)], most)}")
        if self.pools - {""}:
            of.append(f"pools of {_listed(sorted(x or 'the type of queries' for x in self.pools))}")
        of.append(f"up to {self.longest:,} keys, {self.most_queries:,} rows and {self.most_sequences:,} sequences")
        return f"drawn: {'; '.join(of)}"

    def missing(self) -> str:
        """List the usual sizes that were not drawn; "" if all of them were."""
        if self.path not in PATHS:
            return self._missing_choices()
        if not PATHS[self.path].attends or "latent_rank" in PATHS[self.path].words:
            return ""
        path, left = PATHS[self.path], []
        groups = {h // hk for h, hk in self.heads}
        sizes = {d for d, _ in self.head_sizes}
        for name, usual, had in (
            ("groups of", USUAL_GROUPS, groups),
            ("head sizes", USUAL_SIZES, sizes),
            ("blocks of", USUAL_BLOCKS if path.pools else (), self.block_sizes),
        ):
            lacks = [str(x) for x in usual if x not in had]
            left += [f"{name} {_listed(lacks)}"] if lacks else []
        return f"not drawn: {'; '.join(left)}: claim them, or say --heads, --head-size, --block-size" if left else ""

    def _missing_choices(self) -> str:
        """List the sizes and options of an operation that were not drawn."""
        left = []
        for name, values in OPERATIONS[self.path].sizes.items():
            lacks = [repr(x) for x in values if name != "lens" and repr(x) not in self.choices.get(name, set())]
            left += [f"{name} {_listed(lacks)}"] if lacks else []
        return f"not drawn: {'; '.join(left)}" if left else ""

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as values for JSON."""
        sets = dict(heads=sorted(self.heads), head_sizes=sorted(self.head_sizes), block_sizes=sorted(self.block_sizes))
        numbers: dict[str, Any] = dict(
            longest=self.longest, most_queries=self.most_queries, most_sequences=self.most_sequences
        )
        return dict(dtypes=self.dtypes, batches=self.batches, **numbers, **sets, largest=self.largest)


def _pool_of(example: Example) -> str:
    """Return what the pools of a batch hold, "" for the type of the queries."""
    said = example.options.get
    if example.path in PACKED:
        return f"packed rows ({said('rows', 'mixed')})"
    if example.path == "quantized":
        return f"{said('format') or 'e4m3'}{' as bytes' if said('bytes') else ''}"
    return str(said("stored") or said("states") or "")


def _listed(names: Sequence[str], most: int | None = None) -> str:
    if most is not None and len(names) > most:
        return f"{names[0]} to {names[-1]} ({len(names)} of them)"
    return ", ".join(names)
