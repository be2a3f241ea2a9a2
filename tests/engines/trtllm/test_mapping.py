"""What the adapter tells TensorRT-LLM and what it understands of it, piece by piece; no engine runs."""

import dataclasses
import sys
import types

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import DeadlineError, EngineError, KvMismatchError, RequestError
from schemas.ids import Epoch, WorkerId
from schemas.request import Sampling, StopConditions
from services.config import WorkerConfig
from services.engines.registry import make_engine
from services.engines.trtllm.api import check_version, load_api, parse_version
from services.engines.trtllm.args import llm_kwargs, with_words
from services.engines.trtllm.completion import Completion
from services.engines.trtllm.engine import TrtllmEngine
from services.engines.trtllm.held import HeldKv
from services.engines.trtllm.ids import MIN_GLOBAL_ID, DisaggIds
from services.engines.trtllm.params import context_params, first_row, from_wire, generation_params, to_wire
from services.engines.trtllm.sampling import Abilities, sampling_kwargs
from tests.engines.paged.fleet import prompt, request_for
from tests.engines.trtllm import stand_in
from tests.engines.trtllm.stand_in import CompletionOutput, DisaggregatedParams, Logprob, stand_in_api
from tests.engines.trtllm.stand_in_executor import Fabric

API = stand_in_api(Fabric())
OLDER = stand_in_api(Fabric(), is_older=True)
ABILITIES = Abilities.of(API)


# ---- sampling ----


def mapped(eos=(2,), abilities=ABILITIES, **changes):
    return sampling_kwargs(request_for(prompt(5), **changes), eos, abilities)


def test_greedy_is_greedy_by_the_rules_of_all_releases():
    for sampling in (Sampling(seed=1, temperature=0.0), Sampling(seed=1, temperature=0.7, top_k=1)):
        kwargs = mapped(sampling=sampling)
        assert kwargs["top_k"] == 1
        assert not {"temperature", "top_p", "seed"} & kwargs.keys()
        assert API.sampling_params(**kwargs).is_greedy


def test_every_sampling_parameter_arrives():
    sampling = Sampling(
        seed=-1,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        repetition_penalty=1.1,
    )
    kwargs = mapped(sampling=sampling, stop=StopConditions(max_tokens=7, min_tokens=3), num_logprobs=5)
    expected = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 2**64 - 1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
        "max_tokens": 7,
        "min_tokens": 3,
        "logprobs": 5,
        "n": 1,
        "detokenize": False,
    }
    assert {name: kwargs[name] for name in expected} == expected
    known = {field.name for field in msgspec.structs.fields(Sampling)} - {"is_user_seeded"}
    assert known <= kwargs.keys()  # a sampling parameter added to busway must be mapped or refused here


def test_all_logits_are_sampled_from_when_nothing_limits_them():
    kwargs = mapped(sampling=Sampling(seed=3))
    assert (kwargs["temperature"], kwargs["top_p"], kwargs["top_k"]) == (1.0, 1.0, 0)
    assert not API.sampling_params(**kwargs).is_greedy


def test_one_eos_is_the_end_id_and_the_others_are_stop_ids():
    kwargs = mapped(eos=(2, 0), stop=StopConditions(max_tokens=5, stop_token_ids=(9, 2)))
    assert (kwargs["end_id"], kwargs["stop_token_ids"], kwargs["ignore_eos"]) == (2, [0, 9], False)
    kwargs = mapped(eos=(2, 0), stop=StopConditions(max_tokens=5, stop_token_ids=(9,), ignore_eos=True))
    assert (kwargs["end_id"], kwargs["stop_token_ids"], kwargs["ignore_eos"]) == (2, [9], True)
    kwargs = mapped(eos=())
    assert (kwargs["end_id"], kwargs["ignore_eos"]) == (-1, True)


def test_the_chosen_tokens_logprob_alone_is_asked_for_as_one():
    assert mapped(num_logprobs=0)["logprobs"] == 1
    assert "logprobs" not in mapped()


def test_resumed_ids_count_toward_the_limits():
    kwargs = mapped(stop=StopConditions(max_tokens=7, min_tokens=3), resume=(300, 301))
    assert (kwargs["max_tokens"], kwargs["min_tokens"]) == (5, 1)


