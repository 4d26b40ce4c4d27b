"""Tiny random models through the paged runner: the same numbers as the plain model on each whole
sequence alone.
"""

import copy
import json
import random

import pytest
import torch

from atomc.cli import main
from atomc.errors import RunError
from atomc.loading import loader
from atomc.loading.create_model import create_model
from atomc.ops import LAYOUTS
from atomc.ops.state import groups_of
from atomc.options import Options
from atomc.platform import Platform
from atomc.program import compile_model
from atomc.runtime.execution import compile_programs
from atomc.runtime.execution.capacity import Capacity, capacity
from atomc.runtime.execution.input_batch import InputBatch, StepShape
from atomc.runtime.execution.programs import Programs
from atomc.runtime.execution.runner import Runner
from atomc.runtime.execution.slots import Slots, sample_specs
from atomc.runtime.llm import LLM
from atomc.runtime.requests.request import Request
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.sampling.sampler import Sampler
from atomc.runtime.scheduling.blocks import BlockPool
from atomc.runtime.scheduling.scheduler import Scheduler
from atomc.runtime.scheduling.step import Chunk, DecodeRows, ScheduledStep
from atomc.runtime.text.detokenizer import Detokenizer
from atomc.stock.adapter import wrap_stock

# Else each worker compiles all the models.
pytestmark = [pytest.mark.xdist_group("runtime"), pytest.mark.usefixtures("compiled_once")]

