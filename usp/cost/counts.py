"""FLOPs, bytes and messages of a call, exactly: what the library counts when it runs (a test holds them equal).

Everything comes from `blocks`: which rank computes what with whose keys, and which keys leave home.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from usp.blocks import Columns, Load, Tokens, Visits, carried, loads, needed, ring_order, schedule
from usp.cost.workload import Plan, Workload
from usp.heads import runs
from usp.inference.volumes import decode_volume
from usp.masks import Mask
from usp.partitions import Partition

Messages = list[tuple[str, int]]  # kind and bytes of each
Volume = Mapping[str, tuple[int, int]]  # by kind of traffic: bytes and messages of one rank


def work(mask: Mask, tokens: Partition) -> tuple[dict[int, Load], ...]:
    """[ring rank][source]: its load, in the batch rows that the mask tells apart."""
    return _work(mask, of_rings(tokens))


def journeys(mask: Mask, tokens: Partition, keys: Tokens) -> tuple[Visits, tuple[int, ...]]:
    """Whom each source's keys visit when, and how many of its keys travel, in any batch row."""
    return _journeys(mask, of_rings(tokens), of_rings(keys) if isinstance(keys, Partition) else keys)


@lru_cache(maxsize=256)
def of_rings(tokens: Partition) -> Partition:
    """The same shares of the ring ranks, whoever cuts them again: what rings do is found once for all of those."""
    plain = replace(tokens, ulysses=1)
    return plain if plain.padded == tokens.padded else tokens


@lru_cache(maxsize=128)
def _work(mask: Mask, tokens: Partition) -> tuple[dict[int, Load], ...]:
    return loads(mask, tokens, tokens)


@lru_cache(maxsize=128)
def _journeys(mask: Mask, tokens: Partition, keys: Tokens) -> tuple[Visits, tuple[int, ...]]:
    need = _needed(mask, tokens, keys)
    sizes = tuple(sum(map(len, columns)) for columns in carried(need))
    return schedule(need, ring_order(tokens.ring)), sizes


@lru_cache(maxsize=128)
def _needed(mask: Mask, tokens: Partition, keys: Tokens) -> tuple[tuple[Columns, ...], ...]:
    return needed(mask, tokens, keys)


def call_flops(pairs: int, heads: int, head_dim: int, head_dim_v: int, *, backward: bool = False) -> int:
    """Of so many visible pairs a head: q k^T and p v, a multiplication and an addition an element. The backward pass
    alone has five products, q k^T again among them."""
    products = 3 * head_dim + 2 * head_dim_v if backward else head_dim + head_dim_v
    return 2 * pairs * heads * products


def flops(workload: Workload, plan: Plan, *, backward: bool = False) -> tuple[int, ...]:
    """Of each rank (ring rank x ulysses + Ulysses rank) in one call: the attention of its rows to the keys it sees.

    The order is that one for either `plan.inner`. Only visible pairs count: causal attention of a sequence is
    S (S + 1) / 2 of them, a batch row and head. `backward` adds the backward pass, 2.5 times as much where head_dim_v
    is head_dim.
    """
    return tuple(map(sum, step_flops(workload, plan, backward=backward)))


def step_flops(workload: Workload, plan: Plan, *, backward: bool = False) -> tuple[tuple[int, ...], ...]:
    """`flops` by step of the ring: in step n with the keys of the ring rank n before."""
    times = workload.batch if workload.mask.rows == 1 else 1
    dims = workload.head_dim, workload.head_dim_v or 0
    rows = work(workload.mask, plan.tokens(workload.seq, workload.mask))
    found = []
    for rank, row in enumerate(rows):
        loads = [row.get((rank - step) % plan.ring) for step in range(plan.ring)]
        pairs = [times * load.pairs if load else 0 for load in loads]
        for heads in map(len, plan.heads(workload).queries):
            passes = (False, True) if backward else (False,)
            found.append(tuple(sum(call_flops(n, heads, *dims, backward=x) for x in passes) for n in pairs))
    return tuple(found)


def traffic(workload: Workload, plan: Plan, *, backward: bool = False, lse: bool = False) -> tuple[Volume, ...]:
    """What each rank (ring rank x ulysses + Ulysses rank) sends in one call: docs/design.md, Traffic.

    The order is that one for either `plan.inner`. Without the agreement of ranks. `backward` adds the backward pass of
    a call whose q, k and v all need a gradient; `lse` what returning it adds, and its gradient.
    """
    tokens = plan.tokens(workload.seq, workload.mask)
    return _by_rank(workload, plan, tokens, _ring_traffic(workload, plan, tokens, tokens, backward), backward, lse)


