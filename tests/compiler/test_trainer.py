"""transformers' Trainer with a model that atomc compiles in place."""

import pytest
import torch
from tiny_models import SIZES

import atomc

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def test_a_trainer_evaluates_a_compiled_model(tmp_path):
    config = transformers.AutoConfig.for_model("llama", num_hidden_layers=1, **SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config)
    data = [{"input_ids": torch.arange(9), "labels": torch.arange(9)}] * 2
    arguments = transformers.TrainingArguments(tmp_path, report_to=[], use_cpu=True)

    def loss():
        trainer = transformers.Trainer(model, arguments, eval_dataset=data)
        return trainer.evaluate()["eval_loss"]

    expected = loss()
    model.compile(backend="atom", options={"glue": "eager"})
    assert loss() == pytest.approx(expected, rel=1e-4)
    report = atomc.reports()[-1]
    assert report.treated and report.matches["rms_norm"] == 3
