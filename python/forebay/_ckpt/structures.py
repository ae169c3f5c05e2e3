"""From a state to what is written of it: recognising structures, and agreeing on new ones.

A structure may change on some ranks only: state of an optimizer that appears late for an expert, parameters that a
stage of a pipeline freezes. Then those ranks want to agree, and the others have begun to save as before, so that save
fails, on all ranks; `renew` makes the next one agree anew everywhere.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from forebay._ckpt import layout, plans
from forebay._ckpt.agreement import Agreed, Told, agree
from forebay._ckpt.description import Description, Version
from forebay._ckpt.flatten import States
from forebay._ckpt.held import Describer
from forebay._ckpt.objects import Stored, pack
from forebay._ckpt.perrank import Own, describe_own
from forebay._ckpt.plans import Plan
from forebay._ckpt.ranks import Ranks
from forebay._ckpt.shared import share
from forebay._errors import Error, make, usage
from forebay._urls import Place, names_in

#: Structures that are kept: a state with and one without the optimizer, and two more.
_PLANS = 4

#: How long a rank waits for the others when its structure changed after the first save, and they do nothing either.
PATIENCE_SECONDS = 120.0

_SHOWN = 8


@dataclass(slots=True, eq=False)
class Ready:
    """What one save writes, in the order of the native structure's items."""

    plan: Plan
    tensors: list[torch.Tensor]
    objects: list[Stored]
    #: Whether ranks had to talk about it.
    talked: bool


#: Makes a run known, once its ranks agree on its name: its id, and the state's tensors.
Open = Callable[[str, Sequence[torch.Tensor]], None]


@dataclass(frozen=True, slots=True)
class _Call:
    """The save that asks: its number in the run, its step, and how a run is begun."""

    counter: int
    step: int
    begin: Open


