"""The backend for vLLM against the table of vLLM's interface: each of its calls fits, in each supported version.

The table (`tests/helpers/vllm_interface.json`) is read from vLLM's sources; `make vllm-test` compares it with the
installed vLLM. Nothing here runs attention.
"""

import ast
import dataclasses
import enum
import inspect
from collections import ChainMap
from pathlib import Path

import pytest

from refattn.plan import PrefillPlan
from tests.helpers import vllm_doubles, vllm_interface

TABLE = vllm_interface.stored()
NEWEST = [*TABLE][-1]
FLEX_ATTENTION_ONLY = {"block_m", "block_n"}
NOT_REACHED = {
    "_w_uk_packed": "only where the backend says uses_amx_bmm",
    "_w_uv_packed": "likewise",
    "_w_scale": "likewise",
    "masked_mha_available": "only where the backend is sparse",
    "masked_mha_workspace_fits": "likewise",
    "prefill_max_seq_len": "likewise",
    "topk_tokens": "likewise",
    "seq_lens": "only where a backend is sparse, or a step without decodes has them",
    "prefill.chunked_context": "only where vLLM quantizes the output of a prefill backend of its own",
}
each_version = pytest.mark.parametrize("version", TABLE)


@pytest.fixture
def kinds(monkeypatch):
    """The classes of ours, by vLLM's base class."""
    ours = vllm_doubles.install(monkeypatch)
    over_latents = vllm_doubles.install_over_latents(monkeypatch)
    return {
        "AttentionBackend": [ours.FastAttentionBackend, over_latents.FastMLABackend],
        "AttentionMetadataBuilder": [ours.FastAttentionMetadataBuilder, over_latents.FastMLAMetadataBuilder],
        "AttentionImpl": [ours.FastAttentionImpl],
        "MLAAttentionImpl": [over_latents.FastMLAImpl],
    }


def defined(kind, name):
    """Return a method that a class of ours defines; None if it has vLLM's."""
    found = ChainMap(*(vars(x) for x in kind.__mro__ if x.__module__.startswith("twinattn"))).get(name)
    return None if found is None else getattr(kind, name)


def parameters(signature):
    """Return names with the text of defaults, without the receiver."""
    pairs = [(x.name, text_of(x.default)) for x in signature.parameters.values()]
    return [x for x in pairs if x[0] not in ("self", "cls")]


def text_of(default):
    if isinstance(default, enum.Enum):
        return f"{type(default).__name__}.{default.name}"
    return default if default is inspect.Parameter.empty else repr(default)


def of_table(version, name):
    signature = vllm_interface.signature(TABLE[version]["signatures"][name])
    return [x for x in ((x.name, x.default) for x in signature.parameters.values()) if x[0] not in ("self", "cls")]


@each_version
def test_each_call_of_vllm_fits(kinds, version):
    fitted = set()
    for call in TABLE[version]["calls"]:
        base, _, name = call["to"].partition(".")
        for kind in kinds[base]:
            method = defined(kind, name)
            if method is None:
                assert (
                    name in TABLE[version]["names"][base] or f"AttentionImplBase.{name}" in TABLE[version]["signatures"]
                ), call
                continue
            receiver = [None] if "self" in inspect.signature(method).parameters else []
            inspect.signature(method).bind(*receiver, *[None] * call["positional"], **dict.fromkeys(call["names"]))
            fitted.add(f"{kind.__name__}.{name}")
    names = {"FastMLAImpl.do_kv_cache_update", "FastMLAImpl.forward_mha", "FastMLAImpl.__init__"}
    names |= {"FastAttentionImpl.__init__", "FastAttentionImpl.forward", "FastAttentionImpl.do_kv_cache_update"}
    assert names | {"FastAttentionMetadataBuilder.build", "FastMLAMetadataBuilder.build"} <= fitted


@each_version
def test_what_models_add_to_a_layer_is_taken(kinds, version):
    """A name that one model passes to every layer, as `chunk_lookback`, is a TypeError where it is not."""
    taken = inspect.signature(kinds["AttentionImpl"][0].__init__).parameters
    assert set(TABLE[version]["extras"]) - FLEX_ATTENTION_ONLY <= taken.keys()


@each_version
def test_a_method_begins_like_the_one_it_replaces(kinds, version):
    """The same names in the same order with the same defaults; what comes after them, of a later version, has one."""
    for base, classes in kinds.items():
        for kind in classes:
            for name in vars(kind):
                if f"{base}.{name}" in TABLE[version]["signatures"]:
                    mine, theirs = (
                        parameters(inspect.signature(getattr(kind, name))),
                        of_table(version, f"{base}.{name}"),
                    )
                    assert mine[: len(theirs)] == theirs, f"{kind.__name__}.{name}"
                    assert all(x[1] is not inspect.Parameter.empty for x in mine[len(theirs) :]), (
                        f"{kind.__name__}.{name}"
                    )


