"""Shapes and types in signatures are checked in tests, in rank processes too: before usp is imported.

Not in the pure part, which has no shapes and which the proofs call millions of times.
"""

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

TENSOR_MODULES = (
    *("merging", "mesh", "comm", "kernels", "sharding", "ulysses", "ring", "attention", "inference", "nn", "training"),
    "integrations",
)

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int will do for a float

install_import_hook([f"usp.{name}" for name in TENSOR_MODULES], "tests.checked")
