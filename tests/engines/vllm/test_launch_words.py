"""What of vLLM's words is busway's: the connector's flag is taken out, the model refused. vLLM itself is not needed."""

import pytest

from schemas.errors import RequestError
from services.engines.vllm.launch import KV_FLAG, kv_transfer_fields, refuse_ours, take_flag
from services.engines.vllm.words import LaunchOptions


@pytest.mark.parametrize(
    "words",
    [
        ("--a", "1", KV_FLAG, "{}", "--b"),
        ("--a", "1", KV_FLAG + "={}", "--b"),
        ("--a", "1", "--kv_transfer_config", "{}", "--b"),
    ],
)
def test_a_flag_is_taken_out_however_it_is_written(words: tuple[str, ...]) -> None:
    assert take_flag(words, KV_FLAG) == (["--a", "1", "--b"], "{}")


def test_words_without_it_stay_as_they_are() -> None:
    assert take_flag(("--a=b", "c"), KV_FLAG) == (["--a=b", "c"], None)


@pytest.mark.parametrize(
    "word", ["--model", "--model=/m", f"{KV_FLAG}.kv_connector", f"{KV_FLAG}.kv_connector=X", "--kv_transfer_config.x"]
)
def test_words_that_busways_own_would_replace_are_refused_by_name(word: str) -> None:
    with pytest.raises(RequestError, match=word.partition("=")[0].replace("_", "-")[:20]):
        refuse_ours(("--dtype", "float32", word, "x"))
    refuse_ours(("--model-impl", "auto", "--dtype=float32", KV_FLAG, '{"a": "--model"}'))


def options(lease_s: float = 6.0) -> LaunchOptions:
    return LaunchOptions(
        model_path="/m",
        words=(),
        kv_role="kv_producer",
        kv_load_failure="fail",
        lease_s=lease_s,
        side_channel_host="127.0.0.1",
    )


@pytest.mark.parametrize(("lease_s", "seconds"), [(6.0, 6), (29.6, 30), (0.2, 1)])
@pytest.mark.parametrize("given", [None, "{}", '{"kv_connector": "NixlPushConnector"}'])
def test_our_lease_is_vllms_in_whole_seconds(given: str | None, lease_s: float, seconds: int) -> None:
    fields = kv_transfer_fields(given, options(lease_s))
    assert fields is not None
    assert fields["kv_connector_extra_config"] == {"kv_lease_duration": seconds}
    assert (fields["kv_role"], fields["kv_load_failure_policy"]) == ("kv_producer", "fail")


def test_a_users_own_settings_of_the_connector_win_and_ours_complete_them() -> None:
    own = '{"kv_connector_extra_config": {"kv_lease_duration": 40}, "kv_role": "kv_both"}'
    fields = kv_transfer_fields(own, options())
    assert fields is not None
    assert fields["kv_connector_extra_config"] == {"kv_lease_duration": 40}
    assert fields["kv_role"] == "kv_both"
    fields = kv_transfer_fields('{"kv_connector_extra_config": {"backends": ["UCX"]}}', options())
    assert fields is not None
    assert fields["kv_connector_extra_config"] == {"backends": ["UCX"], "kv_lease_duration": 6}


def test_another_connectors_lease_is_its_own() -> None:
    fields = kv_transfer_fields('{"kv_connector": "SharedStorageConnector"}', options())
    assert fields is not None
    assert "kv_connector_extra_config" not in fields


@pytest.mark.parametrize("extra", ["null", "7", '"kv_lease_duration"', "[]"])
def test_settings_that_are_no_object_are_refused_by_name(extra: str) -> None:
    with pytest.raises(RequestError, match="kv_connector_extra_config in --kv-transfer-config is no JSON object"):
        kv_transfer_fields(f'{{"kv_connector_extra_config": {extra}}}', options())