@each_version
def test_a_backend_says_nothing_that_vllm_does_not_ask(kinds, version):
    for kind in kinds["AttentionBackend"]:
        own = {name for name in vars(kind) if not name.startswith(("__", "_abc"))}
        assert own <= set(TABLE[version]["names"]["AttentionBackend"])


@each_version
def test_what_vllms_layers_read_is_there(kinds, version):
    """In a layer's attention, and in the metadata of a step over latents; the rest is for what is refused."""
    table, (over_latents,) = TABLE[version], kinds["MLAAttentionImpl"]
    given = {*table["names"]["AttentionImplBase"], *table["names"]["MLAAttentionImpl"], *dir(over_latents)}
    given |= {*dir(kinds["AttentionImpl"][0]), "num_kv_heads"}
    metadata = inspect.signature(kinds["AttentionMetadataBuilder"][1].build).return_annotation
    given |= {x.name for x in dataclasses.fields(metadata)}
    given |= {f"prefill.{x.name}" for x in dataclasses.fields(PrefillPlan)}
    assert {*table["reads"]["impl"], *table["reads"]["metadata"]} - given <= {*NOT_REACHED}
    for kind in (*kinds["AttentionImpl"], over_latents):
        assert not hasattr(kind, "uses_amx_bmm") and not getattr(kind, "is_sparse", False)
        assert kind.supports_dcp and kind.can_return_lse_for_decode and getattr(kind, "lse_base_on_e", True)
        assert not getattr(kind, "supports_pcp", False)
    decodes = inspect.get_annotations(metadata)["decode"].__args__[0]
    assert "seq_lens" in {x.name for x in dataclasses.fields(decodes)}, "vLLM reads it to merge over ranks"


@each_version
def test_each_field_of_a_step_is_decided(kinds, version):
    ours = inspect.getmodule(kinds["AttentionBackend"][0])
    known = {*ours.READ, *ours.OF_RANKS, *ours.HINTS, *vllm_doubles.NOT_DECLARED}
    fields = {name for name in TABLE[version]["fields"] if name[0] != "_"}
    assert fields <= known and (version != NEWEST or fields == known)


@each_version
def test_each_call_of_ours_fits_vllm(kinds, version):
    """The functions and methods of vLLM that the backend calls, as its sources call them."""
    signatures, fitted = TABLE[version]["signatures"], set()
    called = {
        "super().__init__": "AttentionMetadataBuilder.__init__",
        "self._init_reorder_batch_threshold": "AttentionMetadataBuilder._init_reorder_batch_threshold",
        "self._ranks.all_gather": "GroupCoordinator.all_gather",
        "self._ranks.reduce_scatter": "GroupCoordinator.reduce_scatter",
    }
    files = [Path(inspect.getfile(kind)) for kind in kinds["AttentionBackend"]]
    for file in (*files, files[0].with_name("vllm_ranks.py")):
        for call in (x for x in ast.walk(ast.parse(file.read_text())) if isinstance(x, ast.Call)):
            name = called.get(ast.unparse(call.func), ast.unparse(call.func))
            if name in signatures:
                receiver = [None] if "self" in signatures[name] else []
                names = {x.arg: None for x in call.keywords}
                arguments = [y for x in call.args for y in (range(4) if isinstance(x, ast.Starred) else [x])]
                vllm_interface.signature(signatures[name]).bind(*receiver, *arguments, **names)
                fitted.add(name)
    assert fitted == {*called.values(), *vllm_interface.ELSEWHERE} - {"AttentionImpl.do_kv_cache_update"}


def test_the_doubles_are_like_vllm(kinds):
    """Each class, method, function, member and field of the doubles is the newest version's, with its arguments."""
    table = TABLE[NEWEST]
    for base in (*kinds, "AttentionType", "AttentionCGSupport", "MLACommonMetadataBuilder"):
        double = getattr(vllm_doubles, base)
        if issubclass(double, enum.Enum):
            assert {x.name for x in double} <= {*table["members"][base]}
            continue
        for name in (x for x in vars(double) if not x.startswith("__") or x == "__init__"):
            if inspect.isroutine(getattr(double, name)):
                assert parameters(inspect.signature(getattr(double, name))) == of_table(NEWEST, f"{base}.{name}"), name
            elif not name.startswith("_"):
                assert name in table["names"][base]
    for name in (x for x in table["signatures"] if "." not in x):
        assert parameters(inspect.signature(getattr(vllm_doubles, name))) == of_table(NEWEST, name), name
    assert [x.name for x in dataclasses.fields(vllm_doubles.CommonAttentionMetadata)] == table["fields"]


def test_a_call_that_drifts_is_seen(kinds):
    """`skip_scale` is a seventh argument that vLLM 0.33 passes by position, and 0.32 did not."""
    bind = inspect.signature(kinds["MLAAttentionImpl"][0].do_kv_cache_update).bind
    counts = {x["positional"] for x in TABLE[NEWEST]["calls"] if x["to"] == "MLAAttentionImpl.do_kv_cache_update"}
    assert counts == {6, 7}
    bind(*[None] * 8)
    with pytest.raises(TypeError, match="too many positional"):
        bind(*[None] * 9)
