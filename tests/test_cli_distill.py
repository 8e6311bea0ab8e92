"""`dflash-ort distill` from a target to a bundle, as a user runs it: what it makes, how it goes on, how it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_ort.distill import pipeline
from dflash_ort.distill.pipeline import Distilled, Order, distill
from dflash_ort.errors import RequestError
from dflash_ort.exporter.drafter_reader import read_drafter
from dflash_ort.params import SamplingParams
from dflash_ort.runtime.engine import Engine
from tests.shell import Outcome, call
from tests.tiny import TinyShape, write_drafter, write_simple_target

SHAPE = TinyShape(hidden=32, intermediate=48, heads=2, kv_heads=1)
OPTIONS = ("--budget", "8s", "--depth", "1", "--block-size", "3", "--max-new-tokens", "24", "--max-context", "256")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_simple_target(tmp_path_factory.mktemp("target") / "tiny", SHAPE)


def run(target: Path, output: Path, *more: object) -> Outcome:
    return call("distill", target, "--output", output, *OPTIONS, "--threads", "1", *more)


class Clock:
    """Time as the pipeline sees it: every look at it takes a tenth of a second, whatever the machine does."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.1
        return self.now


def order(target: Path, root: Path, **changes: Any) -> Order:
    options: dict[str, Any] = {
        "target": str(target),
        "output": root / "drafter",
        "work": root / "work",
        "budget": 40.0,
        "depth": 1,
        "block_size": 3,
        "max_new_tokens": 24,
        "max_context": 256,
        "threads": 1,
    }
    return Order(**options | changes)


@pytest.fixture(scope="module")
def made(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Distilled]:
    root = tmp_path_factory.mktemp("made")
    return root, distill(order(target, root, bundle=root / "bundle"), clock=Clock())


def with_data(made: tuple[Path, Distilled], root: Path) -> Path:
    """A working directory with the same data."""
    work = root / "work"
    (work / "data").mkdir(parents=True)
    for path in (made[0] / "work" / "data").glob("shard-*"):
        (work / "data" / path.name).write_bytes(path.read_bytes())
    return work


class TestFromEndToEnd:
    def test_the_drafter_has_learnt(self, made: tuple[Path, Distilled]) -> None:
        root, distilled = made
        trained = distilled.trained
        assert trained.curve[-1].loss < trained.curve[1].loss
        assert trained.acceptance.acceptance_length > trained.curve[0].acceptance_length + 0.3
        drafter = read_drafter(root / "drafter")
        assert (drafter.config.num_layers, drafter.block_size, drafter.extensions.next_token) == (1, 3, True)
        assert "held-out dialogues" in (root / "drafter" / "README.md").read_text()
        assert sorted(path.name for path in root.iterdir()) == ["bundle", "drafter", "work"]

    def test_the_engine_accepts_what_was_promised_and_says_the_same(self, made: tuple[Path, Distilled]) -> None:
        root, distilled = made
        assert distilled.manifest is not None
        assert distilled.manifest.drafter.max_draft == 3
        params = (
            SamplingParams(max_new_tokens=40, ignore_eos=True),
            SamplingParams(max_new_tokens=40, temperature=0.8, seed=3),
        )
        with Engine.load(root / "bundle", threads=1, calibrate=False) as engine:
            for text in ("Why is the sky blue?", "Name three rivers.", "x"):
                for chosen in params:
                    plain = engine.generate(text, chosen, drafter="none", controller="off")
                    for length in ("fixed:1", "fixed:2", "fixed:max"):
                        answer = engine.generate(text, chosen, drafter="dflash", controller=length)
                        assert answer.token_ids == plain.token_ids
                        assert answer.text == plain.text
                assert answer.statistics.drafted > 0
            greedy = engine.generate("Why is the sky blue?", params[0], drafter="dflash", controller="fixed:max")
        assert greedy.statistics.acceptance_length > 1.3

    def test_an_interrupted_order_goes_on(self, target: Path, made: tuple[Path, Distilled], tmp_path: Path) -> None:
        work = with_data(made, tmp_path)
        for stage in ("hidden states", "training: step"):
            pressed = iter([True])

            def press(message: str, fraction: float | None = None, stage: str = stage, once: Any = pressed) -> None:
                if message.startswith(stage) and next(once, False):
                    signal.raise_signal(signal.SIGINT)

            with pytest.raises(KeyboardInterrupt):
                distill(order(target, tmp_path, budget=20.0, data_share=0.0), clock=Clock(), progress=press)
            assert not (tmp_path / "drafter").exists()
        assert not [path for path in work.rglob("*") if "partial" in path.name]
        distilled = distill(order(target, tmp_path, budget=20.0, data_share=0.0), clock=Clock())
        assert distilled.trained.acceptance.acceptance_length > 1.3

    def test_going_on_from_a_drafter(self, target: Path, made: tuple[Path, Distilled], tmp_path: Path) -> None:
        root, before = made
        with_data(made, tmp_path)
        again = {"init": root / "drafter", "depth": None, "block_size": None, "budget": 5.0, "data_share": 0.0}
        after = distill(order(target, tmp_path, **again), clock=Clock()).trained
        assert after.curve[0].acceptance_length > before.trained.curve[0].acceptance_length + 0.2
        assert after.vocabulary.tolist() == before.trained.vocabulary.tolist()

    def test_a_plain_drafter_of_z_lab_s_format_can_be_gone_on_from(
        self, target: Path, made: tuple[Path, Distilled], tmp_path: Path
    ) -> None:
        with_data(made, tmp_path)
        drafter = write_drafter(tmp_path / "plain", SHAPE, block_size=4, draft_vocab=60, taps=(2, 0))
        again = {"init": drafter, "depth": None, "block_size": None, "budget": 10.0, "data_share": 0.0}
        trained = distill(order(target, tmp_path, **again), clock=Clock()).trained
        config = json.loads((tmp_path / "drafter" / "config.json").read_text())
        assert config["dflash_config"]["target_layer_ids"] == [2, 0]
        assert "extensions" not in config["dflash_config"]
        assert trained.curve[-1].loss < trained.curve[1].loss

    def test_a_budget_too_short_for_any_data(self, target: Path, tmp_path: Path) -> None:
        with pytest.raises(RequestError, match="too short to make any data; give a longer --budget"):
            distill(order(target, tmp_path, budget=1.0), clock=Clock())