@pytest.mark.parametrize(
    ("param", "changes"),
    [
        ("min_tokens", {"stop": StopConditions(max_tokens=9, min_tokens=2, stop_token_ids=(7,))}),
        ("seed", {"sampling": Sampling(seed=1, is_user_seeded=True), "resume": (300,)}),
        ("presence_penalty", {"sampling": Sampling(seed=1, presence_penalty=1.0), "resume": (300,)}),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(param, changes):
    with pytest.raises(RequestError) as caught:
        mapped(**changes)
    assert caught.value.param == param


def test_releases_that_lack_a_parameter_refuse_it_by_name():
    old = msgspec.structs.replace(ABILITIES, has_penalties=False, fields=ABILITIES.fields - {"min_p"})
    ignoring = msgspec.structs.replace(ABILITIES, has_min_p_and_seeds=False)
    for name, sampling in (("min_p", Sampling(seed=1, min_p=0.5)), ("seed", Sampling(seed=1, is_user_seeded=True))):
        with pytest.raises(RequestError, match="ignores") as caught:
            mapped(abilities=ignoring, sampling=sampling)
        assert caught.value.param == name
    mapped(abilities=ignoring, sampling=Sampling(seed=1, temperature=0.0, min_p=0.5, is_user_seeded=True))
    for name in ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p"):
        with pytest.raises(RequestError) as caught:
            mapped(abilities=old, sampling=Sampling(seed=1, **{name: 0.5}))
        assert caught.value.param == name


# ---- disaggregated params ----


def test_the_handoff_crosses_the_wire_field_by_field():
    made = DisaggregatedParams(
        request_type="context_only",
        first_gen_tokens=[11],
        first_gen_log_probs=[{11: Logprob(-0.5, 1), 12: Logprob(-1.5, 2)}, -0.25],
        ctx_request_id=2**41 + 7,
        opaque_state=b"\x00\xff\x80",
        draft_tokens=[4, 5],
        disagg_request_id=2**62 + 1,
        ctx_dp_rank=3,
        ctx_info_endpoint="tcp://10.0.0.1:5",
        schedule_style=stand_in.DisaggScheduleStyle.CONTEXT_FIRST,
        ctx_usage={"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}},
        conversation_id="c",
    )
    raw = to_wire(made, context_params(API, 5), None)
    assert msgspec.json.decode(bytes(raw))["opaque_state"] == "AP+A"
    got = generation_params(API, from_wire(raw))
    assert got == dataclasses.replace(made, request_type="generation_only")
    assert isinstance(got.schedule_style, stand_in.DisaggScheduleStyle)


def test_our_id_and_the_first_logprobs_come_along_where_the_answer_leaves_them_out():
    made = DisaggregatedParams(request_type="context_only", first_gen_tokens=[11], ctx_request_id=7)
    wire = from_wire(to_wire(made, context_params(API, 2**41), {11: Logprob(-0.5, None)}))
    assert generation_params(API, wire).disagg_request_id == 2**41
    assert generation_params(API, wire).first_gen_log_probs == [{11: Logprob(-0.5, None)}], "one a token, as upstream's"
    assert first_row(API, wire) == {11: Logprob(-0.5, None)}


def test_an_older_release_gets_only_the_fields_it_has():
    sent = context_params(OLDER, 2**41)
    assert not hasattr(sent, "disagg_request_id")
    full = DisaggregatedParams(ctx_request_id=7, disagg_request_id=2**41, ctx_dp_rank=0, opaque_state=b"x")
    got = generation_params(OLDER, from_wire(to_wire(full, sent, {11: Logprob(-0.5)})))
    assert (got.ctx_request_id, got.opaque_state, got.request_type) == (7, b"x", "generation_only")


@pytest.mark.parametrize(
    ("made", "word"),
    [
        ({"ctx_request_id": 1, "first_gen_logits": [object()]}, "first_gen_logits"),
        ({"ctx_request_id": 1, "multimodal_embedding_handles": [{}]}, "multimodal_embedding_handles"),
        ({"first_gen_tokens": [1]}, "ctx_request_id"),
    ],
)
def test_a_handoff_that_cant_leave_its_process_is_an_error(made, word):
    with pytest.raises(KvMismatchError, match=word):
        to_wire(DisaggregatedParams(**made), context_params(API, 5), None)


@pytest.mark.parametrize(
    "logprobs", ["7", '"x"', "[[[[[[{}]]]]]]", '[{"a":[1,2]}]', '[{"1":[1]}]', '[{"1":["x",null]}]', "[[null]]"]
)
def test_malformed_logprobs_are_the_requests_error(logprobs):
    raw = msgspec.Raw(f'{{"ctx_request_id":1,"first_gen_log_probs":{logprobs}}}'.encode())
    with pytest.raises(RequestError):
        first_row(API, from_wire(raw))


# ---- ids, held KV ----


@given(st.lists(st.floats(0, 4e9), min_size=1, max_size=50))
def test_ids_are_global_positive_and_never_the_same(times):
    ids = DisaggIds(WorkerId("w"), Epoch(3))
    made = [ids.next(now) for now in times]
    assert len({*made}) == len(made)
    assert all(MIN_GLOBAL_ID <= one < 2**63 for one in made)


def test_two_workers_ids_of_the_same_moment_differ():
    made = {DisaggIds(WorkerId(f"w{number}"), Epoch(1)).next(1e9) for number in range(20)}
    assert len(made) == 20
    one, other = DisaggIds(WorkerId("w"), Epoch(1)), DisaggIds(WorkerId("w"), Epoch(1))
    assert [one.next(1e9) for _ in range(3000)] == [other.next(1e9) for _ in range(3000)]


def test_held_kv_ends_by_fetch_or_by_time():
    held = HeldKv(10.0)
    held.hold("a", 3, 0.0)
    held.hold("b", 4, 5.0)
    assert held.totals(9.0) == (2, 7)
    assert held.fetched("a")
    assert not held.fetched("a")
    assert held.totals(14.0) == (1, 4)
    assert held.totals(15.0) == (0, 0)


# ---- completions ----


@given(
    ids=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=5),
    max_tokens=st.integers(1, 12),
)
def test_a_completion_ends_where_busways_rules_say_however_the_output_grows(ids, cuts, max_tokens):
    stop_ids = frozenset({8, 9})
    ending = [at for at, token_id in enumerate(ids, 1) if token_id in stop_ids or at >= max_tokens]
    expected = ids[: ending[0]] if ending else ids
    output = CompletionOutput()
    completion = Completion(max_tokens=max_tokens, stop_ids=stop_ids, end_id=9, num_logprobs=None)
    got: list[int] = []
    for cut in [*sorted(cut for cut in cuts if cut < len(ids)), len(ids)]:
        output.token_ids[:] = ids[:cut]
        is_final = cut == len(ids)
        output.finish_reason = "length" if is_final else None
        step = completion.take(output, is_final=is_final)
        got += step.token_ids
        if step.reason is not None:
            break
    assert got == expected
    assert step.reason == ("stop" if expected[-1] in stop_ids else "length")


@pytest.mark.parametrize(("stop_reason", "expected"), [(None, 9), (8, 8), ("word", 9)])
def test_the_id_an_engine_stopped_at_and_kept_is_delivered(stop_reason, expected):
    completion = Completion(max_tokens=9, stop_ids=frozenset({8, 9}), end_id=9, num_logprobs=None)
    output = CompletionOutput(token_ids=[5], finish_reason="stop", stop_reason=stop_reason)
    step = completion.take(output, is_final=True)
    assert (step.token_ids, step.reason) == ((5, expected), "stop")


@pytest.mark.parametrize(
    ("finish_reason", "error"), [("timeout", DeadlineError), ("cancelled", EngineError), (None, EngineError)]
)
def test_a_bad_end_is_an_error(finish_reason, error):
    completion = Completion(max_tokens=9, stop_ids=frozenset(), end_id=None, num_logprobs=None)
    with pytest.raises(error):
        completion.take(CompletionOutput(token_ids=[5], finish_reason=finish_reason), is_final=True)


def test_a_token_without_its_logprob_is_an_error():
    completion = Completion(max_tokens=9, stop_ids=frozenset(), end_id=None, num_logprobs=2)
    with pytest.raises(EngineError, match="logprobs"):
        completion.take(CompletionOutput(token_ids=[5, 6], logprobs=[{5: Logprob(-1.0)}]), is_final=False)


# ---- arguments, installation ----


def test_engine_arguments_go_to_the_llm_verbatim():
    words = ["--tensor-parallel-size", "2", "--dtype=bfloat16", "--enable_chunked_prefill"]
    args = with_words({"cache_transceiver_config": '{"backend":"UCX"}', "revision": '"7"'}, words)
    assert llm_kwargs(args, role="prefill", model_path="/m") == {
        "model": "/m",
        "skip_tokenizer_init": True,
        "enable_iter_perf_stats": True,
        "cache_transceiver_config": {"backend": "UCX"},
        "revision": "7",
        "tensor_parallel_size": 2,
        "dtype": "bfloat16",
        "enable_chunked_prefill": True,
    }


@pytest.mark.parametrize(
    ("args", "role", "param"),
    [
        ({}, "prefill", "cache_transceiver_config"),
        ({"cache_transceiver_config": "null"}, "decode", "cache_transceiver_config"),
        ({"model": "x"}, "both", "model"),
        ({"skip_tokenizer_init": "false"}, "both", "skip_tokenizer_init"),
    ],
)
def test_engine_arguments_that_cant_be_are_refused_before_anything_loads(args, role, param):
    with pytest.raises(RequestError) as caught:
        llm_kwargs(args, role=role, model_path="/m")
    assert caught.value.param == param


def test_words_that_arent_arguments_are_refused():
    for words in (["tp", "2"], ["--"], ["-x"]):
        with pytest.raises(RequestError):
            with_words({}, words)


def test_without_tensorrt_llm_the_message_says_what_to_install(tmp_path):
    config = WorkerConfig(engine="trtllm", model="m", model_path=str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match=r"busway\[trtllm\]"):
        make_engine(config)
    with pytest.raises(RequestError, match="model"):
        make_engine(msgspec.structs.replace(config, model_path=""))


def test_versions_are_ordered_and_gated(caplog):
    in_order = ["1.2.1", "1.3.0rc9", "1.3.0rc29", "1.3.0rc29.post1", "1.3.0", "1.3.1"]
    assert sorted(in_order, key=parse_version) == in_order
    check_version("1.3.0rc30", allow_untested=False)
    for version in ("1.2.1", "1.4.0rc1", "0.20.0", "1.3.0rc28"):
        with pytest.raises(RequestError, match="allow_untested"):
            check_version(version, allow_untested=False)
        check_version(version, allow_untested=True)
        assert version in caplog.text
    with pytest.raises(EngineError, match="gibberish"):
        check_version("gibberish", allow_untested=True)


@pytest.mark.parametrize("version", ["1.3.0rc29", "1.2.1"])
def test_the_installed_library_is_found_by_the_names_it_has(version, monkeypatch, tmp_path):
    """Names only: a package of the stand-in's classes laid out as the real one's modules are."""
    names = ("", ".executor", ".executor.result", ".executor.utils", ".llmapi", ".disaggregated_params")
    modules = {f"tensorrt_llm{name}": types.ModuleType(f"tensorrt_llm{name}") for name in names}
    root = modules["tensorrt_llm"]
    root.__version__, root.LLM, root.SamplingParams = version, stand_in.StandInLlm, stand_in.SamplingParams
    modules["tensorrt_llm.executor.result"].Logprob = stand_in.Logprob
    modules["tensorrt_llm.executor.utils"].RequestError = stand_in.RequestError
    modules["tensorrt_llm.llmapi"].DisaggregatedParams = stand_in.DisaggregatedParams
    if version != "1.2.1":
        modules["tensorrt_llm.disaggregated_params"].DisaggScheduleStyle = stand_in.DisaggScheduleStyle
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    api = load_api(allow_untested=True)
    assert (api.version, api.has_penalties()) == (version, version != "1.2.1")
    assert (api.schedule_style is None) == (version == "1.2.1")
    (tmp_path / "config.json").write_text('{"eos_token_id": 2, "max_position_embeddings": 64, "vocab_size": 10}')
    (tmp_path / "tokenizer.json").write_text("{}")
    config = WorkerConfig(engine="trtllm", model="m", model_path=str(tmp_path), engine_args={"allow_untested": "true"})
    assert isinstance(make_engine(config), TrtllmEngine)