MAX_LEN = 64
NUM_BLOCKS = 24
VOCAB = 101
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "dtype": "float32",
}
QWEN3 = {**TINY, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
CONFIGS = {
    "qwen3": QWEN3,
    "llama": {**TINY, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "windowed": {**QWEN3, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "stock": QWEN3,
}


def tiny(name):
    """The model to compile, and another with the same weights that stays plain."""
    torch.manual_seed(0)
    if name == "stock":
        transformers = pytest.importorskip("transformers")
        plain = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**CONFIGS[name])).eval()
    else:
        plain = create_model(CONFIGS[name])
    for parameter in plain.parameters():
        # Larger than usual, so that tokens differ and a wrong key shows.
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    loader.ready(plain)
    model = copy.deepcopy(plain)
    return (wrap_stock(model) if name == "stock" else model), plain


class Alone:
    """The plain model on one whole sequence at a time; remembers what it computed."""

    def __init__(self, model):
        self.model = model
        self.seen = {}

    def logits(self, tokens):
        """Logits [V] after the last token."""
        key = tuple(tokens)
        if key not in self.seen:
            ids, positions = torch.tensor(tokens), torch.arange(len(tokens))
            with torch.no_grad():
                if hasattr(self.model, "set_attn_implementation"):
                    out = self.model(
                        input_ids=ids[None], position_ids=positions[None], use_cache=False
                    ).logits[0]
                else:
                    out = self.model(ids, positions)
            self.seen[key] = out[-1]
        return self.seen[key]

    def greedy(self, prompt, count):
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count:
            tokens.append(int(self.logits(tokens).argmax()))
        return tokens[len(prompt) :]


def compiled(model, layout, glue):
    """The program with this layout of the state: with "paged", by the kernels that a GPU gets from
    the same provider.
    """
    if layout == "contiguous":
        program = compile_model(model, options={"strict": True, "glue": glue, "layout": layout})
    else:
        options = {"strict": True, "glue": "eager", "providers": ["torch"]}
        program = compile_model(model, options=options, platform=Platform.named("sm90"))
    assert {spec.paging.layout for spec in program.specs} == {layout}
    return program


# All but one: Inductor takes long for the stock model.
SERVED = [
    ("qwen3", "contiguous"),
    ("qwen3", "paged"),
    ("llama", "contiguous"),
    ("llama", "paged"),
    ("windowed", "contiguous"),
    ("windowed", "paged"),
    ("stock", "paged"),
]


@pytest.fixture(scope="module", params=SERVED, ids="-".join)
def served(request):
    """A runner, the size of its blocks, and the plain model that it must agree with."""
    name, layout = request.param
    model, plain = tiny(name)
    block_size = LAYOUTS[layout].block_size or MAX_LEN
    # Inductor compiles one of them: it takes seconds.
    program = compiled(model, layout, "auto" if name == "qwen3" else "eager")
    runner = Runner(
        Programs({"text": program}),
        num_blocks=NUM_BLOCKS,
        block_size=block_size,
        max_num_seqs=8,
        max_num_rows=80,
        max_columns=-(-MAX_LEN // block_size),
    )
    return runner, block_size, Alone(plain)


def scheduler_for(
    runner, block_size, num_blocks=NUM_BLOCKS, max_num_seqs=8, max_num_batched_tokens=64
):
    return Scheduler(
        BlockPool(
            num_blocks, block_size, [group.window for group in groups_of(runner.program.specs)]
        ),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=MAX_LEN,
    )


def prompts_of(*lengths, seed=0):
    generator = random.Random(seed)
    return [[generator.randrange(VOCAB) for _ in range(length)] for length in lengths]


def assert_close(logits, expected):
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def run_and_compare(runner, scheduler, alone, requests, arrivals=None, aborts=None, padding=0):
    """Greedy steps until all requests ended; compares every row of logits. The number of steps, and
    who gave way.
    """
    arrivals, aborts, gave_way = arrivals or {}, aborts or {}, set()
    for number in range(2000):
        for request in requests:
            if arrivals.get(request.id, 0) == number:
                scheduler.add(request)
            if aborts.get(request.id) == number:
                scheduler.abort(request.id)
        scheduler.check()
        step = scheduler.next_step()
        scheduler.check()
        gave_way |= {request.id for request in scheduler.waiting if request.num_new}
        if step is None:
            if number >= max(arrivals.values(), default=0):
                return number, gave_way
            continue
        size = step.padded_size
        logits = runner.logits(step._replace(size=size._replace(rows=size.rows + padding)))
        drawing = [chunk for chunk in step.chunks if chunk.num_samples]
        assert logits.shape == (len(drawing), VOCAB)
        for row, chunk in zip(logits, drawing, strict=True):
            assert_close(row, alone.logits(scheduler.requests[chunk.request_id].tokens))
        finish(scheduler, step, logits.argmax(-1).tolist())
        scheduler.check()
    raise AssertionError("the requests do not end")


def finish(scheduler, step, tokens):
    """tokens: of the chunks that sample."""
    sampled = iter(tokens)
    scheduler.finish_step(step, [[next(sampled)] if x.num_samples else () for x in step.chunks])


def test_prefill_and_decode_give_the_logits_of_the_whole_sequence(served):
    runner, block_size, alone = served
    (prompt,) = prompts_of(19)
    request = Request("a", prompt, SamplingParams(max_tokens=20))
    assert run_and_compare(runner, scheduler_for(runner, block_size), alone, [request]) == (
        20,
        set(),
    )
    assert request.new_tokens == alone.greedy(prompt, 20)


def test_ragged_batches_give_the_logits_of_each_sequence_alone(served):
    runner, block_size, alone = served
    prompts = prompts_of(1, 17, 2, 31, 16, 5)
    requests = [
        Request(str(i), prompt, SamplingParams(max_tokens=4 + i))
        for i, prompt in enumerate(prompts)
    ]
    arrivals = {str(i): i // 2 for i in range(6)}
    run_and_compare(runner, scheduler_for(runner, block_size), alone, requests, arrivals)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.new_tokens == alone.greedy(prompt, request.params.max_tokens)


@pytest.mark.covering
@pytest.mark.parametrize("chunk", [1, 3, 7, 17])
def test_chunks_of_any_size_give_the_logits_of_the_whole_prompt(served, chunk):
    runner, block_size, alone = served
    requests = [
        Request(str(i), p, SamplingParams(max_tokens=3)) for i, p in enumerate(prompts_of(23, 9))
    ]
    scheduler = scheduler_for(runner, block_size, max_num_batched_tokens=chunk)
    steps, _ = run_and_compare(runner, scheduler, alone, requests)
    assert steps > 23 // chunk


def test_padding_rows_change_nothing(served):
    runner, block_size, alone = served
    requests = [
        Request(str(i), p, SamplingParams(max_tokens=4)) for i, p in enumerate(prompts_of(3, 20, 1))
    ]
    run_and_compare(runner, scheduler_for(runner, block_size), alone, requests, padding=5)
    for request in requests:
        assert request.new_tokens == alone.greedy(request.tokens[: request.num_prompt], 4)


@pytest.mark.rotating
def test_random_arrivals_lengths_and_aborts_in_a_small_pool_change_no_token(served):
    runner, block_size, alone = served
    generator = random.Random(1)
    lengths = [generator.choice([1, 3, 14, 15, 16, 17, 30]) for _ in range(24)]
    requests = [
        Request(str(i), prompt, SamplingParams(max_tokens=generator.randint(1, 20)))
        for i, prompt in enumerate(prompts_of(*lengths, seed=2))
    ]
    arrivals = {request.id: generator.randrange(40) for request in requests}
    aborts = {
        request.id: arrivals[request.id] + generator.randrange(12) for request in requests[::4]
    }
    # As many blocks as the longest request may need.
    scheduler = scheduler_for(
        runner, block_size, num_blocks=-(-MAX_LEN // block_size), max_num_batched_tokens=24
    )
    _, gave_way = run_and_compare(runner, scheduler, alone, requests, arrivals, aborts)
    # Nobody has to where one block holds a whole sequence.
    assert len(gave_way) > 2 or block_size == MAX_LEN
    assert not scheduler.pool.owners and not scheduler.requests
    for request in requests:
        assert request.finish_reason == "length" or request.id in aborts
        assert request.new_tokens == alone.greedy(
            request.tokens[: request.num_prompt], request.num_new
        )


def test_a_request_never_reads_what_the_last_owner_of_its_blocks_left(served):
    runner, block_size, alone = served
    for cache in runner.caches:
        cache["k_cache"].fill_(1e4)
        cache["v_cache"].fill_(-1e4)
    (prompt,) = prompts_of(18)
    request = Request("a", prompt, SamplingParams(max_tokens=3))
    run_and_compare(runner, scheduler_for(runner, block_size), alone, [request])


def test_drawn_tokens_do_not_depend_on_the_batch(served):
    runner, block_size, _ = served
    params = [
        SamplingParams(8, temperature=1.5, seed=1),
        SamplingParams(8, temperature=0.8, top_k=9, seed=2),
        SamplingParams(8, temperature=1.2, top_p=0.9, seed=3),
        SamplingParams(8),
    ]

    def tokens(which, max_num_batched_tokens):
        requests = [Request(str(i), prompts_of(5, 18, 2, 7)[i], params[i]) for i in which]
        scheduler = scheduler_for(runner, block_size, max_num_batched_tokens=max_num_batched_tokens)
        sampler = Sampler(torch.device("cpu"), 8)
        slots = Slots(sampler.counts)
        for request in requests:
            scheduler.add(request)
        while (step := scheduler.next_step()) is not None:
            draws = sample_specs(step, slots.update(step))
            tokens = sampler(runner.logits(step), draws).tokens.tolist() if draws else []
            finish(scheduler, step, tokens)
        return [request.new_tokens for request in requests]

    together = tokens([0, 1, 2, 3], 64)
    assert [tokens([i], 64)[0] for i in range(4)] == together
    assert tokens([3, 2, 1, 0], 5) == together[::-1]


def test_a_step_becomes_ragged_rows_with_padding_behind():
    def chunk(name, slot, tokens, start, blocks, drawing=1, **more):
        return Chunk(
            name,
            slot,
            tokens,
            start,
            ((0, blocks),) * 2,
            num_samples=drawing,
            num_output_rows=drawing,
            **more,
        )

    input_batch = InputBatch(rows=8, sequences=4, columns=5, block_size=4, num_groups=2)
    a, b = chunk("a", 2, (7, 8), 3, (5, 2)), chunk("b", 0, (9,), 0, (1,), drawing=0)
    step = ScheduledStep((a, b, chunk("c", 3, (6,), 8, (0, 4, 3))))
    shape = input_batch.write(step, num_rows=6)
    tensors = input_batch.step(shape)
    assert {
        name: value.tolist()
        for name, value in tensors._asdict().items()
        if name not in ("groups", "state_slots") and value is not None
    } == {
        "input_ids": [7, 8, 9, 6, 0, 0],
        "positions": [3, 4, 0, 8, 0, 0],
        "query_start": [0, 2, 3, 4],
        "seq_lens": [5, 1, 9],
        "logits_rows": [1, 3],
    }
    assert len(tensors.groups) == 2
    assert tensors.groups[1].slots.tolist() == [23, 8, 4, 12, -1, -1]
    assert tensors.groups[1].block_tables.tolist() == [[5, 2, 0], [1, 0, 0], [0, 4, 3]]
    assert tensors.state_slots.tolist() == [2, 0, 3]
    i64, i32 = torch.int64, torch.int32
    assert [value.dtype for value in tensors[:5]] == [i64, i64, i32, i32, i64]
    assert [value.dtype for value in (*tensors.groups[0], tensors.state_slots)] == [i64, i32, i64]

    # The next step computes the token that this one samples, in the blocks of earlier steps.
    input_batch.keep_tokens(torch.tensor([70, 60]))
    step = ScheduledStep((), decoding=DecodeRows((3, 2), (9, 5)))
    tensors = input_batch.step(input_batch.write(step, StepShape(4, 3, 3, 5)))
    assert tensors.input_ids.tolist() == [60, 70, 0, 0]
    assert tensors.query_start.tolist() == [0, 1, 2, 2] and tensors.seq_lens.tolist() == [10, 6, 0]
    assert tensors.groups[0].slots.tolist() == [13, 9, -1, -1]
    assert tensors.groups[0].block_tables.tolist() == [
        [0, 4, 3, 0, 0],
        [5, 2, 0, 0, 0],
        [0, 0, 0, 0, 0],
    ]

    # Decode rows come after the chunks; one of them has a new block.
    input_batch.keep_tokens(torch.tensor([61, 71]))
    rows = DecodeRows((3, 2), (10, 6), ((3, ((3, (4,)),) * 2),))
    step = ScheduledStep((chunk("b", 0, (9, 8), 1, ()),), decoding=rows)
    tensors = input_batch.step(input_batch.write(step, StepShape(5, 3, 3, 5)))
    assert tensors.input_ids.tolist() == [9, 8, 61, 71, 0]
    assert tensors.positions.tolist() == [1, 2, 10, 6, 0]
    assert tensors.query_start.tolist() == [0, 2, 3, 4] and tensors.seq_lens.tolist() == [3, 11, 7]
    assert tensors.logits_rows.tolist() == [1, 2, 3]
    assert tensors.groups[1].slots.tolist() == [5, 6, 14, 10, -1]
    assert tensors.groups[1].block_tables.tolist() == [
        [1, 0, 0, 0, 0],
        [0, 4, 3, 4, 0],
        [5, 2, 0, 0, 0],
    ]


def test_more_new_blocks_than_a_step_has_room_for_arrive_all_the_same():
    input_batch = InputBatch(rows=2, sequences=1, columns=40, block_size=1)
    chunk = Chunk("a", 0, (5,), 39, ((0, tuple(range(40, 80))),))
    assert input_batch.num_updates < 40
    assert input_batch.step(input_batch.write(ScheduledStep((chunk,)))).groups[
        0
    ].block_tables.tolist() == [[*range(40, 80)]]


BYTES = 1000
MODEL = {"groups": [(BYTES, 0)], "block_size": 16, "max_num_seqs": 4, "longest": 1000}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # As much as max_num_seqs sequences can use, if there is memory.
        ({"available": 10**9}, Capacity((4 * 63,), 16, 1000)),
        ({"available": 500 * BYTES}, Capacity((31,), 16, 496)),
        ({"available": 500 * BYTES, "max_model_len": 300}, Capacity((31,), 16, 300)),
        ({"available": 1, "kv_bytes": 160 * BYTES}, Capacity((10,), 16, 160)),
        ({"available": 1, "num_blocks": 100}, Capacity((100,), 16, 1000)),
        ({"available": 10**9, "max_model_len": 20}, Capacity((8,), 16, 20)),
        # One block for each sequence.
        ({"available": 10**9, "block_size": None}, Capacity((4,), 1000, 1000)),
        (
            {"available": 2500 * BYTES, "block_size": None, "max_model_len": 900},
            Capacity((2,), 900, 900),
        ),
        (
            {"available": 20000 * BYTES, "block_size": None, "longest": 9000},
            Capacity((4,), 5000, 5000),
        ),
        (
            {"available": 5000 * BYTES, "block_size": None, "longest": 9000},
            Capacity((2,), 2048, 2048),
        ),
        ({"available": 500 * BYTES, "block_size": None}, Capacity((1,), 500, 500)),
        (
            {"available": 1, "block_size": None, "num_blocks": 3, "max_model_len": 50},
            Capacity((3,), 50, 50),
        ),
    ],
)
def test_the_cache_takes_what_fits_and_what_can_be_used(given, expected):
    assert capacity(**{**MODEL, **given}) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # Four sequences need (40 + 2 * 20) / 16 + 2 blocks each behind their windows.
        ({"available": 10**9}, (4 * 63, 4 * 7)),
        ({"available": 1000 * BYTES}, (97, 28)),
        ({"available": 500 * BYTES}, (34, 28)),
        ({"available": 200 * BYTES}, (12, 12)),
        ({"available": 10**9, "max_model_len": 32}, (8, 8)),
    ],
)
def test_layers_with_a_window_get_what_they_can_use(given, expected):
    size = {
        **MODEL,
        "groups": [(BYTES // 2, 0), (BYTES // 2, 40)],
        "max_num_batched_tokens": 20,
        **given,
    }
    assert capacity(**size).num_blocks == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"max_model_len": 600},
            "a sequence of 600 tokens does not fit into the cache, which holds 496",
        ),
        (
            {"block_size": None, "max_model_len": 600},
            "a sequence of 600 tokens does not fit .* which holds 500",
        ),
        (
            {"kv_bytes": 10},
            r"fit into the cache, which holds 0 \(a token takes \d+ bytes, a block \d+\)",
        ),
    ],
)
def test_a_sequence_that_does_not_fit_the_cache_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        capacity(**{**MODEL, "available": 500 * BYTES, **given})


