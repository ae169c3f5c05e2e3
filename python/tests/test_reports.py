"""What users of other checkpoint writers ran into, and the tests that show what happens here.

Each line: what went wrong elsewhere, and the tests, by name. Those that are not named after a file are in this one. A test
at the end looks whether each of them is there.

Values that are not those of the step

 1  with a kept structure every later save wrote the first one's values: test_every_save_holds_the_values_of_its_own_step,
    test_a_tensor_that_moved_is_read_where_it_is_now
 2  the optimizer's step count was one save ahead of the weights: test_weights_and_step_counts_are_of_one_moment
 3  values of CPU tensors that changed after the call: test_values_changed_after_the_call_are_not_saved
 4  staging memory was used again while it was still read: test_staging_memory_is_not_used_again_before_it_is_written,
    test_a_stager_never_reuses_memory_that_may_still_be_read
 5  a writer that was started again had lost its state, and the save: test_saves_after_close_start_anew,
    test_plans_from_the_cache_of_torch_are_attempts_of_their_own

Memory, threads, processes

 6  GPU memory stayed taken after a save: test_gpu_memory_of_shadows_comes_back, test_memory_is_given_back_on_demand
 7  collective calls of a background thread met those of the main thread:
    test_no_collective_call_from_the_second_save_on_and_none_off_the_main_thread
 8  ranks came to different collective calls at the start: test_the_first_save_needs_no_luck_in_timing,
    test_a_rank_whose_state_alone_changed_gets_an_error_not_a_hang
 9  a port was taken, thousands of descriptors were passed: test_a_save_opens_no_port_and_few_files,
    test_many_tensors_need_no_more_files_than_few
17  0-d tensors broke asynchronous saves: test_scalars_are_saved_in_the_background,
    test_torch_reads_every_dtype_and_shape_back

Crashes, what is visible, what is removed

18  `latest` moved before the data was durable: test_what_latest_names_loads_at_that_moment,
    a_fault_at_any_step_of_a_save_leaves_a_whole_step_or_none
19  a leftover folder failed the next save, and hung other ranks: test_a_save_goes_over_what_others_left,
    test_a_killed_job_leaves_its_last_commit_and_the_next_life_goes_on
20  retention removed the only durable step: test_retention_counts_commits_only,
    retention_counts_commits_only_and_follows_the_line
21  the step's number was read when it was no longer that: test_the_step_is_the_number_at_the_call
22  a job resumed from a step that was cancelled half way: test_a_cancelled_save_is_not_resumed_from,
    test_a_killed_job_leaves_its_last_commit_and_the_next_life_goes_on
23  the highest number won, complete or not, and leftovers piled up: test_the_highest_number_is_not_the_latest_commit,
    the_listing_tells_committed_pending_dead_and_failed_apart
24  a step that was asked for and missing was a fresh start: test_a_step_that_is_not_there_is_an_error_that_lists_what_is
25  ranks that all renamed, folders that were trusted: every_rank_hears_of_the_same_commit_and_the_records_are_tidied,
    of_two_writers_of_one_step_one_wins_and_the_other_knows
26  side files came apart from the step: test_side_files_are_part_of_the_commit
27  `.metadata` was written in place: test_a_reader_beside_overwrites_sees_one_save,
    a_fault_at_any_step_of_an_overwrite_leaves_the_old_step_or_the_new
28  a disk was full for some ranks, who failed each in its own way: test_a_full_disk_is_one_clear_error_on_every_rank,
    test_what_fails_on_one_rank_fails_on_all_with_its_error
29  bits rot in silence: test_a_flipped_bit_is_found_before_anything_is_handed_over, test_a_flipped_bit_is_found,
    test_a_flipped_bit_in_any_file_of_a_step_is_found,
    test_a_flip_anywhere_in_the_metadata_is_an_error_or_does_no_harm,
    test_a_damaged_newest_step_is_no_reason_to_go_back_in_silence
30  ranks waited half an hour for one whose storage had failed: test_what_fails_on_one_rank_fails_on_all_with_its_error,
    a_rank_whose_store_fails_for_good_tells_the_others_by_hints
31  a read error of one rank was hidden by the timeout of the others: test_what_one_rank_cannot_read_all_raise

Other ranks, other shapes

32  whole chunks were read for a few rows: test_only_the_rows_that_are_wanted_are_read,
    test_torch_written_chunks_are_read_in_ranges
37  a rank without a shard lacked the key, and
38  six rows over four ranks, tensors of one element: test_four_ranks_to_others_and_back, test_few_ranks_to_more
39  ragged and padded shards: test_ragged_shards_with_padding_are_stored_without_it
42  unexpected keys were ignored, missing ones could not be: test_names_on_one_side_only_are_errors_or_reported
43  shapes that differ failed deep in a read: test_a_mismatch_names_the_key_and_both_sides_before_anything_is_read
44  storage that is not shared: test_a_directory_that_is_not_shared_is_found_at_the_first_save,
    test_folders_that_are_not_shared_are_found_even_if_they_are_alike

Meaning of the state

45  per-rank tensors under one key, and
46  random states that came back wrong on most ranks: test_values_that_should_be_alike_and_differ_are_one_warning,
    test_what_belongs_to_a_rank_comes_back_to_it
47  tied weights: test_tied_weights_are_stored_once_and_restored_under_both_names,
    test_training_with_fsdp_and_tied_weights_goes_on_bit_for_bit
48  optimizers whose state was lost without a word: test_frozen_parameters_and_unused_groups_keep_their_state,
    test_parts_of_the_state_that_hold_nothing_are_told, test_an_optimizer_that_never_stepped_is_restored
49  strides: test_views_are_saved_as_they_look, test_any_view_arrives_as_torch_has_it

Sizes and pickles from outside

53  a damaged length asked for an exabyte: test_a_damaged_length_is_an_error_and_no_allocation
55  `.metadata` was executed: test_metadata_is_not_executed, test_neither_metadata_nor_objects_are_executed
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import forebay
from forebay import Checkpointer, _native

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def committed(directory: Path) -> list[int]:
    return [one["step"] for one in _native.steps(directory) if one["state"] == "committed"]


def stock(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    return state


def test_every_save_holds_the_values_of_its_own_step(tmp_path: Path) -> None:
    module = nn.Linear(300, 300)
    with Checkpointer(tmp_path, staging_bytes="8MiB") as checkpoints:
        for step in range(8):
            with torch.no_grad():
                module.weight.fill_(step)
                module.bias.fill_(-step)
            checkpoints.save(step, {"model": module})
    for step in range(8):
        weights = {"weight": torch.zeros(300, 300), "bias": torch.zeros(300)}
        found = stock(tmp_path / f"step-{step}", {"model": weights})["model"]
        assert bool((found["weight"] == step).all()) and bool((found["bias"] == -step).all())


def test_weights_and_step_counts_are_of_one_moment(tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = nn.Linear(256, 256)
    # Its step counts are tensors on the CPU.
    optimizer = torch.optim.Adam(module.parameters())
    wanted: dict[int, tuple[torch.Tensor, float]] = {}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.attach(optimizer)
        for step in range(1, 8):
            optimizer.zero_grad()
            module(torch.randn(4, 256)).square().mean().backward()
            optimizer.step()
            count = optimizer.state[module.weight]["step"]
            wanted[step] = (module.weight.detach().clone(), float(count))
            # Goes on at once; the hook waits before the next step.
            checkpoints.save(step, {"model": module, "optim": optimizer})
    for step, (weight, count) in wanted.items():
        other = nn.Linear(256, 256)
        adam = torch.optim.Adam(other.parameters())
        Checkpointer(tmp_path).restore({"model": other, "optim": adam}, step)
        assert torch.equal(other.weight, weight)
        assert float(adam.state[other.weight]["step"]) == count == step


def test_staging_memory_is_not_used_again_before_it_is_written(tmp_path: Path) -> None:
    # Four times as much as the staging memory, from one save to the next without a pause.
    names = [f"t{number}" for number in range(32)]
    state = {name: torch.zeros(1 << 18) for name in names}
    with Checkpointer(tmp_path, staging_bytes="8MiB") as checkpoints:
        for step in range(4):
            for number, tensor in enumerate(state.values()):
                tensor.fill_(step * 100 + number)
            checkpoints.save(step, state)
    for step in range(4):
        blank = {name: torch.zeros(1 << 18) for name in names}
        Checkpointer(tmp_path).restore(blank, step)
        for number, name in enumerate(names):
            assert bool((blank[name] == step * 100 + number).all()), (step, name)


def _sockets() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found


def test_a_save_opens_no_port_and_few_files(tmp_path: Path) -> None:
    state = {f"t{number}": torch.ones(64) for number in range(3000)}
    before, children = _sockets(), _children()
    seen: set[str] = set()
    most = 0
    with Checkpointer(tmp_path, threads=4) as checkpoints:
        for step in range(3):
            handle = checkpoints.save(step, state)
            while not handle.done():
                seen |= _sockets()
                most = max(most, len(os.listdir("/proc/self/fd")))
                assert _children() == children
        opened = len(os.listdir("/proc/self/fd"))
    assert not seen - before
    assert most - opened < 40


def _children() -> set[str]:
    tasks = Path("/proc/self/task")
    texts = []
    for task in os.listdir(tasks):
        try:
            texts.append((tasks / task / "children").read_text())
        except FileNotFoundError:
            continue
    return set(" ".join(texts).split())


def test_scalars_are_saved_in_the_background(tmp_path: Path) -> None:
    dtypes = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64]
    state = {str(dtype): torch.ones((), dtype=dtype) for dtype in dtypes}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        for tensor in state.values():
            tensor.zero_()
        checkpoints.wait()
    blank = {name: torch.zeros_like(value) for name, value in state.items()}
    stock(tmp_path / "step-1", blank)
    for name, value in blank.items():
        assert value.shape == () and bool(value), name


def test_what_latest_names_loads_at_that_moment(tmp_path: Path) -> None:
    stop = threading.Event()
    seen: list[int] = []
    failures: list[BaseException] = []

    def look() -> None:
        while not stop.is_set():
            step = _native.latest(tmp_path)
            if step is None or step in seen:
                continue
            try:
                found = stock(tmp_path / f"step-{step}", {"w": torch.zeros(1 << 18)})
                assert bool((found["w"] == step).all())
            except BaseException as error:  # noqa: BLE001
                failures.append(error)
                return
            seen.append(step)

    looker = threading.Thread(target=look)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(1 << 18)}).wait()
        looker.start()
        for step in range(2, 8):
            checkpoints.save(step, {"w": torch.full((1 << 18,), float(step))}).wait()
    stop.set()
    looker.join(60)
    assert not failures, failures[0]
    assert seen and seen == sorted(seen)


def _abandon(directory: Path, step: int, source: int) -> Path:
    """What a writer leaves that is killed just before it commits: all but `.metadata` and the decision for it."""
    folder = directory / f"step-{step}"
    shutil.copytree(directory / f"step-{source}", folder)
    (folder / ".metadata").unlink()
    for decision in (folder / ".forebay").glob("*/decision"):
        decision.unlink()
    return folder


def test_a_save_goes_over_what_others_left(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(100)}).wait()
        _abandon(tmp_path, 2, 1)
        # A save of torch that was killed, and a folder of somebody who meant to.
        (tmp_path / "step-3").mkdir()
        (tmp_path / "step-3" / "__0_0.distcp").write_bytes(b"half of it")
        (tmp_path / "step-3" / ".metadata.tmp").write_bytes(b"")
        (tmp_path / "step-4").mkdir()
        for step in (2, 3, 4):
            checkpoints.save(step, {"w": torch.full((100,), float(step))}).wait()
    assert committed(tmp_path) == [1, 2, 3, 4]
    for step in (2, 3, 4):
        found = stock(tmp_path / f"step-{step}", {"w": torch.zeros(100)})
        assert bool((found["w"] == step).all())


def test_retention_counts_commits_only(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(100)}).wait()
        handle = checkpoints.save(2, {"w": torch.ones(64 << 20, dtype=torch.uint8)})
        handle.cancel()
        error = handle.exception(60)
        assert error is not None and error.code == "cancelled"
        told = checkpoints.prune(keep_last=1, grace_s=0)
        assert told["unpublished"] == []
    assert committed(tmp_path) == [1]
    assert bool((stock(tmp_path / "step-1", {"w": torch.zeros(100)})["w"] == 1).all())


def test_the_step_is_the_number_at_the_call(tmp_path: Path) -> None:
    counters: list[Any] = [torch.tensor(5), np.array(6)]
    with Checkpointer(tmp_path) as checkpoints:
        handles = []
        for counter in counters:
            handles.append(checkpoints.save(counter, {"w": torch.ones(1 << 20)}))
            counter += 100
        assert [handle.step for handle in handles] == [5, 6]
    assert committed(tmp_path) == [5, 6]
    assert _native.Checkpoint(tmp_path, step=5).info["step"] == 5


def test_a_cancelled_save_is_not_resumed_from(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(100)}).wait()
        handle = checkpoints.save(2, {"w": torch.ones(64 << 20, dtype=torch.uint8)})
        handle.cancel()
        handle.exception(60)
        blank = {"w": torch.zeros(100)}
        assert checkpoints.restore(blank).step == 1 and bool((blank["w"] == 1).all())


def test_the_highest_number_is_not_the_latest_commit(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(100)}).wait()
        folder = _abandon(tmp_path, 1000, 1)
        assert checkpoints.latest() == 1
        states = {one["step"]: one["state"] for one in checkpoints.steps()}
        # It is a moment old: somebody may be writing it.
        assert states[1] == "committed" and states[1000] in ("pending", "dead")
        with pytest.raises(forebay.Error) as caught:
            checkpoints.restore({"w": torch.zeros(100)}, 1000)
        assert caught.value.code == "not_committed"
        _native.gc(tmp_path, grace_s=0)
    assert not folder.exists() and committed(tmp_path) == [1]


def test_a_reader_beside_overwrites_sees_one_save(tmp_path: Path) -> None:
    stop = threading.Event()
    seen: list[float] = []
    failures: list[BaseException] = []

    def read() -> None:
        while not stop.is_set():
            try:
                found = stock(tmp_path / "step-1", {n: torch.zeros(50_000) for n in "abcd"})
                values = {float(value) for one in found.values() for value in one.unique()}
                assert len(values) == 1, values
                seen.append(values.pop())
            except BaseException as error:  # noqa: BLE001
                failures.append(error)
                return

    reader = threading.Thread(target=read)
    with Checkpointer(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(1, {name: torch.zeros(50_000) for name in "abcd"}).wait()
        reader.start()
        for number in range(1, 12):
            checkpoints.save(1, {n: torch.full((50_000,), float(number)) for n in "abcd"}).wait()
        stop.set()
        reader.join(60)
    assert not failures, failures[0]
    assert seen and seen == sorted(seen)


def test_a_flipped_bit_in_any_file_of_a_step_is_found(tmp_path: Path) -> None:
    state = {"w": torch.arange(3000.0), "small": torch.ones(3), "object": {1, 2}}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, side_files={"notes": b"text" * 100}).wait()
    folder = tmp_path / "step-1"
    files = [path for path in folder.iterdir() if path.is_file()]
    assert len(files) == 4
    for path in files:
        good = path.read_bytes()
        # Bytes of data; others are archive headers that a reader of ours does not need.
        places = _places_of_data(folder, path, state)
        for place in places:
            bad = bytearray(good)
            bad[place] ^= 0x10
            path.write_bytes(bad)
            with pytest.raises(forebay.Error) as caught:
                _read_everything(tmp_path, state)
            assert caught.value.code in ("checksum", "invalid_metadata"), (path.name, place)
        path.write_bytes(good)
    _read_everything(tmp_path, state)


def test_a_flip_anywhere_in_the_metadata_is_an_error_or_does_no_harm(tmp_path: Path) -> None:
    state = {"w": torch.arange(300.0), "small": torch.ones(3), "object": {1, 2}}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state).wait()
        checkpoints.save(2, state).wait()
    _native.gc(tmp_path, grace_s=0)
    path = tmp_path / "step-2" / ".metadata"
    data = sorted(path.parent.iterdir())
    good = path.read_bytes()
    sound = refused = 0
    # What a restore reads of it, and more; crates/forebay-checkpoint/tests/metadata_flips.rs flips each bit.
    for place in range(max(len(good) - 4096, 0), len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << (place % 8)
        path.write_bytes(bad)
        blank = {"w": torch.zeros(300), "small": torch.zeros(3), "object": None}
        try:
            assert Checkpointer(tmp_path).restore(blank, weights_only=False).step == 2, place
        except forebay.Error as error:
            assert error.code == "invalid_metadata", (place, error)
            assert not blank["w"].any()  # type: ignore[union-attr]
            refused += 1
        else:
            # By its manifest, so every block was compared.
            assert _native.Checkpoint(tmp_path, step=2).info["step"] == 2, place
            assert torch.equal(blank["w"], state["w"]), place  # type: ignore[arg-type]
            sound += 1
        if place % 50 == 0:
            assert _native.gc(tmp_path, grace_s=0) == []
    assert sound > 300 and refused > 200, (sound, refused)
    path.write_bytes(good)
    assert sorted(path.parent.iterdir()) == data and Checkpointer(tmp_path).latest() == 2


def test_a_damaged_newest_step_is_no_reason_to_go_back_in_silence(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": torch.full((100,), float(step))}).wait()
    path = tmp_path / "step-2" / ".metadata"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"forebay:1 ", b"forebay;1 "))
    blank = {"w": torch.zeros(100)}
    for call in (Checkpointer(tmp_path).latest, lambda: Checkpointer(tmp_path).restore(blank)):
        with pytest.raises(forebay.Error) as caught:
            call()
        assert caught.value.code == "invalid_metadata"
        assert "step 2" in str(caught.value) and "step 1" in str(caught.value)
    assert not blank["w"].any()
    # Named, it is used.
    assert Checkpointer(tmp_path).restore(blank, 1).step == 1
    assert bool((blank["w"] == 1).all())
    # And saved anew, the damage is gone.
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(2, {"w": torch.full((100,), 3.0)}).wait()
        assert checkpoints.restore(blank).step == 2
    assert bool((blank["w"] == 3).all())


def _places_of_data(folder: Path, path: Path, state: dict[str, Any]) -> list[int]:
    whole = path.read_bytes()
    if path.name == ".metadata":
        seal = whole.rindex(b"forebay:1 ")
        return list(range(seal, seal + len(b"forebay:1 ") + 100))
    if path.suffix != ".distcp":
        return list(range(0, len(whole), max(len(whole) // 40, 1)))
    data = state["w"].numpy().tobytes()
    start = whole.index(data)
    return [start, start + len(data) // 2, start + len(data) - 1]


def _read_everything(directory: Path, state: dict[str, Any]) -> None:
    blank = {"w": torch.zeros(3000), "small": torch.zeros(3), "object": None}
    Checkpointer(directory).restore(blank, 1, weights_only=False)
    assert torch.equal(blank["w"], state["w"])  # type: ignore[arg-type]
    checkpoint = _native.Checkpoint(directory, step=1)
    for name in checkpoint.side_files:
        checkpoint.side_file(name)


def test_frozen_parameters_and_unused_groups_keep_their_state(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
        module[0].requires_grad_(False)
        groups = [
            {"params": list(module[0].parameters()), "lr": 0.5},
            {"params": list(module[1].parameters()), "lr": 0.25},
            # Not used in the loss: no gradients, no state.
            {"params": list(module[2].parameters()), "lr": 0.125},
        ]
        return module, torch.optim.AdamW(groups)

    def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            layers = list(module.children())
            layers[1](layers[0](torch.ones(2, 8))).square().mean().backward()
            optimizer.step()

    module, optimizer = make()
    train(module, optimizer, 3)
    for group in optimizer.param_groups:
        group["lr"] /= 2
    with Checkpointer(tmp_path) as checkpoints:
        # Gradients are there, as they are in the middle of a loop.
        assert module[1].weight.grad is not None
        checkpoints.save(3, {"model": module, "optim": optimizer}).wait()
        other, again = make()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpoints.restore({"model": other, "optim": again})
    assert [group["lr"] for group in again.param_groups] == [0.25, 0.125, 0.0625]
    assert len(again.state) == len(optimizer.state) == 2
    train(module, optimizer, 2)
    train(other, again, 2)
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two) and one.requires_grad == two.requires_grad


def test_the_tests_that_are_named_here_are_there() -> None:
    assert __doc__ is not None
    named = set(re.findall(r"\b(?:test_)?[a-z0-9]+(?:_[a-z0-9]+){3,}\b", __doc__))
    assert len(named) > 50
    tests = Path(__file__).parent
    crates = tests.parent.parent / "crates"
    if not crates.is_dir():
        pytest.skip("the crates are not here")
    found = set()
    for path in [*tests.rglob("*.py"), *crates.glob("*/tests/**/*.rs")]:
        found |= set(re.findall(r"(?:def|fn) (\w+)\(", path.read_text()))
    assert not named - found
