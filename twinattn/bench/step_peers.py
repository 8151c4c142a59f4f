"""The contenders of what a step does beside attention: our writes and tables, and those that others would write."""

import importlib
from functools import partial

import numpy as np
import torch
from einops import rearrange

from refattn.batch import Batch
from refattn.scales import Fp8Scales
from twinattn.bench.contender import Contender
from twinattn.bench.measure import Call
from twinattn.bench.step_work import QuantizedWrite, Step, Tokens


def quantized_write_twin(package: str = "fastattn") -> Contender:
    """Our quantizing write."""

    def prepare_call(inputs: Tokens) -> Call:
        by_head = QuantizedWrite(len(inputs.key), *inputs.key.shape[1:]).scales(inputs.key.device)
        return partial(importlib.import_module(f"{package}.quantized").write, *inputs, scales=Fp8Scales(*by_head))

    return Contender(package, prepare_call)


def write_twin(package: str = "fastattn") -> Contender:
    """Our write of new tokens into the pool."""

    def prepare(inputs: Tokens) -> Call:
        write = importlib.import_module(f"{package}.kv_cache").write
        return partial(write, inputs.key, inputs.value, inputs.key_cache, inputs.value_cache, inputs.slots)

    return Contender(package, prepare)


def write_index_put() -> Contender:
    """The write as an assignment to indexed rows of the pool."""

    def prepare(inputs: Tokens) -> Call:
        pools = [rearrange(pool, "n p hk d -> (n p) hk d") for pool in (inputs.key_cache, inputs.value_cache)]

        def call() -> None:
            for pool, rows in zip(pools, (inputs.key, inputs.value), strict=True):
                pool[inputs.slots] = rows

        return call

    return Contender("torch index_put", prepare)


def virtual_batches_twin(package: str = "fastattn") -> Contender:
    """Our virtual batches: the plan of local attention."""

    def prepare_call(inputs: Step) -> Call:
        plan = importlib.import_module(f"{package}.local").plan
        sizes = dict(chunk_size=inputs.work.chunk, block_size=inputs.work.block_size)
        return lambda: plan(inputs.batch, **sizes).batch

    return Contender(package, prepare_call)


def virtual_batches_numpy() -> Contender:
    """Virtual batches of decodes by numpy, as servers make them: the lengths come to the host, the tables go back."""

    def prepare(inputs: Step) -> Call:
        work, batch = inputs.work, inputs.batch
        assert batch.block_table is not None
        device, table = batch.device, batch.block_table
        columns = np.arange(work.chunk // work.block_size)

        def call() -> Batch:
            seq_lens = batch.seq_lens.cpu().numpy()
            begin = (seq_lens - 1) // work.chunk * work.chunk
            used = np.minimum(begin[:, None] // work.block_size + columns, table.shape[1] - 1)
            return Batch(
                cu_seqlens_q=batch.cu_seqlens_q,
                seq_lens=torch.from_numpy(seq_lens - begin).to(device),
                block_table=table.gather(1, torch.from_numpy(used).to(device, torch.int64)),
                max_query_len=1,
                max_seq_len=work.chunk,
            )

        return call

    return Contender("numpy on the host", prepare)


def slots_twin(package: str = "fastattn") -> Contender:
    """Our slots of new tokens."""

    def prepare(inputs: Step) -> Call:
        slot_mapping = importlib.import_module(f"{package}.metadata").slot_mapping
        return partial(slot_mapping, inputs.batch, inputs.work.num_seqs, block_size=inputs.work.block_size)

    return Contender(package, prepare)
