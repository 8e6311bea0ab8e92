"""The data stage of distillation: prompts are read or written, answers on policy, shards whole and resumable."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ort.distill import shards as shards_module
from dflash_ort.distill.data import DataSummary, make_data
from dflash_ort.distill.dialogues import Dialogue, Scripts, cut_at_end
from dflash_ort.distill.generate import is_endless
from dflash_ort.distill.prompts import openings, read_prompts
from dflash_ort.distill.shards import is_held_out, read_dialogues, read_info, read_shard, shard_path
from dflash_ort.distill.target import DataTarget, open_target
from dflash_ort.errors import BundleError, CheckpointError, RequestError
from dflash_ort.runtime.bundle import open_bundle
from dflash_ort.runtime.session import Backend
from dflash_ort.runtime.target import TargetModel
from tests.tiny import TinyShape, write_target

TAPS = (0, 2)
"""What the tiny drafter taps, and so the bundle to compare with."""
SETTINGS: dict[str, Any] = {"max_new_tokens": 8, "shard_dialogues": 4, "seed": 5}


@pytest.fixture(scope="module")
def target(checkpoint: Path, work: Path) -> DataTarget:
    return open_target(checkpoint, work, precision="fp32", taps=TAPS, slots=3, threads=1)


@pytest.fixture(scope="module")
def reference(tiny_bundle: Callable[..., Path]) -> TargetModel:
    return open_bundle(tiny_bundle("fp32"), Backend(1), with_drafter=False).target


class TestTarget:
    def test_the_graph_is_written_once_for_each_way_of_making_it(self, checkpoint: Path, tmp_path: Path) -> None:
        said: list[str] = []

        def opened(**options: Any) -> DataTarget:
            return open_target(
                checkpoint, tmp_path, precision="fp32", slots=1, threads=1, **options,
                progress=lambda message, fraction=None: said.append(message),
            )  # fmt: skip

        first = opened()
        again, tapped = opened(), opened(taps=(1,))
        assert sum("writing the target" in message for message in said) == 2
        assert len(list(tmp_path.iterdir())) == 2
        assert first.identity == again.identity == tapped.identity
        assert tapped.spec.tapped_layers == (1,)

    def test_identity_is_of_the_weights(self, checkpoint: Path, work: Path, target: DataTarget, tmp_path: Path) -> None:
        other = write_target(tmp_path / "other", TinyShape(seed=1))
        assert open_target(other, tmp_path / "work", precision="fp32", slots=1).identity != target.identity
        assert open_target(checkpoint, work, precision="int8", slots=1).identity == target.identity

    def test_layers_that_are_not_there_cannot_be_tapped(self, checkpoint: Path, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"the taps are \[3\]; this target has layers 0 to 2"):
            open_target(checkpoint, tmp_path, precision="fp32", taps=(3,))


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), "utf-8")
    return path


class TestPrompts:
    def test_turns_prompts_and_text(self, tmp_path: Path) -> None:
        lines = [{"turns": ["a", "b"], "suite": "qa"}, {"prompt": "c", "temperature": 0.5}, {"text": "d"}, "  plain e "]
        prompts, _ = read_prompts(write_lines(tmp_path / "p.jsonl", *lines))
        assert [prompt.prompt.turns for prompt in prompts] == [("a", "b"), ("c",), ("d",), ("plain e",)]
        assert [prompt.raw for prompt in prompts] == [False, False, True, False]
        assert [prompt.prompt.suite for prompt in prompts] == ["qa", "prompts", "prompts", "prompts"]
        assert prompts[1].prompt.temperature == 0.5

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{", "line 2 is not JSON"),
            ({"question": "x"}, "line 2 has none of them; expected one of 'turns', 'prompt' and 'text'"),
            ({"turns": ["x"], "text": "y"}, "line 2 has 'turns' and 'text'; expected one of"),
            ({"turns": []}, "line 2 has no 'turns', a list of texts"),
            ({"turns": ["x", 3]}, "line 2 has no 'turns', a list of texts"),
            ({"prompt": " "}, "line 2 has the prompt ' '; expected a text that is not empty"),
            ({"text": ["x"]}, "line 2 has the text"),
            ({"prompt": "x", "temperature": "hot"}, "line 2 has the temperature 'hot'"),
        ],
    )
    def test_a_line_that_is_not_a_prompt_is_named(self, tmp_path: Path, line: Any, message: str) -> None:
        with pytest.raises(RequestError, match=message) as caught:
            read_prompts(write_lines(tmp_path / "p.jsonl", "fine", line))
        assert "\n" not in str(caught.value)

    def test_a_file_without_prompts_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(RequestError, match="holds no prompts"):
            read_prompts(write_lines(tmp_path / "p.jsonl", "", " "))

    def test_the_openings_are_many_and_differ(self) -> None:
        known, _ = openings()
        assert len({opening.text for opening in known}) == len(known) > 200
        suites = {opening.suite for opening in known}
        assert suites == {
            *("chat", "qa", "maths", "code", "code_editing", "translation"),
            *("summarization", "extraction", "writing", "rag"),
        }
        assert not [opening for opening in known if opening.text != opening.text.rstrip(" ")], "a space of its own"

    def test_a_written_turn_is_cut_at_its_last_end(self) -> None:
        assert cut_at_end("One. Two! And th") == "One. Two!"
        assert cut_at_end("a line\nanother li") == "a line\n"
        assert cut_at_end("version 1.5 of") == "version 1.5 of"


def played(script: Any, answers: Iterator[list[int]]) -> tuple[Dialogue, list[Any]]:
    """Run a script on given continuations; returns what came of it and what it asked."""
    asked = [next(script)]
    while True:
        try:
            asked.append(script.send(next(answers)))
        except StopIteration as end:
            return end.value, asked


class TestScripts:
    def scripts(self, target: DataTarget, path: Path | None = None, **changes: Any) -> Scripts:
        prompts = None if path is None else read_prompts(path)[0]
        options = {"seed": 1, "max_new_tokens": 9, "capacity": 512} | changes
        return Scripts(target.text, target.spec, prompts, **options)

    def ids(self, target: DataTarget, text: str) -> list[int]:
        found: list[int] = target.text.tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def test_turns_are_answered_one_after_the_other(self, target: DataTarget, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "p", {"turns": ["first", "second"], "temperature": 0.3, "suite": "qa"})
        end = target.spec.eos_token_ids[0]
        answers = [[*self.ids(target, "yes"), end], self.ids(target, "no")]
        dialogue, asked = played(self.scripts(target, path).script(0), iter(answers))
        opening = "<|im_start|>user\nfirst<|im_end|>\n<|im_start|>assistant\n"
        whole = opening + "yes<|im_end|>\n<|im_start|>user\nsecond<|im_end|>\n<|im_start|>assistant\nno"
        assert list(dialogue.ids) == self.ids(target, whole)
        assert [list(dialogue.ids[start:stop]) for start, stop in dialogue.spans] == answers
        assert asked[0].ids == self.ids(target, opening)
        assert [ask.limit for ask in asked] == [9, 9]
        assert asked[0].seed != asked[1].seed
        assert (dialogue.suite, dialogue.temperature, dialogue.answer_tokens) == ("qa", 0.3, 6)

    def test_an_answer_that_is_read_back_as_other_tokens_is_not_counted(
        self, target: DataTarget, tmp_path: Path
    ) -> None:
        path = write_lines(tmp_path / "p", {"turns": ["first", "second"]})
        half_a_character = self.ids(target, "é")[:1]
        dialogue, _ = played(self.scripts(target, path).script(0), iter([half_a_character, self.ids(target, "no")]))
        assert len(dialogue.spans) == 1
        assert list(dialogue.ids[slice(*dialogue.spans[0])]) == self.ids(target, "no")

    def test_raw_text_is_continued_as_it_stands(self, target: DataTarget, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "p", {"text": "once upon"})
        dialogue, _ = played(self.scripts(target, path).script(0), iter([[7, 8]]))
        assert list(dialogue.ids) == [*self.ids(target, "once upon"), 7, 8]
        assert dialogue.spans == ((9, 11),)

    def test_every_prompt_is_asked_in_every_pass_and_sampled_when_asked_again(
        self, target: DataTarget, tmp_path: Path
    ) -> None:
        scripts = self.scripts(target, write_lines(tmp_path / "p", *[f"prompt {i}" for i in range(20)]))
        made = [played(scripts.script(index), iter([[7]]))[0] for index in range(40)]
        for turn in (made[:20], made[20:]):
            assert sorted(dialogue.origin for dialogue in turn) == list(range(20))
        assert 0.0 in {dialogue.temperature for dialogue in made[:20]}
        assert 0.0 not in {dialogue.temperature for dialogue in made[20:]}
        assert [d.origin for d in made[:20]] != [d.origin for d in made[20:]]

    def test_a_prompt_that_is_too_long_is_named(self, target: DataTarget, tmp_path: Path) -> None:
        scripts = self.scripts(target, write_lines(tmp_path / "p", "short", "x" * 500))
        with pytest.raises(RequestError, match=r"line 2 begins with 5\d\d tokens, and a dialogue has 512; shorten it"):
            scripts.check()

    def test_the_target_writes_turns_that_begin_with_openings(self, target: DataTarget) -> None:
        scripts, known = self.scripts(target), openings()[0]
        suites = set()
        for index in range(60):
            written = self.ids(target, " some words. And mo")
            dialogue, asked = played(scripts.script(index), iter([written, [7], written, [7]]))
            shown = target.text.tokenizer.decode(list(dialogue.ids), skip_special_tokens=False)
            turn = shown.removeprefix("<|im_start|>user\n").split("<|im_end|>")[0]
            opening = next(o for o in known if turn.startswith(o.text + " some words.") and turn.endswith(o.end))
            assert "And mo" not in turn
            assert turn.count("```") % 2 == 0
            assert asked[0].temperature == 1.0
            assert asked[0].ids == self.ids(target, f"<|im_start|>user\n{opening.text}")
            assert (dialogue.suite, dialogue.origin) == (opening.suite, index)
            assert len(dialogue.spans) == (len(asked) // 2)
            suites.add(dialogue.suite)
        assert len(suites) == 10

    def test_without_a_template_openings_are_continued(self, target: DataTarget) -> None:
        base = replace_template(target)
        dialogue, asked = played(self.scripts(base).script(0), iter([[7, 8]]))
        assert target.text.tokenizer.decode(asked[0].ids) in {opening.text for opening in openings()[0]}
        assert list(dialogue.ids) == [*asked[0].ids, 7, 8]

    def test_without_a_template_there_is_one_turn(self, target: DataTarget, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "p", {"turns": ["a", "b"]})
        with pytest.raises(RequestError, match="line 1 has several turns, and this target no chat template"):
            self.scripts(replace_template(target), path).check()


def replace_template(target: DataTarget) -> DataTarget:
    """The same target as a base model."""
    text = object.__new__(type(target.text))
    text.__dict__ |= target.text.__dict__ | {"template": None}
    return replace(target, text=text)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.fixture(scope="module")
def made(target: DataTarget, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DataSummary]:
    directory = tmp_path_factory.mktemp("made")
    return directory, make_data(target, None, directory, dialogues=11, **SETTINGS)


class TestMakingData:
    def test_shards_are_whole(self, target: DataTarget, made: tuple[Path, DataSummary]) -> None:
        directory, summary = made
        assert sorted(contents(directory)) == [f"shard-0000{k}.npz" for k in range(3)]
        dialogues = list(read_dialogues(directory, target.identity))
        assert [dialogue.index for dialogue in dialogues] == list(range(12))
        tokens = sum(dialogue.answer_tokens for dialogue in dialogues)
        assert summary == DataSummary(3, 12, tokens, 12, tokens)
        assert {dialogue.temperature for dialogue in dialogues} <= {0.0, 0.7, 1.0}

    def test_greedy_answers_are_what_the_target_says(
        self, target: DataTarget, reference: TargetModel, made: tuple[Path, DataSummary]
    ) -> None:
        greedy = [d for d in read_dialogues(made[0], target.identity) if d.temperature == 0.0]
        assert greedy
        for dialogue in greedy:
            logits = reference.run(reference.new_cache(520), dialogue.ids, len(dialogue.ids)).logits
            for start, end in dialogue.spans:
                assert np.argmax(logits[start - 1 : end - 1], axis=1).tolist() == list(dialogue.ids[start:end])

    def test_slots_and_interruptions_change_nothing(
        self, checkpoint: Path, work: Path, made: tuple[Path, DataSummary], tmp_path: Path
    ) -> None:
        other = open_target(checkpoint, work, precision="fp32", taps=TAPS, slots=5, threads=1)

        def pull_the_plug(message: str, fraction: float | None = None) -> None:
            if len(list(tmp_path.iterdir())) == 1:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            make_data(other, None, tmp_path, dialogues=11, progress=pull_the_plug, **SETTINGS)
        assert len(contents(tmp_path)) == 1
        summary = make_data(other, None, tmp_path, dialogues=11, **SETTINGS)
        assert (summary.dialogues, summary.new_dialogues) == (12, 8)
        assert contents(tmp_path) == contents(made[0])

    def test_it_ends_at_a_deadline_or_at_enough_tokens(
        self, target: DataTarget, made: tuple[Path, DataSummary], tmp_path: Path
    ) -> None:
        now = iter(range(1000))
        options = SETTINGS | {"clock": lambda: float(next(now))}
        late = make_data(target, None, tmp_path / "late", deadline=30.0, **options)
        assert 0 < late.dialogues < 30
        assert make_data(target, None, tmp_path / "late", deadline=0.0, **options).new_dialogues == 0
        first = read_info(shard_path(made[0], 0)).answer_tokens
        assert make_data(target, None, tmp_path / "enough", tokens=first - 1, **SETTINGS).new_tokens >= first

    def test_each_prompt_of_a_file_is_asked_once(self, target: DataTarget, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "p", *[f"prompt {i}" for i in range(8)])
        assert make_data(target, path, tmp_path / "out", **SETTINGS).dialogues == 8
        origins = [dialogue.origin for dialogue in read_dialogues(tmp_path / "out", target.identity)]
        assert sorted(origins) == list(range(8))

    def test_self_prompting_needs_a_goal(self, target: DataTarget, tmp_path: Path) -> None:
        with pytest.raises(RequestError, match="say how many dialogues or tokens, or how long"):
            make_data(target, None, tmp_path)

    def test_a_shard_of_others_is_refused(self, target: DataTarget, made: tuple[Path, DataSummary]) -> None:
        before = contents(made[0])
        with pytest.raises(BundleError, match=r"shard-00000.npz' was made with other settings \(seed\)"):
            make_data(target, None, made[0], dialogues=11, **SETTINGS | {"seed": 6})
        with pytest.raises(BundleError, match=r"shard-00000.npz' was made by another target"):
            make_data(replace(target, identity="0"), None, made[0], dialogues=11, **SETTINGS)
        with pytest.raises(BundleError, match=r"shard-00000.npz' was made by another target"):
            next(read_dialogues(made[0], "0"))
        assert contents(made[0]) == before

    def test_a_full_disk_leaves_nothing(
        self, target: DataTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(file: Any, **arrays: Any) -> None:
            file.write(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(np, "savez", fail)
        with pytest.raises(OSError, match="No space left"):
            make_data(target, None, tmp_path, dialogues=4, **SETTINGS)
        assert contents(tmp_path) == {}

    @pytest.mark.parametrize("damage", ["truncated", "foreign", "empty", "contradictory"])
    def test_a_damaged_shard_is_named(
        self, target: DataTarget, made: tuple[Path, DataSummary], tmp_path: Path, damage: str
    ) -> None:
        path = shard_path(tmp_path, 0)
        good = shard_path(made[0], 0)
        if damage == "truncated":
            path.write_bytes(good.read_bytes()[:-200])
        elif damage == "foreign":
            with path.open("wb") as file:
                np.savez(file, ids=np.zeros(3))
        elif damage == "empty":
            path.write_bytes(b"")
        else:
            with np.load(good) as arrays, path.open("wb") as file:
                np.savez(file, **{name: arrays[name] for name in arrays} | {"ids": arrays["ids"][:-1]})
        with pytest.raises(BundleError, match=r"shard-00000.npz' is not a whole shard") as caught:
            read_shard(path)
        assert "\n" not in str(caught.value)

    def test_a_directory_without_shards_is_refused(self, target: DataTarget, tmp_path: Path) -> None:
        with pytest.raises(BundleError, match="holds no shards"):
            next(read_dialogues(tmp_path, target.identity))


def test_every_sixteenth_prompt_is_held_out(target: DataTarget, tmp_path: Path) -> None:
    dialogues = [Dialogue(i, i % 32, "qa", 0.0, (5, 6), ((1, 2),)) for i in range(64)]
    shards_module.write_shard(tmp_path, 0, dialogues, target="t", settings={}, vocab=100_000)
    apart = {held: list(read_dialogues(tmp_path, "t", held_out=held)) for held in (True, False)}
    assert {dialogue.origin for dialogue in apart[True]} == {15, 31}
    assert len(apart[True]) == 4
    assert len(apart[False]) == 60
    assert all(is_held_out(dialogue) for dialogue in apart[True])
    assert list(read_dialogues(tmp_path, "t")) == dialogues


def test_an_endless_answer_is_seen() -> None:
    words = list(range(100, 170))
    assert not is_endless(words)
    assert not is_endless([5] * 63)
    assert is_endless([*words, *[5] * 64])
    assert is_endless([*words, *[5, 6, 7] * 22])
    assert not is_endless([*words, *words[:40], *words[:40]])
    assert is_endless([*words, *words[:40] * 3])
    assert not is_endless([*words[:40] * 3, 5])
