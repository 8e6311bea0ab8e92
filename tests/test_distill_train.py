"""Training: it learns, it goes on exactly where it was cut short, and its states and caches are whole or not there."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_ort.distill import features as features_module
from dflash_ort.distill.data import make_data
from dflash_ort.distill.dialogues import Dialogue
from dflash_ort.distill.features import Features
from dflash_ort.distill.result import write_trained
from dflash_ort.distill.settings import TrainSettings
from dflash_ort.distill.shards import is_held_out
from dflash_ort.distill.state import STATE_FILE
from dflash_ort.distill.target import DataTarget, open_target
from dflash_ort.distill.train import Trained, train
from dflash_ort.errors import BundleError, CheckpointError, RequestError
from dflash_ort.exporter.checkpoint import PLAIN
from dflash_ort.exporter.drafter_reader import read_drafter
from tests.tiny import TinyShape, write_simple_target

TAPS = (0, 1, 2)
SETTINGS = TrainSettings(
    taps=TAPS, steps=40, depth=1, block_size=3, dialogues=4, anchors=16, evaluations=4, warm_up=5, learning_rate=4e-3
)
PLENTY = 10**9


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    """Bits depend on how sums are split among threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> DataTarget:
    root = tmp_path_factory.mktemp("target")
    path = write_simple_target(root / "tiny", TinyShape(hidden=32, intermediate=48, heads=2, kv_heads=1))
    return open_target(path, root / "work", precision="fp32", taps=TAPS, slots=8, threads=1)


