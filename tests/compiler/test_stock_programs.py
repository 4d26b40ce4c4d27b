"""Transformers' own ways to use torch.compile, with this backend: `generate` with a compile config,
continuous batching, and any bare torch.compile under `torch.compiler.set_default_backend`.

The compiled results are those of eager, and Dynamo makes one graph of the decode step.
"""

import json
import socket
import time
import urllib.request

import pytest
import torch
from rewriting import since
from tiny_models import SIZES
from torch import Tensor

import atomc
from atomc.demo import PATH

transformers = pytest.importorskip("transformers", reason="its generate is tested")

WITHOUT_ENDS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
DENSE = SIZES | WITHOUT_ENDS | {"num_hidden_layers": 2}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
MODELS = {
    "Llama": DENSE,
    "Qwen3": DENSE,
    "Gemma2": DENSE | WINDOWS | {"query_pre_attn_scalar": 16},
    "Phi3": DENSE,
    "Olmo2": DENSE,
    "Glm4": DENSE,
    "GPTNeoX": DENSE,
    "Mixtral": DENSE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GptOss": DENSE | WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Next": DENSE | EXPERTS | LINEAR | {"num_experts": 4},
    "DeepseekV3": DENSE
    | EXPERTS
    | LATENT
    | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "FalconH1": DENSE
    | {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
}
# The cache of a window counts its tokens in a Python number, which Dynamo specializes at first.
GRAPHS = {"Gemma2": 2, "GptOss": 2}
NEW_TOKENS = 12


def each(*now: str):
    """Every model; those of these names per change."""
    return pytest.mark.parametrize(
        "name", [pytest.param(x, marks=() if x in now else pytest.mark.slow) for x in MODELS]
    )


def built(name: str, **changed):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS[name] | changed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def ids(seed: int = 1) -> Tensor:
    return torch.randint(1, 96, (2, 9), generator=torch.Generator().manual_seed(seed))


def generated(model, prompt: Tensor, config=None, *, cache: str | None = "static", **options):
    """What generate returns for a static cache (None: one that grows); compiled if there is a
    config.
    """
    return model.generate(
        prompt,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        cache_implementation=cache,
        return_dict_in_generate=True,
        output_logits=True,
        compile_config=config,
        disable_compile=config is None,
        **options,
    )


def compile_config(**changed):
    """As a user's, for all devices: transformers ignores it on a CPU otherwise."""
    chosen = {"mode": None, "options": {"glue": "eager"}, "fullgraph": True} | changed
    config = transformers.CompileConfig(backend="atom", **chosen)
    config._compile_all_devices = True
    return config


def close(compiled, eager) -> None:
    assert torch.equal(compiled.sequences, eager.sequences)
    for ours, theirs in zip(compiled.logits, eager.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def similar(compiled, eager, bound: float) -> None:
    """Rounding may decide between two tokens once; what follows depends on it."""
    same = (compiled.sequences == eager.sequences).all(0)[-NEW_TOKENS:]
    steps = NEW_TOKENS if same.all() else int(same.int().argmin()) + 1
    for ours, theirs in zip(compiled.logits[:steps], eager.logits[:steps], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


@each("Qwen3")
def test_generate_with_a_compile_config_runs_one_graph_for_all_tokens(name: str) -> None:
    model, before = built(name), atomc.reports()
    config = compile_config(**({} if name in GRAPHS else {"dynamic": False}))
    compiled = generated(model, ids(), config)
    close(compiled, generated(model, ids()))
    close(compiled, generated(model, ids(), cache=None))
    assert hasattr(model, "_compiled_call")
    reports = since(before)
    assert [report.treated for report in reports] == [True] * GRAPHS.get(name, 1)
    # The cache of the first call is not what the second one reads.
    close(generated(model, ids(2), config), generated(model, ids(2)))
    assert len(since(before)) == len(reports), since(before)[-1].recompile


@pytest.mark.rotating
@each("Llama")
def test_optional_outputs_of_a_compiled_generate_are_those_of_eager(name: str) -> None:
    model = built(name, attn_implementation="eager")
    wanted = {"output_hidden_states": True, "output_attentions": True, "output_scores": True}
    eager = generated(model, ids(), **wanted)
    before = atomc.reports()
    compiled = generated(model, ids(), compile_config(), **wanted)
    assert all(report.treated for report in since(before)) and since(before)
    close(compiled, eager)
    assert type(compiled) is type(eager) and compiled.keys() == eager.keys()
    for ours, theirs in zip(compiled.scores, eager.scores, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for kind in ("hidden_states", "attentions"):
        ours, theirs = compiled[kind], eager[kind]
        assert len(ours) == NEW_TOKENS
        for at, (step, expected) in enumerate(zip(ours, theirs, strict=True)):
            for a, b in zip(step, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=f"{kind} of step {at}")


@each()
def test_a_compiled_generate_returns_the_static_cache_that_eager_fills(name: str) -> None:
    model = built(name)
    eager = generated(model, ids()).past_key_values
    compiled = generated(model, ids(), compile_config()).past_key_values
    assert type(compiled) is type(eager)
    for ours, theirs in zip(compiled.layers, eager.layers, strict=True):
        for kind in ("keys", "values", "conv_states", "recurrent_states"):
            if isinstance(expected := getattr(theirs, kind, None), Tensor):
                torch.testing.assert_close(getattr(ours, kind), expected, rtol=1e-4, atol=1e-4)


@each()
def test_a_compiled_static_cache_in_half_precision_gives_what_a_growing_one_does(name: str) -> None:
    model = built(name).half()
    compiled = generated(model, ids(), compile_config())
    similar(compiled, generated(model, ids(), cache=None), 3e-2)
    attention = [layer for layer in compiled.past_key_values.layers if hasattr(layer, "keys")]
    assert attention and {layer.keys.dtype for layer in attention} == {torch.float16}
    room = ids().shape[1] + NEW_TOKENS - 1
    assert {layer.keys.shape[2] for layer in attention} <= {room, 8}  # 8: the window


@pytest.mark.rotating
@each("Llama")
def test_an_sdpa_model_in_half_precision_compiles_with_dynamic_shapes(name: str) -> None:
    implementation = "eager" if name == "GptOss" else "sdpa"  # it has no sdpa
    model, before = built(name, attn_implementation=implementation).half(), atomc.reports()
    compiled = torch.compile(model, backend="atom", dynamic=True, options={"glue": "eager"})
    with torch.no_grad():
        expected, found = model(ids()), compiled(ids())
    torch.testing.assert_close(found.logits, expected.logits, rtol=3e-2, atol=3e-2)
    assert type(found.past_key_values) is type(expected.past_key_values)
    assert since(before) and all(report.treated for report in since(before))


@pytest.mark.slow
def test_an_sdpa_model_compiles_with_dynamic_shapes_once() -> None:
    model, before = built("Llama", attn_implementation="sdpa"), atomc.reports()
    compiled = torch.compile(model, backend="atom", dynamic=True, options={"glue": "eager"})
    for batch, length in ((2, 9), (3, 17), (4, 5)):
        prompt = torch.randint(1, 96, (batch, length))
        mask = torch.ones_like(prompt)
        mask[0, :2] = 0
        with torch.no_grad():
            expected = model(prompt, attention_mask=mask, use_cache=False).logits
            found = compiled(prompt, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(found[mask == 1], expected[mask == 1], rtol=1e-4, atol=1e-4)
    assert [report.treated for report in since(before)] == [True]


@pytest.mark.rotating
def test_the_default_that_transformers_serve_compiles_with_can_be_replaced(monkeypatch) -> None:
    """It names Inductor; generate passes no config when its server compiles."""
    model, before = built("Llama"), atomc.reports()
    assert model._default_compile_config().backend == "inductor"
    ours = transformers.CompileConfig(backend="atom", mode=None, options={"glue": "eager"})
    monkeypatch.setattr(transformers.PreTrainedModel, "_default_compile_config", lambda _: ours)
    with torch.no_grad():
        found, expected = model.get_compiled_call(None)(ids()), model(ids())
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert [report.treated for report in since(before)] == [True]


@pytest.mark.skipif(
    not hasattr(torch.compiler, "set_default_backend"), reason="torch 2.13 has set_default_backend"
)
def test_a_bare_torch_compile_uses_the_default_backend() -> None:
    before = atomc.reports()
    torch.compiler.set_default_backend("atom")
    try:
        compiled = torch.compile(
            lambda x: torch.nn.functional.silu(x) * 2, options={"glue": "eager"}
        )
        assert torch.compiler.get_default_backend() == "atom"
        x = torch.randn(3, 8)
        torch.testing.assert_close(compiled(x), torch.nn.functional.silu(x) * 2)
    finally:
        torch.compiler.set_default_backend(None)
    assert [report.treated for report in since(before)] == [True]


@pytest.mark.slow
def test_the_server_of_transformers_compiles_with_the_default_of_a_program(monkeypatch) -> None:
    """As docs/transformers.md does it for a GPU; here a CPU compiles, too."""
    if not transformers.utils.import_utils.is_serve_available():
        pytest.skip("transformers serve needs fastapi, uvicorn, pydantic and openai")
    from transformers.cli.serve import Serve

    ours = compile_config()
    monkeypatch.setattr(transformers.PreTrainedModel, "_default_compile_config", lambda _: ours)
    compiles = transformers.GenerationMixin._valid_auto_compile_criteria

    def on_a_cpu(model, inputs, generation):
        generation.compile_config = ours
        return compiles(model, inputs, generation)

    monkeypatch.setattr(transformers.GenerationMixin, "_valid_auto_compile_criteria", on_a_cpu)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    before = atomc.reports()
    server = Serve(str(PATH), compile=True, host="127.0.0.1", port=port, non_blocking=True)
    try:
        while not server.server.started:
            assert server._thread.is_alive()
            time.sleep(0.05)
        body = {"model": str(PATH), "prompt": "In the beginning", "max_tokens": 6, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            text = json.loads(answer.read())["choices"][0]["text"]
    finally:
        server.kill_server()
    assert [report.treated for report in since(before)] == [True]
    tokenizer = transformers.AutoTokenizer.from_pretrained(PATH)
    model = transformers.AutoModelForCausalLM.from_pretrained(PATH).eval()
    prompt = tokenizer("In the beginning", return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=6, do_sample=False)[0]
    new = tokens[prompt["input_ids"].shape[1] :]
    assert text == tokenizer.decode(new, skip_special_tokens=True)
