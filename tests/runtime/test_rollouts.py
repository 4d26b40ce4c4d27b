"""Generation from a module that a trainer owns and updates, as in reinforcement learning."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from embeddings import embed

from atomc import demo
from atomc.errors import RunError
from atomc.runtime.llm import LLM
from atomc.runtime.requests.sampling_params import SamplingParams

transformers = pytest.importorskip("transformers", reason="a stock class is trained")

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


def built():
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, float(parameter.dim() == 1), 0.3)
    return model


def rollouts(model, **options):
    return LLM(model, options={"glue": "eager", **options}, num_blocks=32, progress=False)


def own_tokens(model):
    ids = torch.tensor([PROMPT])
    found = model.generate(ids, do_sample=False, max_new_tokens=8, eos_token_id=None)
    return found[0, len(PROMPT) :].tolist()


def train(model, optimizer):
    """One step that makes other tokens likely."""
    optimizer.zero_grad()
    ids = torch.tensor([PROMPT[::-1]])
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.step()


def test_a_step_of_the_optimizer_is_the_update_and_old_prefixes_are_forgotten():
    model = built()
    llm, optimizer = rollouts(model), torch.optim.AdamW(model.parameters(), lr=0.03)
    tokens = []
    for trains in (False, False, True, False, True):
        if trains:
            train(model, optimizer)
        (found,) = llm.generate([PROMPT], GREEDY)
        assert list(found.token_ids) == own_tokens(model)
        assert (found.num_cached == 0) == (trains or not tokens)
        tokens.append(found.token_ids)
    assert tokens[0] == tokens[1] and tokens[1] != tokens[2] and tokens[3] != tokens[4]
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.rotating
def test_an_update_is_noticed_after_requests_that_a_stop_token_has_ended():
    model = built()
    llm, optimizer = rollouts(model), torch.optim.AdamW(model.parameters(), lr=0.03)
    stops = SamplingParams(max_tokens=8, stop_token_ids=(own_tokens(model)[3],))
    (found,) = llm.generate([PROMPT], stops)
    assert found.finish_reason == "stop" and llm.engine.has_work  # a further step was launched
    train(model, optimizer)
    (found,) = llm.generate([PROMPT], GREEDY)
    assert list(found.token_ids) == own_tokens(model) and found.num_cached == 0


def test_an_update_also_reaches_pooled_hidden_states():
    model = built()
    llm = rollouts(model)
    (before,) = embed(llm.engine, [PROMPT])
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.mul_(-1.1)
    (after,) = embed(llm.engine, [PROMPT])
    (expected,) = model.model(torch.tensor([PROMPT])).last_hidden_state.mean(1).tolist()
    assert after == pytest.approx(expected, abs=1e-4) != pytest.approx(before, abs=0.01)


@pytest.mark.parametrize(
    "mode",
    [
        torch.inference_mode(),
        torch.no_grad(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.device("meta"),
    ],
    ids=["inference", "no_grad", "autocast", "device"],
)
def test_modes_of_the_caller_change_no_request(llm, mode):
    params = SamplingParams(
        max_tokens=4, ignore_eos=True, frequency_penalty=0.1, logprobs=0, prompt_logprobs=0
    )
    (expected,), (score,) = llm.generate([PROMPT], params), llm.score([PROMPT])
    llm.reset_prefix_cache()
    with mode:
        (found,), (found_score,) = llm.generate([PROMPT], params), llm.score([PROMPT])
    assert found == expected and found_score.tolist() == score.tolist()


@pytest.fixture(scope="module")
def llm():
    return rollouts(built())


@pytest.mark.rotating
def test_a_module_in_training_mode_generates_without_dropout():
    config = transformers.PhiConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        resid_pdrop=0.5,
    )
    model = transformers.PhiForCausalLM(config).train()
    (found,) = rollouts(model).generate([PROMPT], GREEDY)
    assert all(module.training for module in model.modules())
    assert list(found.token_ids) == own_tokens(model.eval())


@pytest.mark.rotating
def test_an_llm_may_be_made_and_used_inside_and_outside_of_inference_mode():
    params = SamplingParams(max_tokens=8, ignore_eos=True, frequency_penalty=0.1)
    with torch.inference_mode():
        llm = rollouts(built())
        (first,) = llm.generate([PROMPT], params)
    (second,) = llm.generate([PROMPT], params)
    assert first.error is None and first.token_ids == second.token_ids
    (found,) = llm.generate([PROMPT], GREEDY)
    assert list(found.token_ids) == own_tokens(built())


@pytest.mark.rotating
def test_the_owner_of_a_module_calls_its_own_attention():
    model, expected = built(), own_tokens(built())
    mask = torch.ones(2, len(PROMPT), dtype=torch.int64)
    mask[0, :3] = 0  # padding
    given = {"input_ids": torch.tensor([PROMPT, PROMPT[::-1]]), "attention_mask": mask}
    before = model(**given).logits[mask == 1]
    llm = rollouts(model)
    for _ in range(2):
        assert own_tokens(model) == expected
        torch.testing.assert_close(model(**given).logits[mask == 1], before)
        llm.engine.prepare_pooling()


@pytest.mark.rotating
def test_weights_loaded_from_another_model_are_the_update():
    model, other = built(), built()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-1.1)
    llm = rollouts(model)
    llm.generate([PROMPT], GREEDY)
    model.load_state_dict(other.state_dict())
    (found,) = llm.generate([PROMPT], GREEDY)
    assert list(found.token_ids) == own_tokens(other) and found.num_cached == 0


@pytest.mark.rotating
def test_parameters_with_other_storage_are_one_error():
    model = built()
    llm = rollouts(model)
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    with pytest.raises(RunError, match="given new storage after compiling"):
        llm.generate([PROMPT], GREEDY)
    model.load_state_dict(built().state_dict(), assign=True)
    with pytest.raises(RunError, match="another parameter than the one that was compiled"):
        llm.generate([PROMPT], GREEDY)


@pytest.mark.rotating
def test_scores_have_the_bits_of_the_log_probabilities_of_sampling():
    llm = rollouts(built().eval(), batch_invariant=True)
    sampled = SamplingParams(max_tokens=9, ignore_eos=True, temperature=1.0, logprobs=0, seed=1)
    prompts = [PROMPT, PROMPT[:3], PROMPT[5:12]]
    found = llm.generate(prompts, sampled)
    sequences = [[*prompt, *one.token_ids] for prompt, one in zip(prompts, found, strict=True)]
    scores = llm.score([PROMPT[4:9], *reversed(sequences)])
    for prompt, one, score in zip(prompts, found, reversed(scores), strict=False):
        expected = torch.tensor([each.logprob for each in one.logprobs])
        assert torch.equal(score[len(prompt) - 1 :], expected)


@pytest.mark.rotating
def test_scores_are_those_of_the_module():
    model = built().eval()
    (score,) = rollouts(model).score([PROMPT])
    with torch.no_grad():
        logprobs = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, torch.tensor(PROMPT)[1:, None])[:, 0]
    torch.testing.assert_close(score, expected, rtol=0, atol=1e-5)
    assert score.dtype == torch.float32


@pytest.mark.rotating
def test_to_score_needs_lists_of_two_tokens():
    llm = rollouts(built())
    for ids, why in (
        ([PROMPT, [7]], "at least 2 tokens"),
        ([PROMPT, []], "at least 2 tokens"),
        (PROMPT, "token_ids is one list of token ids"),
    ):
        with pytest.raises(ValueError, match=why):
            llm.score(ids)
    rows = torch.tensor([PROMPT, PROMPT[::-1]])
    for found, expected in zip(llm.score(rows), llm.score(rows.tolist()), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.rotating
def test_the_rollout_function_of_the_docs_returns_what_trl_reads():
    """TRL calls it with the prompts and the trainer, and reads three lists with a row per prompt."""
    text = (Path(__file__).parents[2] / "docs/rollouts.md").read_text()
    source = text[text.index("def rollouts(prompts, trainer):") : text.index("\ntrainer = GRPO")]
    llm = LLM(
        demo.PATH, dtype=torch.float32, options={"glue": "eager"}, num_blocks=32, progress=False
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo.PATH)
    names = {"llm": llm, "tokenizer": tokenizer, "SamplingParams": SamplingParams}
    exec(source, names)
    prompts = ["She looked at him", "She looked at him", "It was"]
    found = names["rollouts"](prompts, SimpleNamespace(num_generations=2))
    assert found["prompt_ids"] == [tokenizer(each)["input_ids"] for each in prompts]
    rows = zip(found["prompt_ids"], found["completion_ids"], found["logprobs"], strict=True)
    for prompt, completion, logprobs in rows:
        assert 0 < len(completion) <= 64
        [expected] = llm.score([prompt + completion])
        expected = expected[-len(completion) :]
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=1e-3)
