import pytest
import torch

from tests import oracle, pool

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--all-heads", action="store_true", help="every head count on every mesh (tests/test_heads.py)")


@pytest.fixture(scope="session")
def ranks():
    """ranks(world) is a pool of that many rank processes, started once and kept."""
    pools = pool.Pools()
    yield pools.of
    pools.close()


def pytest_sessionfinish(session):
    """Where tests run in several processes, each hands its worst errors to the one that prints them."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["worst"] = oracle.worst


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    for (dtype, what), (error, where) in getattr(node, "workeroutput", {}).get("worst", {}).items():
        oracle.note_worst(dtype, what, error, where)


def pytest_terminal_summary(terminalreporter):
    for (dtype, what), (error, where) in sorted(oracle.worst.items()):
        terminalreporter.write_line(f"worst error, {dtype} {what}: {error:.1e} of the largest value ({where})")