class TestCommand:
    def test_it_makes_a_drafter_from_prompts_and_says_how_good_it_is(self, target: Path, tmp_path: Path) -> None:
        prompts = tmp_path / "prompts.txt"
        prompts.write_text("\n".join(f"What is {i}?" for i in range(20)))
        done = run(target, tmp_path / "d", "--prompts", prompts)
        assert done.code == 0, done.err
        assert done.out == ""
        assert "held out: acceptance length" in done.err
        assert "block rows in" in done.err
        assert f"wrote {tmp_path / 'd'}" in done.err
        assert (tmp_path / "d.work" / "training" / "state.pt").is_file()
        error = run(target, tmp_path / "d", "--prompts", prompts).error
        assert error == f"'{tmp_path / 'd'}' exists; pass --force to replace it, or choose another --output"
        other = run(target, tmp_path / "d", "--prompts", prompts, "--force", "--budget", "9s").error
        assert "holds a run of 8 s, 40% of them for data" in other
        other = run(target, tmp_path / "d", "--prompts", prompts, "--force", "--block-size", "2").error
        assert "was trained with other settings (block_size)" in other
        again = run(target, tmp_path / "d", "--prompts", prompts, "--force")
        assert again.code == 0, again.err

    MISTAKES: dict[str, tuple[Callable[[Path], list[str]], str]] = {  # noqa: RUF012
        "budget": (lambda p: ["--budget", "soon"], "'soon' is not a duration, such as 90s, 30m or 2h"),
        "no time": (lambda p: ["--budget", "0m"], "'0m' is no time at all"),
        "taps": (lambda p: ["--taps", "1-3"], "'1-3' is not a list of layers"),
        "taps too high": (lambda p: ["--taps", "1,3"], "the taps are [1, 3]; this target has layers 0 to 2"),
        "depth": (lambda p: ["--depth", "4"], "the depth is 4; this target has 3 layers to borrow"),
        "block": (lambda p: ["--plain", "--block-size", "1"], "block_size is 1"),
        "device": (lambda p: ["--device", "abacus"], "torch cannot use the device 'abacus'"),
        "no prompts": (lambda p: ["--prompts", str(p / "none")], "none: No such file"),
        "no data": (lambda p: ["--no-data"], "holds no shards; make some first"),
        "no drafter": (lambda p: ["--init", str(p)], "has no config.json; expected a directory with a DFlash drafter"),
        "share": (lambda p: ["--data-share", "1"], "--data-share"),
        "bundle": (lambda p: ["--bundle", str(p)], "is not a bundle; choose another --output"),
    }

    @pytest.mark.parametrize("name", MISTAKES)
    def test_a_mistake_is_one_line(self, name: str, target: Path, tmp_path: Path) -> None:
        (tmp_path / "something").touch()
        make, words = self.MISTAKES[name]
        assert words in run(target, tmp_path / "d", *make(tmp_path)).error
        assert not (tmp_path / "d").exists()

    def test_an_output_that_is_something_else(self, target: Path, tmp_path: Path) -> None:
        (tmp_path / "photograph").touch()
        for force in ([], ["--force"]):
            assert "is not a drafter; choose another --output" in run(target, tmp_path, *force).error

    def test_a_drafter_of_another_shape_to_go_on_from(self, target: Path, tmp_path: Path) -> None:
        drafter = write_drafter(tmp_path / "plain", SHAPE, block_size=4)
        assert "was made with another --depth" in run(target, tmp_path / "d", "--init", drafter).error

    def test_without_torch(self, target: Path, tmp_path: Path) -> None:
        code = "import sys; sys.modules['torch'] = None; from dflash_ort.cli.main import main; main()"
        arguments = ["distill", str(target), "--output", str(tmp_path / "d")]
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (1, "error: torch is missing: pip install 'dflash-ort[distill]'\n")

    def test_ctrl_c_says_how_to_go_on(self, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(pipeline, "distill", interrupted)
        done = run(target, tmp_path / "d")
        assert done.code == 130
        assert f"what was done is in '{tmp_path / 'd.work'}'; the same command goes on from there" in done.err
        assert done.err.endswith("stopped\n")