class Structures:
    """The structures that ranks agreed on."""

    def __init__(self, ranks: Ranks, files: int | None, directory: Place) -> None:
        self.ranks = ranks
        self._files = files
        self._directory = directory
        self._describer = Describer(ranks.rank, ranks.group_rank)
        self._plans: list[Plan] = []
        #: By the hash of this rank's description.
        self._agreed: dict[str, Agreed] = {}
        self._run_id = ""
        self._begun = False
        self._told: set[str] = set()

    @property
    def known(self) -> bool:
        """Whether ranks agreed on anything yet."""
        return self._begun

    def forget(self) -> None:
        """The next save is the first of a run. The same on all ranks."""
        self._begun = False
        self.renew()

    def renew(self) -> None:
        """The next save agrees anew. To be called on all ranks whose save failed because structures differ."""
        self._plans.clear()
        self._agreed.clear()

    def stay_away(self, counter: int, error: Error) -> None:
        """This rank does not agree on anything in the save of that number: those who wait for it fail with its error."""
        if self._begun:
            self.ranks.stay_away(self._meeting(counter), error)

    def step_of(self, counter: int) -> int | None:
        """The step that other ranks save with that number; None where nobody has begun."""
        names = names_in(self._directory)
        digits = [name.removeprefix("step-") for name in names if name.startswith("step-")]
        # Newest first: it nearly always is that, and each look at a bucket is a request.
        for step in sorted((int(one) for one in digits if one.isdecimal()), reverse=True):
            if names_in(self._directory, f"step-{step}", ".forebay", self._attempt(counter)):
                return step
        return None

    def _attempt(self, counter: int) -> str:
        """How the native part calls the save of that number."""
        return f"{self._run_id}-{counter:x}"

    def _meeting(self, counter: int) -> str:
        return f"{self._run_id}/{counter}"

    def describe(self, state: Any) -> tuple[Plan, list[torch.Tensor]]:
        """A state as it is here, and all pieces of its tensors. Nobody else hears of it."""
        plan, values = plans.describe(state, self._describer, {})
        return plan, [piece for group in plans.memory(plan, values) for piece in group]

    def prepare(
        self,
        counter: int,
        step: int,
        state: Any,
        per_rank: Any,
        begin: Open,
        failure: Exception | None = None,
    ) -> Ready:
        """What to write of a state. Collective for a structure that was never seen. `failure` is why this rank cannot
        save at all, for the others to hear of. Errors: those of describing a state, and of other ranks."""
        states: States = {}
        for place, plan in enumerate(() if failure is not None else self._plans):
            found = plans.fits(plan, state, self._describer, states)
            if found is not None:
                self._plans.insert(0, self._plans.pop(place))
                values, pieces = found
                own = self._own(per_rank)
                packed = layout.pack_objects(plan, values, plan.writes_objects)
                return self._gather(plan, own, pieces, packed, False)
        return self._new(_Call(counter, step, begin), state, per_rank, states, failure)

    def _new(
        self, call: _Call, state: Any, per_rank: Any, states: States, failure: Exception | None
    ) -> Ready:
        """A structure that was not seen before, or not lately."""
        plan: Plan | None = None
        values: list[Any] = []
        packed: dict[int, Stored] = {}
        own: Own | None = None
        try:
            if failure is not None:
                raise failure
            plan, values = plans.describe(state, self._describer, states)
            packed = layout.pack_objects(plan, values, plan.objects)
            own = self._own(per_rank)
        except Exception as error:
            if self.ranks.alone or self.known:
                # Later on others may have nothing to agree on, so nobody may wait for this rank.
                raise
            failure = error
        talked = self._agree(call, plan, values, packed, own, failure)
        assert plan is not None
        self._plans.insert(0, plan)
        del self._plans[_PLANS:]
        return self._gather(plan, own, plans.memory(plan, values), packed, talked)

    def _own(self, per_rank: Any) -> Own | None:
        if not per_rank:
            return None
        return describe_own(self.ranks.rank, per_rank, self._describer)

    def _gather(
        self,
        plan: Plan,
        own: Own | None,
        pieces: Sequence[Sequence[torch.Tensor]],
        packed: Mapping[int, Stored],
        talked: bool,
    ) -> Ready:
        if plan.structure is None or plan.own_signature != (own and own.signature()):
            layout.lay_out(plan, own, self.ranks.rank, self.ranks.size, self._files)
        tensors = [pieces[at][number] for at, number in plan.writes]
        objects = [packed[place] for place in plan.writes_objects]
        if own is not None:
            for name, value, held in zip(own.flat.names, own.flat.values, own.held, strict=True):
                if held is None:
                    objects.append(pack(name, value))
                else:
                    tensors.append(value)
        return Ready(plan, tensors, objects, talked)

    def _agree(
        self,
        call: _Call,
        plan: Plan | None,
        values: Sequence[Any],
        packed: Mapping[int, Stored],
        own: Own | None,
        failure: Exception | None,
    ) -> bool:
        """Finds or makes the agreement on a plan's structure; True if ranks had to talk about it."""
        ranks = self.ranks
        if ranks.alone:
            assert plan is not None
            self._agree_alone(call, plan, values, own)
            return False
        first = not self.known
        description = Description() if plan is None else layout.description(plan)
        digest = _digest(description)
        known = self._agreed.get(digest)
        if plan is not None and known is not None:
            plan.agreed = known
            return False
        if not first:
            began = partial(self._others_began, call)
            ranks.meet(self._meeting(call.counter), PATIENCE_SECONDS, began, _left_alone)
        told = Told(
            description,
            {} if plan is None else layout.checksums(plan, values, packed),
            layout.element_bytes,
            call.step,
            _as_error(failure),
            {"run": secrets.token_hex(4)} if first else {},
            {} if plan is None else layout.readings(plan),
        )

        def reread(found: Mapping[str, int]) -> Description:
            return description if plan is None else layout.reread(plan, self._describer, found)

        try:
            agreed = agree(ranks, told, reread)
        except Error as raised:
            if failure is not None and not isinstance(failure, Error):
                raise failure from raised
            raise
        assert plan is not None
        plan.agreed = agreed
        if first:
            self._begin(call, str(agreed.first["run"]), plan, values)
        ranks.raise_first(self._lay_out(plan, own))
        self._begun = True
        self._agreed[digest] = agreed
        self._tell(plan, agreed)
        return True

    def _agree_alone(self, call: _Call, plan: Plan, values: Sequence[Any], own: Own | None) -> None:
        """With nobody to ask everything is as it is here."""
        ties = {plan.names[plan.tensors[at]]: True for at in plan.ties}
        alone = layout.description(plan)
        names: dict[str, list[Version]] = {
            name: [(alone, (0,), entry)] for name, entry in alone.entries.items()
        }
        plan.agreed = Agreed("", {}, {}, ties, [], share(names, ties))
        if not self.known:
            self._begin(call, secrets.token_hex(4), plan, values)
        error = self._lay_out(plan, own)
        if error is not None:
            raise error
        self._begun = True
        self._tell(plan, plan.agreed)
        if not plan.names and not plan.empty and own is None:
            self._warn("the state holds nothing, so the step holds nothing either", 9)

    def _begin(self, call: _Call, run_id: str, plan: Plan, values: Sequence[Any]) -> None:
        self._run_id = run_id
        call.begin(run_id, [values[at] for at in plan.tensors])

    def _others_began(self, call: _Call) -> bool:
        """Whether another rank has begun to write what this rank waits to agree on: that one does not come any more.
        What does not show yet is found later."""
        folder = f"step-{call.step}"
        try:
            records = names_in(self._directory, folder, ".forebay", self._attempt(call.counter))
        except Error:
            # A bucket that does not answer now: the next look may.
            return False
        return any(name.startswith("begin-") for name in records)

    def _lay_out(self, plan: Plan, own: Own | None) -> Error | None:
        """Makes the native structure; the error if that cannot be, for the others to hear of."""
        try:
            layout.lay_out(plan, own, self.ranks.rank, self.ranks.size, self._files)
        except Error as error:
            return error
        return None

    def _tell(self, plan: Plan, agreed: Agreed) -> None:
        """What is worth a warning, once."""
        if self.ranks.rank:
            return
        lines = list(agreed.warnings)
        if plan.empty:
            shown = ", ".join(plan.empty[:_SHOWN]) + (", ..." if len(plan.empty) > _SHOWN else "")
            lines.append(
                f"these parts of the state hold nothing, so nothing of them is saved: {shown}"
            )
        for line in lines:
            self._warn(line)

    def _warn(self, line: str, level: int = 10) -> None:
        if line not in self._told:
            self._told.add(line)
            warnings.warn(line, stacklevel=level)


def _left_alone(came: int, size: int) -> Error:
    what = (
        f"the structure of the state changed on {came} of {size} ranks: "
        f"the others saved it as before, or not at all"
    )
    hint = "the next save agrees on the structure anew, on all ranks"
    return make("structure_mismatch", what, None, [hint])


def _digest(description: Description) -> str:
    text = json.dumps(description.message(), separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _as_error(failure: BaseException | None) -> Error | None:
    if failure is None or isinstance(failure, Error):
        return failure
    return usage(f"describing the state failed: {type(failure).__name__}: {failure}")
