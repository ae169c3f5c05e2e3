"""Drives of nodes that the agent of each node moves: ranks hand their node's drive over, and may die."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckpt_cases import harness, nodes
from test_ckpt_agent import is_committed, reached, until
from test_ckpt_nodes import data_of
from test_export import command

WORLD = 4

#: Of each node. `place` is no job's: drives are handed over.
CONFIG = """
[[tier]]
name = "drive"
place = "none{node}"
records = "shared"
[[tier]]
name = "shared"
place = "shared"
[[tier]]
name = "far"
place = "far"
write_limit = "{limit}"
[tiers]
look_every = "100 ms"
[agent]
socket = "agent{node}.sock"
"""


class Site:
    """A folder for all, with a short path for sockets, and two agents that share what is in it."""

    config = CONFIG

    def __init__(self, limit: str = "1 GB/s") -> None:
        self.limit = limit
        self.folder = Path(tempfile.mkdtemp(prefix="fb"))
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        for name in ("shared", "far"):
            (self.folder / name).mkdir()
        self.prepare()
        for node in (0, 1):
            self.start(node)

    def prepare(self) -> None:
        """Makes what agents need to start."""

    def start(self, node: int) -> None:
        """Starts the agent of a node."""
        config = self.folder / f"agent{node}.toml"
        config.write_text(self.config.format(node=node, limit=self.limit))
        with open(self.folder / f"agent{node}.log", "ab") as log:
            run = [command(), "agent", "--config", str(config)]
            self.agents[node] = subprocess.Popen(run, stdout=log, stderr=log)
        until(lambda: reached(self.folder / f"agent{node}.sock"), self.told)

    def told(self) -> str:
        """What the agents say."""
        return "\n".join(log.read_text() for log in sorted(self.folder.glob("agent*.log")))

    def kill(self, node: int) -> None:
        """As a node that is lost."""
        self.agents[node].kill()
        self.agents[node].wait()


@pytest.fixture
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    made = Site(*getattr(request, "param", ()))
    yield made
    for node in made.agents:
        made.kill(node)
    shutil.rmtree(made.folder)


def test_ranks_that_are_killed_have_handed_their_drives_over(site: Site) -> None:
    folder = site.folder
    harness.run(nodes.hands_over_and_dies, WORLD, WORLD, str(folder))
    shared, far = folder / "shared" / "run7", folder / "far" / "run7"
    until(lambda: is_committed(shared, 1), site.told)
    assert [data_of(folder / f"drive{node}", 1) for node in (0, 1)] == [{0, 1}, {2, 3}]
    assert data_of(shared, 1) == {0, 1, 2, 3}
    # One of them goes on from there.
    until(lambda: is_committed(far, 1), site.told)
    results = harness.run(nodes.finds_agents, WORLD, WORLD, str(folder))
    for result in results:
        assert result["step"] == 1 and result["whole"] and result["drained"], result
        assert not result["told"], result["told"]
        copies = [step["copies"] for step in result["status"]["steps"]]
        assert copies == [["on_nodes", "committed", "committed"]] * 2, result["status"]
        assert result["status"]["agent"]["job"] == "run7"
    assert not (folder / "none0").exists() or not list((folder / "none0").glob("step-*"))


@pytest.mark.parametrize("site", [("100 KB/s",)], indirect=True)
def test_another_goes_on_from_the_shared_tier_if_the_one_that_did_is_lost(site: Site) -> None:
    folder = site.folder
    harness.run(nodes.hands_over_and_dies, WORLD, WORLD, str(folder))
    shared, far = folder / "shared" / "run7", folder / "far" / "run7"
    until(lambda: is_committed(shared, 1), site.told)
    leads = json.loads((shared / ".forebay/nodes/.forebay/leads").read_text())
    pids = {agent.pid: node for node, agent in site.agents.items()}
    lost = pids[int(leads["who"].rpartition(" ")[2])]
    until(lambda: far.exists(), site.told)
    site.kill(lost)
    assert not is_committed(far, 1)
    until(lambda: is_committed(far, 1), site.told)
    assert data_of(far, 1) == {0, 1, 2, 3}


def test_agents_that_start_anew_get_the_drives_from_the_next_life_of_the_job(site: Site) -> None:
    folder = site.folder
    harness.run(nodes.hands_over_and_dies, WORLD, WORLD, str(folder))
    until(lambda: is_committed(folder / "far" / "run7", 1), site.told)
    for node in (0, 1):
        site.kill(node)
        site.start(node)
    results = harness.run(nodes.finds_agents, WORLD, WORLD, str(folder))
    assert all(result["drained"] and result["step"] == 1 for result in results)
    assert is_committed(folder / "far" / "run7", 2)