def most_sent(workload: Workload, plan: Plan, *, backward: bool = False) -> int:
    """Bytes of the rank that sends most in one call: the largest sum in `traffic`."""
    tokens = plan.tokens(workload.seq, workload.mask)
    rings = _ring_traffic(workload, plan, tokens, tokens, backward)
    most = []
    for u in range(plan.ulysses):
        exchanged = sum(size for _, size in _all_to_all_traffic(workload, plan, tokens, u, backward, lse=False))
        most.append(exchanged + max(sum(size for _, size in ranks[u]) for ranks in rings))
    return max(most)


def prefill_traffic(
    workload: Workload, plan: Plan, tokens: Partition, held: Tokens, algorithm: str
) -> tuple[Volume, ...]:
    """What each rank sends in one `prefill_attention` of `tokens`, as `traffic` has it.

    `held` is what the cache holds with them: a `Ledger`, or `tokens` if it was empty and everything is kept. Heads and
    batch are the workload's; `algorithm` is one of `usp.inference.volumes.PREFILL`.
    """
    if algorithm == "pass_q" and plan.ring > 1:
        rings = _query_traffic(workload, plan, tokens, held)
    else:
        exchange = "all_gather" if algorithm == "all_gather" else "ring"
        rings = _ring_traffic(workload, replace(plan, exchange=exchange), tokens, held, backward=False)
    return _by_rank(workload, plan, tokens, rings, backward=False, lse=False)


def decode_traffic(workload: Workload, plan: Plan, *, seq: int = 1, gather: bool = True) -> tuple[Volume, ...]:
    """What each rank sends in one `decode_attention` of `seq` new tokens a row, as `traffic` has it.

    Without `gather` out is left where `plan.algorithm` leaves it.
    """
    return tuple(
        _merged(*decode_volumes(workload, plan, rank, u, seq=seq, gather=gather))
        for rank in range(plan.ring)
        for u in range(plan.ulysses)
    )


def _merged(one: Volume, other: Volume) -> Volume:
    kinds = [*one, *(kind for kind in other if kind not in one)]
    pairs = {kind: (one.get(kind, (0, 0)), other.get(kind, (0, 0))) for kind in kinds}
    return {kind: (a[0] + b[0], a[1] + b[1]) for kind, (a, b) in pairs.items()}


def decode_volumes(
    workload: Workload, plan: Plan, rank: int, u: int, *, seq: int = 1, gather: bool = True
) -> tuple[Volume, Volume]:
    """What ring rank `rank` of Ulysses rank `u` sends over the ring axis and over the Ulysses axis."""
    heads = [len(x) for x in plan.heads(workload).queries]
    dim_v, element_bytes = workload.head_dim_v or 0, workload.element_bytes
    shape = {"batch": workload.batch, "heads": heads[u], "head_dim": workload.head_dim, "head_dim_v": dim_v}
    over_ring = dict(
        decode_volume(plan.algorithm, ring=plan.ring, rank=rank, element_bytes=element_bytes, seq=seq, **shape)
    )
    token_bytes = seq * dim_v * element_bytes
    if gather and plan.ring > 1 and plan.algorithm != "tree":
        rows, mine = workload.batch, len(runs(heads[u], plan.ring)[rank])
        if plan.algorithm == "pass_q":
            rows, mine = len(runs(workload.batch, plan.ring)[rank]), heads[u]
        over_ring["out"] = (plan.ring - 1) * rows * mine * token_bytes, 1
    over_ulysses = {}
    if gather and plan.ulysses > 1:
        over_ulysses["out"] = (plan.ulysses - 1) * workload.batch * heads[u] * token_bytes, 1
    return over_ring, over_ulysses


def _by_rank(
    workload: Workload, plan: Plan, tokens: Partition, rings: list[list[Messages]], backward: bool, lse: bool
) -> tuple[Volume, ...]:
    exchanges = [_all_to_all_traffic(workload, plan, tokens, u, backward, lse) for u in range(plan.ulysses)]
    return tuple(_counted(rings[rank][u], exchanges[u]) for rank in range(plan.ring) for u in range(plan.ulysses))


def _counted(*parts: Sequence[tuple[str, int]]) -> Volume:
    """By kind: the bytes and the number of messages."""
    sizes: Counter[str] = Counter()
    messages: Counter[str] = Counter()
    for kind, size_bytes in (message for part in parts for message in part):
        sizes[kind] += size_bytes
        messages[kind] += 1
    return {kind: (sizes[kind], messages[kind]) for kind in messages}


