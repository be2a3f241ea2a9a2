"""Which fields of a public request are refused by name. Pure.

Three kinds of field are not in the request structs. Hand-off fields steer connections and KV between workers: they
are refused wherever they stand in the JSON. Fields that would change the answer and aren't served are refused unless
their value asks for nothing. Everything else is unknown and ignored, as in vLLM and SGLang, so that a client written
for a newer API keeps working; the names go back in a response header, so that it isn't silent.
"""

from collections.abc import Mapping

from schemas.errors import RequestError

HANDOFF_FIELDS = frozenset(
    {
        "attempt_id",
        "bootstrap",
        "bootstrap_host",
        "bootstrap_info",
        "bootstrap_port",
        "bootstrap_room",
        "bootstrap_room_id",
        "ctx_dp_rank",
        "ctx_info_endpoint",
        "ctx_request_id",
        "data_parallel_rank",
        "decode_worker",
        "disagg_prefill_dp_rank",
        "disagg_request_id",
        "disaggregated_params",
        "do_remote_decode",
        "do_remote_prefill",
        "encoded_opaque_state",
        "first_gen_log_probs",
        "first_gen_logits",
        "first_gen_tokens",
        "kv_ticket",
        "kv_transfer_params",
        "opaque_state",
        "prefill_worker",
        "remote_block_ids",
        "remote_engine_id",
        "remote_host",
        "remote_port",
        "result_subject",
        "rid",
        "routed_dp_rank",
    }
)

# Field -> the values beside null that ask for nothing.
_UNSERVED: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "ebnf": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": ([],),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "regex": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}


def refuse_handoff_fields(document: object) -> None:
    """Raise RequestError naming the first hand-off field among the keys of a JSON document, at any depth."""
    pending: list[tuple[str, object]] = [("", document)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict):
            for key, child in value.items():
                if key in HANDOFF_FIELDS:
                    raise RequestError(
                        f"{path}{key}: a hand-off field is set by busway itself, never by a client",
                        param=f"{path}{key}",
                    )
                if isinstance(child, dict | list):
                    pending.append((f"{path}{key}.", child))
        elif isinstance(value, list):
            prefix = path.removesuffix(".")
            pending.extend(
                (f"{prefix}[{i}].", child) for i, child in enumerate(value) if isinstance(child, dict | list)
            )


def refuse_unserved_fields(document: Mapping[str, object]) -> None:
    """Raise RequestError naming a field that would change the answer and isn't served."""
    for name in _UNSERVED.keys() & document.keys():
        value = document[name]
        if value is not None and value not in _UNSERVED[name]:
            raise RequestError(f"{name}: not supported by this server", param=name)


def ignored_fields(document: Mapping[str, object], known: frozenset[str]) -> tuple[str, ...]:
    """Return the names, sorted, that are neither in `known` nor judged by refuse_unserved_fields."""
    return tuple(sorted(document.keys() - known - _UNSERVED.keys()))
