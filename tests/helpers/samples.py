"""Engines that are asked for several samples of a prompt, and what these have to be."""

from collections import Counter
from dataclasses import replace

from tests.helpers.engines import make_engine
from twinattn.engine import SamplingParams


def samples_of(engine, prompts, sampling):
    """Return the tokens of all samples of each prompt, with one `sampling` for all or one for each."""
    samplings = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    requests = [engine.add(*case) for case in zip(prompts, samplings, strict=True)]
    for _ in range(1000):  # a sample that never begins would not end the loop
        if engine.running or engine.waiting:
            engine.step()
    samples = [sample for request in requests for sample in request.samples]
    assert [(sample.error, sample.status) for sample in samples] == [(None, "finished")] * len(samples)
    return [[sample.output_ids for sample in request.samples] for request in requests]


def alone(model, twin, prompt, sampling, **options):
    """Answer a prompt as often as samples are wanted, by requests of one sample in an engine of their own each."""
    samplings = [replace(sampling, seed=sampling.seed + index, n=1) for index in range(sampling.n)]
    return [make_engine(model, twin, **options).generate([prompt], one)[0].output_ids for one in samplings]


def assert_the_prefix_is_shared(engine, request):
    """Check that running samples have the full blocks of their prompt together, and all others for themselves."""
    running = [sample for sample in request.samples if sample.status == "running"]
    full = request.prompt_len // engine.block_size
    assert {tuple(sample.blocks[:full]) for sample in running} == {tuple(running[0].blocks[:full])}
    users = Counter(block for sample in running for block in sample.blocks)
    assert all(engine.pool.users[block] == count for block, count in users.items())
    assert all(users[block] == 1 for sample in running for block in sample.blocks[full:])
