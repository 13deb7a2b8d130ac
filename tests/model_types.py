"""Every causal language model that transformers knows, tiny, with random weights: right on a ring of two, or refused?

python -m tests.model_types        a line a type
"""

from __future__ import annotations

import copy
import sys

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests import pool
from usp.integrations.transformers import parallelize

# What configurations call their sizes; a type takes those that it has.
SIZES = dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 48)
SIZES |= dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "n_inner"), 40)
SIZES |= dict.fromkeys(("num_hidden_layers", "n_layer", "decoder_layers"), 2)
SIZES |= dict.fromkeys(("num_attention_heads", "n_head", "decoder_attention_heads"), 6)
SIZES |= dict.fromkeys(("max_position_embeddings", "n_positions", "vocab_size"), 64)
SIZES |= dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4)
SIZES |= dict.fromkeys(("head_dim", "rotary_dim"), 8)
SIZES |= {"num_key_value_heads": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "attention_dropout": 0.0}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
LARGEST = 3_000_000  # parameters; types whose sizes have other names stay out
PROMPT, SEQ = 9, 24


def made(kind: str) -> transformers.PreTrainedModel | None:
    """A tiny model of a type, if its configuration can be made so by these names."""
    try:
        config = transformers.CONFIG_MAPPING[kind]()
        for name in SIZES.keys() & config.to_dict().keys():
            setattr(config, name, SIZES[name])
        if getattr(config, "sliding_window", None) is not None:
            config.sliding_window = 7
        if getattr(config, "layer_types", None):
            config.layer_types = list(config.layer_types)[:2]
        with torch.device("meta"):
            empty = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        if sum(x.numel() for x in empty.parameters()) > LARGEST:
            return None
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * (0.5 if parameter.ndim < 2 else 0.15))
            model(tokens(), use_cache=False)
    except Exception:  # whatever: transformers alone did not get so far
        return None
    return model


def tokens() -> torch.Tensor:
    return torch.randint(2, 60, (2, SEQ), generator=torch.Generator().manual_seed(1))


def outcome(kind: str) -> str:
    """On a rank of two: "equal", "refused: why", "not tried", or what is wrong."""
    model = made(kind)
    if model is None:
        return "not tried"
    ids = tokens()
    how = {"max_new_tokens": 10, "do_sample": False}
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
        try:
            text = model.generate(ids[:, :PROMPT], **how)
        except Exception:
            text = None  # transformers alone cannot
        try:
            spread = parallelize(copy.deepcopy(model), pool.mesh(2, 1))
            found = spread(ids, use_cache=False).logits
            same = text is None or torch.equal(spread.generate(ids[:, :PROMPT], **how), text)
        except ValueError as error:
            return f"refused: {error}"
    off = ((found - logits).abs().max() / logits.abs().max()).item()
    return "equal" if off < 1e-5 and same else f"logits off by {off:.0e}, same text: {same}"


def outcomes(kinds: list[str]) -> dict[str, str]:
    transformers.logging.set_verbosity_error()
    return {kind: outcome(kind) for kind in kinds}


def main() -> None:
    two = pool.Pool(2)
    for kind in sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        (found, _) = two(outcomes, [kind])
        print(f"{kind:24} {found[kind]}", flush=True)
    two.close()


if __name__ == "__main__":
    main()
