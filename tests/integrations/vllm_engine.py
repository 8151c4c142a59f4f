"""The backend inside vLLM on a CPU, against vLLM's own: chunked prefill, prefix caching, windows, the same tokens.

Not a part of `make test`: `make vllm-test` makes an environment with vLLM's CPU wheel and runs this file. Each engine
is a process of its own, as vLLM keeps its choice of backend for as long as a process lives.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertModel,
)

from refattn import mla
from tests.helpers import vllm_interface
from tests.helpers.tiny_models import SIZES, byte_tokenizer
from tests.helpers.vllm_served import served
from twinattn.kit import assert_close

SMALL = SIZES | dict(num_attention_heads=4, head_dim=32, max_position_embeddings=256)  # a head of 32, for CPU_ATTN
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "llama_mqa": lambda: LlamaForCausalLM(LlamaConfig(**SMALL | dict(num_key_value_heads=1))),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SMALL, sliding_window=11, query_pre_attn_scalar=32, attn_logit_softcapping=2.0)
    ),
    "llama4": lambda: Llama4ForCausalLM(
        Llama4TextConfig(
            **SMALL,
            attention_chunk_size=32,
            layer_types=["chunked_attention", "full_attention"],
            no_rope_layers=[1, 0],
            intermediate_size_mlp=64,
            num_local_experts=4,
            moe_layers=[],
            interleave_moe_layer_step=0,
        )
    ),
    "deepseek_v2": lambda: DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **SMALL | dict(num_key_value_heads=4, head_dim=64, initializer_range=0.02),
            kv_lora_rank=512,  # CPU_MLA is compiled for it, with 64 rotary elements
            q_lora_rank=None,
            qk_rope_head_dim=64,
            qk_nope_head_dim=32,
            v_head_dim=32,
            first_k_dense_replace=2,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
            moe_intermediate_size=32,
        )
    ),
}
WIDE = dict(hidden_size=128, num_key_value_heads=4, vocab_size=257)  # 4 heads of 32, and a token for each byte
OVER_LATENTS = ("deepseek_v2",)
ENCODERS = {
    "bert": lambda: BertModel(BertConfig(**SMALL | WIDE)),
    "modernbert": lambda: ModernBertModel(
        ModernBertConfig(
            **SMALL | WIDE | dict(num_hidden_layers=3),
            cls_token_id=1,
            sep_token_id=2,
            global_attn_every_n_layers=3,
            local_attention=8,
        )
    ),
}
TOKENS = torch.randint(3, 97, (60,), generator=torch.Generator().manual_seed(0)).tolist()
PROMPTS = [TOKENS[:50], [*TOKENS[:45], 5, 6, 7], [9, 8, 7], TOKENS[:20]]
FIRST_BLOCKS = 256  # the pool's first blocks, more than a test fills
BUDGET = 32  # tokens of a step, so that long prompts come in chunks


def block_size_of(name):
    """Return how many tokens a block has: over latents 16, which vLLM takes without AMX, whatever is asked for."""
    return 16 if name in OVER_LATENTS else 32


def stock_name(name):
    """Return which of vLLM's backends is asked for on a CPU: over latents not AMX_MLA, which refuses float32."""
    return "CPU_MLA" if name in OVER_LATENTS else "CPU_ATTN"


def hold_to_reference(kind, report):
    """Compare each call of each layer over latents with the reference on the same inputs, by the one tolerance.

    And keep what comes to the first layer, `[rows, features]` by prompt length, of each step with prompts.
    """
    prefill, decode, first = kind.forward_mha, kind.forward_mqa, []

    def wide(x):
        return x.double() if isinstance(x, torch.Tensor) else x

    def close(out, reference, tensors, plan, options, more):
        low = reference(*tensors, plan, options, **more)
        ref = reference(*map(wide, tensors), plan, options, **{name: wide(x) for name, x in more.items()})
        assert_close(out.view_as(ref), ref, low)

    def forward_mha(self, q, kv_c_normed, k_pe, cache, metadata, k_scale, output, output_scale=None):
        prefill(self, q, kv_c_normed, k_pe, cache, metadata, k_scale, output, output_scale)
        tensors = q, kv_c_normed, k_pe.squeeze(1), cache[:FIRST_BLOCKS]
        close(output, mla.prefill, tensors, metadata.prefill, self.options, self.projections)
        report["calls"]["prefill"] += 1
        first[:] = first or [self]
        if first[0] is self:
            lens = metadata.prefill.own.batch.query_lens.tolist()
            rows = torch.cat([q.flatten(1), kv_c_normed, k_pe.flatten(1)], dim=1).split(lens)
            report["first"].append(dict(zip(lens, rows, strict=True)))

    def forward_mqa(self, q, cache, metadata, layer):
        out, lse = decode(self, q, cache, metadata, layer)
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        more = dict(latent_rank=self.kv_lora_rank)
        close(out, mla.attention, (query, cache[:FIRST_BLOCKS]), metadata.decode.plan, self.options, more)
        report["calls"]["decode"] += 1
        return out, lse

    kind.forward_mha, kind.forward_mqa = forward_mha, forward_mqa


