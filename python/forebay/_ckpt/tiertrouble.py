"""Trouble of tiers, told in the log of the job that saves: training goes on, and somebody should know."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from forebay._ckpt.agents import Agent
from forebay._ckpt.tiers import Tiers
from forebay._errors import Error

#: Healths of a tier to which nothing goes.
_BAD = ("down", "full", "read_only")

_log = logging.getLogger("forebay")


class Troubles:
    """What was told of each tier: it is told when it changes, not at every save."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}

    def see(self, tiers: Tiers | None, agent: Agent | None) -> None:
        """A step was committed: how do the tiers stand? Nothing is raised."""
        try:
            if agent is not None:
                self._compare(agent.status())
            elif tiers is not None:
                self._compare(tiers.status())
        except Error as error:
            _log.info("forebay: how the tiers stand is not known: %s", error)

    def _compare(self, status: Mapping[str, Any]) -> None:
        for number, tier in enumerate(status["tiers"]):
            name, health = tier["name"], tier["health"]
            before = self._told.get(name, "ok")
            if health in _BAD and health != before:
                errors = [one["what"] for one in status["errors"] if one["tier"] == number]
                why = errors[-1] if errors else ", ".join(tier["notes"]) or "no more is known"
                _log.warning("forebay: tier %s (%s) is %s: %s", name, tier["place"], health, why)
                self._told[name] = health
            elif health == "ok" and before != "ok":
                _log.warning("forebay: tier %s is ok again", name)
                self._told[name] = health
