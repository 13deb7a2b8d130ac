"""What is computed (a model, an attention call) and how it is spread over ranks: what follows from shapes alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

from usp.balance import balanced
from usp.heads import HeadPlan
from usp.inference.volumes import DECODE
from usp.masks import Mask
from usp.partitions import Layout, Partition

WEIGHTS = ("whole", "fsdp")
INNER = ("ulysses", "ring")
_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")
MODELS = Path(__file__).parent / "models"


def check_sizes(least: int = 1, **sizes: object) -> None:
    """All of them are whole numbers, and large enough.

    Raises:
        ValueError: naming the first that is not.
    """
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}={value!r} is not a whole number of at least {least}")


@dataclass(frozen=True)
class Model:
    """A decoder of identical layers: attention with grouped heads, and an MLP or a mixture of them.

    Args:
        name: of the model, for a reader.
        layers, hidden, heads, kv_heads, head_dim: as in transformers' configurations.
        intermediate: width of an MLP; of one expert's in a mixture.
        vocab: rows of the embedding.
        tied: whether the head is the embedding.
        gated: whether an MLP has three matrices (gate, up, down) or two.
        experts, experts_per_token: of a mixture; 0 without one. Its router is `hidden x experts`.
        windows: of each layer, how far a query looks back; None sees everything. Empty: all layers see everything.

    Raises:
        ValueError: for sizes that are no whole positive numbers, KV heads that do not divide the heads, or another
            number of windows than layers.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    gated: bool = True
    experts: int = 0
    experts_per_token: int = 0
    windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "windows", tuple(self.windows))
        check_sizes(**{name: getattr(self, name) for name in _SIZES})
        check_sizes(0, experts=self.experts, experts_per_token=self.experts_per_token)
        check_sizes(**{f"windows[{n}]": x for n, x in enumerate(self.windows) if x is not None})
        if self.heads % self.kv_heads:
            raise ValueError(f"model {self.name!r}: {self.kv_heads} KV heads do not divide {self.heads} query heads")
        if not 0 <= self.experts_per_token <= self.experts or (self.experts and not self.experts_per_token):
            raise ValueError(f"model {self.name!r}: {self.experts_per_token} experts a token of {self.experts}")
        if self.windows and len(self.windows) != self.layers:
            raise ValueError(f"model {self.name!r}: {len(self.windows)} windows for {self.layers} layers")

    @classmethod
    def from_config(cls, config: object, name: str | None = None) -> Model:
        """Of a transformers configuration, or a mapping with the same names, as in a config.json; of its text decoder.

        What a file leaves out, since it is usual for its type of model, is taken as it is there: ties, MLPs without a
        gate, which layers have a window.

        Raises:
            ValueError: if a field is missing, or the model has what this one has not: another attention, layers of
                several kinds, experts that all tokens meet, an encoder.
        """
        read = dict(config) if isinstance(config, Mapping) else _plain(config)
        if isinstance(nested := read.get("text_config"), Mapping):
            return cls.from_config({"tie_word_embeddings": read.get("tie_word_embeddings"), **nested}, name)
        kind = str(read.get("model_type"))

        def wanted(*keys: str):
            found = [read[key] for key in keys if read.get(key) is not None]
            if not found:
                raise ValueError(f"{kind!r} without {' or '.join(keys)}: {_CURE}")
            return found[0]

        if kind in _UNLIKE:
            raise ValueError(f"{kind!r}: {_CURE}")
        if other := [key for key in _OTHERWISE if read.get(key)]:
            raise ValueError(f"{kind!r} has {', '.join(f'{key}={read[key]}' for key in other)}: {_CURE}")
        types = read.get("layer_types") or ()
        if not isinstance(types, (list, tuple)) or set(types) - {"full_attention", "sliding_attention"}:
            raise ValueError(f"{kind!r} has layer_types={types}: {_CURE}")
        if read.get("decoder_sparse_step") not in (None, 1):
            raise ValueError(f"{kind!r} has decoder_sparse_step={read['decoder_sparse_step']}: {_CURE}")
        hidden, heads = wanted("hidden_size", "n_embd", "d_model"), wanted("num_attention_heads", "n_head")
        check_sizes(hidden_size=hidden, num_attention_heads=heads)
        experts = read.get("num_experts") or read.get("num_local_experts") or 0
        layers = wanted("num_hidden_layers", "n_layer", "num_layers")
        inner = {"n_inner": 4 * hidden} if kind in _FOUR_TIMES else {}
        inner |= {key: value for key, value in read.items() if value is not None}
        narrow = read.get("moe_intermediate_size") if experts else None
        widths = [inner[key] for key in ("intermediate_size", "n_inner", "ffn_dim") if key in inner]
        if not (narrow or widths):
            raise ValueError(f"{kind!r} without intermediate_size or n_inner or ffn_dim: {_CURE}")
        tied = read.get("tie_word_embeddings")
        return cls(
            name=name or str(read.get("_name_or_path") or kind),
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=read.get("num_key_value_heads") or (1 if read.get("multi_query") else heads),
            head_dim=read.get("head_dim") or hidden // heads,
            intermediate=narrow or widths[0],
            vocab=wanted("vocab_size"),
            tied=kind in _TIED if tied is None else bool(tied),
            gated=kind not in _UNGATED,
            experts=experts,
            experts_per_token=(read.get("num_experts_per_tok") or 0) if experts else 0,
            windows=_windows(read, kind, layers),
        )

    @property
    def attention_params(self) -> int:
        """Matrices of one layer's attention: q, k, v and output projections."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def expert_params(self) -> int:
        """Matrices of one MLP."""
        return (3 if self.gated else 2) * self.hidden * self.intermediate

    @property
    def layer_params(self) -> int:
        """Matrices of one layer, all experts; without its norms."""
        return self.attention_params + (self.experts * (self.expert_params + self.hidden) or self.expert_params)

    @property
    def active_params(self) -> int:
        """Matrices of one layer that a token meets."""
        return self.met_params(1)

    def met_params(self, tokens: int) -> int:
        """Matrices of one layer that so many tokens meet; no two choose the same expert while there are others."""
        if not self.experts:
            return self.layer_params
        met = min(self.experts, tokens * self.experts_per_token)
        return self.attention_params + self.experts * self.hidden + met * self.expert_params

    @property
    def params(self) -> int:
        """Of the whole model: layers, two norms each, the last norm, embedding and head."""
        embeddings = (1 if self.tied else 2) * self.vocab * self.hidden
        return self.layers * (self.layer_params + 2 * self.hidden) + self.hidden + embeddings

    def kv_bytes(self, tokens: int, element_bytes: int = 2) -> int:
        """Keys and values of so many tokens in all layers."""
        return tokens * self.layers * 2 * self.kv_heads * self.head_dim * element_bytes

    def linear_flops(self, tokens: int) -> int:
        """Forward, through the matrices of all layers: two a parameter and token. Embedding and head are not in it."""
        return 2 * self.active_params * self.layers * tokens

    def head_flops(self, tokens: int) -> int:
        """Forward, from hidden states to logits."""
        return 2 * self.vocab * self.hidden * tokens

    def attention(self, batch: int, seq: int, mask: Mask, element_bytes: int = 2, tensor: int = 1) -> Workload:
        """The attention call of one layer, of a rank among `tensor` that share its heads."""
        return Workload(
            batch, seq, self.heads // tensor, max(1, self.kv_heads // tensor), self.head_dim, mask,
            element_bytes=element_bytes,
        )  # fmt: skip

    def masks(self, mask: Mask) -> dict[Mask, int]:
        """The masks of the layers, and how many layers have each: of a layer's window and the mask's, the narrower."""
        found: dict[Mask, int] = {}
        for window in self.windows or (None,) * self.layers:
            both = [x for x in (window, mask.window) if x is not None]
            one = replace(mask, window=min(both, default=None))
            found[one] = found.get(one, 0) + 1
        return found


_CURE = (
    "the cost model knows decoders of like layers with grouped heads and one MLP, or a mixture of them, each; "
    "usp.cost.Model(...) takes sizes"
)
_OTHERWISE = (  # what says that a model is of another form
    *("kv_lora_rank", "state_size", "linear_num_key_heads", "mamba_d_state", "mamba_expand", "attn_layer_period"),
    *("conv_L_cache", "rwkv", "attention_hidden_size", "lru_width", "is_encoder_decoder", "type_vocab_size"),
    *("interleave_moe_layer_step", "attention_chunk_size", "intermediate_size_mlp", "attention_layers"),
    *("n_routed_experts", "moe_num_experts", "n_shared_experts", "num_shared_experts"),
    *("shared_expert_intermediate_size", "shared_intermediate_size", "first_k_dense_replace", "mlp_only_layers"),
    *("cross_attention_layers", "global_head_dim"),
)
_TIED = {"gemma", "gemma2", "gemma3_text", "gpt2", "opt", "cohere", "cohere2", "smollm3"}
_UNGATED = {
    *("gpt2", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gptj", "opt", "codegen", "phi", "starcoder2", "gpt_bigcode"),
    *("nemotron", "arcee", "apertus", "apertus1p5_text", "biogpt", "xglm", "persimmon", "jais2", "nanochat"),
}
_UNLIKE = {
    "gemma4",
    "gemma4_text",
    "gemma4_unified",
    "gemma4_unified_text",
    "bert-generation",
    "beam",
    "doge",
    "git",
    "hrm_text",
    "jetmoe",
    "moshi",
}
_FOUR_TIMES = {"gpt2", "gpt_neo", "gptj", "codegen", "gpt_bigcode"}  # of the hidden size, where n_inner is not told
_EVERY = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "cohere2": 4}  # one layer of so many sees everything


def _plain(config: object) -> dict:
    """What transformers would write of a configuration."""
    whole = getattr(config, "to_dict", None)
    return dict(whole()) if callable(whole) else dict(vars(config))  # pyright: ignore[reportArgumentType, reportCallIssue]


def _windows(read: Mapping, kind: str, layers: int) -> tuple[int | None, ...]:
    """Of each layer, from a configuration."""
    window, types = read.get("sliding_window"), read.get("layer_types")
    asked = read.get("use_sliding_window", False if kind.startswith(("qwen2", "qwen3")) else None)
    if not window or asked is False:
        return ()
    if types:
        return tuple(window if x == "sliding_attention" else None for x in types)
    if every := read.get("sliding_window_pattern") or _EVERY.get(kind):
        check_sizes(sliding_window_pattern=every)
        return tuple(None if n % every == 0 else window for n in range(1, layers + 1))
    first = read.get("max_window_layers") or 0 if read.get("use_sliding_window") else 0
    return tuple(window if n >= first else None for n in range(layers))


@lru_cache
def model(name: str) -> Model:
    """A model that comes with the library.

    Raises:
        ValueError: if there is none of that name; names those there are.
    """
    if name not in models():
        raise ValueError(f"model={name!r} is not one of {models()}; others: usp.cost.Model.from_config(config)")
    read = plain_yaml((MODELS / f"{name}.yaml").read_text())
    return Model(name=name, **read)


def models() -> list[str]:
    """Names of the models that come with the library."""
    return sorted(path.stem for path in MODELS.glob("*.yaml"))


def plain_yaml(text: str) -> dict:
    """YAML of one mapping whose values are written as JSON, each on its own line; comments have lines of their own.

    All that the data of this package needs, without a package to read it; a test compares it with PyYAML.

    Raises:
        ValueError: for a line of another form, naming it.
    """
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        key, colon, value = line.partition(": ")
        try:
            if not colon or key != key.strip():
                raise ValueError("no `key: value`")
            found[key] = json.loads(value)
        except ValueError as error:
            raise ValueError(
                f"line {number}, {line!r}, is not `key: value` with a value as in JSON ({error})"
            ) from None
    return found


@dataclass(frozen=True)
class Workload:
    """One attention call of the whole mesh: (batch, seq, heads, head_dim) queries and as many keys with kv_heads.

    Args:
        batch: rows of one replica.
        seq: tokens of the whole sequence.
        mask: as in `usp.hybrid_attention`.
        head_dim_v: of the values, if it is another.
        element_bytes: of q, k, v and out: 2 for bfloat16 and float16.

    Raises:
        ValueError: for sizes that are no whole positive numbers, or a mask of another number of rows.
    """

    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    mask: Mask
    head_dim_v: int | None = None
    element_bytes: int = 2

    def __post_init__(self) -> None:
        if self.head_dim_v is None:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        check_sizes(**{item.name: getattr(self, item.name) for item in fields(self) if item.name != "mask"})
        if self.mask.rows not in (1, self.batch):
            raise ValueError(f"the mask tells {self.mask.rows} batch rows apart, but batch={self.batch}")

    @property
    def dims(self) -> int:
        """head_dim + head_dim_v: elements of a token's keys and values, a KV head."""
        return self.head_dim + (self.head_dim_v or 0)