def _ring_traffic(
    workload: Workload, plan: Plan, tokens: Partition, keys: Tokens, backward: bool
) -> list[list[Messages]]:
    """[ring rank][ulysses rank]: kinds and sizes of its messages."""
    sent: list[list[Messages]] = [[[] for _ in range(plan.ulysses)] for _ in range(plan.ring)]
    if plan.ring == 1:
        return sent
    wide_bytes = max(4, workload.element_bytes)
    token = [workload.batch * len(x) * workload.dims for x in plan.heads(workload).keys]  # elements a token
    passes = 2 if backward else 1

    def send(rank: int, kind: str, count: int, element_bytes: int) -> None:
        for u, elements in enumerate(token):
            sent[rank][u].append((kind, count * elements * element_bytes))

    if plan.exchange == "all_gather":
        for rank in range(plan.ring):
            for _ in range(passes):
                send(rank, "all_gather", (plan.ring - 1) * keys.seq_ring, workload.element_bytes)
            if backward:
                send(rank, "reduce_scatter", (plan.ring - 1) * keys.seq_ring, wide_bytes)
        return sent
    visits, sizes = journeys(workload.mask, tokens, keys)
    for source, stops in enumerate(visits):
        for (here, _), _ in pairwise(stops):
            for _ in range(passes):
                send(here, "ring", sizes[source], workload.element_bytes)
        for there, _ in stops[1:] if backward else ():
            send(there, "ring_grad", sizes[source], wide_bytes)
    return sent


def _query_traffic(workload: Workload, plan: Plan, tokens: Partition, held: Tokens) -> list[list[Messages]]:
    """[ring rank][ulysses rank]: its messages where queries travel, and what they found comes back."""
    ranks = range(plan.ring)
    need = _needed(workload.mask, tokens, held)
    visited = [[need[source][rank] for source in ranks] for rank in ranks]
    rows, wide_bytes = workload.batch * tokens.seq_ring, max(4, workload.element_bytes)
    found_bytes = (workload.head_dim_v or 0) * workload.element_bytes + wide_bytes
    sent: list[list[Messages]] = []
    visits = schedule(visited, ring_order(plan.ring))
    for rank in ranks:
        hops = sum(here == rank for stops in visits for (here, _), _ in pairwise(stops))
        others = sum(bool(visited[rank][source]) for source in ranks if source != rank)
        travels = any(visited[a][b] for a in ranks for b in ranks if a != b)
        sent.append([
            [("queries", rows * heads * workload.head_dim * workload.element_bytes)] * hops
            + [("partials", others * rows * heads * found_bytes)] * travels
            for heads in map(len, plan.heads(workload).queries)
        ])  # fmt: skip
    return sent


@lru_cache(maxsize=4096)
def all_to_all_bytes(workload: Workload, plan: Plan, *, backward: bool = False) -> int:
    """What the Ulysses rank that sends most sends in the two exchanges of a pass, forward or backward."""
    tokens = plan.tokens(workload.seq, workload.mask)
    found = []
    for u in range(plan.ulysses):
        sizes = [size for _, size in _all_to_all_traffic(workload, plan, tokens, u, backward, lse=False)]
        found.append(sum(sizes[2:] if backward else sizes))
    return max(found)


def _all_to_all_traffic(
    workload: Workload, plan: Plan, tokens: Partition, u: int, backward: bool, lse: bool
) -> Messages:
    """Kinds and sizes of the messages of Ulysses rank u."""
    if plan.ulysses == 1:
        return []
    heads = plan.heads(workload)
    rows, element_bytes = workload.batch * tokens.seq_local, workload.element_bytes
    queries, keys = [len(x) for x in heads.queries], [len(x) for x in heads.keys]
    dim_v = workload.head_dim_v or 0

    def others(count: list[int]) -> int:
        return sum(count) - count[u]

    to_heads = others(queries) * workload.head_dim + others(keys) * workload.dims
    to_sequence = (plan.ulysses - 1) * queries[u] * dim_v
    back = (plan.ulysses - 1) * (queries[u] * workload.head_dim + keys[u] * workload.dims)
    wanted = [to_heads, to_sequence] + ([others(queries) * dim_v, back] if backward else [])
    found = [("all_to_all", rows * element_bytes * elements) for elements in wanted]
    if lse:
        wide_bytes = max(4, element_bytes)
        found.append(("lse", rows * wide_bytes * (plan.ulysses - 1) * queries[u]))
        if backward:
            found.append(("lse", rows * wide_bytes * others(queries)))
    return found
