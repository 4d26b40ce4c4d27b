"""The vision encoder of a model that the cache knows is not traced."""

import pytest
import torch
from test_mtp_images import PROMPTS, image, tiny_model

from atomc.cache.model_cache import ModelCache
from atomc.compiler import trace_model
from atomc.encoder import TAKES, compile_encoder
from atomc.options import Options
from atomc.platform import Platform
from atomc.runtime.engine import Engine, EngineConfig
from atomc.runtime.requests.sampling_params import SamplingParams

pytestmark = pytest.mark.xdist_group("mtp_images")


def options_of(folder):
    return {"strict": True, "glue": "eager", "cache": True, "cache_dir": str(folder)}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder with the entry of the encoder, and the encoder."""
    folder = tmp_path_factory.mktemp("encoder")
    return folder, compile_encoder(tiny_model(), options_of(folder))


@pytest.fixture
def no_traces(monkeypatch):
    """From its call on, a trace is an error."""

    def trace(*arguments, **named):
        raise AssertionError("a program is traced")

    return lambda: monkeypatch.setattr(trace_model, "trace", trace)


def test_a_second_start_traces_no_encoder_and_reads_the_weights_of_its_own_model(kept, no_traces):
    folder, cold = kept
    assert cold.report.cache == "miss: the cache is empty" and "dynamo" in cold.report.phases
    assert not [note for note in cold.report.notes if note.startswith("traced")]
    no_traces()
    model = tiny_model()
    for name, weight in model.named_parameters():
        if "visual" in name:
            weight.mul_(1.2)
    warm = compile_encoder(model, options_of(folder))
    assert warm.report.cache == "hit" and warm.report.phases.keys() == {"cache"}
    assert warm.report.num_ops == cold.report.num_ops
    for images in ([image(0, 0)], [image(1, 0), image(2, 0), image(3, 0)]):
        given = [torch.frombuffer(bytearray(one.pixels), dtype=torch.float32) for one in images]
        pixels, grids = torch.cat(given).view(-1, 96).double(), [one.grid for one in images]
        expected = model.encode_images(pixels, grids)
        torch.testing.assert_close(warm(pixels, grids), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("takes", "owned", "eps", "why"),
    [
        (TAKES, False, 1e-6, None),
        (TAKES, False, 1e-2, "module model.visual.blocks.0.norm1 changed"),
        (TAKES, True, 1e-6, "kind of program changed from"),
        ("others", False, 1e-6, "inputs changed from"),
    ],
)
def test_another_encoder_and_another_program_of_the_model_are_other_entries(
    kept, takes, owned, eps, why
):
    model = tiny_model()
    model.model.visual.blocks[0].norm1.eps = eps
    options = Options.of(options_of(kept[0]))
    cache = ModelCache(model, options, Platform.detect("cpu"), takes, owned=owned, observed=False)
    found = cache.load()
    assert (found is None) == (why is not None)
    assert cache.lookup.outcome.why.startswith(why or "")


@pytest.mark.slow
def test_a_second_start_of_an_engine_traces_none_of_its_programs(tmp_path, no_traces):
    def tokens():
        config = EngineConfig(
            speculative="mtp",
            speculative_tokens=2,
            num_blocks=40,
            max_num_seqs=4,
            options=options_of(tmp_path) | {"layout": "paged"},
        )
        one = Engine(config, module=tiny_model(), progress=False)
        of = one.executor.programs
        programs = [of.main, of.steps["images"], of.encoder.encode, *of.draft.programs]
        prompt, images = PROMPTS[0]
        request = one.request("a", prompt, SamplingParams(max_tokens=9), images=images)
        one.add(request)
        while one.has_work:
            one.step()
        return request.new_tokens, [program.report.cached.kind for program in programs]

    cold, outcomes = tokens()
    assert set(outcomes) == {"miss"}
    no_traces()
    assert tokens() == (cold, ["hit"] * 5)
