"""How kinds of models write calls of tools, told from their chat templates."""

_PARSERS = {
    "<function=": "qwen3_coder",
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama3_json",
}
"""What a template tells its model to write, and vLLM's name for what reads that; the first that fits."""


def tool_parser(chat_template: str | None) -> str | None:
    """vLLM's name of the parser; None where the template teaches no calls that one of them reads."""
    fitting = [name for mark, name in _PARSERS.items() if mark in (chat_template or "")]
    return next(iter(fitting), None)