@dataclass(frozen=True)
class Plan:
    """How a model or a call is spread over ranks: data x ring x ulysses x tensor of them, tensor innermost.

    Args:
        ring, ulysses, data: the mesh axes.
        tensor: ranks that share heads and the columns and rows of matrices (tensor parallel, with the tokens between
            the matrices sharded over the same ranks).
        layout: how tokens are dealt to the ring ranks.
        replicate_kv: as in `usp.HeadPlan`.
        weights: "whole", a copy on every rank (less what tensor parallel takes), or "fsdp", sharded over all ranks and
            gathered a layer at a time.
        exchange: "ring" or "all_gather", as in `usp.hybrid_attention`.
        tile_mlp: tokens of one tile of the MLP, None for all at once; of memory, not of time.
        checkpoint: when training, whether layers keep their inputs alone and compute the rest again.
        algorithm: of decode, in `usp.inference.volumes.DECODE`.
        inner: the axis of consecutive ranks, which lie in one node where it holds that many: "ulysses", or "ring" as
            `usp.init_mesh(order=("data", "ulysses", "ring"))` has it.

    Raises:
        ValueError: for degrees below 1 or an unknown name.
    """

    ring: int = 1
    ulysses: int = 1
    data: int = 1
    tensor: int = 1
    layout: Layout | str = Layout.ZIGZAG
    replicate_kv: bool = False
    weights: str = "whole"
    exchange: str = "ring"
    tile_mlp: int | None = None
    checkpoint: bool = False
    algorithm: str = "all_to_all"
    inner: str = "ulysses"

    def __post_init__(self) -> None:
        check_sizes(**{name: getattr(self, name) for name in ("ring", "ulysses", "data", "tensor")})
        if self.tile_mlp is not None:
            check_sizes(tile_mlp=self.tile_mlp)
        for name, known in (
            ("layout", [str(x) for x in Layout]),
            ("weights", WEIGHTS),
            ("exchange", ("ring", "all_gather")),
            ("algorithm", DECODE),
            ("inner", INNER),
            ("checkpoint", (False, True)),
            ("replicate_kv", (False, True)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"plan: {name}={getattr(self, name)!r} is not one of {list(known)}")
        object.__setattr__(self, "layout", Layout(self.layout))

    @property
    def world(self) -> int:
        """Ranks."""
        return self.data * self.ring * self.ulysses * self.tensor

    @property
    def sequence_ranks(self) -> int:
        """Ranks that share one sequence's tokens between layers' attentions."""
        return self.ring * self.ulysses

    @property
    def ring_stride(self) -> int:
        """How many ranks a rank of a ring is before the next one."""
        return self.tensor * (1 if self.inner == "ring" else self.ulysses)

    @property
    def ulysses_stride(self) -> int:
        """How many ranks a rank of a Ulysses group is before the next one."""
        return self.tensor * (1 if self.inner == "ulysses" else self.ring)

    def tokens(self, seq: int, mask: Mask) -> Partition:
        """Which of so many tokens each rank owns; balanced for this mask."""
        if self.layout == Layout.BALANCED:
            return balanced(mask, seq, self.ring, self.ulysses)
        return Partition(seq, self.layout, self.ring, self.ulysses)

    def heads(self, workload: Workload) -> HeadPlan:
        """Of the call's heads, whose each Ulysses rank's are.

        Raises:
            ValueError: if there are more Ulysses ranks than heads to deal.
        """
        return HeadPlan(workload.heads, workload.kv_heads, self.ulysses, self.replicate_kv)