def slots_of_rank(self, num_reqs, query_start_loc, positions):
    """Compute what vLLM's block table computes in Triton: the slots of a rank's tokens, -1 for those of others."""
    starts = query_start_loc[: num_reqs + 1].long()
    where, request = positions[: starts[-1]].long(), torch.arange(num_reqs).repeat_interleave(starts.diff())
    run, size = self.cp_kv_cache_interleave_size, self.block_size
    block, place = where // (size * self.dcp_world_size), where % (size * self.dcp_world_size)
    slots = self.block_table.gpu[request, block].long() * size
    slots += place // (run * self.dcp_world_size) * run + place % run
    self.slot_mapping.gpu.fill_(-1)
    self.slot_mapping.gpu[: len(where)] = slots.where(place // run % self.dcp_world_size == self.dcp_rank, -1)


def weigh_part(out, lses, rank, context, is_lse_base_on_e=True):
    """Compute what vLLM's merge of decodes over latents computes in Triton: a rank's part by its weight."""
    assert is_lse_base_on_e
    total = lses.logsumexp(0)
    weight = (lses[rank] - total).exp()[..., None]
    return out.copy_(torch.where(weight == 0, 0.0, out * weight)), total


def begin_rank():
    """Prepare a process that vLLM has spawned for a rank, before it reads what it is to do: what needs Triton."""
    from vllm.v1.attention.ops import dcp
    from vllm.v1.worker.block_table import BlockTable

    BlockTable.compute_slot_mapping, dcp.correct_attn_out = slots_of_rank, weigh_part


def kinds_of_layers(worker):
    """Return the kinds of attention in the layers of a worker of vLLM, which may be another process."""
    layers = worker.model_runner.vllm_config.compilation_config.static_forward_context.values()
    return sorted({type(layer.impl).__name__ for layer in layers if hasattr(layer, "impl")})


def serve(path, prompts, name, interleave=None):
    """Answer the prompts twice in this process, and print the tokens, or embeddings, and what the backend saw.

    With `interleave`, two more processes do, which share the keys, and with vLLM's `VLLM_ENABLE_V1_MULTIPROCESSING`
    another one does: of what the backend sees there only the kinds of its layers are known here.
    """
    from vllm import LLM, SamplingParams
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    load_general_plugins()  # as vLLM does when it begins: through the entry point of this package
    kind, steps = AttentionBackendEnum[stock_name(name)].get_class(), []
    ours = kind.__module__.startswith("twinattn")
    if ours:
        build = kind.get_builder_cls().build

        def watch(self, common_prefix_len, common_attn_metadata, fast_build=False):
            metadata = build(self, common_prefix_len, common_attn_metadata, fast_build)
            steps.append(metadata)
            return metadata

        kind.get_builder_cls().build = watch
    seen = dict(calls=dict(prefill=0, decode=0), first=[])
    more = dict(attention_backend="FASTATTN" if ours else stock_name(name))
    if name in OVER_LATENTS:
        # vLLM's rotary kernel for CPUs takes the stride of heads for that of tokens: it turns `[t, h, d]` wrongly, and
        # otherwise in a batch than alone. The layers of other models give it `[t, h * d]`.
        more["compilation_config"] = dict(custom_ops=["-rotary_embedding"])
        if ours:
            more["attention_backend"] = "FASTATTN_MLA"
            if interleave is None:
                hold_to_reference(kind.get_impl_cls(), seen)
    if interleave is not None:
        more |= dict(tensor_parallel_size=2, decode_context_parallel_size=2, cp_kv_cache_interleave_size=interleave)
    engine = LLM(
        model=path,
        skip_tokenizer_init=name not in ENCODERS,
        enforce_eager=True,
        dtype="float32",
        max_model_len=128,
        max_num_batched_tokens=128 if name in (*OVER_LATENTS, *ENCODERS) else BUDGET,
        max_num_seqs=8,
        block_size=block_size_of(name),
        enable_prefix_caching=name not in ENCODERS,
        **more | (dict(runner="pooling") if name in ENCODERS else {}),
    )
    steps.clear()  # forget the run that measures memory
    seen["first"].clear()
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    words, counts, asked = [], [], [dict(prompt_token_ids=prompt) for prompt in prompts]
    for _ in range(2):
        done = len(steps)
        if name in ENCODERS:
            words.append([answer.outputs.embedding for answer in engine.embed(asked, use_tqdm=False)])
        else:
            answers = engine.generate(asked, greedy, use_tqdm=False)
            words.append([list(answer.outputs[0].token_ids) for answer in answers])
        counts.append(sum(step.num_actual_tokens for step in steps[done:]))
    if seen["first"]:
        together = seen["first"][0]
        engine.reset_prefix_cache()  # or most of the prompt is found there, on a CPU with AMX
        engine.generate(asked[0], greedy, use_tqdm=False)
        alone = seen["first"][-1]
        (rows,) = alone.values()
        seen["apart"] = float((together[len(rows)] - rows).abs().max() / rows.abs().max())
    windows = sorted({window or 0 for step in steps for window in getattr(step, "plans", ())})
    most = max((step.num_actual_tokens for step in steps), default=0)
    report = dict(backend=kind.__name__, words=words, counts=counts, most=most, windows=windows, steps=len(steps))
    report |= dict(calls=seen["calls"], apart=seen.get("apart"))
    cache = engine.llm_engine.vllm_config.cache_config
    report |= dict(block_size=cache.block_size, caches=cache.enable_prefix_caching)
    report |= dict(layers=engine.collective_rpc(kinds_of_layers))
    sys.stdout.write("REPORT " + json.dumps(report) + "\n")


def run(path, prompts, name, *, interleave=None, **environment):
    """Serve in a process of its own."""
    own = dict(
        PYTHONPATH=os.pathsep.join(sys.path),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",  # or `kinds_of_layers` is not sent to another process
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="ERROR",
    )
    arguments = [sys.executable, __file__, str(path), json.dumps(prompts), name]
    if interleave is not None:
        arguments.append(str(interleave))
        own |= dict(VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_HOST_IP="127.0.0.1")  # or each rank has cores of its own
        own |= dict.fromkeys((f"VLLM_USE_DIRECT_DCP_{x}" for x in ("A2A", "Q_GATHER", "KV_GATHER")), "0")
    done = subprocess.run(
        arguments, env=os.environ | own | environment, check=False, capture_output=True, text=True, timeout=280
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("REPORT "))


def save(make, folder):
    """Save a model with weights that matter."""
    torch.manual_seed(1)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():  # norms begin as 0 or 1
            parameter.add_(0.15 * torch.randn_like(parameter))
        model.get_input_embeddings().weight.mul_(0.05)  # or each word would be followed by itself
    model.save_pretrained(folder)


def both(name, make, folder):
    """Save a model, and serve it with vLLM's backend and with ours."""
    save(make, folder)
    if name in ENCODERS:  # without one, vLLM does not begin
        byte_tokenizer().save_pretrained(folder)
    return [run(folder, PROMPTS, name, **ours) for ours in ({}, dict(FASTATTN_REPLACES_CPU_ATTN="1"))]


def of_transformers(folder):
    """Answer the prompts one by one with transformers' own code, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    greedy = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    return [model.generate(torch.tensor([prompt]), **greedy)[0, len(prompt) :].tolist() for prompt in PROMPTS]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama_mqa"])
def test_the_same_tokens_as_stock(name, tmp_path):
    stock, ours = both(name, MODELS[name], tmp_path)
    kinds = ("MLABackend", "FastMLABackend") if name in OVER_LATENTS else ("AttentionBackend", "FastAttentionBackend")
    assert stock["backend"].endswith(kinds[0]) and "Fast" not in stock["backend"] and ours["backend"] == kinds[1]
    if name in OVER_LATENTS:
        assert min(ours["calls"].values()) >= 2 * SIZES["num_hidden_layers"], "each was within the tolerance"
        assert ours["apart"] < 1e-5, "layers of vLLM give the first attention other inputs in a batch than alone"
        assert ours["words"][0] == of_transformers(tmp_path)
    assert ours["words"] == stock["words"]
    assert len({tuple(words) for words in ours["words"][0]}) == len(PROMPTS)
    prompt_tokens = sum(map(len, PROMPTS))
    if name in OVER_LATENTS:  # on a CPU without AMX, vLLM has neither chunks nor cached prefixes for these
        first, again = ours["counts"]
        assert again < first if ours["caches"] else again == first > prompt_tokens
        return
    assert ours["most"] <= BUDGET < max(map(len, PROMPTS)), "prompts come in chunks"
    assert ours["counts"][0] >= prompt_tokens and ours["counts"][1] < ours["counts"][0], "a prefix is found again"
    assert ours["windows"] == ([0, 11] if name == "gemma2" else [0])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["llama_mqa", "deepseek_v2"])
def test_two_ranks_that_share_keys_give_the_same_tokens(name, tmp_path):
    """Over vLLM's own ranks; runs of a token, and of a block."""
    save(MODELS[name], tmp_path)
    words = run(tmp_path, PROMPTS, name)["words"]
    for interleave in (1, block_size_of(name)):
        ours = run(tmp_path, PROMPTS, name, interleave=interleave, FASTATTN_REPLACES_CPU_ATTN="1")
        assert ours["backend"].startswith("Fast") and ours["words"] == words
        assert ours["layers"] == [["FastMLAImpl" if name in OVER_LATENTS else "FastAttentionImpl"]] * 2
        assert ours["block_size"] == block_size_of(name), "or the second run is not that of a block"
    assert len({tuple(tokens) for tokens in words[0]}) == len(PROMPTS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["llama", "deepseek_v2"])
def test_an_engine_in_a_process_of_its_own_gives_the_same_tokens(name, tmp_path):
    """As `vllm serve` has it: that process is spawned, and reads its configuration before it loads a plugin."""
    save(MODELS[name], tmp_path)
    spawned = dict(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_WORKER_MULTIPROC_METHOD="spawn")
    ours = run(tmp_path, PROMPTS, name, FASTATTN_REPLACES_CPU_ATTN="1", **spawned)
    assert ours["layers"] == [["FastMLAImpl" if name in OVER_LATENTS else "FastAttentionImpl"]]
    assert not ours["steps"], "they are those of another process"
    assert ours["words"] == run(tmp_path, PROMPTS, name)["words"]


@pytest.mark.timeout(600)
def test_the_server_of_vllm_gives_the_same_tokens(tmp_path):
    """`vllm serve`, with the name of the backend among its arguments."""
    save(MODELS["llama"], tmp_path)
    environment = dict(PYTHONPATH=os.pathsep.join(sys.path), FASTATTN_REPLACES_CPU_ATTN="1", VLLM_CPU_KVCACHE_SPACE="1")
    arguments = ["--attention-backend", "FASTATTN", "--enforce-eager", "--dtype", "float32", "--max-model-len", "128"]
    with served(tmp_path, tmp_path / "log", *arguments, "--block-size", "32", **environment) as ask:
        assert ask(PROMPTS, 12) == of_transformers(tmp_path)
    assert "FASTATTN" in (tmp_path / "log").read_text()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ENCODERS)
