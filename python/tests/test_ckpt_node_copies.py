"""Copies of what is on the drives of nodes on other nodes: a node that is lost does not take the newest step with it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from ckpt_cases import harness, nodes
from test_ckpt_agent import is_committed, until
from test_ckpt_node_agents import CONFIG, WORLD, Site
from test_ckpt_nodes import data_of
from test_export import command

#: Of each node, beside what all agents of drives have.
COPIES = """records = "shared"
copies = 1
copies_gone = "6 s"
"""
PEERS = """listen = "127.0.0.1:0"
peer_token_file = "peer.token"
"""


class Copying(Site):
    """Two agents that copy what is on the drives of their nodes."""

    config = CONFIG.replace('records = "shared"\n', COPIES) + PEERS

    def prepare(self) -> None:
        token = self.folder / "peer.token"
        token.write_text("0123456789abcdef-of-agents")
        token.chmod(0o600)

    def tier(self, node: int, *words: str) -> Any:
        """What `forebay tier` says to the agent of a node."""
        config = str(self.folder / f"agent{node}.toml")
        run = [command(), "tier", words[0], "--config", config, "--json", *words[1:]]
        done = subprocess.run(run, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def wait_started(self, node: int) -> None:
        log = self.folder / f"agent{node}.log"
        until(lambda: "started" in log.read_text(), self.told)

    def wait_copied(self, node: int) -> None:
        def states() -> list[str]:
            steps = self.tier(node, "status", "--job", "run7")["steps"]
            return [step["copies"][0] for step in steps]

        until(lambda: states() == ["copied"], self.told)


@pytest.fixture
def site() -> Iterator[Copying]:
    made = Copying()
    yield made
    for node in made.agents:
        made.kill(node)
    shutil.rmtree(made.folder)


def test_a_job_that_lost_a_node_goes_on_from_its_newest_step(site: Copying) -> None:
    folder, shared = site.folder, site.folder / "shared" / "run7"
    for node in (0, 1):
        site.wait_started(node)
        site.tier(node, "pause", "shared")
    harness.run(nodes.hands_over_and_dies, WORLD, WORLD, str(folder))
    for node in (0, 1):
        site.wait_copied(node)
    for node in (0, 1):
        assert data_of(folder / f"drive{node}", 1) == {0, 1, 2, 3}
    assert not is_committed(shared, 1)
    # The node is gone with all that it had, and another one takes its place.
    site.kill(1)
    shutil.rmtree(folder / "drive1")
    site.start(1)
    site.tier(0, "resume", "shared")
    results = harness.run(nodes.finds_agents, WORLD, WORLD, str(folder))
    for result in results:
        assert result["step"] == 1 and result["whole"] and result["drained"], result
        assert not result["told"], result["told"]
    assert is_committed(shared, 2) and data_of(shared, 1) == {0, 1, 2, 3}
    # Copies of what is in one place are gone.
    until(lambda: data_of(folder / "drive0", 1) == {0, 1}, site.told)
    until(lambda: data_of(folder / "drive0", 2) == {0, 1}, site.told)
