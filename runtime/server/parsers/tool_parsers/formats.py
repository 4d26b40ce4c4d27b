"""The formats of tool calls that are read: a row for each family of models, and their names."""

from collections.abc import Mapping

from atomc.runtime.server.parsers.tool_parsers.tool_format import ToolFormat


def _deepseek(name: str) -> str:
    """A special token: with full-width bars, and U+2581 between words."""
    return f"<\uff5c{name.replace('_', chr(0x2581))}\uff5c>"


_CALLS, _CALLS_END = _deepseek("tool_calls_begin"), _deepseek("tool_calls_end")
_CALL, _CALL_END = _deepseek("tool_call_begin"), _deepseek("tool_call_end")
_SEPARATOR, _DSML = _deepseek("tool_sep"), "\uff5cDSML\uff5c"


def _dsml(source: str, calls: str) -> ToolFormat:
    """DeepSeek's markup, with this word around all calls."""
    return ToolFormat(
        source,
        ((f"{_DSML}{calls}",),),
        f'<{_DSML}invoke name="{{name}}">\n{{parameters}}</{_DSML}invoke>',
        parameter=f'<{_DSML}parameter name="{{key}}" string="{{is_string}}">{{value}}'
        f"</{_DSML}parameter>\n",
        begin=f"<{_DSML}{calls}>\n",
        between="\n",
        end=f"\n</{_DSML}{calls}>",
    )