def write_checkpoint(folder):
    """A Qwen3 of random weights whose 256 + 2 tokens are bytes and two special ones."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, [])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<pad>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({**QWEN3, "vocab_size": 258, "eos_token_id": 7}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 257]}))
    return tokenizer


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder)
    return LLM(
        folder,
        load_format="dummy",
        kv_bytes=2**20,
        max_num_seqs=4,
        options={"strict": True, "glue": "eager"},
        progress=False,
    )


def test_an_llm_starts_from_a_folder_and_says_what_it_did(llm):
    assert list(llm.phases) == ["load", "compile", "allocate", "warm up"]
    assert llm.engine.eos_ids == {256, 257}
    assert llm.program.report is not None
    assert llm.engine.scheduler.next_step() is None and not llm.engine.scheduler.pool.owners


def test_generate_answers_texts_and_token_ids_in_order(llm):
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    first, second = llm.generate(["Once", [1, 2, 3]], params)
    assert first == llm.generate("Once", params)[0]
    assert list(first.prompt_token_ids) == llm.tokenizer.encode(
        "Once"
    ).ids and second.prompt_token_ids == (1, 2, 3)
    assert len(first.token_ids) == 6 and first.finish_reason == "length"
    assert first.text == llm.tokenizer.decode(list(first.token_ids))
    assert llm.tokens_per_second > 0 and not llm.engine.scheduler.pool.owners


def test_a_stop_token_ends_the_completion_and_is_not_text(llm):
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=5, ignore_eos=True)
    whole = llm.generate("Once", params)[0]
    stop = whole.token_ids[4]
    first = whole.token_ids.index(stop)
    stopped = llm.generate(
        "Once", SamplingParams(9, 1.0, seed=5, ignore_eos=True, stop_token_ids=(stop,))
    )[0]
    assert stopped.finish_reason == "stop" and stopped.token_ids == whole.token_ids[: first + 1]
    assert stopped.text == llm.tokenizer.decode(list(whole.token_ids[:first]))


def test_parameters_are_given_for_all_prompts_or_for_each(llm):
    each = [
        SamplingParams(max_tokens=1, ignore_eos=True),
        SamplingParams(max_tokens=3, ignore_eos=True),
    ]
    assert [len(completion.token_ids) for completion in llm.generate([[1], [2]], each)] == [1, 3]
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompts"):
        llm.generate([[1]], each)


def test_requests_without_a_seed_draw_differently(llm):
    params = SamplingParams(max_tokens=12, temperature=2.0, ignore_eos=True)
    assert len({completion.token_ids for completion in llm.generate([[1]] * 8, params)}) > 1


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], "the prompt is empty"),
        ([[1], [258]], "token id 258 is not in the vocabulary of 258 tokens"),
        ([[1], [0] * MAX_LEN], "a prompt of 64 tokens does not fit, at most 63 do"),
        ([1, 2], "expected a list of such lists"),
    ],
)
def test_a_wrong_prompt_fails_before_any_is_computed(llm, prompts, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts)
    assert not llm.engine.scheduler.requests


def test_pieces_are_whole_characters_and_make_the_text(llm):
    text = "na\u00efve \u4e2d\u6587 \U0001f600!"
    token_ids = llm.tokenizer.encode(text).ids
    assert len(token_ids) > len(text)
    detokenizer = Detokenizer(llm.tokenizer, prompt=[1, 2, 3])
    pieces = [detokenizer.add([token]) for token in token_ids]
    assert [piece for piece in pieces if piece] == list(text) and detokenizer.flush() == ""


def test_half_a_character_at_the_end_is_shown_as_such(llm):
    token_ids = llm.tokenizer.encode("ok\u4e2d").ids[:-1]
    detokenizer = Detokenizer(llm.tokenizer, prompt=[])
    assert [detokenizer.add(token_ids), detokenizer.flush()] == ["ok", "\ufffd"]


def test_special_tokens_have_no_text(llm):
    detokenizer = Detokenizer(llm.tokenizer, prompt=[256])
    assert (
        detokenizer.add([*llm.tokenizer.encode("a").ids, 257]) == "a" and detokenizer.flush() == ""
    )


def test_a_word_after_the_prompt_keeps_its_space():
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"\u2581once": 0, "\u2581upon": 1}, "\u2581once")
    )
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    assert tokenizer.decode([1]) == "upon"
    assert Detokenizer(tokenizer, prompt=[0]).add([1]) == " upon"


def test_streaming_gives_the_text_of_generate(llm):
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=1)
    assert "".join(llm.stream("Once", params)) == llm.generate("Once", params)[0].text


def test_a_stream_goes_on_while_others_generate_and_ends_when_closed(llm):
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=1, ignore_eos=True)
    expected = llm.generate("Once", params)[0].text
    stream = llm.stream("Once", params)
    start = next(stream)
    llm.generate([[1, 2]] * 5, SamplingParams(max_tokens=10, ignore_eos=True))
    assert start + "".join(stream) == expected
    closed = llm.stream("Once", params)
    next(closed)
    assert llm.engine.scheduler.requests
    closed.close()
    assert not llm.engine.scheduler.requests and not llm.engine.scheduler.pool.owners


def test_a_module_generates_from_token_ids():
    model, plain = tiny("llama")
    llm = LLM(model, max_model_len=40, options={"strict": True, "glue": "eager"}, progress=False)
    (completion,) = llm.generate([[3, 1, 4, 1, 5]], SamplingParams(max_tokens=8))
    assert (
        list(completion.token_ids) == Alone(plain).greedy([3, 1, 4, 1, 5], 8)
        and completion.text == ""
    )
    with pytest.raises(ValueError, match="no tokenizer for the prompt 'Hello'"):
        llm.generate("Hello")
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.stream([1])
    with pytest.raises(ValueError, match="stop strings cannot be found: use stop_token_ids"):
        llm.generate([[1]], SamplingParams(stop=(".",)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens is -1"),
        ({"num_blocks": 1, "kv_bytes": 1}, "set one of them"),
        ({"max_model_len": 65}, "max_model_len=65 exceeds the model's limit of 64 tokens"),
        ({"dtype": torch.float16}, "leave them out for a module"),
    ],
)
def test_wrong_arguments_fail_before_compiling(given, message):
    with pytest.raises(ValueError, match=message):
        LLM(tiny("llama")[0], **given)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_model_length", r"did you mean 'max_model_len'\?"),
        ("tensor_parallel_size", "docs/from-vllm.md has the names"),
    ],
)
def test_an_argument_that_llm_does_not_have_is_named(name, message):
    with pytest.raises(TypeError, match=f"LLM has no argument '{name}'.*{message}"):
        LLM(**{name: 2})


@pytest.mark.parametrize("options", [None, {"glue": "auto"}, Options(), {"strict": True}])
def test_auto_glue_is_eager_on_a_cpu(options):
    model, _ = tiny("llama")
    notes = LLM(model, options=options, progress=False).program.report.notes
    assert compile_programs.EAGER_NOTE in notes
    assert any(note.startswith("glue: eager") for note in notes)


@pytest.mark.parametrize("options", [{"glue": "inductor"}, Options(glue="inductor")])
def test_glue_that_was_asked_for_is_used(options, monkeypatch):
    options_used = []

    def stop(model, options, **_):
        options_used.append(options)
        raise ValueError("stop")

    monkeypatch.setattr(compile_programs, "compile_model", stop)
    with pytest.raises(ValueError, match="stop"):
        LLM(tiny("llama")[0], options=options, progress=False)
    assert [used.glue for used in options_used] == ["inductor"]


def test_the_file_of_options_sets_the_glue_of_every_command(monkeypatch, tmp_path):
    (tmp_path / "options.toml").write_text('[options]\nglue = "inductor"\n')
    monkeypatch.setenv("ATOMC_OPTIONS", str(tmp_path / "options.toml"))
    configs = []

    def stop(config, **_):
        configs.append(config)
        raise ValueError("stop")

    monkeypatch.setattr("atomc.runtime.llm.Engine", stop)
    main(["generate", "--quiet"])
    assert Options.of(configs[0].options).glue == "inductor"


class Stateless(torch.nn.Embedding):
    """No attention at all: the next token depends on the last one only."""

    def forward(self, input_ids, positions, logits_rows):
        return super().forward(input_ids)[logits_rows] @ self.weight.T


def test_a_model_that_does_not_say_its_length_needs_max_model_len():
    with pytest.raises(ValueError, match="set max_model_len"):
        LLM(Stateless(9, 4))


def test_a_model_without_state_handles_is_refused():
    with pytest.raises(ValueError, match="Stateless has no state"):
        LLM(
            loader.ready(Stateless(9, 4)),
            max_model_len=8,
            options={"strict": True, "glue": "eager"},
        )


def test_weights_replaced_after_compiling_are_noticed():
    model, _ = tiny("llama")
    llm = LLM(model, max_model_len=40, options={"strict": True, "glue": "eager"}, progress=False)
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    with pytest.raises(RunError, match="compile again"):
        llm.generate([[1, 2]])
    assert not llm.engine.scheduler.requests


def test_a_stock_transformers_model_generates_as_it_does_itself():
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**CONFIGS["llama"], eos_token_id=[3, 4])
    ).eval()
    prompt = [5, 6, 7, 8]
    expected = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=None
    )
    llm = LLM(model, options={"strict": True, "glue": "eager"}, progress=False)
    assert (llm.engine.eos_ids, llm.engine.vocab_size, llm.engine.scheduler.max_len) == (
        {3, 4},
        VOCAB,
        MAX_LEN,
    )
    (completion,) = llm.generate([prompt], SamplingParams(max_tokens=12, ignore_eos=True))
    assert [*prompt, *completion.token_ids] == expected[0].tolist()
