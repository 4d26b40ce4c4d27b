"""Why a request cannot run on a model: its token ids, images, or LoRA adapter."""

from atomc.runtime.lora_adapters import LoraAdapters
from atomc.runtime.requests.request import Request
from atomc.runtime.scheduling.image_limits import ImageLimits


def refuse_tokens(request: Request, vocab_size: int | None) -> None:
    """Raise ValueError for token ids outside of the vocabulary, and if no token may be sampled.
    vocab_size: None if it is not known.
    """
    for token in request.tokens:
        if token < 0 or (vocab_size is not None and token >= vocab_size):
            raise ValueError(f"token id {token} is not in the vocabulary of {vocab_size} tokens")
    if vocab_size is None:
        return
    request.params.check_vocabulary(vocab_size)
    allowed, least = request.params.allowed_token_ids, request.params.min_tokens
    possible = range(vocab_size) if allowed is None else allowed
    if least and request.banned.issuperset(possible):
        excluded = "the whole vocabulary" if allowed is None else "all of allowed_token_ids"
        raise ValueError(
            f"min_tokens is {least}, but stop_token_ids and end-of-sequence tokens are {excluded}: "
            "no token may be sampled; lower min_tokens"
        )


def refuse_images(request: Request, limits: ImageLimits | None, model: str) -> None:
    """Raise ValueError for images that do not fit the prompt or the model, whose name is `model`.
    limits: None if it reads no images.
    """
    if not request.images:
        return
    if limits is None:
        raise ValueError(f"the prompt has images, and {model} has no vision encoder: text only")
    limits.refuse(request.images, request.tokens[: request.num_prompt])


def refuse_adapter(request: Request, adapters: LoraAdapters) -> None:
    """Raise ValueError for an adapter that was unloaded, or for hidden states with one."""
    if request.lora is None:
        return
    if request.pooling is not None:
        raise ValueError(
            f"hidden states with the LoRA adapter {request.lora.name!r} are not supported: leave "
            "it out"
        )
    if adapters.get(request.lora.name) is not request.lora:
        raise ValueError(f"the LoRA adapter {request.lora.name!r} was unloaded: try again")
