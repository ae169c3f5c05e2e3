"""Python's audit hooks hear of what the native part changes in a checkpoint folder, before it is changed."""

from __future__ import annotations

from pathlib import Path

from support import run_script

CODE = """
import os, sys, torch, forebay
folder = sys.argv[1]
heard, refuse = [], [None]

def hook(event, arguments):
    if event in ("open", "os.rename", "os.remove", "forebay.seal"):
        path = str(arguments[-3] if event == "os.rename" else arguments[0])
        if path.startswith(folder):
            heard.append((event, os.path.basename(path), os.path.exists(path)))
            if event == refuse[0]:
                raise PermissionError("not here")

sys.addaudithook(hook)
checkpoints = forebay.Checkpointer(folder)
state = {"w": torch.ones(100_000), "step": 1}
checkpoints.save(1, state, side_files={"notes": b"text"}).wait()
events = [(event, name.split("_")[-1] if "_" in name else name) for event, name, _ in heard]
wanted = [("open", "begin-0"), ("open", "0.distcp"), ("forebay.seal", "0.distcp"), ("open", "metadata-0"),
          ("open", "decision"), ("os.rename", ".metadata"), ("os.remove", "begin-0")]
places = [events.index(one) for one in wanted]
assert places == sorted(places), events
assert not any(there for event, name, there in heard if event == "open" and name.endswith("distcp"))
assert ("os.rename", ".metadata", False) in heard
refuse[0] = "os.rename"
error = checkpoints.save(1, state).exception(60)
assert error is not None and error.code == "permission_denied" and "not here" in str(error), error
refuse[0] = None
assert checkpoints.restore({"w": torch.zeros(100_000), "step": 0}).step == 1
checkpoints.save(2, state).wait()
print("heard", len(heard))
"""


def test_audit_hooks_hear_of_each_change_before_it_is_made_and_may_refuse(tmp_path: Path) -> None:
    assert "heard" in run_script(CODE, tmp_path)