@pytest.fixture(scope="module")
def data(target: DataTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    make_data(target, None, directory, dialogues=48, max_new_tokens=24, shard_dialogues=16, seed=3)
    return directory


@pytest.fixture(scope="module")
def features(target: DataTarget, data: Path) -> Features:
    made = Features(target, data, budget=PLENTY)
    made.fill()
    return made


def run(
    target: DataTarget, features: Features, directory: Path, settings: TrainSettings = SETTINGS, **options: Any
) -> Trained:
    return train(
        target.checkpoint,
        features.dialogues,
        features,
        settings,
        directory,
        vocab_size=target.spec.vocab_size,
        **options,
    )


@pytest.fixture(scope="module")
def trained(target: DataTarget, features: Features, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return run(target, features, tmp_path_factory.mktemp("training"))


def interrupting(step: int, number: int = signal.SIGINT) -> Callable[..., None]:
    """A progress that presses Ctrl-C at some step of a run that says every step."""

    def press(message: str, fraction: float | None = None) -> None:
        if f"step {step}," in message:
            signal.raise_signal(number)

    return press


def ticking() -> Callable[[], float]:
    """A clock on which everything takes ten seconds, so that every step is worth a word."""
    times = iter(range(0, 10**9, 10))
    return lambda: float(next(times))


def assert_same(a: Trained, b: Trained) -> None:
    assert a.tensors.keys() == b.tensors.keys()
    for name in a.tensors:
        np.testing.assert_array_equal(a.tensors[name], b.tensors[name], err_msg=name)
    assert [(p.step, p.loss, p.acceptance_length) for p in a.curve] == [
        (p.step, p.loss, p.acceptance_length) for p in b.curve
    ]
    assert (a.acceptance, a.rows, a.steps) == (b.acceptance, b.rows, b.steps)


class TestTraining:
    def test_it_learns(self, trained: Trained) -> None:
        losses = [point.loss for point in trained.curve[1:]]
        assert losses == sorted(losses, reverse=True)
        lengths = [point.acceptance_length for point in trained.curve]
        assert max(lengths) > lengths[0] + 0.4
        assert trained.acceptance.survival[0] > 0.5
        assert trained.steps == 40
        assert not trained.ended_early

    @pytest.mark.parametrize("changes", [{"muon": 4e-3}, {"extensions": PLAIN, "taps": TAPS}, {"token_weight": 0.5}])
    def test_every_way_of_training_lowers_the_loss(
        self, changes: dict[str, Any], target: DataTarget, features: Features, tmp_path: Path
    ) -> None:
        made = run(target, features, tmp_path, replace(SETTINGS, steps=20, **changes))
        assert made.curve[-1].loss < made.curve[1].loss
        assert made.shape.num_drafts == (2 if "extensions" in changes else 3)

    @pytest.mark.parametrize("muon", [None, 4e-3])
    @pytest.mark.parametrize("step", [1, 13])
    def test_an_interrupted_run_ends_as_the_other(
        self, step: int, muon: float | None, target: DataTarget, features: Features, trained: Trained, tmp_path: Path
    ) -> None:
        settings = replace(SETTINGS, muon=muon)
        whole = trained if muon is None else run(target, features, tmp_path / "whole", settings)
        with pytest.raises(KeyboardInterrupt):
            run(target, features, tmp_path / "cut", settings, clock=ticking(), progress=interrupting(step))
        assert [path.name for path in (tmp_path / "cut").iterdir()] == [STATE_FILE]
        assert_same(run(target, features, tmp_path / "cut", settings), whole)

    def test_a_finished_run_is_only_evaluated_again(
        self, target: DataTarget, features: Features, trained: Trained, tmp_path: Path
    ) -> None:
        assert_same(run(target, features, tmp_path), trained)
        assert_same(run(target, features, tmp_path), trained)

    def test_states_are_saved_now_and_then(
        self, target: DataTarget, features: Features, trained: Trained, tmp_path: Path
    ) -> None:
        """A kill that nobody can catch loses what came after the last state."""

        class Killed(BaseException):
            pass

        def kill(message: str, fraction: float | None = None) -> None:
            if "step 33," in message:
                raise Killed

        with pytest.raises(Killed):
            run(target, features, tmp_path, clock=ticking(), progress=kill)
        assert [path.name for path in tmp_path.iterdir()] == [STATE_FILE]
        assert_same(run(target, features, tmp_path), trained)

    def test_time_ends_it_and_is_counted_over_interruptions(
        self, target: DataTarget, features: Features, tmp_path: Path
    ) -> None:
        settings = replace(SETTINGS, steps=None, seconds=300.0)
        with pytest.raises(KeyboardInterrupt):
            run(target, features, tmp_path, settings, clock=ticking(), progress=interrupting(9))
        made = run(target, features, tmp_path, settings, clock=ticking())
        assert made.seconds >= 300.0
        assert 20 < made.steps < 35

    def test_it_ends_early_when_nothing_gets_better(
        self, target: DataTarget, features: Features, tmp_path: Path
    ) -> None:
        settings = replace(SETTINGS, learning_rate=1e-9, evaluations=20, patience=2)
        made = run(target, features, tmp_path, settings)
        assert made.ended_early
        assert made.steps == 24, "two evaluations behind the half of short blocks"

    def test_a_state_of_another_run_is_refused(
        self, target: DataTarget, features: Features, data: Path, tmp_path: Path
    ) -> None:
        run(target, features, tmp_path, replace(SETTINGS, steps=4))
        with pytest.raises(BundleError, match=r"other settings \(block_size, seed\); delete it") as caught:
            run(target, features, tmp_path, replace(SETTINGS, steps=4, seed=1, block_size=2))
        assert "\n" not in str(caught.value)
        less = Features(target, data, budget=PLENTY)
        less.dialogues = less.dialogues[:32]
        with pytest.raises(BundleError, match="trained on other data"):
            run(target, less, tmp_path, replace(SETTINGS, steps=4))
        path = tmp_path / STATE_FILE
        path.write_bytes(path.read_bytes()[:1000])
        with pytest.raises(BundleError, match="not a whole training state"):
            run(target, features, tmp_path, replace(SETTINGS, steps=4))

    def test_a_drafter_is_gone_on_from(
        self, target: DataTarget, features: Features, trained: Trained, tmp_path: Path
    ) -> None:
        whole = {"vocab_size": target.spec.vocab_size, "data": {}, "settings": {}}
        write_trained(tmp_path / "drafter", trained, target.checkpoint, **whole)
        init = read_drafter(tmp_path / "drafter")
        made = run(target, features, tmp_path / "training", replace(SETTINGS, steps=4), init=init)
        assert made.curve[0].acceptance_length == pytest.approx(
            max(point.acceptance_length for point in trained.curve), abs=0.1
        )
        smaller = run(target, features, tmp_path / "smaller", replace(SETTINGS, steps=4, vocabulary=40), init=init)
        counts = np.bincount(np.concatenate([d.ids for d in features.dialogues if not is_held_out(d)]))
        assert len(smaller.vocabulary) == 40
        assert counts[smaller.vocabulary].min() >= np.sort(counts)[-40]
        for changes, word in (
            ({"depth": 2}, "depth"),
            ({"extensions": PLAIN}, "extensions"),
            ({"taps": (0, 1)}, "taps"),
        ):
            with pytest.raises(CheckpointError, match=f"has {word}"):
                run(target, features, tmp_path / "x", replace(SETTINGS, **changes), init=init)

    def test_too_few_dialogues_to_hold_some_out(self, target: DataTarget, features: Features, tmp_path: Path) -> None:
        few = [dialogue for dialogue in features.dialogues if dialogue.origin % 16 != 15][:9]
        with pytest.raises(RequestError, match="9 dialogues are too few to hold some out; give at least 16 prompts"):
            train(target.checkpoint, few, features, SETTINGS, tmp_path, vocab_size=260)

    def test_the_card_says_what_was_done(self, target: DataTarget, trained: Trained, tmp_path: Path) -> None:
        facts = {"data": {"prompts": "some"}, "settings": {"seed": 0}}
        write_trained(tmp_path / "d", trained, target.checkpoint, vocab_size=target.spec.vocab_size, **facts)
        card = (tmp_path / "d" / "README.md").read_text()
        for words in ("next_token, context_start, slot_embeddings", f"{trained.acceptance.acceptance_length:.3f}"):
            assert words in card
        assert "| 40 | " in card


class TestFeatures:
    def test_what_is_kept_is_what_is_computed(self, target: DataTarget, data: Path, features: Features) -> None:
        assert features.kept == len(features.dialogues) == 48
        none = Features(target, data, budget=0)
        for dialogue in features.dialogues[::7]:
            expected = target.model.hidden(dialogue.ids).astype(np.float16)
            np.testing.assert_array_equal(features(dialogue), expected)
            np.testing.assert_array_equal(none(dialogue), expected)

    def copy(self, data: Path, directory: Path) -> Path:
        directory.mkdir()
        for path in data.glob("shard-*.npz"):
            (directory / path.name).write_bytes(path.read_bytes())
        return directory

    def test_the_budget_is_kept_in_whole_shards(self, target: DataTarget, data: Path, tmp_path: Path) -> None:
        directory = self.copy(data, tmp_path / "data")
        made = Features(target, directory, budget=PLENTY)
        sizes = [2 * 96 * sum(len(d.ids) for d in made.dialogues[i : i + 16]) for i in (0, 16, 32)]
        for budget, kept in ((sizes[0] - 1, 0), (sizes[0] + 200, 16), (sizes[0] + sizes[1] + 400, 32), (PLENTY, 48)):
            made = Features(target, directory, budget=budget)
            made.fill()
            assert made.kept == kept

    def test_nothing_half_written_stays(
        self, target: DataTarget, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        directory = self.copy(data, tmp_path / "data")
        made, count = Features(target, directory, budget=PLENTY), iter(range(100))
        compute = features_module.Features._compute

        def pull_the_plug(self: Features, dialogue: Dialogue) -> Any:
            if next(count) == 20:
                raise KeyboardInterrupt
            return compute(self, dialogue)

        monkeypatch.setattr(features_module.Features, "_compute", pull_the_plug)
        with pytest.raises(KeyboardInterrupt):
            made.fill()
        names = [path.name for path in directory.iterdir() if not path.name.startswith("shard-")]
        assert [name[:12] for name in names] == ["hidden-00000"]

    def test_files_that_are_damaged_or_of_other_data_are_made_again(
        self, target: DataTarget, data: Path, tmp_path: Path
    ) -> None:
        directory = self.copy(data, tmp_path / "data")
        Features(target, directory, budget=PLENTY).fill()
        first, *_ = sorted(directory.glob("hidden-*.npy"))
        whole = first.read_bytes()
        first.write_bytes(whole[:5000])
        (directory / "hidden-00007-0123456789abcdef.npy").write_bytes(b"stale")
        made = Features(target, directory, budget=PLENTY)
        assert made.kept == 32
        assert len(list(directory.glob("hidden-*.npy"))) == 2
        made.fill()
        assert first.read_bytes() == whole

    def test_a_directory_without_shards(self, target: DataTarget, tmp_path: Path) -> None:
        with pytest.raises(BundleError, match="holds no shards"):
            Features(target, tmp_path, budget=PLENTY)