def test_the_same_embeddings_as_stock(name, tmp_path):
    stock, ours = both(name, ENCODERS[name], tmp_path)
    assert ours["backend"] == "FastAttentionBackend" and ours["steps"]
    torch.testing.assert_close(torch.tensor(ours["words"]), torch.tensor(stock["words"]), rtol=1e-4, atol=1e-5)
    assert torch.tensor(ours["words"][0]).std(0).max() > 0.01, "prompts differ in their embeddings"
    assert ours["windows"] == ([0, 5] if name == "modernbert" else [0])


@pytest.mark.timeout(300)
def test_the_block_on_the_page_runs():
    page = Path(__file__).parents[2] / "docs/integrations/vllm.md"
    code = page.read_text().split("```py\n")[1].split("```")[0]
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=280)
    assert done.stdout.split()[-1:] == ["5"], done.stderr[-3000:]


def test_the_table_is_of_this_vllm():
    """The table of vLLM's signatures and calls, to which `test_vllm_interface.py` holds the backend and the doubles."""
    folder = Path(find_spec("vllm").origin).parent
    assert vllm_interface.read(folder) == vllm_interface.stored()[vllm_interface.version_of(folder)]


def test_vllm_says_whether_its_nccl_is_disabled():
    """`check_reduce_scatter` reads it where there is a GPU; here the sources are searched."""
    folder = Path(find_spec("vllm").origin).parent / "distributed"
    for file, line in (
        ("parallel_state.py", "self.device_communicator = "),
        ("device_communicators/cuda_communicator.py", "self.pynccl_comm = PyNcclCommunicator("),
        ("device_communicators/pynccl.py", "self.disabled = True"),
    ):
        assert line in (folder / file).read_text(), file


if __name__ == "__mp_main__" and len(sys.argv) > 4:
    begin_rank()
if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:]))
