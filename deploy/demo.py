"""One question, its answer, and where the time went."""

from deploy.chat_client import ChatError, ChatRequest, Phases, Usage, ask_chat


def answer_with_phases(request: ChatRequest) -> str:
    """Return question, answer and phases as text; raises ChatError when one is missing."""
    answer = ask_chat(request)
    text = (answer.choices[0].message.content or "").strip() if answer.choices else ""
    if not text or answer.busway is None or answer.usage is None:
        raise ChatError("the gateway's answer lacks its text, its usage or its timings")
    return f"\n> {request.question}\n{text}\n\n{render_phases(answer.busway, answer.usage)}"


def render_phases(phases: Phases, usage: Usage) -> str:
    """Return one line a phase; the indented ones add up to the first token's time."""
    prefill = phases.prefill_queue_s + phases.prefill_s
    wait = phases.decode_queue_s + phases.first_token_s + phases.retry_s + phases.unreported_s
    rows = (
        ("  gateway", phases.gateway_s, "tokenize, template"),
        ("  route", phases.queue_s + phases.route_s, "to a router and its workers"),
        ("  prefill", prefill, f"{usage.prompt_tokens} tokens by {phases.prefill_worker or phases.decode_worker}"),
        ("  transfer", phases.transfer_s, f"{phases.kv_bytes:,} bytes of KV cache"),
        ("  waiting", wait, "decode's queue and step, messages"),
        ("first token", phases.ttft_s, "after the question came in"),
        ("decode", phases.decode_s, f"{usage.completion_tokens} tokens by {phases.decode_worker}"),
        ("total", phases.total_s, ""),
    )
    return "\n".join(f"{name:<12}{seconds * 1000:>9.1f} ms  {note}".rstrip() for name, seconds, note in rows)
