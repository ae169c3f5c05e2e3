"""Saves steps to the first of three tiers, shows them arriving in each, loses the first and goes on from the next.

Usage: tiers.py FOREBAY FOLDER [S3_ENDPOINT]
FOREBAY is the command. The tiers are three folders below FOLDER; with S3_ENDPOINT the third is a bucket of the server
there, which must not ask for real credentials.
"""

import os
import shutil
import subprocess
import sys
import time
import urllib.request
import warnings
from pathlib import Path

import forebay
import torch
import torch.distributed.checkpoint as dcp

STEPS = (100, 200, 300)
BUCKET = "quickstart"
#: Most seconds until all is everywhere.
PATIENCE = 120.0


def configure(folder, endpoint):
    """Writes forebay.toml; gives the places."""
    third = f"s3://{BUCKET}/run" if endpoint else str(folder / "archive")
    places = [str(folder / "local"), str(folder / "shared"), third]
    store = f'[tier.store]\nendpoint = "{endpoint}"\nregion = "us-east-1"\n' if endpoint else ""
    (folder / "forebay.toml").write_text(
        f'[[tier]]\nname = "local"\nplace = "{places[0]}"\nkeep_last = 3\n\n'
        f'[[tier]]\nname = "shared"\nplace = "{places[1]}"\n\n'
        f'[[tier]]\nname = "archive"\nplace = "{places[2]}"\ntakes = "every 100"\n{store}\n'
        f'[tiers]\naudit_log = "{folder / "audit.log"}"\nlook_every = "1 s"\n'
    )
    return places


def state_of(step):
    generator = torch.Generator().manual_seed(step)
    weights = {f"layers.{n}.weight": torch.randn(256, 1024, generator=generator) for n in range(8)}
    return {"model": weights, "step": step}


def blank():
    weights = {f"layers.{n}.weight": torch.zeros(256, 1024) for n in range(8)}
    return {"model": weights, "step": -1}


def same(left, right):
    models = zip(left["model"].values(), right["model"].values(), strict=True)
    return left["step"] == right["step"] and all(torch.equal(mine, other) for mine, other in models)


def watch(checkpoints, begun):
    """Prints each arrival once, until every step is on every tier."""
    seen = set()
    wanted = {(step, tier) for step in STEPS for tier in range(3)}
    while seen < wanted:
        status = checkpoints.tier_status()
        for step in status["steps"]:
            for tier, copy in enumerate(step["copies"]):
                if copy == "committed" and (step["step"], tier) not in seen:
                    seen.add((step["step"], tier))
                    name = status["tiers"][tier]["name"]
                    print(f"  {time.monotonic() - begun:6.2f} s  step {step['step']} is on {name}")
        if time.monotonic() - begun > PATIENCE:
            errors = "\n".join(error["what"] for error in status["errors"])
            sys.exit(f"not everything arrived in {PATIENCE:.0f} s\n{errors}")
        time.sleep(0.02)


def stock(place, step, endpoint):
    """What stock torch reads there."""
    state = blank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if endpoint:
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

            options = {"client_kwargs": {"endpoint_url": endpoint, "region_name": "us-east-1"}}
            dcp.load(state, storage_reader=FsspecReader(f"{place}/step-{step}", **options))
        else:
            dcp.load(state, checkpoint_id=f"{place}/step-{step}")
    return state


def main(command, folder, endpoint=None):
    folder = Path(folder).absolute()
    folder.mkdir(parents=True)
    if endpoint:
        os.environ |= {"AWS_ACCESS_KEY_ID": "quickstart", "AWS_SECRET_ACCESS_KEY": "quickstart"}
        os.environ["AWS_REGION"] = "us-east-1"
        request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request, timeout=30).close()
    places = configure(folder, endpoint)
    tiers = str(folder / "forebay.toml")

    begun = time.monotonic()
    with forebay.Checkpointer(places[0], tiers=tiers) as checkpoints:
        for step in STEPS:
            checkpoints.save(step, state_of(step)).wait()
        watch(checkpoints, begun)

    environment = {**os.environ, "FOREBAY_CONFIG": tiers}
    subprocess.run([command, "tier", "status"], env=environment, check=True)
    subprocess.run([command, "ckpt", "audit", str(folder / "audit.log")], check=True)

    shutil.rmtree(places[0])
    print("the first tier is lost; what the next one has:")
    with forebay.Checkpointer(places[0], tiers=tiers) as checkpoints:
        state = blank()
        report = checkpoints.restore(state)
    if report.step != STEPS[-1] or not same(state, state_of(report.step)):
        sys.exit(f"step {report.step} is not what was saved")
    print(f"  restored step {report.step} bit for bit")
    if not same(stock(places[2], STEPS[0], endpoint), state_of(STEPS[0])):
        sys.exit("stock torch reads something else from the third tier")
    print(f"  stock torch reads step {STEPS[0]} of {places[2]} bit for bit")


if __name__ == "__main__":
    main(*sys.argv[1:])