# In the order in which they are looked for in a chat template.
FORMATS: Mapping[str, ToolFormat] = {
    "deepseek-v4": _dsml("encoding_dsv4.py of deepseek-ai/DeepSeek-V4", "tool_calls"),
    "deepseek-v3.2": _dsml("encoding_dsv32.py of deepseek-ai/DeepSeek-V3.2", "function_calls"),
    "deepseek-v3": ToolFormat(
        "chat templates of deepseek-ai/DeepSeek-V3-0324 and DeepSeek-R1-0528",
        ((_CALL, "```json"),),
        f"{_CALL}function{_SEPARATOR}{{name}}\n```json\n{{object}}\n```{_CALL_END}",
        begin=_CALLS,
        between="\n",
        end=_CALLS_END,
    ),
    "deepseek-v3.1": ToolFormat(
        "section ToolCall of the model card of deepseek-ai/DeepSeek-V3.1",
        ((_CALL,),),
        f"{_CALL}{{name}}{_SEPARATOR}{{object}}{_CALL_END}",
        begin=_CALLS,
        end=_CALLS_END,
    ),
    "kimi-k2": ToolFormat(
        "docs/tool_call_guidance.md of moonshotai/Kimi-K2-Instruct",
        (("<|tool_call_begin|>",),),
        "<|tool_call_begin|>{name}<|tool_call_argument_begin|>{object}<|tool_call_end|>",
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
        named="functions.{name}:{index}",
    ),
    "minimax-m2": ToolFormat(
        "docs/tool_calling_guide.md of MiniMaxAI/MiniMax-M2",
        (("<minimax:tool_call>",), ("minimax:tool_call",)),
        '<invoke name="{name}">\n{parameters}</invoke>',
        parameter='<parameter name="{key}">{value}</parameter>\n',
        begin="<minimax:tool_call>\n",
        between="\n",
        end="\n</minimax:tool_call>",
    ),
    "seed-oss": ToolFormat(
        "chat template of ByteDance-Seed/Seed-OSS-36B-Instruct",
        (("seed:tool_call",),),
        "<function={name}>\n{parameters}</function>",
        parameter="<parameter={key}>{value}</parameter>\n",
        begin="<seed:tool_call>\n",
        between="\n",
        end="\n</seed:tool_call>",
        apart=True,
    ),
    "qwen3-coder": ToolFormat(
        "chat templates of Qwen/Qwen3-Coder-30B-A3B-Instruct and Qwen/Qwen3.5-35B-A3B",
        (("<function=", "<parameter="),),
        "<function={name}>\n{parameters}</function>",
        parameter="<parameter={key}>\n{value}\n</parameter>\n",
        begin="<tool_call>\n",
        between="\n",
        end="\n</tool_call>",
        apart=True,
    ),
    "glm-4.5": ToolFormat(
        "chat templates of zai-org/GLM-4.5 and GLM-4.7",
        (("<arg_key>",),),
        "<tool_call>{name}\n{parameters}</tool_call>",
        parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
        between="\n",
    ),
    "gemma-4": ToolFormat(
        "chat template of google/gemma-4-31B-it",
        (("<|tool_call>", "<tool_call|>"),),
        "<|tool_call>call:{name}{unquoted}<tool_call|>",
        quote='<|"|>',
    ),
    "hermes": ToolFormat(
        "model card of NousResearch/Hermes-2-Pro-Llama-3-8B, chat template of Qwen/Qwen3-8B",
        (("<tool_call>",),),
        "{call}",
        begin="<tool_call>\n",
        between="\n",
        end="\n</tool_call>",
        apart=True,
    ),
    "mistral": ToolFormat(
        "mistral-common, tokenizers v11 and later",
        (("[TOOL_CALLS]", "[ARGS]"),),
        "[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]{object}",
        optional=("[CALL_ID]", "[ARGS]"),
    ),
    "mistral-list": ToolFormat(
        "chat template of mistralai/Mistral-7B-Instruct-v0.3",
        (("[TOOL_CALLS]",),),
        "{call}",
        begin="[TOOL_CALLS] [",
        between=", ",
        end="]",
    ),
    "phi-4-mini": ToolFormat(
        "model card of microsoft/Phi-4-mini-instruct",
        (("<|tool|>",), ("<|/tool_call|>",)),
        "{call}",
        begin="<|tool_call|>[",
        between=", ",
        end="]<|/tool_call|>",
    ),
    "granite-3": ToolFormat(
        "chat template of ibm-granite/granite-3.3-8b-instruct",
        (("<|tool_call|>",),),
        "{call}",
        begin="<|tool_call|>[",
        between=", ",
        end="]",
    ),
    "command-a": ToolFormat(
        "chat template of CohereLabs/c4ai-command-a-03-2025",
        (("<|START_ACTION|>",),),
        "{call}",
        begin="<|START_ACTION|>[\n    ",
        between=",\n    ",
        end="\n]<|END_ACTION|>",
        keys=("tool_name", "parameters"),
        extra=("tool_call_id",),
    ),
    "nemotron": ToolFormat(
        "chat template of nvidia/Llama-3_3-Nemotron-Super-49B-v1_5",
        (("<TOOLCALL>",),),
        "{call}",
        begin="<TOOLCALL>[",
        between=", ",
        end="]</TOOLCALL>",
    ),
    "hunyuan": ToolFormat(
        "chat template of tencent/Hunyuan-A13B-Instruct",
        (("<tool_calls>",),),
        "{call}",
        begin="<tool_calls>[",
        between=", ",
        end="]</tool_calls>",
    ),
    "internlm": ToolFormat(
        "chat/chat_format.md of InternLM/InternLM (InternLM2.5 and later)",
        (("<|action_start|>", "<|plugin|>"),),
        "{call}",
        begin="<|action_start|><|plugin|>\n",
        end="<|action_end|>",
        apart=True,
        keys=("name", "parameters"),
    ),
    "olmo-3": ToolFormat(
        "chat template of allenai/Olmo-3-7B-Instruct",
        (("<function_calls>",),),
        "{name}({keywords})",
        begin="<function_calls>",
        between="\n",
        end="</function_calls>",
    ),
    "pythonic": ToolFormat(
        "models/llama4/prompt_format.md of github.com/meta-llama/llama-models",
        (("[func_name1(",), ("<|python_start|>",)),
        "{name}({keywords})",
        begin="[",
        between=", ",
        end="]",
        starts=True,
        tag="<|python_start|>",
    ),
    "llama3": ToolFormat(
        "models/llama3_1/prompt_format.md of github.com/meta-llama/llama-models",
        (("<|python_tag|>",), ("<|start_header_id|>", '"parameters"')),
        "{call}",
        between="; ",
        starts=True,
        tag="<|python_tag|>",
        keys=("name", "parameters"),
    ),
}
# Other names of them, as vLLM has them.
ALIASES: Mapping[str, str] = {
    "qwen3": "hermes",
    "granite4": "hermes",
    "ernie45": "hermes",
    "qwen3_coder": "qwen3-coder",
    "qwen3_xml": "qwen3-coder",
    "glm45": "glm-4.5",
    "glm47": "glm-4.5",
    "gemma4": "gemma-4",
    "kimi_k2": "kimi-k2",
    "minimax_m2": "minimax-m2",
    "deepseek_v3": "deepseek-v3",
    "deepseek_v31": "deepseek-v3.1",
    "deepseek_v32": "deepseek-v3.2",
    "deepseek_v4": "deepseek-v4",
    "seed_oss": "seed-oss",
    "llama3_json": "llama3",
    "llama4_json": "llama3",
    "llama4_pythonic": "pythonic",
    "granite": "granite-3",
    "phi4_mini_json": "phi-4-mini",
    "cohere_command3": "command-a",
    "hunyuan_a13b": "hunyuan",
    "olmo3": "olmo-3",
    "openai": "gpt-oss",
}
