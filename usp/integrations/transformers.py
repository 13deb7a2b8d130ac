"""Models of transformers on a mesh: training, evaluation and generation (transformers 4.57 to 5).

Note [Calls of a model]
~~~~~~~~~~~~~~~~~~~~~~~
Everything but attention works token by token, so a model needs no change to run on a shard. What attention must know
about a call (who has which tokens, what they see, which cache) travels with the call, as the keyword argument `usp`
that transformers hands down to every layer, and that a recomputed layer gets again. A parallelized model is called in
one of two ways:

- with what `usp.shard_batch` returns: this rank's tokens. Logits are this rank's, the loss is of all ranks.
- as before, with whole tensors, the same on every rank: they are cut inside, and logits are whole again. So `generate`
  and evaluation need no change. A prompt is computed across ranks and stays where it was computed, in a cache with this
  rank's tokens and heads; the next tokens are computed by every rank, but for attention, which asks all caches.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (  # pyright: ignore[reportMissingImports]
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, CacheLayerMixin  # pyright: ignore[reportMissingImports]

from usp import comm
from usp.attention import hybrid_attention, traced_attention
from usp.heads import runs
from usp.inference import KVCache, decode_attention, prefill_attention
from usp.masks import EVERYWHERE, Mask
from usp.mesh import axes, data_axis
from usp.nn import tiled_cross_entropy, tiled_mlp
from usp.partitions import Layout, Partition
from usp.sharding import partition, positions, unshard
from usp.training import (
    IGNORED,
    Spread,
    check_gradients,
    check_targets,
    checked_items,
    cut,
    digest,
    documents_of,
    mean_over_ranks,
    sequence_parallel_loss,
    shown,
    sorted_out,
)

NAME = "usp"  # of the attention and the mask function; "flash", "sdpa" and "flex" in it would have a meaning
Model = TypeVar("Model", bound=PreTrainedModel)
T = TypeVar("T")


def parallelize(
    model: Model,
    mesh: DeviceMesh | None,
    *,
    layout: Layout | str = Layout.ZIGZAG,
    gradients: str = "mean",
    replicate_kv: bool = False,
    exchange: str = "ring",
    backend: str = "auto",
    prefill: str = "auto",
    decode: str = "auto",
    tile_mlp: int | None = None,
    tile_loss: int | None = None,
    seed: int = 0,
    check_ranks: bool = True,
) -> Model:
    """Make a model of transformers compute its attention over a mesh, in place. Its parameters stay as they are.

    Causal language models and base models whose layers other than attention work token by token: Llama, Qwen, Mistral,
    Gemma, GPT-OSS, GPT-2 and their like. Grouped heads, windows, softcap, sinks, packed documents, padding and dropout
    are honoured. Every rank has the same model; a model that is itself sharded (FSDP2, tensor parallel linear layers)
    is parallelized first, with the ring and ulysses axes of the same mesh.

    Args:
        mesh: a mesh with the axes "ring" and "ulysses", or None for one process.
        layout: for calls with whole tensors. `shard_batch` has the layout of its partition.
        gradients: "mean" if gradients will be averaged over data x ring x ulysses, as by DDP and FSDP2; or "sum". The
            gradient of the loss that the model returns is scaled for it. An axis of other samples is called "data".
        replicate_kv, exchange, backend: as in `usp.hybrid_attention`.
        prefill, decode: algorithms of `usp.inference`.
        tile_mlp: let the MLPs compute so many tokens at a time, again in backward (`usp.nn.tiled_mlp`).
        tile_loss: let the loss have logits of so many tokens at a time (`usp.nn.tiled_cross_entropy`); the logits that
            a sharded call returns beside its loss are then those of the last token alone, and a whole call has none.
        seed: of attention dropout; another one for a run that is resumed, which begins its masks anew.
        check_ranks: let the ranks of a sequence agree on each call of the model, on its tokens too.

    Returns:
        the model. Called with whole tensors and labels, with gradients, it returns its loss and no logits.

    Raises:
        ValueError: on every rank, for a model with layers that mix tokens otherwise (convolutions, recurrent layers,
            other kinds of attention), naming them, for options that do not fit, or if the ranks' models differ.
    """
    options = {"replicate_kv": replicate_kv, "exchange": exchange, "backend": backend}

    def check() -> _Parallel:
        check_gradients(gradients)
        _check_model(model)
        for name, tile in (("tile_mlp", tile_mlp), ("tile_loss", tile_loss)):
            if tile is not None and (not isinstance(tile, int) or isinstance(tile, bool) or tile < 1):
                raise ValueError(f"{name}={tile!r}: give how many tokens are computed at a time, at least 1, or None")
        if tile_mlp is not None and not any(isinstance(getattr(x, "mlp", None), nn.Module) for x in model.modules()):
            raise ValueError(f"tile_mlp={tile_mlp}: no module of {type(model).__name__} is called mlp; leave it out")
        return _Parallel(model, mesh, Layout(layout), gradients, options, prefill, decode, tile_loss, seed, check_ranks)

    def facts(_: _Parallel) -> dict[str, object]:
        return {
            "model": type(model).__name__,
            "config": str(model.config),
            "parameters": [(name, tuple(x.shape), str(x.dtype)) for name, x in model.named_parameters()],
            "options": options | {"layout": layout, "gradients": gradients, "prefill": prefill, "decode": decode}
            | {"tile_mlp": tile_mlp, "tile_loss": tile_loss, "seed": seed},
        }  # fmt: skip

    parallel = comm.agreed(axes(mesh), check, facts, ask=check_ranks)
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    model.set_attn_implementation(NAME)
    for module in model.modules():
        module._usp = parallel  # pyright: ignore[reportArgumentType]
        if tile_mlp is not None and isinstance(mlp := getattr(module, "mlp", None), nn.Module):
            mlp.forward = partial(_in_tiles, mlp.forward, tile_mlp)
        if isinstance(module, PreTrainedModel) and module is not model:
            module.register_forward_pre_hook(parallel.before_part, with_kwargs=True)
        if _asks_for_the_last_position(module):
            module.register_forward_pre_hook(parallel.before_rotary, with_kwargs=True)
            module.register_forward_hook(parallel.after_rotary)
    model.register_forward_pre_hook(parallel.before, with_kwargs=True)
    model.register_forward_hook(parallel.after, with_kwargs=True)
    if _is_language_model(model):
        model.loss_function = parallel.loss
        if tile_loss is not None:
            head = model.get_output_embeddings()
            head.register_forward_pre_hook(parallel.before_head)
            head.register_forward_hook(parallel.after_head)
    return model


@dataclass
class _Call:
    """What attention must know about one call of a model, and what is kept until its loss."""

    spread: Spread
    seed: int = 0
    whole: bool = False  # the caller has whole tensors
    cache: ShardedCache | None = None
    sharded: bool = True  # the tensors of the layers are this rank's tokens, not all
    last: int = 0  # of a whole sequence, the logits of so many tokens are wanted; 0 is all
    tiled: bool = False  # the head gets one token, and the loss calls it with the others
    head: nn.Module | None = None
    hidden: Tensor | None = None  # what the head would have got
    raw: Tensor | None = None  # the logits of that token


class _Whole(NamedTuple):
    """A call with whole tensors that has been found right."""

    tensors: dict[str, Tensor]
    documents: Tensor | None
    spread: Spread
    turn: bool  # a prompt or more of one, to be computed in shards


class _Parallel:
    """A model on a mesh: its options, and what happens before and after a call."""

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: DeviceMesh | None,
        layout: Layout,
        gradients: str,
        options: dict[str, Any],
        prefill: str,
        decode: str,
        tile_loss: int | None,
        seed: int,
        check_ranks: bool,
    ):
        self.mesh, self.layout, self.gradients, self.options = mesh, layout, gradients, options
        self.prefill, self.decode, self.tile_loss = prefill, decode, tile_loss
        self.seed, self.check_ranks = seed, check_ranks
        self.ranks, self.data = axes(mesh), data_axis(mesh)
        self.size = self.ranks[0].size * self.ranks[1].size
        self.config = model.config.get_text_config()
        self.names = list(inspect.signature(model.forward).parameters)
        self.cache_name = "cache" if "cache" in self.names else "past_key_values"
        self.drops = any(getattr(self.config, name, 0) for name in _DROPOUT)
        self.calls = 0
        self.known = False  # what the model does with logits
        self.current: _Call | None = None  # for modules that are not handed keyword arguments
        self.positions = [
            (name, module.num_embeddings - getattr(module, "offset", 0))
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding) and re.search("position|wpe", name)
        ]

    def __deepcopy__(self, memo) -> _Parallel:
        return self  # of the mesh; a copied model is on the same one

    def before(self, model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Make a call one of this rank's tokens."""
        if self.cache_name not in kwargs and "past_key_values" in kwargs:  # its name before transformers 5
            kwargs = kwargs | {self.cache_name: kwargs["past_key_values"]}
            del kwargs["past_key_values"]
        if "usp" in kwargs:
            return args, self._sharded(model, kwargs)
        kwargs = dict(zip(self.names, args, strict=False)) | kwargs
        return (), self._whole(model, kwargs)

    def before_part(self, part: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Of a part that is called by itself, with what `usp.shard_batch` returned."""
        return (args, self._sharded(part, kwargs)) if isinstance(kwargs.get("usp"), Spread) else None

    def _sharded(self, model: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        spread, labelled = kwargs["usp"], kwargs.get("labels") is not None

        def check() -> None:
            if not isinstance(spread, Spread):
                raise ValueError(
                    f"usp is of the type {type(spread).__name__}: give the model what usp.shard_batch returns"
                )
            self._check_kwargs(model, kwargs, spread.last)
            if kwargs.get("attention_mask") is not None:
                raise ValueError(
                    "attention_mask beside usp: give it to usp.shard_batch with the whole batch; usp stands for it"
                )
            if kwargs.get(self.cache_name) is not None or kwargs.get("use_cache"):
                raise ValueError("a sharded batch is computed without a cache: for one, give whole tensors")
            given = [name for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None]
            if not given:
                raise ValueError("a sharded batch needs input_ids or inputs_embeds, by name: model(**batch)")
            if kwargs[given[0]].shape[1] != spread.tokens.seq_local:
                raise ValueError(
                    f"{given[0]} has {kwargs[given[0]].shape[1]} tokens, but usp is of a batch of which this rank has "
                    f"{spread.tokens.seq_local}: give both as usp.shard_batch returned them"
                )
            if kwargs.get("position_ids") is None:
                raise ValueError("position_ids are missing: a shard does not know where it is; usp.shard_batch says it")

        self._agreed(check, lambda _: self._facts(model, kwargs, spread), labelled)
        self.current = _Call(spread, self._next_seed(model), tiled=self.tile_loss is not None and labelled)
        return kwargs | {"usp": self.current, "use_cache": False}

    def _agreed(self, check: Callable[[], T], facts: Callable[[T], dict[str, object]], labelled: bool) -> T:
        """What `check` finds, on all ranks of the sequence; and of all replicas, if they will meet in a loss."""

        def here() -> T:
            return comm.agreed(self.ranks, check, facts, ask=self.check_ranks)

        if not labelled or self.data.size == 1:
            return here()
        return comm.agreed((self.data,), here, lambda _: {}, ask=self.check_ranks)

    def _facts(self, model: nn.Module, kwargs: dict[str, Any], spread: Spread) -> dict[str, object]:
        learning = torch.is_grad_enabled()
        modes = {"grad mode": learning, "training": model.training}
        modes["trained parameters"] = learning and [x.requires_grad for x in model.parameters()]
        modes["arguments"] = sorted(name for name, x in kwargs.items() if x is not None)
        return modes | {"tokens": spread.tokens, "mask": spread.mask(causal=True)}

    def _next_seed(self, model: nn.Module) -> int:
        """The same on all ranks of a sequence, another one in each replica and call; 0 without dropout."""
        if not (model.training and self.drops):
            return 0
        self.calls += 1
        return hash((self.seed, self.calls, self.data.rank)) % (1 << 48) + 1

    def _whole(self, model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
        batch = {name: kwargs[name] for name in _BATCH if kwargs.get(name) is not None}
        labelled, cache = "labels" in batch, kwargs.get(self.cache_name)
        trained = any(x.requires_grad for x in (*batch.values(), *model.parameters()))
        learning, use_cache = torch.is_grad_enabled() and trained, kwargs.get("use_cache")
        if use_cache is None:
            padding = batch.get("attention_mask")
            ends = isinstance(padding, Tensor) and padding.ndim == 2 and not bool(padding[:, -1].all())
            wanted = getattr(self.config, "use_cache", False) and not (learning or labelled or ends)
            use_cache = cache is not None or wanted

        def check() -> _Whole:
            _check_whole(kwargs, cache)
            if learning and self.size > 1 and (use_cache or not labelled):
                raise ValueError(
                    "a whole sequence on every rank, with gradients and without labels: give the model what "
                    "usp.shard_batch returns, or call it under torch.no_grad()"
                )
            if use_cache and model.training and self.drops:
                raise ValueError("a cache, of a model that trains with attention dropout: call model.eval() first")
            if labelled and (use_cache or kwargs.get("logits_to_keep")):
                raise ValueError(
                    "labels beside a cache or logits_to_keep: compute the loss of a whole sequence with "
                    "use_cache=False and all logits"
                )
            found = self._found(batch, cache if use_cache else None, use_cache)
            self._check_kwargs(model, kwargs, found.spread.last)
            return found

        def facts(found: _Whole) -> dict[str, object]:
            same = {f"{name} (when sampling, seed all ranks alike)": digest(x) for name, x in batch.items()}
            return same | {"use_cache": use_cache} | self._facts(model, kwargs, found.spread)

        tensors, documents, spread, turn = self._agreed(check, facts, labelled)
        if use_cache and not isinstance(cache, ShardedCache):
            cache = ShardedCache.instead_of(cache)
        last = kwargs.get("logits_to_keep", 0) if "logits_to_keep" in self.names else 0
        how = {"whole": True, "sharded": turn, "last": last, "tiled": self.tile_loss is not None and labelled}
        self.current = _Call(spread, self._next_seed(model), cache=cache if use_cache else None, **how)
        kwargs = {name: x for name, x in kwargs.items() if name not in (*_BATCH, "cache_position")}
        if turn:
            tensors = cut(tensors, documents, self.mesh, spread.tokens)
            if last:
                kwargs["logits_to_keep"] = self._last(spread.tokens, last)[0].to(tensors["position_ids"].device)
        return kwargs | tensors | {"usp": self.current, "use_cache": use_cache, self.cache_name: self.current.cache}

    def _found(self, batch: dict[str, Any], cache: Any, use_cache: bool) -> _Whole:
        """What a whole batch is about, and whether it is computed in shards.

        Raises:
            ValueError: naming what does not fit.
        """
        tensors = dict(batch)
        padding = tensors.pop("attention_mask", None) if use_cache else None
        if not (given := [x for name, x in batch.items() if name in ("input_ids", "inputs_embeds")]):
            raise ValueError(f"the call has {sorted(batch)}: give input_ids or inputs_embeds")
        count, seq = given[0].shape[:2]
        start = 0 if cache is None else cache.get_seq_length()
        tensors, _ = sorted_out(tensors, seq)
        documents = None if use_cache else documents_of(tensors)
        show, padded = _history(padding, count, start, seq) if use_cache else (shown(documents), False)
        if "position_ids" not in tensors:
            tensors["position_ids"] = torch.arange(start, start + seq, device=given[0].device)[None]
        turn = not start or padded or seq >= 2 * self.size
        layout = self.layout if turn else Layout.CONTIGUOUS
        mask = show(True, None) if layout == Layout.BALANCED else None
        tokens = partition(seq, self.mesh, layout, mask=mask, start=start)
        return _Whole(tensors, documents, Spread(tokens, show, tensors["position_ids"].max()), turn)

    def after(self, model: PreTrainedModel, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """Give the caller of a call with whole tensors whole tensors."""
        call, self.current = kwargs["usp"], None
        if not call.whole:
            return output
        for name in ("last_hidden_state", "logits"):
            if (x := output.get(name)) is not None:
                output[name] = self._put_together(x, call, call.last if name == "logits" else 0)
        if call.sharded and output.get("hidden_states") is not None:
            output["hidden_states"] = tuple(unshard(x, self.mesh, call.spread.tokens) for x in output["hidden_states"])
        return output

    def _put_together(self, x: Tensor, call: _Call, last: int) -> Tensor | None:
        """Whole, and the same to the bit on every rank, so that all draw the same token."""
        tokens = call.spread.tokens
        if call.tiled or (torch.is_grad_enabled() and x.requires_grad and self.size > 1):
            return None  # the loss is what counts, and it is there
        if call.sharded and not last:
            return unshard(x, self.mesh, tokens)
        if not call.sharded:
            return self._alike(x)
        _, places = self._last(tokens, last)
        whole = x.new_zeros((len(x), min(last, tokens.seq), *x.shape[2:]))
        whole[:, places.to(x.device)] = x
        for axis in self.ranks:
            if axis.size > 1:
                comm.all_reduce(whole, axis.group, "logits")
        return whole

    def _alike(self, x: Tensor) -> Tensor:
        """What every rank has computed, to the bit the same: each gives a share of the last dim to all others."""
        for axis in self.ranks:
            if axis.size > 1:
                shares = runs(x.shape[-1], axis.size)
                own = x[..., shares[axis.rank].start : shares[axis.rank].stop].movedim(-1, 0).contiguous()
                x = comm.all_gather_uneven(own, [len(share) for share in shares], axis.group, "logits").movedim(0, -1)
        return x.contiguous()

    def _last(self, tokens: Partition, count: int) -> tuple[Tensor, Tensor]:
        """This rank's tokens among the last of a whole sequence: where they are here, and where among those."""
        here = positions(self.mesh, tokens, device="cpu")[0] - tokens.starts[0]
        chosen = ((here < tokens.seq) & (here >= tokens.seq - count)).nonzero()[:, 0]
        return chosen, here[chosen] - max(0, tokens.seq - count)

    # Some rotary embeddings ask how long the sequence is, by its largest position: they get that one besides.

    def before_rotary(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        given = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
        here = given["position_ids"]
        last = here.max() if self.current is None or self.current.spread.last is None else self.current.spread.last
        besides = last.to(here).expand(len(here), 1)
        return (), given | {"position_ids": torch.cat([here, besides], 1)}

    def after_rotary(self, module: nn.Module, args: tuple, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(x[:, :-1] for x in output)

    def loss(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: int | Tensor | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Of all ranks, as the model's own loss function would be of all tokens.

        Raises:
            ValueError: without targets that were shifted before the batch was cut.
        """

        call = self.current

        def check() -> float | None:
            if shift_labels is None or ignore_index != IGNORED:
                raise ValueError(
                    f"labels on a mesh, with shift_labels={shift_labels} and ignore_index={ignore_index}: labels are "
                    "shifted before a batch is cut, and -100 is ignored; give the model all that usp.shard_batch "
                    "returns, shift_labels too"
                )
            if call is not None and call.tiled:
                self._check_logits(logits, call)
            elif logits.shape[:-1] != shift_labels.shape:
                raise ValueError(
                    f"logits {tuple(logits.shape)} for labels {tuple(shift_labels.shape)}: leave logits_to_keep out of "
                    "a call with labels"
                )
            if not torch.compiler.is_compiling():  # this looks at numbers
                check_targets(shift_labels, vocab_size)
            return None if num_items_in_batch is None else checked_items(num_items_in_batch)

        everyone, how = (*self.ranks, self.data), {"gradients": self.gradients, "check_ranks": False}
        items = comm.agreed(everyone, check, lambda x: {"num_items_in_batch": x}, ask=self.check_ranks)
        if call is None or not call.tiled:
            return sequence_parallel_loss(logits, shift_labels, self.mesh, num_items=items, **how)
        head, hidden, call.hidden = call.head, call.hidden, None
        total = tiled_cross_entropy(hidden, lambda x: self._after_head(head(x)), shift_labels, tile=self.tile_loss)
        count = (shift_labels != IGNORED).sum()
        return mean_over_ranks(total, count, self.mesh, num_items=items, gradients=self.gradients)

    # With `tile_loss` the model's head gets one token, and the loss what the head would have got.

    def before_head(self, head: nn.Module, args: tuple) -> tuple | None:
        """Keep what the head is called with, and let it have the last token."""
        call = self.current
        if call is None or not call.tiled or call.head is not None:
            return None
        call.head, call.hidden = head, args[0]
        return (args[0][:, -1:], *args[1:])

    def after_head(self, head: nn.Module, args: tuple, output: Tensor) -> None:
        """Keep the logits of that token, before the model does more with them."""
        if self.current is not None and self.current.raw is None:
            self.current.raw = output.detach()

    def _after_head(self, logits: Tensor) -> Tensor:
        """What models do with logits, by their configuration."""
        for name, then in _AFTER_HEAD.items():
            if (value := getattr(self.config, name, None)) is not None:
                logits = then(logits, value)
        return logits

    def _check_logits(self, logits: Tensor, call: _Call) -> None:
        """They are of the one token that the head got, and the model does with them what is known of it.

        Raises:
            ValueError: if not.
        """
        raw = call.raw
        if raw is None or call.hidden is None or raw.shape != logits.shape:
            raise ValueError(
                f"tile_loss={self.tile_loss}: the head that the model was parallelized with was replaced or wrapped, "
                "and gave no logits of one token; parallelize the model as it is now, or leave tile_loss out"
            )
        if torch.compiler.is_compiling():
            return
        if not self.known and not torch.allclose(
            self._after_head(raw), logits.detach(), rtol=1e-2, atol=1e-3, equal_nan=True
        ):
            raise ValueError(
                f"tile_loss={self.tile_loss}: the model changes its logits behind the head by more than "
                f"{', '.join(_AFTER_HEAD)} of its configuration say; leave tile_loss out"
            )
        self.known = True

    def _check_kwargs(self, model: Any, kwargs: dict[str, Any], last: Tensor | None) -> None:
        """Nothing is asked that a model on a mesh does not do, and no table lacks an entry for a token of one rank.

        Raises:
            ValueError: naming it.
        """
        if (chosen := self.config._attn_implementation) != NAME:
            raise ValueError(
                f"the model was told to use attention {chosen!r} after it was parallelized, which would see this "
                f"rank's tokens alone: model.set_attn_implementation({NAME!r})"
            )
        for name, reason in _REFUSED.items():
            if kwargs.get(name, getattr(self.config, name, False)):
                raise ValueError(f"{name}=True: {reason}; set it to False in the call and in the configuration")
        if torch.compiler.is_compiling():
            return  # what follows looks at numbers
        ids, table = kwargs.get("input_ids"), model.get_input_embeddings()
        if ids is not None and ids.numel() and isinstance(table, nn.Embedding):
            low, high = (int(x) for x in ids.aminmax())
            if low < 0 or high >= table.num_embeddings:
                raise ValueError(
                    f"input_ids hold {low if low < 0 else high}, but the vocabulary has {table.num_embeddings}"
                )
        for name, size in self.positions:
            if last is not None and last >= size:
                raise ValueError(f"a token is at position {int(last)}, but {name} has {size}: give shorter sequences")


_REFUSED = {
    "output_attentions": "attention weights are never whole anywhere",
    "output_router_logits": "the loss that balances experts needs the tokens of all ranks at once",
}
_BATCH = ("input_ids", "inputs_embeds", "token_type_ids", "attention_mask", "position_ids", "labels", "shift_labels")
_AFTER_HEAD: dict[str, Callable[[Tensor, float], Tensor]] = {
    "logits_scaling": lambda x, value: x / value,
    "logit_scale": lambda x, value: x * value,
    "final_logit_softcapping": lambda x, value: torch.tanh(x / value) * value,
}
_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
_LAYERS = ("full_attention", "sliding_attention")
_MIXERS = re.compile("Mamba|Rwkv|Recurrent|Hyena|Retention|LinearAttention|GatedDelta|ShortConv")


def _in_tiles(forward: Callable[[Tensor], Tensor], tile: int, x: Tensor) -> Tensor:
    """An MLP's forward, with `tile_mlp`."""
    try:
        return tiled_mlp(forward, x, tile=tile)
    except ValueError as error:
        raise ValueError(f"tile_mlp={tile}: {error}, or leave tile_mlp out") from None


def _asks_for_the_last_position(module: nn.Module) -> bool:
    """A rotary embedding whose frequencies depend on how long the sequence is."""
    kinds = getattr(module, "rope_type", None) or ()
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(x, str) and ("dynamic" in x or x == "longrope") for x in kinds)


def _is_language_model(model: PreTrainedModel) -> bool:
    return model.get_output_embeddings() is not None


def _check_model(model: PreTrainedModel) -> None:
    """All its layers but attention work token by token, and attention is computed by the function it is told.

    Raises:
        ValueError: naming what is not so.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model is a {type(model).__name__} and not a PreTrainedModel of transformers: parallelize it "
            "before it is wrapped, or call usp.hybrid_attention in it"
        )
    kind, config = type(model).__name__, model.config.get_text_config()
    if getattr(model, "_usp", None) is not None:
        raise ValueError(f"this {kind} is parallelized already")
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{kind} has an encoder and a decoder: their cross attention is not adapted; causal models are"
        )
    if not any(x.kind == x.VAR_KEYWORD for x in inspect.signature(model.forward).parameters.values()):
        raise ValueError(
            f"{kind}.forward takes no further keyword arguments, so shift_labels and usp do not reach its loss and its "
            "layers: let it take **kwargs and hand them on"
        )
    if not _is_language_model(model) and model.base_model is not model:
        raise ValueError(
            f"{kind} has a head that is no language model's: parallelize its base model, {kind}.base_model"
        )
    if _is_language_model(model) and model.loss_type not in (None, "ForCausalLM"):
        raise ValueError(
            f"{kind} has the loss {model.loss_type}, of which targets are not the next tokens: parallelize "
            "its base model"
        )
    mixers = [
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.conv._ConvNd | nn.RNNBase) or _MIXERS.search(type(module).__name__)
    ]
    if mixers:
        raise ValueError(
            f"{kind} has layers that mix tokens otherwise than by attention, and would mix those of a shard alone: "
            f"{', '.join(mixers[:3])}{' ...' if len(mixers) > 3 else ''}"
        )
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        raise ValueError(f"{kind} counts positions from its padding token, which a shard cannot: it is not adapted")
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - set(_LAYERS)):
        raise ValueError(f"{kind} has layers of the types {others}: only {list(_LAYERS)} are adapted")
    if not getattr(model, "_supports_attention_backend", True):
        raise ValueError(f"{kind} does not compute its attention through AttentionInterface, so nothing can replace it")
    if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "kv_sharing_modes", None):
        raise ValueError(f"{kind} has layers that share keys and values with others, which is not adapted")


def _check_whole(kwargs: dict[str, Any], cache: object) -> None:
    """What is asked of a call with whole tensors.

    Raises:
        ValueError: naming what is not done.
    """
    if kwargs.get("return_dict") is False:
        raise ValueError("return_dict=False: whole logits are put together by their name in the result; leave it out")
    if not isinstance(kwargs.get("logits_to_keep", 0), int):
        raise ValueError("logits_to_keep is a tensor: give how many of the last tokens, or 0 for all")
    if (given := kwargs.get("attention_mask")) is not None and not (isinstance(given, Tensor) and given.ndim == 2):
        raise ValueError(
            f"attention_mask is {tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__}: give "
            "(batch, seq), 0 where padding is; a dense mask would make every rank compute and send everything"
        )
    if cache is not None and not isinstance(cache, ShardedCache):
        filled = cache.get_seq_length() if isinstance(cache, Cache) else "some"
        if type(cache) is not DynamicCache or filled:
            raise ValueError(
                f"the cache is a {type(cache).__name__} with {filled} tokens: a model on a mesh fills its own, from an "
                "empty DynamicCache, a ShardedCache(), or none; leave cache_implementation out"
            )


def _history(
    padding: Tensor | None, batch: int, start: int, seq: int
) -> tuple[Callable[[bool, int | None], Mask], bool]:
    """What tokens in a cache and new ones see of each other, and whether some of the new ones are padding.

    Raises:
        ValueError: for an attention mask of another shape, or one that ends with padding.
    """
    if padding is None:
        return Mask, False
    if padding.shape != (batch, start + seq):
        raise ValueError(
            f"attention_mask is {tuple(padding.shape)}: give ({batch}, {start + seq}), for the {start} tokens in the "
            f"cache and the {seq} new ones"
        )
    real = padding != 0
    if bool(real.all()):
        return Mask, False
    if not bool(real[:, -1].all()):
        raise ValueError(
            "attention_mask ends with padding, and the next token would follow that: pad prompts on the left (and take "
            "a larger prefill_chunk_size than the padding), or give use_cache=False"
        )
    padded = not bool(real[:, start:].all())
    firsts = real.to(torch.uint8).argmax(1)
    if bool((real == (torch.arange(real.shape[1], device=real.device) >= firsts[:, None])).all()):
        rows = tuple(((first, EVERYWHERE[1]),) for first in firsts.tolist())
        return lambda causal, window: Mask(causal, window, documents=rows), padded
    return lambda causal, window: Mask.from_attention_mask(real, causal=causal, window=window), padded  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------------------------------------------
# What transformers calls.


def _no_mask(*, attention_mask: Tensor | None = None, use_vmap: bool = False, **_: Any) -> None:
    """What tokens see is known before a model is called, and of all ranks' tokens: no mask is made here.

    Raises:
        ValueError: for what would be lost.
    """
    if attention_mask is not None:
        raise ValueError(
            "an attention mask reached the layers of a model on a mesh: call the parallelized model itself, not a part "
            "of it, and without cache_implementation; or give the mask to usp.shard_batch"
        )
    if use_vmap:
        raise ValueError("the model adds a mask function of its own (both ways in images, say), which is not adapted")


_PASSED_ON = {  # to every layer, without a meaning for attention
    *("position_ids", "use_cache", "cache_position", "labels", "shift_labels", "num_items_in_batch", "return_dict"),
    *("output_hidden_states", "output_attentions", "output_router_logits", "position_embeddings"),
}


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    usp: _Call | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Of one layer: (batch, heads, tokens, head_dim) each, after rotary embedding, to (batch, tokens, heads, head_dim).

    Raises:
        ValueError: for anything that is not honoured, by its name.
    """
    parallel: _Parallel | None = getattr(module, "_usp", None)
    if parallel is None:
        raise ValueError(
            f"this {type(module).__name__} is told to use attention {NAME!r} and was not parallelized: its model "
            "shares a configuration with one that was; give each model its own copy of it"
        )
    if not isinstance(usp, _Call):
        raise ValueError(
            f"{type(module).__name__} got no usp: call the parallelized model itself, or its base model with what "
            "usp.shard_batch returns, and let it hand its keyword arguments on to its layers"
        )
    if attention_mask is not None:
        raise ValueError("a dense attention mask reached a layer: describe who sees what by documents and padding")
    if strange := sorted(name for name, x in others.items() if x is not None and name not in _PASSED_ON):
        raise ValueError(f"{type(module).__name__} gives its attention {strange}, which is not adapted")
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"{key.shape[2]} keys for {query.shape[2]} queries in {type(module).__name__}: cross attention, and caches "
            "other than ShardedCache, are not adapted"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = _window(module, sliding_window)
    if window is not None and not causal:
        raise ValueError(f"sliding_window={window} both ways in {type(module).__name__} is not adapted")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    layer = getattr(module, "layer_idx", None) or 0
    if dropout and not usp.seed:
        raise ValueError(f"dropout={dropout} in {type(module).__name__}, of which the configuration says nothing")
    given = {"sinks": s_aux, "scale": scaling, "softcap": softcap}
    dropped = (dropout, usp.seed + layer) if dropout else None
    if torch.compiler.is_compiling() and usp.cache is None:
        seen = {"causal": bool(causal), "window": window}
        out = traced_attention(
            *(q, k, v, parallel.ranks, usp.spread.number), dropout=dropped, **seen, **given, **parallel.options
        )
    elif usp.cache is None:
        mask = usp.spread.mask(causal=bool(causal), window=window)
        options = {"mask": mask, "dropout": dropped, "check_ranks": False} | given | parallel.options
        out = hybrid_attention(q, k, v, parallel.mesh, usp.spread.tokens, **options)
    else:
        mask = usp.spread.mask(causal=bool(causal), window=window)
        out = usp.cache.attend(q, k, v, parallel, usp, {"mask": mask, "check_ranks": False} | given)
    assert out.shape == (*q.shape[:3], v.shape[3])  # (batch, heads, tokens, dim) would be accepted, and wrong
    return out, None


def _window(module: nn.Module, given: int | None) -> int | None:
    """The window of a layer, in which the query's own position counts.

    Raises:
        ValueError: if the layer's type and what it gives to its attention differ.
    """
    config: Any = getattr(module, "config", None)
    types, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if (
        types
        and layer is not None
        and layer < len(types)
        and (types[layer] == "sliding_attention") != (given is not None)
    ):
        raise ValueError(
            f"layer {layer} is of the type {types[layer]!r}, but {type(module).__name__} gives its attention "
            f"sliding_window={given}"
        )
    if (
        not types
        and given is None
        and getattr(config, "sliding_window", None)
        and getattr(config, "use_sliding_window", True)
    ):
        raise ValueError(
            f"the configuration has sliding_window={config.sliding_window}, but {type(module).__name__} does not give "
            "it to its attention"
        )
    return given


class _Layer(CacheLayerMixin):
    """A layer's keys and values on the mesh, as transformers asks for them: it gets back what it gives."""

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self):
        super().__init__()
        self.kept: KVCache | None = None

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing is known yet; see `ShardedCache.attend`."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, *_: Any) -> int:
        return 0 if self.kept is None else max(self.kept.lengths)

    def get_mask_sizes(self, query_length: Any, *_: Any) -> tuple[int, int]:
        return self.get_seq_length() + (query_length if isinstance(query_length, int) else len(query_length)), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 4

    def reset(self) -> None:
        if self.kept is not None:
            self.kept.reset()

    def crop(self, count: int) -> None:
        """To `count` tokens, or by -count: drafts that were rejected."""
        if self.kept is not None:
            self.kept.truncate([max(0, x + count) if count <= 0 else min(x, count) for x in self.kept.lengths])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise ValueError("num_beams: beam search reorders caches, which would move them between ranks; use num_beams=1")

    batch_repeat_interleave = batch_select_indices = reorder_cache


class ShardedCache(Cache):
    """The keys and values of all layers of a parallelized model, each a `usp.inference.KVCache`.

    A parallelized model makes one when it is called with whole tensors and use_cache; give it back with the next ones,
    as `generate` does. It grows as needed, by a quarter at a time.
    """

    def __init__(self):
        super().__init__(layer_class_to_replicate=_Layer)
        self.updated: int | None = None

    @classmethod
    def instead_of(cls, cache: Cache | None) -> ShardedCache:
        """A new one. An empty cache that the caller made, and will give again, becomes it."""
        if cache is None:
            return cls()
        cache.__dict__.clear()
        cache.__class__ = cls
        cache.__init__()
        return cache

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        """Give back what is new; attention, which follows, keeps it and sees the rest."""
        self.updated = layer_idx
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def memory_bytes(self) -> int:
        """What this rank has room for, used or not, in all layers."""
        return sum(layer.kept.memory_bytes for layer in self.layers if layer.kept is not None)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        parallel: _Parallel,
        call: _Call,
        given: dict[str, Any],
    ) -> Tensor:
        """Keep what is new and attend to all, for the layer that updated the cache last.

        Raises:
            ValueError: if none did.
        """
        if self.updated is None:
            raise ValueError("a layer attends without new keys in the cache: layers that share them are not adapted")
        layer, self.updated = self.updated, None
        tokens = call.spread.tokens
        kept, more = self.layers[layer].kept, tokens.seq_ring if call.sharded else tokens.seq
        most = more + (max(map(max, kept.counts)) if kept else 0)
        capacity = parallel.ranks[0].size * most + _MORE
        if kept is None:
            kept = self.layers[layer].kept = KVCache(
                parallel.mesh,
                batch=len(k),
                capacity=capacity,
                kv_heads=k.shape[2],
                head_dim=k.shape[3],
                head_dim_v=v.shape[3],
                dtype=k.dtype,
                replicate_kv=parallel.options["replicate_kv"],
                heads=q.shape[2],
                device=k.device,
            )
        elif most > kept.k.shape[1] or max(kept.lengths) + tokens.seq > kept.capacity:
            kept.reserve(capacity + kept.capacity // 4)
        given = given | {"backend": parallel.options["backend"]}
        if call.sharded:
            return prefill_attention(q, k, v, parallel.mesh, tokens, kept, algorithm=parallel.prefill, **given)[0]
        return decode_attention(q, k, v, parallel.mesh, kept, algorithm=parallel.decode, **given)


_MORE = 256  # tokens that a new cache has room for, beyond what is known
