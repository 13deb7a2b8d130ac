"""The page docs/support.md, from the library's capability table.

    python -m experiments.support > docs/support.md

tests/test_scores.py holds the page to this, and runs every cell of its first table.
"""

from __future__ import annotations

import torch

import usp
from usp.kernels import OPTIONS

PLAIN = "none of these"


def cells() -> dict[tuple[str, str, str], bool]:
    """(option, backend, layout): whether that is computed; if not, it is refused by name."""
    return {
        (option, name, str(layout)): option == PLAIN or option in backend.options
        for option in (PLAIN, *OPTIONS)
        for name, backend in usp.backends().items()
        for layout in usp.Layout
    }


def page() -> str:
    """Markdown."""
    table, backends = cells(), usp.backends()
    names = ", ".join(f"`{name}`" for name in backends)
    heads = [f"{name}, {layout}" for name in backends for layout in usp.Layout]
    rows = [
        [f"`{option}`" if option != PLAIN else option]
        + ["yes" if table[option, name, str(layout)] else "refused" for name in backends for layout in usp.Layout]
        for option in (PLAIN, *OPTIONS)
    ]
    how = [
        [f"`{option}`", name, "yes" if option in backend.options else "refused", text]
        for option in OPTIONS
        for name, backend in backends.items()
        for text in [backend.options.get(option) or backend.lacks[option]]
    ]
    limits = [
        [name, device, ", ".join(_name(x) for x in dtypes), str(backend.head_dim.get(device, "any"))]
        for name, backend in backends.items()
        for device, dtypes in backend.dtypes.items()
    ]
    return f"""# What each backend can do

Made from the capability table by `python -m experiments.support`; a test runs every cell of the first table. What is
refused raises a ValueError on every rank before anything is sent, with the option, its value and who can do it.
`backend="auto"` takes the first of {names} that can do all of a call{_slow(backends)}.

{_table(["option", *heads], rows)}

Masks, lengths, cross attention, joint tokens, sinks, GQA and head plans, scale, returned and differentiated lse and
both exchanges work with every backend, layout and option. One exception: `alibi` on `sdpa` between striped shards
and others (`key_tokens` of another layout, joint tokens beside striped ones): blocks cannot be cut by order there.

## How, or why not

{_table(["option", "backend", "", ""], how)}

{_steepest(backends)}

## Devices

{_table(["backend", "device", "dtypes", "largest head dim"], limits)}

A gradient through lse (also with sinks or joint tokens) takes 1 column of a head, 2 in half precision, and ALiBi on
`sdpa` 1, in half precision 2 for every 2^8 (bfloat16) or 2^11 (float16) that positions are a power of; they count
where a head dim has a limit.
"""


def _slow(backends: dict) -> str:
    cases = [(name, option, dtypes) for name, x in backends.items() for option, dtypes in x.slow.items()]
    return "".join(
        f"; on the CPU, `{option}` in {' and '.join(map(_name, dtypes))} goes past `{name}`, which is slower at it"
        for name, option, dtypes in cases
    )


def _steepest(backends: dict) -> str:
    limits = [(name, dtype, most) for name, x in backends.items() for dtype, most in x.slope.items()]
    texts = ", ".join(f"{most:g} in {_name(dtype)} (`{name}`)" for name, dtype, most in limits)
    return f"Slopes of ALiBi over scale: at most {texts}."


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    print(page(), end="")
