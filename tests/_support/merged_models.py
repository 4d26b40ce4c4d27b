"""Models whose linears are merged, and what is asked of them."""

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import shared_objects
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import atomc
from atomc.loading.create_model import create_model
from atomc.weights import packed as packed_weights

Model = TypeVar("Model", bound=nn.Module)
EAGER = {"glue": "eager"}
UNMERGED = {
    **EAGER,
    "passes": dict.fromkeys(["merge_qkv", "merge_gate_up", "merge_linears"], False),
}
WIDTHS = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=128,
    head_dim=16,
    max_position_embeddings=64,
)


class Attention(nn.Module):
    """Queries, keys and values of one input, of different widths."""

    def __init__(self, width: int = 32, bias: bool = False):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, n, bias=bias) for n in (width, 16, 16))
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (-1, 8)).transpose(-2, -3)
            for linear in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(-2, -3).flatten(-2))  # type: ignore[no-any-return]


class Gated(nn.Module):
    def __init__(self, width: int = 32, bias: bool = False):
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(a, b, bias=bias) for a, b in ((width, 48), (width, 48), (48, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, bias: bool = False):
        super().__init__()
        self.attention, self.mlp = Attention(bias=bias), Gated(bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)  # type: ignore[no-any-return]


def ready(model: nn.Module) -> nn.Module:
    return model.eval().requires_grad_(False)


def fresh(kind: type[Model]) -> Model:
    """Such a model with the same weights each time."""
    torch.manual_seed(0)
    model = kind()
    ready(model)
    return model


X = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))


def compiled(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="atom", options={**EAGER, **options})


def last() -> atomc.Report:
    return atomc.reports()[-1]


def merges(report: atomc.Report | None = None) -> dict[str, int]:
    return {
        name: count
        for name, count in (report or last()).matches.items()
        if name.startswith("merge")
    }


def widths() -> list[list[int]]:
    return [site.attrs["widths"] for site in last().sites if site.rewrite.startswith("merge")]


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def live_bytes() -> int:
    """The bytes of all tensors that are alive, each byte counted once however many tensors lie on
    it.
    """
    with shared_objects.shown():
        spans = {
            (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
            for item in gc.get_objects()
            if type(item) in (Tensor, nn.Parameter)
            and item.device.type == "cpu"
            and item.layout == torch.strided
            for storage in [item.untyped_storage()]
        }
    total = reached = 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def whole(*parameters: nn.Parameter) -> Tensor:
    """The pack of these, which there must be already."""
    assert packed_weights.packed_together(parameters[0]), "not packed"
    found = packed_weights.pack(parameters)
    assert isinstance(found, Tensor)
    return found


def weights(*linears: nn.Linear) -> list[nn.Parameter]:
    return [linear.weight for linear in linears]


def stock(kind: str, **config: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**WIDTHS, **config)
    )
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return ready(made)


def own(device: str = "cpu") -> nn.Module:
    config: dict[str, Any] = {
        **WIDTHS,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
    model = ready(create_model(config, device=device))
    if device != "meta":
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model
