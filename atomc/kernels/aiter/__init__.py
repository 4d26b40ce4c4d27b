"""Ops run by AITER, AMD's kernels for its GPUs: compiled ones first, those in Triton where these
refuse.
"""

from importlib import import_module

# Of the kernels that take a call, the first is chosen: those of the first module here.
MODULES = (
    "rows.activation",
    "rows.activation_quant",
    "attention.attention",
    "collective.collective",
    "collective.collective_quant",
    "experts.experts",
    "experts.experts_blocks",
    "experts.experts_mxfp4_triton",
    "experts.experts_triton",
    "latent.indexer",
    "rows.kv_write",
    "latent.latent_attention",
    "latent.latent_attention_triton",
    "latent.latent_cache",
    "latent.latent_chosen_triton",
    "latent.latent_prompts",
    "linear.linear",
    "linear.linear_shuffled_split_cat",
    "linear.linear_shuffled_split_cat_mxfp4",
    "linear.linear_split_cat",
    "latent.mla",
    "latent.mla_unfused",
    "rows.norm",
    "rows.norm_quant",
    "rows.norm_quant_triton",
    "rows.norm_rope_kv_write",
    "rows.norm_triton",
    "attention.paged_attention",
    "attention.paged_attention_triton",
    "rows.quant",
    "rows.quant_triton",
    "rows.rope",
    "rows.rope_kv_write",
    "rows.rope_triton",
    "experts.route",
    "linear.scaled_linear",
    "linear.scaled_linear_blocks",
    "linear.scaled_linear_rows",
    "linear.scaled_linear_triton",
    "attention.shuffled_attention",
    "attention.shuffled_attention_gluon",
    "attention.shuffled_attention_triton",
    "attention.shuffled_kv_write",
    "attention.shuffled_norm_rope_kv_write",
    "attention.shuffled_rope_kv_write",
    "attention.shuffled_unfused",
)
for _module in MODULES:
    import_module(f"{__name__}.{_module}")
